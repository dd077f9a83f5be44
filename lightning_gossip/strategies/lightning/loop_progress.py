"""Lightning's own counters of one fit, moved where the workers' common progress differs from what its loops have counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage


def epochs_processed(trainer: pl.Trainer) -> int:
    """The number of the epoch under way; that of the next one between two."""
    progress = trainer.fit_loop.epoch_progress.current
    return int(progress.processed)  # type: ignore[attr-defined]


def mean_step(steps: Sequence[int]) -> int:
    """The step count that all workers go on with."""
    return round(sum(steps) / len(steps))


@contextmanager
def at_step(trainer: pl.Trainer, steps: int) -> Iterator[None]:
    """Lightning's step count is this one for a while."""
    own = trainer.global_step
    set_global_step(trainer, steps)
    try:
        yield
    finally:
        set_global_step(trainer, own)


def set_global_step(trainer: pl.Trainer, steps: int) -> None:
    """Set Lightning's global step: with shared work the workers' own counts differ until a synchronisation point."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        total = loop.automatic_optimization.optim_progress.optimizer.step.total
    else:
        total = loop.manual_optimization.optim_step_progress.total
    shift = steps - total.completed
    total.ready += shift
    total.completed += shift


def has_skipped(trainer: pl.Trainer) -> bool:
    """Whether ``on_train_batch_start`` has returned -1. Asked when the loop has ended: it leaves that batch unfinished."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(current.completed < current.ready)


def skip_validation(trainer: pl.Trainer, skip: bool) -> None:
    """Leave out the validation that follows the batch under way, or do not."""
    trainer.fit_loop.epoch_loop._skip_next_val = skip


def resize_epoch(trainer: pl.Trainer, length: int) -> None:
    """Tell Lightning's loop another length of this worker's share: what it has reckoned from that follows."""
    fit_loop = trainer.fit_loop
    batches = _parse_num_batches(RunningStage.TRAINING, length, trainer.limit_train_batches)
    fit_loop.max_batches = batches
    assert fit_loop._combined_loader is not None
    fit_loop._combined_loader.limits = [batches]
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))


def align_epoch(trainer: pl.Trainer, done: int) -> None:
    """Set the loop to so many batches done: workers may have stopped at different ones, and the rest is dealt out evenly."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    shift = max(0, done) - current.ready
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, max(0, getattr(current, name) + shift))
