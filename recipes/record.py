"""What a run leaves behind besides the model: metrics.csv while it goes on, record.json at its end."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from lightning_gossip import FitReport
from lightning_gossip.callbacks import CollectiveCounter
from lightning_gossip.callbacks.monitor import metrics
from lightning_gossip.runtime.workers import FixedWorkers

RECORD, METRICS = "record.json", "metrics.csv"
_MAX_INTERVALS = 10_000  # a worker; a plot cannot show more, and a long run must not fill the disk
_MAX_LOSSES = 4_000

Span = tuple[str, float, float, int | None]  # activity, start and end in seconds of the run, partner


@dataclass
class WorkerRecord:
    """One worker's run. Times are seconds since rank 0 began to train."""

    rank: int
    steps: int
    samples: int
    busy_s: float
    spans: list[Span]
    losses: list[tuple[float, float]]  # when, and the loss of that worker's batch


@dataclass
class RunRecord:
    """One fit, of all workers; ``report`` is the strategy's own, if it keeps one.

    A fit that goes on from a checkpoint counts its seconds and epochs on from there; what workers are said to have done, and
    the spans, are of this fit alone.

    Args:
        train_s: seconds of training, those before a resume included.
        collectives: inside epochs, the largest count of a worker.
        epochs: one row an epoch, those before a resume included.
        workers: by rank.
        report: the strategy's.
        epochs_before: how many of the epochs were trained before a resume.
        before_s: how many of the seconds.
    """

    train_s: float
    collectives: int
    epochs: list[dict[str, float]]
    workers: list[WorkerRecord] = field(default_factory=list)
    report: dict[str, Any] | None = None
    epochs_before: int = 0
    before_s: float = 0.0

    def save(self, folder: Path) -> None:
        """Write ``record.json``."""
        (folder / RECORD).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RunRecord:
        """Read what :meth:`save` wrote."""
        values = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        workers = [WorkerRecord(**worker) for worker in values.pop("workers")]
        return cls(**values, workers=workers)


class RunRecorder(Callback):
    """Follows a fit on every worker; rank 0 writes. No collective inside an epoch.

    Args:
        folder: where to write; exists.
        counter: asked for the number of collectives.
    """

    def __init__(self, folder: Path, counter: CollectiveCounter) -> None:
        self._folder = folder
        self._counter = counter
        self._started_s = self._ended_s = self._batch_s = self._evaluation_s = 0.0
        self._samples = self._steps_before = 0
        self._computing: list[Span] = []
        self._evaluating: list[Span] = []
        self._losses: list[tuple[float, Tensor]] = []
        self._epochs: list[dict[str, float]] = []
        self._epochs_before, self._before_s = 0, 0.0

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self._epochs, "wall_s": time.time() - self._started_s}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epochs, self._before_s = list(state_dict["epochs"]), state_dict["wall_s"]
        self._epochs_before = len(self._epochs)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started_s = time.time() - self._before_s
        self._steps_before = trainer.global_step

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._batch_s = time.time()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now_s = time.time()
        self._samples += len(batch[0])
        self._computing.append(("compute", self._batch_s, now_s, None))
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._losses.append((now_s, loss.detach()))

    @override
    def on_validation_start(self, *_: Any) -> None:
        self._evaluation_s = time.time()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._evaluating.append(("evaluate", self._evaluation_s, time.time(), None))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}  # reduces: on every rank
        self._epochs.append(
            {
                "epoch": trainer.current_epoch,
                **logged,
                **metrics(trainer),
                "time/wall_s": time.time() - self._started_s,
            }
        )
        if trainer.is_global_zero:
            write_csv(self._folder / METRICS, self._epochs)

    @override
    def on_train_end(self, *_: Any) -> None:
        self._ended_s = time.time()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        timeline = getattr(trainer.strategy, "timeline", None)
        spans: list[Span] = self._computing
        if timeline is not None and trainer.world_size > 1:
            spans = [(i.activity, i.start_s, i.end_s, i.peer) for i in timeline.intervals()]
        mine: dict[str, Any] = {
            "started_s": self._started_s,
            "collectives": self._counter.count + self._counter.of_algorithm,
            "rank": trainer.global_rank,
            "steps": trainer.global_step - self._steps_before,
            "samples": self._samples,
            "busy_s": sum(end_s - start_s for _, start_s, end_s, _ in self._computing),
            "spans": _bounded(sorted([*spans, *self._evaluating], key=lambda span: span[1])),
            "losses": [(at_s, float(loss)) for at_s, loss in self._losses[:: 1 + len(self._losses) // _MAX_LOSSES]],
        }
        workers = getattr(trainer.strategy, "all_workers", None) or FixedWorkers()
        everyones = workers.gather(mine)
        if not trainer.is_global_zero:
            return
        report = getattr(trainer.strategy, "report", None)
        began_s = everyones[0].pop("started_s")
        RunRecord(
            train_s=self._ended_s - self._started_s,
            collectives=max(theirs["collectives"] for theirs in everyones),
            epochs=self._epochs,
            workers=[_worker(theirs, began_s) for theirs in everyones],
            report=asdict(report) if isinstance(report, FitReport) and report.workers else None,
            epochs_before=self._epochs_before,
            before_s=self._before_s,
        ).save(self._folder)


def _worker(gathered: dict[str, Any], began_s: float) -> WorkerRecord:
    return WorkerRecord(
        rank=gathered["rank"],
        steps=gathered["steps"],
        samples=gathered["samples"],
        busy_s=gathered["busy_s"],
        spans=[(what, start_s - began_s, end_s - began_s, peer) for what, start_s, end_s, peer in gathered["spans"]],
        losses=[(at_s - began_s, loss) for at_s, loss in gathered["losses"]],
    )


def _bounded(spans: list[Span]) -> list[Span]:
    """The same lane with few enough spans: neighbours of one kind with the smallest gaps between them become one."""
    gap_s = 0.0
    while len(spans) > _MAX_INTERVALS:
        gap_s = 2.0 * gap_s or 1e-4
        merged: dict[str, list[Span]] = {}
        for what, start_s, end_s, peer in spans:
            lane = merged.setdefault(what, [])
            if lane and start_s - lane[-1][2] <= gap_s:
                lane[-1] = (what, lane[-1][1], max(end_s, lane[-1][2]), None)
            else:
                lane.append((what, start_s, end_s, peer))
        spans = sorted((span for lane in merged.values() for span in lane), key=lambda span: span[1])
    return spans


def write_csv(path: Path, rows: list[dict[str, float]]) -> None:
    """One column a name; rows may lack some."""
    first = ["epoch", "time/wall_s"]
    names = [*first, *sorted({name for row in rows for name in row} - set(first))]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
