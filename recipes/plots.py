"""Two pictures of a run: learning against wall time, and who did what when; the latter also as a trace for Perfetto.

Drawn again from a run's folder by ``python -m recipes.plots outputs/<date>/<time>``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_gossip.runtime.chrome_trace import write_trace
from recipes.record import RunRecord, Span
from recipes.summary import SUMMARY

LEARNING, TIMELINE, TRACE = "learning.png", "timeline.png", "timeline.json"
_PERIOD = "averaging/period"

_COLOURS = {"compute": "#4C78A8", "exchange": "#F58518", "wait": "#E45756", "evaluate": "#D5D8DC"}
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
_LANE, _THIN = 0.46, 0.16  # heights of a worker's lane and of the thinner one beneath, of a row of 1


def draw(record: RunRecord, summary: dict[str, Any], folder: Path) -> list[Path]:
    """Write both pictures.

    Args:
        record: of the fit.
        summary: of the run, for the titles.
        folder: where to write.

    Returns:
        The files.
    """
    with matplotlib.rc_context(STYLE):
        figures = {LEARNING: learning(record, summary), TIMELINE: timeline(record, summary)}
        for name, figure in figures.items():
            figure.savefig(folder / name, dpi=150)
    return [folder / name for name in figures]


def trace(record: RunRecord, folder: Path) -> Path:
    """Write who did what when as ``timeline.json``, which https://ui.perfetto.dev opens; returns the file."""
    return write_trace({worker.rank: worker.spans for worker in record.workers}, folder / TRACE)


def learning(record: RunRecord, summary: dict[str, Any]) -> Figure:
    """Loss and accuracy against wall time."""
    periods = [(row["time/wall_s"], row[_PERIOD]) for row in record.epochs if _PERIOD in row]
    figure = Figure(figsize=(14 if periods else 10, 4.2), layout="constrained")
    loss, accuracy, *rest = figure.subplots(1, 3 if periods else 2)
    figure.suptitle(_title(summary), x=0.01, ha="left", fontsize=12)
    at_s, losses = zip(*sorted(pair for worker in record.workers for pair in worker.losses), strict=True)
    loss.plot(at_s, losses, ".", ms=2.5, color="#9DB7D5", alpha=0.6, zorder=1, label="one batch of one worker")
    for name, label, colour in (("train_loss", "training, mean of an epoch", "#4C78A8"), ("val_loss", "validation", "#F58518")):
        _line(loss, record, name, label, colour)
    loss.set(title="Loss", xlabel="wall time [s]", yscale="log")
    loss.legend(loc="lower left")
    _line(accuracy, record, "val_acc", "validation, mean model", "#F58518")
    accuracy.axhline(summary["test_acc"], color="#54A24B", ls="--", lw=1.2, label=f"test at the end: {summary['test_acc']:.3f}")
    seen = [row["val_acc"] for row in record.epochs if "val_acc" in row]
    accuracy.set(title="Accuracy", xlabel="wall time [s]", ylim=(max(0.0, min([*seen, summary["test_acc"]]) - 0.03), 1.005))
    accuracy.legend(loc="lower right")
    for axes in rest:
        axes.step(*zip(*periods, strict=True), where="post", color="#B279A2")
        axes.set(title="Averaging period", xlabel="wall time [s]", ylabel="steps", ylim=(0, None))
    for axes in (loss, accuracy, *rest):
        axes.grid(alpha=0.25)
        axes.set_xlim(0, record.train_s)
    return figure


