"""Which group of runs is how fast and how good, against the baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gossip import ConfigurationError
from recipes.report.runs import ACCURACY, WALL, Job

_BASELINE = "ddp"


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone.

    Args:
        label: what sets them apart from the other groups.
        number: which colour they have.
        jobs: at least one.
    """

    label: str
    number: int
    jobs: tuple[Job, ...]

    @property
    def options(self) -> dict[str, str]:
        """What they were called with, the seed apart."""
        return self.jobs[0].options

    @property
    def epochs(self) -> set[int]:
        """How many they ran, a single number as a rule."""
        return {job.summary["epochs"] for job in self.jobs}

    def values(self, name: str) -> list[float]:
        """Of the summaries that have such a thing."""
        return [job.summary[name] for job in self.jobs if job.summary.get(name) is not None]

    def mean(self, name: str) -> float | None:
        """Of a summary's value over the seeds."""
        return mean(self.values(name))

    def of_workers(self, name: str) -> float | None:
        """A worker's mean, over workers and seeds."""
        return mean([value for job in self.jobs for value in job.worker_values(name)])

    def curve(self, metric: str) -> list[tuple[float, float, float]]:
        """Seconds, samples and the metric, each the mean over the seeds, by epoch; as long as the shortest of the runs."""
        curves = [curve for job in self.jobs if (curve := job.curve(metric))]
        rows = zip(*curves, strict=False) if curves else ()
        return [tuple(map(statistics.fmean, zip(*row, strict=True))) for row in rows]  # type: ignore[misc]

    @property
    def staleness(self) -> tuple[float, float, float] | None:
        """Mean over all steps; of the 95th percentiles of the workers the highest, mean over seeds; the highest of all."""
        known = [job for job in self.jobs if job.worker_values("staleness_mean")]
        if not known:
            return None
        counts = [(w["steps"], w["staleness_mean"]) for job in known for w in job.workers if w["staleness_mean"] is not None]
        steps = sum(count for count, _ in counts) or 1
        return (
            sum(count * value for count, value in counts) / steps,
            statistics.fmean(max(job.worker_values("staleness_p95"), default=0.0) for job in known),
            max(max(job.worker_values("staleness_max"), default=0.0) for job in known),
        )

    @property
    def waiting(self) -> float | None:
        """Share of the training time in which a worker waited for others, mean over workers and seeds."""
        shares = [wait_s / job.summary["train_s"] for job in self.jobs for wait_s in job.worker_values("wait_s")]
        return mean(shares)


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
    """The groups of one recipe, those that reach the target first at the top, then by test accuracy.

    Args:
        recipe: its name.
        target: validation accuracy to which the times are taken, in [0, 1]; None where nobody validates.
        bytes_reference: the group to whose bytes the others' are compared; None where nobody counts them.
        rows: best first.
    """

    recipe: str
    target: float | None
    bytes_reference: Group | None
    rows: tuple[Row, ...]


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return statistics.fmean(values) if values else None


def group(jobs: list[Job]) -> list[Group]:
    """Put the jobs together that differ in their seed alone, in the order in which they come."""
    together: dict[tuple[tuple[str, str], ...], list[Job]] = {}
    for job in jobs:
        together.setdefault(tuple(sorted(job.options.items())), []).append(job)
    options = [dict(key) for key in together]
    names = {name: None for job in jobs for name in job.options}  # in the order of the command line
    differing = [name for name in names if len({each.get(name) for each in options}) > 1]
    differing.sort(key=lambda name: name != "strategy")
    labels = [_label(each, differing) for each in options]
    return [
        Group(label, number, tuple(members))
        for number, (label, members) in enumerate(zip(labels, together.values(), strict=True))
    ]


def _label(options: dict[str, str], differing: list[str]) -> str:
    if not differing:
        return options["strategy"]
    short = {name: name.rpartition(".")[2] for name in differing}
    names = {name: last if list(short.values()).count(last) == 1 else name for name, last in short.items()}
    parts = [options[n] if n == "strategy" else f"{names[n]}={options[n]}" for n in differing if n in options]
    return ", ".join(parts) or "defaults"


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
    rows.sort(key=lambda row: (row.reached is None, row.reached or 0.0, -(row.group.mean("test_acc") or 0.0)))
    return Ranking(recipe, target, reference, tuple(rows))


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
