"""From the measures of single runs to medians over the seeds, and times to a loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.network.contenders import REFERENCE, YARDSTICK

TARGETS_AT = (0.9, 0.75, 0.5)
"""Shares of its schedule at which DDP's test losses are those to be reached."""


def value_at(xs: Sequence[float], ys: Sequence[float], x: float) -> float | None:
    """Of a curve, straight between its points; None outside."""
    return float(np.interp(x, xs, ys)) if xs and xs[0] <= x <= xs[-1] else None


def time_to(loss: float, curve: dict[str, list[float]]) -> float | None:
    """When a curve first reaches a loss, straight between its points; None if it never does."""
    reached = np.flatnonzero(np.array(curve["loss"]) <= loss)
    if not len(reached):
        return None
    near = slice(max(0, reached[0] - 1), reached[0] + 1)
    return float(np.interp(-loss, [-value for value in curve["loss"][near]], curve["s"][near]))


def median_and_spread(values: Iterable[float | None]) -> tuple[float, float, float] | None:
    """Median, least and largest of those that are known."""
    known = [value for value in values if value is not None]
    return (float(np.median(known)), min(known), max(known)) if known else None


def summarize(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each scenario, work, condition and contender, in the order in which they first ran.

    Times to a loss are compared run by run: with DDP's of the same seed under the same condition, where there is one that was
    not stopped. ``share`` and the like are triples: median, least, largest.
    """
    reference = {_place(run): run for run in runs if run["contender"] == REFERENCE}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["scenario"], run["work"], run["condition"], run["contender"]), []).append(run)
    rows = {key: _row(group, reference) for key, group in groups.items()}
    for (*where, condition, contender), row in rows.items():
        row["over_yardstick"] = _ratio(row, rows.get((*where, condition, YARDSTICK)), "share")
        calm = rows.get((*where, row["undisturbed"], contender)) if row["undisturbed"] != condition else None
        row["others_over_undisturbed"] = _ratio(row, calm, "others_per_s")
    return list(rows.values())


def _place(run: dict[str, Any]) -> tuple[Any, ...]:
    return (run["scenario"], run["work"], run["condition"], run["seed"], run["steps"])


def _row(group: list[dict[str, Any]], reference: dict[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    ended = [run for run in group if not run["stopped"]]
    others = [sum(run["samples_per_s"][:-1]) if run["samples_per_s"] else None for run in group]
    measured = ("exchanges_per_step", "bytes_per_step", "cpu_s_per_step")
    ends = {"loss": "loss", "accuracy": "accuracy", "training_s": "s"}
    return {
        **{name: group[0][name] for name in ("scenario", "work", "condition", "undisturbed", "contender")},
        "runs": len(group),
        "stopped": len(group) - len(ended),
        "share": median_and_spread(run["share"] for run in group),
        "others_per_s": median_and_spread(others),
        **{name: median_and_spread(run[name] for run in group) for name in measured},
        **{name: median_and_spread(run["curve"][column][-1] for run in ended) for name, column in ends.items()},
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


def _ratio(row: dict[str, Any], other: dict[str, Any] | None, what: str) -> float | None:
    """Of a row's median to that of another contender or condition."""
    if other is None or row[what] is None or other[what] is None or other[what][0] == 0:
        return None
    return row[what][0] / other[what][0]
