"""What a user's code asks for inside an epoch and all workers do together: a checkpoint, an end (decisions/014).

Nobody waits for anybody inside an epoch, so what needs all workers is asked for: rank 0 calls the others, each comes after its
current step, all do what rank 0 was asked for, and go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_info
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from typing_extensions import override

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.strategies.lightning.loop_progress import at_step
from lightning_gossip.strategies.lightning.patches import Patches

if TYPE_CHECKING:
    from lightning_gossip.strategies.fit.fit import Fit


class Ask(ABC):
    """What rank 0 was asked for. Is sent to all workers, so it must pickle."""

    name: ClassVar[str]  # for messages

    @abstractmethod
    def carry_out(self, trainer: pl.Trainer) -> None:
        """Do it. All workers do so together."""


@dataclass(frozen=True)
class SaveCheckpoint(Ask):
    """Request to call ``trainer.save_checkpoint`` with these arguments on all workers."""

    name: ClassVar[str] = "trainer.save_checkpoint"

    path: _PATH
    weights_only: bool | None
    storage_options: Any | None

    @override
    def carry_out(self, trainer: pl.Trainer) -> None:
        # the trainer's own is replaced by the one that asks
        type(trainer).save_checkpoint(trainer, self.path, self.weights_only, self.storage_options)


@dataclass(frozen=True)
class SaveByCallback(Ask):
    """What a ModelCheckpoint does after a batch at this step of rank 0's.

    Args:
        index: of the callback among those of its type.
        step: Lightning's ``global_step`` on rank 0.
    """

    name: ClassVar[str] = "ModelCheckpoint"

    index: int
    step: int

    @override
    def carry_out(self, trainer: pl.Trainer) -> None:
        callback = _savers(trainer)[self.index]
        asked = callback.on_train_batch_end
        if isinstance(asked, AskedSaver):
            asked.asked_at = max(asked.asked_at, self.step)
        with at_step(trainer, self.step):
            batch_idx = trainer.fit_loop.epoch_loop.batch_idx
            type(callback).on_train_batch_end(callback, trainer, trainer.lightning_module, None, None, batch_idx)


def install(trainer: pl.Trainer, fit: Fit, patches: Patches) -> None:
    """Replace in one Trainer what would make all workers wait inside an epoch."""
    save = trainer.save_checkpoint

    def save_together(filepath: _PATH, weights_only: bool | None = None, storage_options: Any | None = None) -> None:
        if fit.is_inside_epoch:
            fit.ask(SaveCheckpoint(filepath, weights_only, storage_options))
        else:
            save(filepath, weights_only, storage_options)

    patches.set(trainer, "save_checkpoint", save_together)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Timer):
            patches.set(callback, "_check_time_remaining", OwnClock(callback))
    for index, saver in enumerate(_savers(trainer)):
        if is_asked_for(saver):
            patches.set(saver, "on_train_batch_end", AskedSaver(saver, index))


def saves_passed(trainer: pl.Trainer, before: int, now: int) -> tuple[SaveByCallback, ...]:
    """What checkpoint callbacks would have missed: rank 0's count has become that of all workers, and has passed their step.

    The same on all workers.

    Args:
        before: rank 0's ``global_step`` as it came.
        now: that of all.
    """
    passed = []
    for index, saver in enumerate(_savers(trainer)):
        asked = saver.on_train_batch_end
        if isinstance(asked, AskedSaver) and saver._every_n_train_steps:
            step = now - now % saver._every_n_train_steps
            if step > max(before, asked.asked_at):
                passed.append(SaveByCallback(index, step))
    return tuple(passed)


def refuse_other_runs(trainer: pl.Trainer, patches: Patches) -> None:
    """``trainer.validate`` and its like would end the fit that they are called in."""

    def refused(name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> None:
            raise ConfigurationError(
                f"trainer.{name}(...) inside trainer.fit(...) would end the fit under way. To validate inside an epoch use"
                " Trainer(val_check_interval=...); else call it after trainer.fit(...)."
            )

        return refuse

    for name in ("fit", "validate", "test", "predict"):
        patches.set(trainer, name, refused(name))


def is_asked_for(saver: ModelCheckpoint) -> bool:
    """Whether a checkpoint callback saves by steps or by time, as Lightning's own does."""
    by_step_or_time = bool(saver._every_n_train_steps) or saver._train_time_interval is not None
    return by_step_or_time and type(saver).on_train_batch_end is ModelCheckpoint.on_train_batch_end


class OwnClock:
    """Stands in for ``Timer._check_time_remaining``: inside an epoch each worker looks at its own clock, and asks nobody.

    Whoever's time is up wants to stop, and all stop with it. Copies and pickles with its callback.
    """

    def __init__(self, timer: Timer) -> None:
        self._timer = timer

    def __call__(self, trainer: pl.Trainer) -> None:
        timer = self._timer
        if not _in_session(trainer):
            type(timer)._check_time_remaining(timer, trainer)
        elif not trainer.should_stop and timer._duration is not None and timer.time_elapsed() >= timer._duration:
            trainer.should_stop = True
            if timer._verbose:
                rank_zero_info("Time limit reached: all workers stop after their current step.")


class AskedSaver:
    """Stands in for ``ModelCheckpoint.on_train_batch_end``: rank 0 sees when it is time, by its own steps or clock.

    Copies and pickles with its callback.

    Attributes:
        asked_at: the largest step that a checkpoint was asked for at: a fast rank 0 comes to it again after the epoch's end.
    """

    def __init__(self, saver: ModelCheckpoint, index: int) -> None:
        self._saver = saver
        self._index = index
        self.asked_at = -1

    def __call__(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        saver, step = self._saver, trainer.global_step
        fit = _fit_of(trainer)
        if fit is None or not fit.in_session or (fit.is_lockstep and saver._train_time_interval is None):
            type(saver).on_train_batch_end(saver, trainer, pl_module, *args, **kwargs)
        elif trainer.is_global_zero and self._is_due(trainer, step):
            self.asked_at = max(self.asked_at, step)
            fit.ask(SaveByCallback(self._index, step))

    def _is_due(self, trainer: pl.Trainer, step: int) -> bool:
        saver = self._saver
        if saver._should_skip_saving_checkpoint(trainer):
            return False
        if saver._train_time_interval is not None:
            waited_s = now_s() - (saver._last_time_checked or 0.0)
            return step != self.asked_at and waited_s >= saver._train_time_interval.total_seconds()
        return step > self.asked_at and step % saver._every_n_train_steps == 0


def _savers(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]  # type: ignore[attr-defined]


def _fit_of(trainer: pl.Trainer) -> Fit | None:
    """The fit under way; None where there is none, as for a copied callback under another strategy than ours."""
    return getattr(trainer.strategy, "_fit", None)


def _in_session(trainer: pl.Trainer) -> bool:
    fit = _fit_of(trainer)
    return fit is not None and fit.in_session
