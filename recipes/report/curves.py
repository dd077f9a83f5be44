"""How the groups learned: validation accuracy and training loss, one line a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from recipes.report.figures import WIDTH, Picture, colour, dash, safe
from recipes.report.groups import Group
from recipes.report.runs import ACCURACY, LOSS
from recipes.report.units import Unit, digits, percent

_TICKS = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
_ROOM = 1.002  # so that no error at all has a height too
_LEGEND = 72  # letters in a row of it


def accuracy(
    groups: list[Group], against: Literal["time", "samples"], unit: Unit, targets: Sequence[float] = ()
) -> Picture | None:
    """Validation accuracy.

    Args:
        groups: of which those are shown that have it.
        against: what is on the horizontal axis.
        unit: of times.
        targets: drawn as lines.
    """
    shown = [group for group in groups if group.curve(ACCURACY)]
    if not shown:
        return None
    figure, axes = _lines(shown, ACCURACY, against, unit)
    stretched = _accuracy_axis(axes, [value for group in shown for job in group.jobs for _, _, value in job.curve(ACCURACY)])
    for target in targets:
        axes.axhline(target, color="#888888", lw=0.9, ls=(0, (4, 3)), zorder=0)
    note = {
        "time": "Of the mean model, at the end of each epoch; further left is sooner.",
        "samples": "How much is learned from the same data, whatever the time that it takes.",
    }
    sentences = [note[against], *_thin(shown)]
    sentences += ["Dashes tell the settings of a strategy apart."] if any(group.dash for group in shown) else []
    sentences += ["Dashed grey: the target."] if targets else []
    sentences += ["The upper end of the axis is stretched."] if stretched else []
    title = f"Validation accuracy against {'wall time' if against == 'time' else 'samples'}"
    return Picture(f"accuracy_{against}", title, " ".join(sentences), _alt(title, shown, ACCURACY, percent), figure)


def loss(groups: list[Group], unit: Unit) -> Picture | None:
    """Training loss against wall time.

    Args:
        groups: of which those are shown that have it.
        unit: of times.
    """
    shown = [group for group in groups if group.curve(LOSS)]
    if not shown:
        return None
    figure, axes = _lines(shown, LOSS, "time", unit)
    axes.set_ylabel("training loss")
    if all(value > 0.0 for group in shown for job in group.jobs for _, _, value in job.curve(LOSS)):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    title = "Training loss against wall time"
    caption = " ".join(["Mean of each epoch, over the workers' own models.", *_thin(shown)])
    return Picture("loss_time", title, caption, _alt(title, shown, LOSS, digits), figure)


def _lines(groups: list[Group], metric: str, against: str, unit: Unit) -> tuple[Figure, Axes]:
    columns = max(1, min(4, _LEGEND // (max(len(group.label) for group in groups) + 7), len(groups)))
    figure = Figure(figsize=(WIDTH, 4.0 + 0.22 * -(-len(groups) // columns)), layout="constrained")
    axes = figure.subplots()

    def line(curve: list[tuple[float, float, float]], **style: object) -> None:
        x = [seconds / unit.size if against == "time" else samples for seconds, samples, _ in curve]
        single = {"marker": "o"} if len(curve) == 1 else {}
        axes.plot(x, [value for _, _, value in curve], **style, **single)  # type: ignore[arg-type]

    for group in groups:
        for job in group.jobs if len(group.jobs) > 1 else ():
            line(job.curve(metric), color=colour(group), lw=0.8, alpha=0.45)
    for group in groups:
        line(group.curve(metric), color=colour(group), ls=dash(group), lw=2.0)
    axes.set_xlim(left=0.0)
    axes.grid(alpha=0.25)
    if against == "time":
        axes.set_xlabel(f"wall time [{unit.name}]")
    else:
        axes.set_xlabel("training samples, all workers")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    handles = [Line2D([], [], color=colour(group), ls=dash(group), lw=2.0, label=safe(group.label)) for group in groups]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure, axes


def _accuracy_axis(axes: Axes, seen: list[float]) -> bool:
    """Per cent; where the best are above 90 %, halving the error takes the same height everywhere. Returns whether it does."""
    axes.set_ylabel("validation accuracy")
    stretched = max(seen) >= 0.9
    if stretched:
        axes.set_yscale("function", functions=(lambda acc: -np.log10(_ROOM - np.minimum(acc, 1.0)), lambda y: _ROOM - 10.0**-y))
        axes.yaxis.set_major_locator(FixedLocator(_TICKS))
        axes.set_ylim(max(0.0, min(seen) - 0.03), min(1.0, max(seen) + 0.3 * (_ROOM - max(seen))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))
    return stretched


def _thin(groups: list[Group]) -> list[str]:
    several = any(len(group.jobs) > 1 for group in groups)
    return ["Thin lines: each seed; thick: their mean, epoch by epoch."] if several else []


def _alt(title: str, groups: list[Group], metric: str, text: Callable[[float], str]) -> str:
    last = ", ".join(f"{group.label} {text(group.curve(metric)[-1][2])}" for group in groups)
    return f"{title}, one line a strategy. At the end: {last}."


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g} {letter}"
    return f"{value:g}"
