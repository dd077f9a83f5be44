"""Pictures of simulated runs: loss and accuracy against virtual time, epoch times against a slowdown, time lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_gossip.simulation import Epochs, Result, Steps
from recipes import plots
from recipes.plots import STYLE
from recipes.simulated.outputs import record_of

LOSS, SLOWDOWN = "loss.png", "slowdown.png"


def draw_loss(results: Mapping[str, Result], path: Path) -> None:
    """Loss, and accuracy if there is one, of the mean model against virtual time and against samples."""
    accuracy = any(point.accuracy is not None for result in results.values() for point in result.points)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 8 if accuracy else 4.2), layout="constrained")
        rows = figure.subplots(2 if accuracy else 1, 2, squeeze=False)
        for row, what in zip(rows, ("loss", "accuracy"), strict=False):
            _curves(row[0], results, "time_s", what)
            _curves(row[1], results, "samples", what)
            for axes, label in zip(row, ("virtual time [s]", "samples of all workers"), strict=True):
                axes.set(xlabel=label, ylabel=f"{what}, mean model", yscale="log" if what == "loss" else "linear")
                axes.grid(alpha=0.25)
        rows[0][1].legend()
        figure.savefig(path, dpi=150)


def _curves(axes: Axes, results: Mapping[str, Result], x: str, y: str) -> None:
    for name, result in results.items():
        points = [(getattr(point, x), getattr(point, y)) for point in result.points if getattr(point, y) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), lw=1.5, label=name)


def draw_slowdowns(
    times: Mapping[str, Sequence[tuple[float, float]]], path: Path, *, workers: int, rank: int, work: Epochs | Steps
) -> None:
    """Epoch time against the slowdown of one worker, relative to each strategy's own without it.

    Args:
        times: by strategy, pairs of a factor and the mean length of an epoch in virtual seconds.
        path: of the picture.
        workers: how many there are.
        rank: of the slow one.
        work: that they do.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.5, 4.6), layout="constrained")
        axes = figure.subplots()
        for name, pairs in times.items():
            factors = [factor for factor, _ in pairs]
            axes.plot(factors, [epoch_s / pairs[0][1] for _, epoch_s in pairs], "o-", lw=1.5, ms=4, label=name)
        length = f"an epoch has {work.batches} batches" if isinstance(work, Epochs) else f"{work.number} steps of each"
        ideal = [workers / (workers - 1 + 1 / factor) for factor in factors]
        axes.plot(factors, ideal, "--", color="black", lw=1.0, label="nobody ever waits")
        axes.set(
            title=f"Worker {rank} of {workers} is slower; {length}",
            xlabel="slowdown",
            ylabel=f"epoch time ÷ that at {factors[0]:g}×",
            xscale="log",
            yscale="log" if axes.dataLim.y1 > 5 else "linear",
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        axes.set_xticks(factors)
        axes.grid(alpha=0.25)
        axes.legend()
        figure.savefig(path, dpi=150)


def draw_timeline(result: Result, summary: dict[str, Any], path: Path) -> None:
    """Who did what when, as a picture and beside it as a trace; see :func:`recipes.plots.timeline`."""
    record = record_of(result)
    with matplotlib.rc_context(STYLE):
        plots.timeline(record, summary).savefig(path, dpi=150)
    plots.trace(record, path.parent)
