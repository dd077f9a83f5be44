"""How a worker that comes later gets to where the others are: their progress, their mean model, one's optimizer state."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer import call
from torch import Tensor

from lightning_gossip.runtime.sync_point import gather, together
from lightning_gossip.strategies.data.epoch_progress import FitWork
from lightning_gossip.strategies.lightning.loop_progress import epochs_processed, set_global_step
from lightning_gossip.strategies.state.optimizer_state import OptimizerStates, Slot


class News(NamedTuple):
    """What a member tells those who come. Small, plain values; models and optimizer states go over the groups.

    Args:
        epoch: epochs that have been processed.
        global_step: Lightning's.
        batches_that_stepped: Lightning's step of the loggers.
        steps: of the account.
        work: see :meth:`FitWork.news`.
        schedulers, callbacks, precision: their states.
    """

    epoch: int
    global_step: int
    batches_that_stepped: int
    steps: int
    work: dict[str, Any]
    schedulers: list[dict[str, Any]]
    callbacks: dict[str, Any]
    precision: dict[str, Any]


def tell(trainer: pl.Trainer, work: FitWork, *, steps: int) -> News:
    """Where this worker is, at the beginning of an epoch."""
    return News(
        epoch=epochs_processed(trainer),
        global_step=trainer.global_step,
        batches_that_stepped=trainer.fit_loop.epoch_loop._batches_that_stepped,
        steps=steps,
        work=work.news(),
        schedulers=[config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        callbacks=call._call_callbacks_state_dict(trainer),
        precision=trainer.precision_plugin.state_dict(),
    )


def follow(news: News, trainer: pl.Trainer, work: FitWork, *, ready: int) -> None:
    """Be where the news come from.

    Args:
        news: of a member.
        trainer, work: of this worker.
        ready: epochs that this worker has already counted as ready beyond the processed ones: 0 or 1.
    """
    loop = trainer.fit_loop
    for progress in (loop.epoch_progress.current, loop.epoch_progress.total):
        for name in ("started", "processed", "completed"):
            setattr(progress, name, news.epoch)
        progress.ready = news.epoch + ready
    for one in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):  # not as if resumed in the middle of something
        one.restarting = False
        one.reset_restart_stage()
    set_global_step(trainer, news.global_step)
    loop.epoch_loop._batches_that_stepped = news.batches_that_stepped
    trainer.should_stop = False
    for config, state in zip(trainer.lr_scheduler_configs, news.schedulers, strict=True):
        config.scheduler.load_state_dict(state)
    call._call_callbacks_load_state_dict(trainer, {"callbacks": news.callbacks})
    if news.precision:
        trainer.precision_plugin.load_state_dict(news.precision)
    work.follow(news.work)


def copy_optimizers(trainer: pl.Trainer, *, receives: bool) -> None:
    """Give those who come rank 0's optimizer states; the next one's if that dies meanwhile. Collective.

    Args:
        trainer: of this worker.
        receives: whether this worker takes them.
    """
    states = OptimizerStates(trainer.optimizers)
    mine = [] if receives else states.slots()
    everyones = gather((mine, None if receives else _plain_values(trainer)), kind="the optimizer states of a joiner")
    slots, plain = everyones[0]
    if not slots and not plain:
        return
    if receives:
        states.reset()
        tensors = states.tensors(slots)
    else:
        have = set(mine)
        tensors = [states.tensors([slot])[0] if slot in have else _scratch(slot) for slot in slots]

    def copy() -> None:
        with torch.no_grad():
            for tensor in tensors:
                sent = tensor.to(trainer.strategy.root_device).contiguous()
                sent = sent if receives or sent is not tensor else sent.clone()  # only those who come are changed
                dist.broadcast(sent, src=0)
                if receives:
                    tensor.copy_(sent)

    together(copy)
    if receives:
        for optimizer, values in zip(trainer.optimizers, plain, strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for index, name, value in values:
                optimizer.state[parameters[index]][name] = value


def _plain_values(trainer: pl.Trainer) -> list[list[tuple[int, str, Any]]]:
    """Per optimizer what is no floating-point tensor: (parameter, name, value)."""
    return [
        [
            (index, name, value)
            for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
            for name, value in optimizer.state.get(parameter, {}).items()
            if not isinstance(value, Tensor)
        ]
        for optimizer in trainer.optimizers
    ]


def _scratch(slot: Slot) -> Tensor:
    tensor = torch.zeros(slot.shape, dtype=getattr(torch, slot.dtype))
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
