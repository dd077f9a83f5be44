"""The points of Lightning's training loop at which a decentralized strategy acts and for which there is no strategy hook."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_gossip.strategies.fit.fit import Fit
from lightning_gossip.strategies.fit.slurm_requeue import Requeue


class StrategyHooks(Callback):
    """Stands first among the callbacks of a fit, so that the others see the model as it is after the synchronisation point."""

    def __init__(self, fit: Fit, requeue: Requeue) -> None:
        self._fit = fit
        self._requeue = requeue

    @override
    def on_train_epoch_start(self, *_: Any) -> None:
        self._fit.begin_epoch()

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._fit.work.show_length()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._fit.after_batch()

    @override
    def on_train_epoch_end(self, *_: Any) -> None:
        self._fit.end_epoch()
        self._fit.work.show_nominal_length()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, SIGTERMException):
            self._fit.abort()
        elif not self._fit.aborted:  # all have stopped together
            self._requeue.stopped()
