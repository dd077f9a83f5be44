"""A table on the screen and a JSON file beside it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str | None = None) -> None:
    """A table whose first column names the row."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def against(value: float, aim: float, *, at_most: bool = False, digits: int = 2) -> str:
    """A number marked by whether it reaches its aim."""
    reached = value <= aim if at_most else value >= aim
    return f"{value:.{digits}f} {'✓' if reached else '✗'}"


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.fmean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def best_rate(runs: Mapping[str, Sequence[dict[str, float] | None]], seeds: int) -> tuple[str, list[dict[str, float]]] | None:
    """The learning rate of the least mean test loss, of those with which no seed diverged, and its runs; None if there is none.

    Args:
        runs: by learning rate; what diverged is None, or not there.
        seeds: how many there are of each.
    """
    finished = {lr: [run for run in of if run is not None] for lr, of in runs.items()}
    whole = {lr: of for lr, of in finished.items() if len(of) == seeds}
    return min(whole.items(), key=lambda item: statistics.fmean(run["test"] for run in item[1]), default=None)


def write_results(name: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write ``<name>.json`` with when and where it was measured."""
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{name}.json"
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    path.write_text(json.dumps({"date": when, "machine": machine(), **results}, indent=2) + "\n")
    return path


def machine() -> dict[str, Any]:
    """What a reader needs to judge a time."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}


def axes_of(rows: int = 1, columns: int = 1, *, width: float = 5.2, height: float = 3.8, **options: Any) -> tuple[Figure, Any]:
    """A figure and its panels, rows of columns; each of so many inches."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in panels.flat:
        axes.grid(alpha=0.3, which="both" if rows > 1 else "major")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels
