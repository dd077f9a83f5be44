"""Which group of runs is how fast and how good, against the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_gossip import ConfigurationError
from recipes.report.groups import Group, mean
from recipes.report.runs import ACCURACY, WALL, Job

_BASELINE = "ddp"


@dataclass(frozen=True)
class Row:
    """One group measured against its baseline. ``None`` where something is not known or not reached.

    Args:
        group: which.
        baseline: the group that it is measured against; itself, if it is one.
        reached_s: for each seed, when its validation accuracy first was at least the target, at the end of an epoch.
        reached: their mean, if all have reached it.
        speedup: baseline's training time ÷ this one's, at equal epochs.
        speedup_to_target: the same of the times to the target.
        difference: of the mean test accuracies, this one's less the baseline's.
        bytes_ratio: bytes sent by a worker ÷ those in the reference.
    """

    group: Group
    baseline: Group
    reached_s: tuple[float | None, ...]
    reached: float | None
    speedup: float | None
    speedup_to_target: float | None
    difference: float
    bytes_ratio: float | None

    @property
    def is_baseline(self) -> bool:
        """Whether it is measured against itself."""
        return self.group is self.baseline


@dataclass(frozen=True)
class Ranking:
    """The groups of one recipe by their baseline; of each, those that reach the target first at the top, then by test accuracy.

    Args:
        recipe: its name.
        target: validation accuracy to which the times are taken, in [0, 1]; None where nobody validates.
        bytes_reference: the group to whose bytes the others' are compared; None where nobody counts them.
        rows: those with one baseline together, best first.
    """

    recipe: str
    target: float | None
    bytes_reference: Group | None
    rows: tuple[Row, ...]

    def parts(self) -> list[Ranking]:
        """One for each baseline."""
        together: dict[str, list[Row]] = {}
        for row in self.rows:
            together.setdefault(row.baseline.label, []).append(row)
        return [replace(self, rows=tuple(rows)) for rows in together.values()]


def rank(groups: list[Group], *, baseline: str | None = None, target: float | None = None) -> list[Ranking]:
    """A ranking for each recipe.

    Args:
        groups: all of the page.
        baseline: strategy or label of the groups to measure against; if None ``ddp``, or the first group where there is none.
        target: validation accuracy to which times are taken, in (0, 1]; if None the lowest that the runs of the baseline
            reached at best, rounded down to a whole per cent.

    Raises:
        ConfigurationError: if there is no such baseline, or the target is out of its range.
    """
    if target is not None and not 0.0 < target <= 1.0:
        raise ConfigurationError(f"target={target} is not an accuracy in (0, 1]. Write 0.9 for 90 %.")
    if baseline is not None and not _called(groups, baseline):
        there = ", ".join(dict.fromkeys(each.options["strategy"] for each in groups))
        raise ConfigurationError(f"No finished run has the baseline {baseline!r}. There are: {there}.")
    recipes: dict[str, list[Group]] = {}
    for each in groups:
        recipes.setdefault(each.options["recipe"], []).append(each)
    return [_rank(recipe, members, baseline or _BASELINE, target) for recipe, members in recipes.items()]


def _called(groups: list[Group], name: str) -> list[Group]:
    return [each for each in groups if name in (each.options["strategy"], each.label)]


def _rank(recipe: str, groups: list[Group], name: str, target: float | None) -> Ranking:
    baselines = _called(groups, name) or groups[:1]
    target = target if target is not None else _target(baselines)
    counted = [each for each in (*baselines, *groups) if each.of_workers("bytes_sent")]
    reference = counted[0] if counted else None
    rows = [_row(each, _nearest(each, baselines), target, reference) for each in groups]
    rows.sort(key=lambda row: (baselines.index(row.baseline), *_place(row)))
    return Ranking(recipe, target, reference, tuple(rows))


def _place(row: Row) -> tuple[bool, float, float]:
    return row.reached is None, row.reached or 0.0, -(row.group.mean("test_acc") or 0.0)


def _nearest(of: Group, baselines: list[Group]) -> Group:
    """The baseline that was called with most of the same options: under a slow worker, the one under a slow worker."""
    if of in baselines:
        return of
    return max(baselines, key=lambda each: len(of.options.items() & each.options.items()))


def _target(baselines: list[Group]) -> float | None:
    best = [max(acc for _, _, acc in curve) for each in baselines for job in each.jobs if (curve := job.curve(ACCURACY))]
    if not best:
        return None
    # the nudge: 0.97 in 32 bits is below 0.97
    return math.floor(100 * min(best) + 1e-4) / 100 or min(best)


def _row(of: Group, baseline: Group, target: float | None, reference: Group | None) -> Row:
    reached_s = tuple(_reached_s(job, target) for job in of.jobs)
    sent, theirs = of.of_workers("bytes_sent"), reference.of_workers("bytes_sent") if reference else None
    reached = _mean_of_all(reached_s)
    return Row(
        group=of,
        baseline=baseline,
        reached_s=reached_s,
        reached=reached,
        speedup=_ratio(baseline.mean("train_s"), of.mean("train_s")) if of.epochs == baseline.epochs else None,
        speedup_to_target=_ratio(_mean_of_all([_reached_s(job, target) for job in baseline.jobs]), reached),
        difference=(of.mean("test_acc") or 0.0) - (baseline.mean("test_acc") or 0.0),
        bytes_ratio=_ratio(sent, theirs),
    )


def _reached_s(job: Job, target: float | None) -> float | None:
    if target is None:
        return None
    # accuracies are of 32 bits
    return next((row[WALL] for row in job.epochs if row.get(ACCURACY, -1.0) >= target - 1e-6), None)


def _mean_of_all(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _ratio(of: float | None, to: float | None) -> float | None:
    return of / to if of is not None and to else None
