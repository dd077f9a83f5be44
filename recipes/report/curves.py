"""How the groups learned: validation accuracy, training loss and bits per character, one line a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, LogLocator, NullFormatter

from recipes.report.runs import ACCURACY, BITS, LOSS
from recipes.report.units import Unit, digits, percent

WIDTH = 6.4  # inches
_TICKS = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
_ROOM = 1.002  # so that no error at all has a height too
_LEGEND = 72  # letters in a row of it


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


def accuracy(
    groups: pd.DataFrame, epochs: pd.DataFrame, against: Literal["time", "samples"], unit: Unit, targets: Sequence[float] = ()
) -> Picture | None:
    """Validation accuracy.

    Args:
        groups: of which those are shown that have it.
        epochs: theirs.
        against: what is on the horizontal axis.
        unit: of times.
        targets: drawn as lines.
    """
    epochs = epochs[epochs[ACCURACY].notna()]
    if epochs.empty:
        return None
    figure, axes, ends = _lines(groups, epochs, ACCURACY, against, unit)
    stretched = _accuracy_axis(axes, epochs[ACCURACY].min(), epochs[ACCURACY].max())
    for target in targets:
        axes.axhline(target, color="#888888", lw=0.9, ls=(0, (4, 3)), zorder=0)
    sentences = {
        "Of the mean model, at the end of each epoch; further left is sooner.": against == "time",
        "How much is learned from the same data, whatever the time that it takes.": against == "samples",
        _thin(groups): True,
        "Dashes tell the settings of a strategy apart.": groups.dash.nunique() > 1,
        "Dashed grey: the target.": len(targets) > 0,
        "The upper end of the axis is stretched.": stretched,
    }
    title = f"Validation accuracy against {'wall time' if against == 'time' else 'samples'}"
    caption = " ".join(sentence for sentence, said in sentences.items() if said and sentence)
    return Picture(f"accuracy_{against}", title, caption, _alt(title, ends, percent), figure)


def loss(groups: pd.DataFrame, epochs: pd.DataFrame, unit: Unit) -> Picture | None:
    """Training loss against wall time.

    Args:
        groups: of which those are shown that have it.
        epochs: theirs.
        unit: of times.
    """
    epochs = epochs[epochs[LOSS].notna()]
    if epochs.empty:
        return None
    figure, axes, ends = _lines(groups, epochs, LOSS, "time", unit)
    axes.set_ylabel("training loss")
    if epochs[LOSS].min() > 0.0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    title = "Training loss against wall time"
    caption = "Mean of each epoch, over the workers' own models. Of simulated runs: the mean model's at its end, on the"
    caption = f"{caption} samples that the objective evaluates. {_thin(groups)}".rstrip()
    return Picture("loss_time", title, caption, _alt(title, ends, digits), figure)


def bits(groups: pd.DataFrame, epochs: pd.DataFrame, unit: Unit) -> Picture | None:
    """Bits per character of the validation text against wall time.

    Args:
        groups: of which those are shown that have it.
        epochs: theirs.
        unit: of times.
    """
    epochs = epochs[epochs[BITS].notna()]
    if epochs.empty:
        return None
    figure, axes, ends = _lines(groups, epochs, BITS, "time", unit)
    axes.set_ylabel("bits per character")
    title = "Bits per character against wall time"
    caption = f"Of the mean model on the validation text, at the end of each epoch; lower is better. {_thin(groups)}".rstrip()
    return Picture("bits_time", title, caption, _alt(title, ends, digits), figure)


def safe(label: str) -> str:
    """Nothing in it is mathematics to matplotlib."""
    return label.replace("$", r"\$")


def _lines(
    groups: pd.DataFrame, epochs: pd.DataFrame, metric: str, against: str, unit: Unit
) -> tuple[Figure, Axes, dict[str, float]]:
    """The figure, and where each group's line ends."""
    groups = groups[groups.label.isin(epochs.label)]
    columns = max(1, min(4, _LEGEND // (groups.label.str.len().max() + 7), len(groups)))
    figure = Figure(figsize=(WIDTH, 4.0 + 0.22 * -(-len(groups) // columns)), layout="constrained")
    axes = figure.subplots()
    epochs = epochs.assign(x=epochs.s / unit.size if against == "time" else epochs.samples)
    for _, own in epochs.groupby("run"):
        axes.plot(own.x, own[metric], color=own.colour.iloc[0], lw=0.8, alpha=0.45)
    ends, handles = {}, []
    for row in groups.itertuples():
        own = epochs[epochs.label == row.label]
        by_epoch = own.groupby("number")
        mean = by_epoch[["x", metric]].mean()[by_epoch.size() == own.run.nunique()]  # as long as the shortest of the runs
        axes.plot(mean.x, mean[metric], color=row.colour, ls=row.dash, lw=2.0, marker="o" if len(mean) == 1 else "")
        ends[row.label] = mean[metric].iloc[-1]
        handles.append(Line2D([], [], color=row.colour, ls=row.dash, lw=2.0, label=safe(row.label)))
    axes.set_xlim(left=0.0)
    axes.grid(alpha=0.25)
    if against == "time":
        axes.set_xlabel(f"wall time [{unit.name}]")
    else:
        axes.set_xlabel("training samples, all workers")
        axes.xaxis.set_major_formatter(EngFormatter())
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure, axes, ends


def _accuracy_axis(axes: Axes, least: float, most: float) -> bool:
    """Per cent; where the best are above 90 %, halving the error takes the same height everywhere. Returns whether it does."""
    axes.set_ylabel("validation accuracy")
    if most >= 0.9:
        axes.set_yscale("function", functions=(lambda acc: -np.log10(_ROOM - np.minimum(acc, 1.0)), lambda y: _ROOM - 10.0**-y))
        axes.yaxis.set_major_locator(FixedLocator(_TICKS))
        axes.set_ylim(max(0.0, least - 0.03), min(1.0, most + 0.3 * (_ROOM - most)))
    axes.yaxis.set_major_formatter(lambda value, _: percent(value, 0))
    return most >= 0.9


def _thin(groups: pd.DataFrame) -> str:
    return "Thin lines: each seed; thick: their mean, epoch by epoch." if groups.seeds.max() > 1 else ""


def _alt(title: str, ends: dict[str, float], text: Callable[[float], str]) -> str:
    last = ", ".join(f"{label} {text(value)}" for label, value in ends.items())
    return f"{title}, one line a strategy. At the end: {last}."
