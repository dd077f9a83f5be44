"""A report of the workers under strategies that keep none, such as Lightning's DDP."""

from __future__ import annotations

import statistics
import warnings
from collections import deque
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.data import extract_batch_size
from typing_extensions import override

from lightning_gossip.arguments import clear_arguments
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.usage import Usage
from lightning_gossip.runtime.workers import FixedWorkers, Workers
from lightning_gossip.strategies.report import FitReport, WorkerReport

_RECENT = 1000  # batches of which the median is said


@clear_arguments
class FitReporter(Callback):
    """Counts steps, samples and seconds of every worker, for :func:`lightning_gossip.report`, under any strategy.

    A strategy of this package keeps a report of its own, which says more; this callback then does nothing. Under another
    strategy the workers tell each other at the end of each epoch. ``busy_s`` is the time in training steps, and holds what a
    step of DDP waits for the slowest worker.
    """

    def __init__(self) -> None:
        self.report: FitReport | None = None
        """Of the last fit, from its first epoch's end on; None under a strategy that keeps its own."""
        self._own = WorkerReport(rank=0)
        self._before = 0
        self._usage = Usage()
        self._began_s = 0.0
        self._batches_s: deque[float] = deque(maxlen=_RECENT)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.report, self._own = None, WorkerReport(rank=trainer.global_rank)
        self._usage = Usage()
        self._batches_s.clear()
        self._before = trainer.global_step

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._began_s = now_s()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        batch_s = now_s() - self._began_s
        self._own.busy_s += batch_s
        self._batches_s.append(batch_s)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a batch whose size is a guess, self.log warns
            self._own.samples += extract_batch_size(batch)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(getattr(trainer.strategy, "report", None), FitReport):
            return
        self._own.steps = trainer.global_step - self._before
        self._own.describe_usage(self._usage)
        self._own.batch_s = statistics.median(self._batches_s) if self._batches_s else None
        workers: Workers = getattr(trainer.strategy, "all_workers", None) or FixedWorkers()
        everyones = workers.gather(self._own.as_dict())
        met = 0 if self.report is None else self.report.rendezvous
        self.report = FitReport(workers=[WorkerReport(**own) for own in everyones], rendezvous=met + 1)
