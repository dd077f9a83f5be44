"""Batches of a fixed length: sleep until the period since the end of the last batch is over."""

from __future__ import annotations

import time
from collections.abc import Mapping

from lightning.pytorch import Callback, LightningModule, Trainer


class Pacer:
    """Pads a worker's batches; a batch that is late by itself is not made up for."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._last_end_s = 0.0

    def begin(self) -> None:
        self._last_end_s = time.monotonic()

    def wait(self) -> None:
        end_s = max(time.monotonic(), self._last_end_s + self._period_s)
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self._last_end_s = end_s


class ClusterEmulator(Callback):
    """Makes each batch of worker r last ``slowdown[r] · period_s``, everything that belongs to it included."""

    def __init__(self, *, slowdown: Mapping[int, float], period_s: float) -> None:
        self._slowdown = dict(slowdown)
        self._period_s = period_s
        self._pacer = Pacer(period_s)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pacer = Pacer(self._period_s * self._slowdown.get(trainer.global_rank, 1.0))
        self._pacer.begin()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pacer.wait()  # before the strategy's end of the batch, where it may go to a rendezvous
