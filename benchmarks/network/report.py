"""Tables and the picture, from what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.harness import against, axes_of, print_table
from benchmarks.network.contenders import CONTENDERS, REFERENCE
from benchmarks.network.scenarios import SCENARIOS
from benchmarks.network.summary import TARGETS_AT, summarize

AIM_OVER_YARDSTICK = 0.98
AIM_OTHERS = 0.98
AIM_ACCURACY = 0.01  # below DDP's
AIM_SPEED_UP = {"1 Gb/s": 3.0, "200 Mb/s": 6.0, "links slow at random": 4.0}
"""The aims are AD-PSGD's."""
_AIMING = ("adpsgd", "adpsgd_int8")

COLUMNS: tuple[str, ...] = (
    "contender",
    "share of ideal",
    "/ no exch.",
    "exch. a step",
    "MB a step",
    "CPU ms",
    "accuracy",
    *(f"× DDP, {at:.0%}" for at in TARGETS_AT),
)
_OTHERS = "others / undisturbed"
_CAPTION = (
    "Medians over seeds, \\[least, largest]. Share: samples/s over those of workers that never wait. MB: what a host sends,"
    " headers included. CPU ms: of a worker's processor time a step, all threads."
    " × DDP: DDP's time to the test loss that it has at so much of its schedule, over the contender's time to it, same seed"
    " (n/m: so many of the seeds reached it). ✓ reached, ✗ missed: aims of AD-PSGD."
)


def show(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print one table for each scenario, work and condition; returns the summary."""
    summary = summarize(runs)
    tables: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in summary:
        tables.setdefault((row["scenario"], row["work"], row["condition"]), []).append(row)
    for (scenario, work, condition), rows in tables.items():
        rows.sort(key=lambda row: list(CONTENDERS).index(row["contender"]))
        disturbed = any(row["undisturbed"] != condition for row in rows)
        columns = (*COLUMNS, _OTHERS) if disturbed else COLUMNS
        accuracy = next((row["accuracy"] for row in rows if row["contender"] == REFERENCE), None)
        cells = [_cells(row, accuracy, disturbed) for row in rows]
        print_table(f"{scenario}, {work}: {condition}", columns, cells, caption=_CAPTION)
    return summary


def _cells(row: dict[str, Any], reference_accuracy: tuple[float, ...] | None, disturbed: bool) -> list[str]:
    aims = row["contender"] in _AIMING
    accuracy = row["accuracy"]
    accuracy_aim = reference_accuracy[0] - AIM_ACCURACY if aims and reference_accuracy else None
    megabytes = row["bytes_per_step"] and [value / 1e6 for value in row["bytes_per_step"]]
    cells = [
        CONTENDERS[row["contender"]].label + (f" (stopped {row['stopped']}/{row['runs']})" if row["stopped"] else ""),
        _triple(row["share"], 2),
        _against(row["over_yardstick"], AIM_OVER_YARDSTICK if aims else None, 3),
        "–" if row["exchanges_per_step"] is None else f"{row['exchanges_per_step'][0]:.2f}",
        "–" if megabytes is None else f"{megabytes[0]:.1f}",
        "–" if row["cpu_s_per_step"] is None else f"{row['cpu_s_per_step'][0] * 1e3:.0f}",
        _against(accuracy and accuracy[0], accuracy_aim, 3),
        *(_speed_up(found, AIM_SPEED_UP.get(row["condition"]) if aims else None) for found in row["to_loss"].values()),
    ]
    if disturbed:
        others = row["others_over_undisturbed"]
        cells.append(_against(others, AIM_OTHERS if aims and row["scenario"] == "slow_link" else None, 3))
    return cells


def _speed_up(found: dict[str, Any], aim: float | None) -> str:
    speed_up = found["speed_up"]
    spread = f" [{speed_up[1]:.2f}, {speed_up[2]:.2f}]" if speed_up and speed_up[1] < speed_up[2] else ""
    missed = f" {found['reached']}/{found['compared']}" if found["reached"] < found["compared"] else ""
    return _against(speed_up and speed_up[0], aim, 2) + spread + missed


def _triple(values: tuple[float, float, float] | None, digits: int) -> str:
    if values is None:
        return "–"
    spread = f" [{values[1]:.{digits}f}, {values[2]:.{digits}f}]" if values[1] < values[2] else ""
    return f"{values[0]:.{digits}f}{spread}"


def _against(value: float | None, aim: float | None, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if aim is None else against(value, aim, digits=digits)


def plot(runs: list[dict[str, Any]], scenario: str, path: Path) -> None:
    """Loss and accuracy of the mean model against wall time, a column for each condition; medians over the seeds."""
    fast_first = sorted(runs, key=lambda run: -run["rate_mbit"])  # runs of one rate as they were made
    conditions = list(dict.fromkeys(run["condition"] for run in fast_first))
    figure, grid = axes_of(2, len(conditions), width=4.5, sharey="row")
    for column, condition in enumerate(conditions):
        for name, contender in CONTENDERS.items():
            curves = [pd.DataFrame(r["curve"]) for r in runs if r["condition"] == condition and r["contender"] == name]
            points = min(map(len, curves), default=0)
            if points == 0:
                continue
            # the last points are the ends of training, however many models were written before
            aligned = [pd.concat([each[: points - 1], each[-1:]], ignore_index=True) for each in curves]
            medians = pd.concat(aligned).groupby(level=0).median()[1:]
            style: dict[str, Any] = {"color": contender.colour, "linewidth": 2.2 if name in _AIMING else 1.2}
            style["linestyle"] = "-" if contender.strategy is not None else "--"
            style |= {"marker": contender.marker, "markersize": 4, "markevery": (1, 3)}
            grid[0][column].plot(medians.s, medians.loss, label=contender.label, **style)
            grid[1][column].plot(medians.s, medians.accuracy, **style)
        grid[0][column].set(title=condition, xscale="log", yscale="log")
        grid[1][column].set(xscale="log", xlabel="seconds of training", ylim=(0.5, 1.0))
    grid[0][0].set_ylabel("test loss")
    grid[1][0].set_ylabel("test accuracy")
    lines = {line.get_label(): line for axes in grid[0] for line in axes.get_lines()}  # of all panels
    order = [contender.label for contender in CONTENDERS.values() if contender.label in lines]
    columns = min(5, max(1, 2 * len(conditions)))
    figure.legend([lines[label] for label in order], order, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(SCENARIOS[scenario].question)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
