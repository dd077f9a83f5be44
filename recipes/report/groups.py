"""Runs that differ in their seed alone, taken together: their name, their look and their means."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.report.runs import Job

COLOURS, DASHES = 10, 4  # how many there are


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone.

    Args:
        label: what sets them apart from the other groups.
        colour, dash: numbers of theirs: a strategy has one colour and its settings different dashes, where these suffice.
        jobs: at least one.
    """

    label: str
    colour: int
    dash: int
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
        timed = [job for job in self.jobs if job.summary["train_s"] > 0.0]
        return mean([wait_s / job.summary["train_s"] for job in timed for wait_s in job.worker_values("wait_s")])


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
    looks = _looks([each["strategy"] for each in options])
    return [Group(label, *look, tuple(members)) for label, look, members in zip(labels, looks, together.values(), strict=True)]


def _looks(strategies: list[str]) -> list[tuple[int, int]]:
    """Numbers of colour and dash for each group, from the strategy that each has."""
    settings = max(strategies.count(name) for name in strategies)
    if len(set(strategies)) == 1 or len(set(strategies)) > COLOURS or settings > DASHES:
        return [(number % COLOURS, number // COLOURS) for number in range(len(strategies))]
    colours = {name: number for number, name in enumerate(dict.fromkeys(strategies))}
    return [(colours[name], strategies[:place].count(name)) for place, name in enumerate(strategies)]


def _label(options: dict[str, str], differing: list[str]) -> str:
    if not differing:
        return options["strategy"]
    short = {name: name.rpartition(".")[2] for name in differing}
    names = {name: last if list(short.values()).count(last) == 1 else name for name, last in short.items()}
    parts = [options[n] if n == "strategy" else f"{names[n]}={options[n]}" for n in differing if n in options]
    return ", ".join(parts) or "defaults"
