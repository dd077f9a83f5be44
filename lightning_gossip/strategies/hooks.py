"""The points of Lightning's training loop at which a decentralized strategy acts and for which there is no strategy hook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_gossip.strategies.decentralized import DecentralizedStrategy


class StrategyHooks(Callback):
    """Stands first among the callbacks of a fit, so that the others see the model as it is after the rendezvous."""

    def __init__(self, strategy: DecentralizedStrategy) -> None:
        self._strategy = strategy

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strategy.after_batch(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strategy.before_epoch_end(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._strategy.after_failure(exception)
