"""What a simulated run leaves: the files of a training run, so that what reads those reads these, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from lightning_gossip.simulation import Result, Span
from recipes import summary as summaries
from recipes.record import METRICS, RunRecord, WorkerRecord, write_csv


def record_of(result: Result) -> RunRecord:
    """A simulated run as a record; times are virtual seconds."""
    spans: Sequence[Sequence[Span]] = result.spans or [()] * len(result.workers)
    return RunRecord(
        train_s=result.time_s,
        collectives=0,
        epochs=[_epoch(result, number) for number in range(len(result.epochs))],
        workers=[
            WorkerRecord(worker.rank, worker.steps, worker.samples, worker.busy_s, list(own), [])
            for worker, own in zip(result.workers, spans, strict=True)
        ],
        report={},  # computing and waiting are told apart
    )


def _epoch(result: Result, number: int) -> dict[str, float]:
    """One row: what was known when the epoch ended."""
    epoch = result.epochs[number]
    row: dict[str, float] = {"epoch": number, "time/wall_s": epoch.end_s, "epoch_s": epoch.length_s}
    if epoch.consensus_distance is not None:
        row["gossip/consensus_distance"] = epoch.consensus_distance
    seen = [point for point in result.points if point.time_s <= epoch.end_s]
    if seen:
        row["train_loss"] = seen[-1].loss
        if seen[-1].accuracy is not None:
            row["val_acc"] = seen[-1].accuracy  # of the test samples: a simulated run chooses nothing by it
    return row


def save(result: Result, folder: Path) -> dict[str, Any]:
    """Write summary.json, record.json and metrics.csv; returns the summary.

    It has the keys of a training run's summary and one more, ``simulation``: what only a simulated run has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        **result.summary(),
        "simulation": {
            "ended": result.ended,
            "epoch_times_s": result.epoch_times_s,
            "exchanges_per_step": result.exchanges_per_step,
            "events": result.events,
            "points": [point._asdict() for point in result.points],
        },
    }
    summaries.save(summary, folder)
    record = record_of(result)
    record.save(folder)
    write_csv(folder / METRICS, record.epochs)
    return summary


def show(results: Mapping[str, Result], console: Console | None = None) -> None:
    """Print a table, a strategy a row; the first one is what epoch times are compared with."""
    first = next(iter(results.values()))
    title = f"Simulated: {len(first.workers)} workers, {decimal(first.model_bytes)} a model, virtual seconds"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("strategy", no_wrap=True)
    for heading in ("epoch", "×", "in all", "loss", "acc.", "exch.", "stale", "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in results.items():
        table.add_row(
            name if result.ended == "done" else f"{name} ({result.ended})",
            summaries.text(_epoch_s(result), ".4g"),
            summaries.text(_ratio(first, result), ".2f"),
            summaries.text(result.time_s, ".4g"),
            summaries.text(result.loss, ".3g"),
            summaries.text(result.points[-1].accuracy if result.points else None, ".3f"),
            summaries.text(result.exchanges_per_step or None, ".2f"),
            summaries.text(result.staleness.mean if result.staleness.count else None, ".2f"),
            decimal(sum(worker.bytes_sent for worker in result.workers) // len(result.workers)),
        )
    table.caption = "exch.: exchanges of a worker per step; stale: mean staleness of a step; sent: by a worker in all"
    table.caption_justify = "left"
    (console or Console()).print(table)


def _epoch_s(result: Result) -> float | None:
    """Mean length of an epoch."""
    return sum(result.epoch_times_s) / len(result.epochs) if result.epochs else None


def _ratio(first: Result, result: Result) -> float | None:
    mine, other = _epoch_s(result), _epoch_s(first)
    return None if mine is None or not other else mine / other
