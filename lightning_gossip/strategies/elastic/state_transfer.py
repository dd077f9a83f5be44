"""Transfer of the state of a training to a joiner: progress and learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from lightning_gossip.strategies.data.epoch_progress import FitWork
from lightning_gossip.strategies.lightning.loop_progress import epochs_processed, set_global_step


class StateSnapshot(NamedTuple):
    """State of a training that joiners get with the grant: small, plain values. Models and optimizer states go over groups.

    Args:
        epoch: epochs that have been processed.
        global_step: Lightning's.
        batches_that_stepped: Lightning's step of the loggers.
        steps: optimizer steps of all workers, by their accounts.
        work: of :meth:`FitWork.snapshot`.
        schedulers: the type of each, and its state.
        callbacks, precision: their states.
    """

    epoch: int
    global_step: int
    batches_that_stepped: int
    steps: int
    work: dict[str, Any]
    schedulers: list[tuple[str, dict[str, Any]]]
    callbacks: dict[str, Any]
    precision: dict[str, Any]


def take_snapshot(trainer: pl.Trainer, work: FitWork, *, steps: int) -> StateSnapshot:
    """The state of the training on this worker, at the beginning of an epoch."""
    return StateSnapshot(
        epoch=epochs_processed(trainer),
        global_step=trainer.global_step,
        batches_that_stepped=trainer.fit_loop.epoch_loop._batches_that_stepped,
        steps=steps,
        work=work.snapshot(),
        schedulers=scheduler_states(trainer.lr_scheduler_configs),
        callbacks=call._call_callbacks_state_dict(trainer),
        precision=trainer.precision_plugin.state_dict(),
    )


def apply_snapshot(snapshot: StateSnapshot, trainer: pl.Trainer, work: FitWork, *, ready: int) -> None:
    """Put a joiner into the state of a member.

    Args:
        snapshot: of the member.
        trainer, work: of this worker.
        ready: epochs that this worker has already counted as ready beyond the processed ones: 0 or 1.
    """
    loop = trainer.fit_loop
    for progress in (loop.epoch_progress.current, loop.epoch_progress.total):
        for name in ("started", "processed", "completed"):
            setattr(progress, name, snapshot.epoch)
        progress.ready = snapshot.epoch + ready
    for one in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):  # not as if resumed in the middle of something
        one.restarting = False
        one.reset_restart_stage()
    set_global_step(trainer, snapshot.global_step)
    loop.epoch_loop._batches_that_stepped = snapshot.batches_that_stepped
    trainer.should_stop = False
    load_scheduler_states(trainer.lr_scheduler_configs, snapshot.schedulers)
    call._call_callbacks_load_state_dict(trainer, {"callbacks": snapshot.callbacks})
    if snapshot.precision:
        trainer.precision_plugin.load_state_dict(snapshot.precision)
    work.apply_snapshot(snapshot.work)


def scheduler_states(configs: Sequence[LRSchedulerConfig]) -> list[tuple[str, dict[str, Any]]]:
    """The type of each schedule, and its state."""
    return [(_type_of(config.scheduler), config.scheduler.state_dict()) for config in configs]


def load_scheduler_states(configs: Sequence[LRSchedulerConfig], states: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Take over :func:`scheduler_states` of a member.

    A callback may have put others in the place of the user's there (StochasticWeightAveraging), and does so here when its
    time comes: these are left as they are.
    """
    for config, (kind, state) in zip(configs, states, strict=False):
        if _type_of(config.scheduler) == kind:
            config.scheduler.load_state_dict(state)


def _type_of(scheduler: object) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"


def hyperparameters(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """Per optimizer and group of parameters its options, as learning rates that a schedule has lowered. Plain values."""
    return [
        [
            {name: value.tolist() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


def set_hyperparameters(optimizers: Sequence[Optimizer], groups: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Take over the options that :func:`hyperparameters` has told."""
    for optimizer, theirs in zip(optimizers, groups, strict=True):
        for group, options in zip(optimizer.param_groups, theirs, strict=True):
            for name, value in options.items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
