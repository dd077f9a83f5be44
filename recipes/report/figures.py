"""The pictures of a page; a group has one colour in all of them."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from recipes.plots import STYLE
from recipes.report.ranking import Group, Ranking
from recipes.report.runs import ACCURACY, LOSS
from recipes.report.units import Unit, digits, percent, unit_of_bytes

# Vega's ten, from which the colours of recipes.plots are too
COLOURS = (
    *("#4C78A8", "#F58518", "#54A24B", "#E45756", "#B279A2"),
    *("#72B7B2", "#9D755D", "#EECA3B", "#FF9DA6", "#79706E"),
)
_DASHES = ("-", "--", ":", "-.")  # for the eleventh and later groups
_TICKS = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
_ROOM = 1.002  # so that no error at all has a height too
_WIDTH = 6.4  # inches
_ROW = 0.34  # inches, of a bar


@dataclass(frozen=True)
class Picture:
    """A figure and what is said of it.

    Args:
        name: of its file.
        title: above it.
        caption: below it: what one sees, and where it comes from.
        alt: what it shows, for those who cannot see it.
        figure: itself.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure


def colour(group: Group) -> str:
    """Of its lines and bars."""
    return COLOURS[group.number % len(COLOURS)]


def draw(groups: list[Group], rankings: list[Ranking], unit: Unit) -> list[Picture]:
    """Every picture for which there is something to show.

    Args:
        groups: in the order in which they are listed.
        rankings: theirs, for the targets.
        unit: of the time axes.
    """
    with matplotlib.rc_context(STYLE):
        found = [
            _lines(groups, ACCURACY, "time", unit, rankings),
            _lines(groups, ACCURACY, "samples", unit, rankings),
            _lines(groups, LOSS, "time", unit, []),
            _steps(groups),
            _waiting(groups),
            _bytes(groups),
            _staleness(groups),
        ]
    return [picture for picture in found if picture is not None]


def _lines(groups: list[Group], metric: str, against: str, unit: Unit, rankings: list[Ranking]) -> Picture | None:
    shown = [group for group in groups if group.curve(metric)]
    if not shown:
        return None
    column, scale = (0, unit.size) if against == "time" else (1, 1.0)
    figure = Figure(figsize=(_WIDTH, 4.0 + 0.22 * _legend_rows(shown)), layout="constrained")
    axes = figure.subplots()
    for group in shown:
        seeds = [job.curve(metric) for job in group.jobs]
        for curve in seeds if len(seeds) > 1 else []:
            axes.plot(
                [row[column] / scale for row in curve], [row[2] for row in curve], color=colour(group), lw=0.7, alpha=0.35
            )
        curve = group.curve(metric)
        axes.plot(
            [row[column] / scale for row in curve], [row[2] for row in curve], color=colour(group), ls=_dash(group), lw=2.0
        )
    axes.grid(alpha=0.25)
    stretched = False
    if metric == ACCURACY:
        stretched = _accuracy_axis(axes, [row[2] for group in shown for job in group.jobs for row in job.curve(metric)])
        for ranking in rankings:
            if ranking.target is not None:
                axes.axhline(ranking.target, color="#888888", lw=0.9, ls=(0, (4, 3)), zorder=0)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left=0.0)
    if against == "samples":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.set(
        xlabel=f"wall time [{unit.name}]" if against == "time" else "training samples, all workers",
        ylabel="validation accuracy" if metric == ACCURACY else "training loss",
    )
    handles = [Line2D([], [], color=colour(group), ls=_dash(group), lw=2.0, label=_safe(group.label)) for group in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=_legend_columns(shown))
    what = "Validation accuracy" if metric == ACCURACY else "Training loss"
    last = [f"{group.label} {(percent if metric == ACCURACY else digits)(group.curve(metric)[-1][2])}" for group in shown]
    axis = "wall time" if against == "time" else "samples"
    thin = " Thin lines: each seed; thick: their mean, epoch by epoch." if any(len(g.jobs) > 1 for g in shown) else ""
    upper = " The upper end of the axis is stretched." if stretched else ""
    target = " Dashed grey: the target." if metric == ACCURACY and any(r.target is not None for r in rankings) else ""
    notes = {
        (ACCURACY, "time"): "Further left is sooner. Of the mean model, at the end of each epoch.",
        (ACCURACY, "samples"): "How much is learned from the same data, whatever the time that it takes.",
        (LOSS, "time"): "Mean of each epoch, over the workers' own models; logarithmic.",
    }
    return Picture(
        name=f"{'accuracy' if metric == ACCURACY else 'loss'}_{against}",
        title=f"{what} against {axis}",
        caption=notes[metric, against] + thin + target + upper,
        alt=f"{what} against {axis}, one line a strategy. At the end: {', '.join(last)}.",
        figure=figure,
    )


def _accuracy_axis(axes: Axes, seen: list[float]) -> bool:
    """Per cent; where the best are above 90 %, halving the error takes the same height everywhere. Returns whether it does."""
    stretched = max(seen) >= 0.9
    if stretched:
        axes.set_yscale("function", functions=(lambda acc: -np.log10(_ROOM - np.minimum(acc, 1.0)), lambda y: _ROOM - 10.0**-y))
        axes.yaxis.set_major_locator(FixedLocator(_TICKS))
        axes.set_ylim(max(0.0, min(seen) - 0.03), min(1.0, max(seen) + 0.3 * (_ROOM - max(seen))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))
    return stretched


