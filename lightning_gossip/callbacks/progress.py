"""A progress bar that knows how long an epoch of shared work is."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override


class EpochProgressBar(TQDMProgressBar):
    """Shows the epoch's progress, of all workers together.

    With shared work nobody knows how many of the epoch's batches this worker will get, and Lightning shows ``15/?``. How many
    all of them have taken is known, from the worker's last claim. With equal static shares, or under another strategy, it is
    Lightning's own bar.
    """

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if _progress(trainer) is None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        elif self._should_update(batch_idx + 1, -1) and not self.train_progress_bar.disable:
            self._show(trainer)
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show(trainer, finished=True)
        super().on_train_epoch_end(trainer, pl_module)

    def _show(self, trainer: pl.Trainer, *, finished: bool = False) -> None:
        progress = _progress(trainer)
        bar = self.train_progress_bar
        if progress is not None and not bar.disable:
            taken, bar.total = progress
            bar.n = bar.total if finished else taken
            bar.refresh()


def _progress(trainer: pl.Trainer) -> tuple[int, int] | None:
    """Batches of the epoch that all workers have taken, and all of them; None without shared work."""
    progress: tuple[int, int] | None = getattr(trainer.strategy, "epoch_progress", None)
    return progress
