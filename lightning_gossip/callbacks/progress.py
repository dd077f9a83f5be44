"""A progress bar that knows how long an epoch of shared work is."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override

from lightning_gossip.arguments import clear_arguments
from lightning_gossip.runtime.clock import now_s


@clear_arguments
class EpochProgressBar(TQDMProgressBar):
    """Shows the epoch's progress, of all workers together; in a file, one line an epoch.

    With shared work nobody knows how many of the epoch's batches this worker will get, and Lightning shows ``15/?``. How many
    all of them have taken is known, from the worker's last claim. With equal static shares, or under another strategy, it is
    Lightning's own bar.

    A bar that is drawn anew with each batch makes a file of thousands of lines. Where standard output is no terminal there is
    a line at the end of each epoch instead: ``Epoch 3 of 20: 80 batches in 1.2 s, val_acc=0.912``.

    Args:
        lines: lines instead of the bar. None: where standard output is neither a terminal nor a notebook's.
        options: of Lightning's TQDMProgressBar; with ``refresh_rate=0`` nothing is shown at all.
    """

    def __init__(self, *, lines: bool | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._lines = lines
        self._epoch_began_s = 0.0

    @property
    def lines(self) -> bool:
        """Whether the bar prints lines instead of redrawing one."""
        if self._lines is not None:
            return self._lines
        return not (sys.stdout.isatty() or hasattr(sys, "ps1"))  # notebooks and interactive sessions have a prompt

    @property
    @override
    def is_enabled(self) -> bool:
        return super().is_enabled and not self.lines

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        self._epoch_began_s = now_s()

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
        if super().is_enabled and self.lines:
            print(self._line(trainer, pl_module), flush=True)

    def _line(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
        progress = _progress(trainer)
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.completed if progress is None else progress[1]
        of = f" of {trainer.max_epochs}" if trainer.max_epochs is not None and trainer.max_epochs > 0 else ""
        values = {name: value for name, value in self.get_metrics(trainer, pl_module).items() if name != "v_num"}
        shown = [f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()]
        took = f"{batches} batches in {now_s() - self._epoch_began_s:.1f} s"
        return ", ".join([f"Epoch {trainer.current_epoch + 1}{of}: {took}", *shown])

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
