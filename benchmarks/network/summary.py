"""From the measures of single runs to medians over the seeds, and times to a loss."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.network.contenders import REFERENCE, YARDSTICK

TARGETS_AT = (0.9, 0.75, 0.5)
"""Shares of its schedule at which DDP's test losses are those to be reached."""


def value_at(xs: Sequence[float], ys: Sequence[float], x: float) -> float | None:
    """Of a curve, straight between its points; None outside."""
    for (x0, y0), (x1, y1) in pairwise(zip(xs, ys, strict=True)):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def time_to(loss: float, curve: dict[str, list[float]]) -> float | None:
    """When a curve first reaches a loss, straight between its points; None if it never does."""
    if not curve["s"]:
        return None
    if curve["loss"][0] <= loss:
        return curve["s"][0]
    for (s0, loss0), (s1, loss1) in pairwise(zip(curve["s"], curve["loss"], strict=True)):
        if loss1 <= loss < loss0:
            return s0 + (s1 - s0) * (loss0 - loss) / (loss0 - loss1)
    return None


def median_and_spread(values: Iterable[float | None]) -> tuple[float, float, float] | None:
    """Median, least and largest of those that are known."""
    known = sorted(value for value in values if value is not None)
    return (statistics.median(known), known[0], known[-1]) if known else None


def summarize(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each scenario, work, condition and contender, in the order in which they first ran.

    Times to a loss are compared run by run: with DDP's of the same seed under the same condition, where there is one that was
    not stopped. ``share`` and the like are triples: median, least, largest.
    """
    reference = {_place(run): run for run in runs if run["contender"] == REFERENCE}
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        rows.setdefault((run["scenario"], run["work"], run["condition"], run["contender"]), []).append(run)
    summary = [_row(group, reference) for group in rows.values()]
    for row in summary:
        row["over_yardstick"] = _ratio(row, YARDSTICK, row["condition"], "share", summary)
        row["others_over_undisturbed"] = None
        if row["undisturbed"] != row["condition"]:
            row["others_over_undisturbed"] = _ratio(row, row["contender"], row["undisturbed"], "others_per_s", summary)
    return summary


def _place(run: dict[str, Any]) -> tuple[Any, ...]:
    return (run["scenario"], run["work"], run["condition"], run["seed"], run["steps"])


def _row(group: list[dict[str, Any]], reference: dict[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    ended = [run for run in group if not run["stopped"]]
    others = [sum(run["samples_per_s"][:-1]) if run["samples_per_s"] else None for run in group]
    return {
        **{name: group[0][name] for name in ("scenario", "work", "condition", "undisturbed", "contender")},
        "runs": len(group),
        "stopped": len(group) - len(ended),
        "share": median_and_spread(run["share"] for run in group),
        "others_per_s": median_and_spread(others),
        "exchanges_per_step": median_and_spread(run["exchanges_per_step"] for run in group),
        "bytes_per_step": median_and_spread(run["bytes_per_step"] for run in group),
        "cpu_s_per_step": median_and_spread(run["cpu_s_per_step"] for run in group),
        "loss": median_and_spread(run["curve"]["loss"][-1] for run in ended),
        "accuracy": median_and_spread(run["curve"]["accuracy"][-1] for run in ended),
        "training_s": median_and_spread(run["curve"]["s"][-1] for run in ended),
        "to_loss": {f"{share:.0%}": _to_loss(group, reference, share) for share in TARGETS_AT},
    }


def _to_loss(group: list[dict[str, Any]], reference: dict[tuple[Any, ...], dict[str, Any]], share: float) -> dict[str, Any]:
    """Seconds to the loss that DDP has at a share of its schedule, DDP's over them, and in how many runs of how many."""
    times, speed_ups, compared = [], [], 0
    for run in group:
        theirs = reference.get(_place(run))
        target = value_at(theirs["curve"]["steps"], theirs["curve"]["loss"], share * run["steps"]) if theirs else None
        if theirs is None or target is None:
            continue
        compared += 1
        time_s, their_s = time_to(target, run["curve"]), time_to(target, theirs["curve"])
        if time_s is not None and their_s is not None:
            times.append(time_s)
            speed_ups.append(their_s / time_s)
    spread = {"seconds": median_and_spread(times), "speed_up": median_and_spread(speed_ups)}
    return {**spread, "reached": len(times), "compared": compared}


def _ratio(row: dict[str, Any], contender: str, condition: str, what: str, summary: list[dict[str, Any]]) -> float | None:
    """Of a row's median to that of another contender or condition."""
    for other in summary:
        if (other["scenario"], other["work"], other["condition"], other["contender"]) == (
            row["scenario"],
            row["work"],
            condition,
            contender,
        ):
            if row[what] is None or other[what] is None or other[what][0] == 0:
                return None
            return float(row[what][0] / other[what][0])
    return None
