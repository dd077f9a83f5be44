"""What the headlines share: tables on the screen, figures and JSON under ``benchmarks/results/reproduction``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.ticker import NullLocator

from benchmarks import harness
from benchmarks.harness import RESULTS, console, print_table, write_results

FOLDER = RESULTS / "reproduction"

COLOURS = {
    "AD-PSGD": "#1b7f5c",
    "AD-PSGD, ring": "#7cc4a6",
    "all-reduce, overlapped": "#c8553d",
    "all-reduce": "#e5a08f",
    "D-PSGD": "#8a6fb0",
    "A-PSGD": "#3b6ea8",
    "ideal": "#444444",
}
"""One colour a strategy, the same in all figures."""


@dataclass(frozen=True)
class Table:
    """What was printed, cell by cell; ``docs/reproduction.md`` holds the same cells, and a test compares them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str | None = None


@dataclass
class Report:
    """One headline's tables, numbers and figures.

    Args:
        name: of the headline and of its files.
    """

    name: str
    tables: list[Table] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str | None = None) -> None:
        """Print a table and keep it."""
        table = Table(title, list(columns), [list(row) for row in rows], caption)
        self.tables.append(table)
        print_table(title, table.columns, table.rows, caption=caption)

    def figure(self, figure: Any, suffix: str = "") -> None:
        """Save a figure of matplotlib as ``<name><suffix>.png``."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        path = FOLDER / f"{self.name}{suffix}.png"
        figure.savefig(path, dpi=130)
        self.written.append(path.name)

    def write(self, settings: dict[str, Any], seconds: float) -> Path:
        """Write ``<name>.json``: the settings, the tables, and how long it took."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        tables = [asdict(table) for table in self.tables]
        return write_results(f"reproduction/{self.name}", {"seconds": seconds, "settings": settings, "tables": tables})


def axes_of(columns: int = 1, **size: float) -> tuple[Any, list[Any]]:
    """A figure with panels side by side."""
    figure, panels = harness.axes_of(1, columns, **size)
    return figure, list(panels[0])


def plain_ticks(axis: Any, values: Sequence[float], *, suffix: str = "") -> None:
    """Exactly these ticks on an axis, as plain numbers."""
    axis.set_ticks(list(values), [f"{value:g}{suffix}" for value in values])
    axis.set_minor_locator(NullLocator())


def mean_and_deviation(values: Sequence[float], digits: int = 3) -> str:
    """Over seeds, as text: the mean and the sample's standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {deviation:.{digits}f}"


def progress(what: str) -> Any:
    """A line that shows what is going on while it goes on."""
    return console.status(what)
