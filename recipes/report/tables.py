"""The tables of a page, as columns of cells."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.report.figures import colour
from recipes.report.groups import Group
from recipes.report.ranking import Ranking, Row
from recipes.report.units import UNKNOWN, Unit, digits, percent, points, spread, times, unit_of_bytes

Column = tuple[str, list["Cell"]]  # heading and cells


@dataclass(frozen=True)
class Cell:
    """One cell of a table: the text, and smaller text below it."""

    text: str
    small: str = ""
    colour: str = ""


def speed_table(ranking: Ranking, unit: Unit) -> list[Column]:
    """Accuracy and time, against the baseline."""
    rows = ranking.rows
    several = len({row.baseline.label for row in rows}) > 1
    columns = [
        ("", [Cell(str(place)) for part in ranking.parts() for place in range(1, len(part.rows) + 1)]),
        ("strategy", [_name(row, several) for row in rows]),
        ("seeds", [Cell(str(len(row.group.jobs))) for row in rows]),
        ("test accuracy", [_accuracy(row) for row in rows]),
        (
            "difference to the baseline",
            [Cell(UNKNOWN if row.is_baseline else points(row.difference), "points" * (not row.is_baseline)) for row in rows],
        ),
        (
            "training time",
            [Cell(unit.text(row.group.mean("train_s")), _between(row.group.values("train_s"), unit)) for row in rows],
        ),
        ("speed-up, equal epochs", [Cell(times(row.speedup), "" if row.speedup else "other number of epochs") for row in rows]),
        ("samples/s", [Cell(digits(row.group.mean("samples_per_s"))) for row in rows]),
    ]
    if ranking.target is not None:
        columns += [
            (f"time to {percent(ranking.target, 0)}", [_reached(row, unit) for row in rows]),
            (f"speed-up to {percent(ranking.target, 0)}", [Cell(times(row.speedup_to_target)) for row in rows]),
        ]
    return columns


def traffic_table(ranking: Ranking) -> list[Column]:
    """What the workers sent, and how far apart they were."""
    groups = [row.group for row in ranking.rows]
    unit = unit_of_bytes(value for group in groups if (value := group.of_workers("bytes_sent")) is not None)
    reference = ranking.bytes_reference
    stale = [group.staleness for group in groups]
    columns = [
        ("strategy", [Cell(group.label, "", colour(group)) for group in groups]),
        ("sent by a worker", [Cell(unit.text(group.of_workers("bytes_sent"))) for group in groups]),
        *(
            [(f"ratio to {reference.label}", [Cell(times(row.bytes_ratio)) for row in ranking.rows])]
            if reference is not None
            else []
        ),
        ("consensus distance", [Cell(digits(group.mean("consensus_distance"))) for group in groups]),
        ("averagings", [_averagings(group) for group in groups]),
        ("staleness", [Cell(UNKNOWN) if s is None else Cell(digits(s[0]), f"p95 {s[1]:.3g}, max {s[2]:g}") for s in stale]),
        ("waiting", [Cell(percent(group.waiting)) for group in groups]),
        ("steps of a worker", [_steps(group) for group in groups]),
    ]
    dropped = [sum(sum(job.worker_values("dropped")) for job in group.jobs) / len(group.jobs) for group in groups]
    return [*columns, ("dropped updates", [Cell(digits(value)) for value in dropped])] if any(dropped) else columns


def _name(row: Row, several: bool) -> Cell:
    small = "baseline" if row.is_baseline else f"against {row.baseline.label}" if several else ""
    return Cell(row.group.label, small, colour(row.group))


def _accuracy(row: Row) -> Cell:
    return Cell(percent(row.group.mean("test_acc"), 2), spread(row.group.values("test_acc"), lambda acc: f"{100 * acc:.2f}"))


def _reached(row: Row, unit: Unit) -> Cell:
    if row.reached is not None:
        return Cell(unit.text(row.reached), _between([value for value in row.reached_s if value is not None], unit))
    some = sum(value is not None for value in row.reached_s)
    return Cell("not reached", f"{some} of {len(row.reached_s)} seeds did" if some else "")


def _between(seconds: list[float], unit: Unit) -> str:
    return spread(seconds, unit.number)


def _averagings(group: Group) -> Cell:
    number, period = group.mean("averagings"), group.mean("period_mean")
    return Cell(UNKNOWN if number is None else f"{number:,.0f}", "" if period is None else f"one in {period:.1f} steps")


def _steps(group: Group) -> Cell:
    steps = [value for job in group.jobs for value in job.worker_values("steps")]
    low, high = min(steps, default=0), max(steps, default=0)
    return Cell(f"{low:,}" if low == high else f"{low:,}–{high:,}")