def _steps(groups: list[Group]) -> Picture:
    most = max(len(job.workers) for group in groups for job in group.jobs)
    figure = Figure(figsize=(_WIDTH, 1.0 + len(groups) * min(max(0.16 * most, 0.5), 1.2)), layout="constrained")
    axes = figure.subplots()
    said = []
    for row, group in enumerate(groups):
        steps = _by_rank(group, "steps")
        height = 0.8 / len(steps)
        for rank, value in enumerate(steps):
            axes.barh(row - 0.4 + (rank + 0.5) * height, value, height * 0.88, color=colour(group))
        said.append(f"{group.label} {min(steps):,.0f} to {max(steps):,.0f}")
    _rows(axes, groups, "optimizer steps of a worker")
    return Picture(
        name="steps",
        title="Steps per worker",
        caption="One bar a worker, rank 0 at the top; mean over the seeds. "
        "Where the bars of a strategy are unequal, its fast workers took over work of the slow ones.",
        alt=f"Bars of the steps of each worker. Fewest and most: {', '.join(said)}.",
        figure=figure,
    )


def _waiting(groups: list[Group]) -> Picture | None:
    return _bars(
        groups,
        lambda group: None if group.waiting is None else 100 * group.waiting,
        name="waiting",
        title="Share of the time spent waiting",
        axis="of the training time [%]",
        caption="Seconds that a worker stood still until the last one came, mean over workers and seeds.",
        text=lambda value: percent(value / 100),
    )


def _bytes(groups: list[Group]) -> Picture | None:
    unit = unit_of_bytes(value for group in groups if (value := group.of_workers("bytes_sent")) is not None)
    return _bars(
        groups,
        lambda group: group.of_workers("bytes_sent"),
        name="bytes",
        title="Bytes sent by a worker",
        axis=f"sent in the whole run [{unit.name}]",
        caption="Payload that one worker sent in the whole run, mean over workers and seeds.",
        text=unit.text,
        scale=unit.size,
    )


def _bars(
    groups: list[Group],
    value_of: Callable[[Group], float | None],
    *,
    name: str,
    title: str,
    axis: str,
    caption: str,
    text: Callable[[float], str],
    scale: float = 1.0,
) -> Picture | None:
    values = [(group, value) for group in groups if (value := value_of(group)) is not None]
    if not values:
        return None
    figure = Figure(figsize=(_WIDTH, 1.0 + _ROW * 1.3 * len(values)), layout="constrained")
    axes = figure.subplots()
    for row, (group, value) in enumerate(values):
        axes.barh(row, value / scale, 0.62, color=colour(group))
        axes.annotate(text(value), (value / scale, row), (4, 0), textcoords="offset points", va="center")
    _rows(axes, [group for group, _ in values], axis)
    axes.set_xlim(0.0, 1.18 * max(value / scale for _, value in values) or 1.0)
    said = ", ".join(f"{group.label} {text(value)}" for group, value in values)
    return Picture(name, title, caption + _missing(groups, [group for group, _ in values]), f"{title}: {said}.", figure)


def _staleness(groups: list[Group]) -> Picture | None:
    known = [(group, staleness) for group in groups if (staleness := group.staleness) is not None]
    if not known:
        return None
    figure = Figure(figsize=(_WIDTH, 1.3 + _ROW * 1.6 * len(known)), layout="constrained")
    axes = figure.subplots()
    markers = {"mean": "o", "95th percentile": "D", "largest": "|"}
    for row, (group, values) in enumerate(known):
        axes.plot([0.0, values[2]], [row, row], color=colour(group), lw=2.0, alpha=0.4)
        for marker, value in zip(markers.values(), values, strict=True):
            axes.plot(
                [value], [row], marker, color=colour(group), ms=11 if marker == "|" else 7, mew=2.5 if marker == "|" else 1
            )
    _rows(axes, [group for group, _ in known], "changes of the model between reading it and updating it")
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.set_xlim(0.0, 1.05 * max(values[2] for _, values in known) or 1.0)
    handles = [
        Line2D([], [], color="#555555", ls="", marker=marker, ms=11 if marker == "|" else 7, label=label)
        for label, marker in markers.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    said = [f"{group.label} mean {digits(m)}, 95th percentile {digits(p)}, largest {digits(x)}" for group, (m, p, x) in known]
    return Picture(
        name="staleness",
        title="Staleness of the updates",
        caption="By how many changes the model was out of date when a step updated it."
        + _missing(groups, [group for group, _ in known]),
        alt=f"Staleness: {'; '.join(said)}.",
        figure=figure,
    )


def _missing(groups: list[Group], known: list[Group]) -> str:
    names = [group.label for group in groups if group not in known]
    return f" Not counted by {', '.join(names)}." if names else ""


def _by_rank(group: Group, name: str) -> list[float]:
    ranks = range(max(len(job.workers) for job in group.jobs))
    return [statistics.fmean(job.workers[r][name] for job in group.jobs if r < len(job.workers)) for r in ranks]


def _rows(axes: Axes, groups: list[Group], label: str) -> None:
    axes.set_yticks(range(len(groups)), [_safe(textwrap.fill(group.label, 26)) for group in groups])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(left=0.0)
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)


def _dash(group: Group) -> str:
    return _DASHES[group.number // len(COLOURS) % len(_DASHES)]


def _safe(label: str) -> str:
    """Nothing in it is mathematics."""
    return label.replace("$", r"\$")


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g} {letter}"
    return f"{value:g}"


def _legend_columns(groups: list[Group]) -> int:
    longest = max(len(group.label) for group in groups)
    return max(1, min(4, 72 // (longest + 7), len(groups)))


def _legend_rows(groups: list[Group]) -> int:
    return -(-len(groups) // _legend_columns(groups))