def timeline(record: RunRecord, summary: dict[str, Any]) -> Figure:
    """One lane a worker: the whole run above, the middle epoch below, where single steps and exchanges can be told apart."""
    workers = len(record.workers)
    figure = Figure(figsize=(11, 2.2 + 0.62 * workers * 2), layout="constrained")
    whole, zoom = figure.subplots(2, 1)
    figure.suptitle(_title(summary), x=0.01, ha="left", fontsize=12)
    start_s, end_s = _middle_epoch(record)
    _lanes(whole, record, 0.0, record.train_s, edges=False)
    whole.axvspan(start_s, end_s, fill=False, ec="black", lw=0.9, zorder=5)
    whole.set_title("The whole run")
    _lanes(zoom, record, start_s, end_s, edges=True)
    zoom.set(title="One epoch (framed above)", xlabel="wall time [s]")
    shown = {what for worker in record.workers for what, *_ in worker.spans}
    computing = "computing" if record.report is not None else "computing and waiting in all-reduce"
    labels = {
        "compute": computing,
        "exchange": "exchanging, beside it",
        "wait": "waiting for the others",
        "evaluate": "validating",
    }
    handles = [Patch(color=_COLOURS[what], label=label) for what, label in labels.items() if what in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _lanes(axes: Axes, record: RunRecord, start_s: float, end_s: float, *, edges: bool) -> None:
    for row, worker in enumerate(record.workers):
        spans = [span for span in worker.spans if span[2] > start_s and span[1] < end_s]
        for what, colour in _COLOURS.items():
            bars = [(from_s, to_s - from_s) for kind, from_s, to_s, _ in spans if kind == what]
            y = row - _LANE / 2
            if what == "exchange":
                axes.broken_barh(bars, (y + _LANE + 0.02, _THIN), fc=colour, ec=colour, lw=0.4)
            else:
                axes.broken_barh(bars, (y, _LANE), fc=colour, ec="white", lw=0.5 if edges else 0.0)
        if edges:
            _partners(axes, row, spans)
    axes.set_yticks(range(len(record.workers)), [f"worker {worker.rank}" for worker in record.workers])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(record.workers) - 0.4, -0.45)
    axes.set_xlim(start_s, end_s)
    axes.spines["left"].set_visible(False)


def _partners(axes: Axes, row: int, spans: Sequence[Span]) -> None:
    """A line between the two lanes of each exchange, drawn once."""
    for what, from_s, to_s, peer in spans:
        if what == "exchange" and peer is not None and peer > row:
            middle_s = (from_s + to_s) / 2
            y = _LANE / 2 + 0.02 + _THIN / 2
            axes.plot([middle_s, middle_s], [row + y, peer + y], color=_COLOURS["exchange"], lw=0.8, alpha=0.7, zorder=4)
            axes.plot([middle_s] * 2, [row + y, peer + y], "o", ms=2.5, color=_COLOURS["exchange"], zorder=4)


def _middle_epoch(record: RunRecord) -> tuple[float, float]:
    """The epoch in the middle of the run, from its first step on, with a little room at both ends."""
    ends_s = [0.0, *([row["time/wall_s"] for row in record.epochs] or [record.train_s])]
    middle = (len(ends_s) - 1) // 2
    start_s, end_s = ends_s[middle], ends_s[middle + 1]
    steps = [
        from_s for worker in record.workers for what, from_s, to_s, _ in worker.spans if what == "compute" and to_s > start_s
    ]
    room_s = 0.01 * (end_s - start_s)
    return max(start_s, min(steps, default=start_s) - room_s), end_s + room_s


def _line(axes: Axes, record: RunRecord, name: str, label: str, colour: str) -> None:
    points = [(row["time/wall_s"], row[name]) for row in record.epochs if name in row]
    if points:
        axes.plot(*zip(*points, strict=True), "o-", ms=3.5, lw=1.6, color=colour, label=label)


def _title(summary: dict[str, Any]) -> str:
    topology = "" if summary["topology"] is None else f" on {summary['topology']}"
    epochs = f"{summary['epochs']} epochs in {summary['train_s']:.1f} s"
    return f"{summary['strategy']}{topology}, {summary['world_size']} workers, {epochs}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run = Path(argument)
        loaded = RunRecord.load(run)
        for path in (*draw(loaded, json.loads((run / SUMMARY).read_text(encoding="utf-8")), run), trace(loaded, run)):
            print(path)
