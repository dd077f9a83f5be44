"""What the workers did, one row a group: steps, waiting, bytes, staleness."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pandas as pd
from matplotlib.artist import setp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from recipes.report.curves import WIDTH, Picture, safe
from recipes.report.units import digits, filesize, percent

_ROW = 0.45  # inches, of a group
_STALENESS = {"staleness": ("mean", "o"), "staleness_p95": ("95th percentile", "D"), "stalest_max": ("largest", "|")}


def steps(groups: pd.DataFrame, workers: pd.DataFrame) -> Picture:
    """Optimizer steps of each worker.

    Args:
        groups: in the order of the rows.
        workers: with the label of their group.
    """
    means = workers.groupby(["label", "rank"]).steps.mean().unstack().loc[groups.label]
    figure = Figure(figsize=(WIDTH, 1.0 + len(groups) * min(max(0.16 * means.shape[1], 0.5), 1.2)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / means.shape[1]
    for number, (_, values) in enumerate(means.items()):
        places = [row - 0.4 + (number + 0.5) * height for row in range(len(groups))]
        axes.barh(places, values, height * 0.88, color=groups.colour)
    _rows(axes, groups, "optimizer steps of a worker")
    said = ", ".join(f"{label} {own.min():,.0f} to {own.max():,.0f}" for label, own in means.iterrows())
    return Picture(
        name="steps",
        title="Steps per worker",
        caption="One bar a worker, rank 0 at the top; mean over the seeds. "
        "Where the bars of a strategy are unequal, its fast workers took over work of the slow ones.",
        alt=f"Bars of the steps of each worker. Fewest and most: {said}.",
        figure=figure,
    )


def waiting(groups: pd.DataFrame) -> Picture | None:
    """Share of the training time."""
    caption = "Seconds that a worker stood still until the last one came, mean over workers and seeds."
    return _bars(groups, "waiting", "Share of the time spent waiting", "of the training time", caption, percent)


def bytes_sent(groups: pd.DataFrame) -> Picture | None:
    """Bytes sent by one worker."""
    caption = "Payload that one worker sent in the whole run, mean over workers and seeds."
    return _bars(groups, "bytes_sent", "Bytes sent by a worker", "sent in the whole run", caption, filesize)


def _bars(
    groups: pd.DataFrame, column: str, title: str, axis: str, caption: str, text: Callable[[float], str]
) -> Picture | None:
    known = groups[groups[column].notna()]
    if known.empty:
        return None
    figure = Figure(figsize=(WIDTH, 1.0 + _ROW * len(known)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(range(len(known)), known[column], 0.62, color=known.colour)
    texts = list(map(text, known[column]))
    axes.bar_label(bars, texts, padding=4)
    axes.xaxis.set_major_formatter(EngFormatter("B") if text is filesize else lambda value, _: percent(value, 0))
    _rows(axes, known, axis)
    axes.set_xlim(0.0, 1.18 * known[column].max() or 1.0)
    said = ", ".join(f"{label} {value}" for label, value in zip(known.label, texts, strict=True))
    name = "bytes" if column == "bytes_sent" else column
    return Picture(name, title, caption + _missing(groups, known), f"{title}: {said}.", figure)


def staleness(groups: pd.DataFrame) -> Picture | None:
    """Mean, 95th percentile and largest, on one line a group."""
    known = groups[groups.staleness.notna()]
    if known.empty:
        return None
    figure = Figure(figsize=(WIDTH, 1.3 + 1.2 * _ROW * len(known)), layout="constrained")
    axes = figure.subplots()
    rows = range(len(known))
    axes.hlines(rows, 0.0, known.stalest_max, color=known.colour, lw=2.0, alpha=0.4)
    for column, (label, marker) in _STALENESS.items():
        size, edge = (120, 2.5) if marker == "|" else (50, 1)
        axes.scatter(known[column], rows, s=size, c=known.colour, marker=marker, linewidths=edge, label=label, zorder=3)
    _rows(axes, known, "changes of the model between reading it and updating it")
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.set_xlim(0.0, 1.05 * known.stalest_max.max() or 1.0)
    legend = figure.legend(loc="outside lower center", ncols=len(_STALENESS))
    setp(legend.legend_handles, color="#555555")  # type: ignore[arg-type]
    said = "; ".join(
        f"{row.label} mean {digits(row.staleness)}, 95th percentile {digits(row.staleness_p95)},"
        f" largest {digits(row.stalest_max)}"
        for row in known.itertuples()
    )
    caption = "By how many changes the model was out of date when a step updated it." + _missing(groups, known)
    return Picture("staleness", "Staleness of the updates", caption, f"Staleness: {said}.", figure)


def _missing(groups: pd.DataFrame, known: pd.DataFrame) -> str:
    names = [label for label in groups.label if label not in set(known.label)]
    return f" Not counted by {'; '.join(names)}." if names else ""


def _folded(label: str) -> str:
    return textwrap.fill(label, 28, break_long_words=max(map(len, label.split())) > 40, break_on_hyphens=False)


def _rows(axes: Axes, groups: pd.DataFrame, label: str) -> None:
    axes.set_yticks(range(len(groups)), [safe(_folded(each)) for each in groups.label])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(left=0.0)
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
