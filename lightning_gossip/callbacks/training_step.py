"""What a LightningModule's ``training_step`` returns for a batch, outside of the training loop and without traces."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric, MetricCollection

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.strategies.lightning.patches import Patches


class Step(NamedTuple):
    """What ``training_step`` is given: a batch on the module's device, and its number in the epoch."""

    batch: Any
    number: int


def loss_of(module: pl.LightningModule) -> Callable[[Step], Tensor]:
    """The loss that a module's ``training_step`` returns, as a function that leaves no traces.

    What the step logs goes nowhere, its metrics keep their states and do not synchronize, and SyncBatchNorm uses the
    statistics of this worker, so that one worker can call it alone.

    Raises:
        ConfigurationError: for manual optimization, or a training step that takes the data loader's iterator. When called:
            for a step that returns no loss, or calls ``all_gather`` among several workers.
    """
    check_step(module)
    numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def loss(step: Step) -> Tensor:
        with _without_traces(module):
            output = module.training_step(*step) if numbered else module.training_step(step.batch)
        value = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                f"training_step returned {'no loss' if value is None else type(value).__name__} for batch {step.number}. Return"
                ' the loss, or a dict with the key "loss", for every batch that the curvature is measured on.'
            )
        return value

    return loss


def check_step(module: pl.LightningModule) -> None:
    """Refuse a module whose loss is not known from its ``training_step`` alone.

    Raises:
        ConfigurationError: for manual optimization, or a training step that takes the data loader's iterator.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            "With automatic_optimization=False only training_step knows what the loss is. Call"
            " lightning_gossip.analysis.curvature.curvature(loss, module.parameters(), batches, module=module) with a loss of"
            " your own."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigurationError(
            "training_step(dataloader_iter) takes its batches itself, so none is known to measure the curvature on. Write"
            " training_step(batch, batch_idx)."
        )


@contextmanager
def _without_traces(module: pl.LightningModule) -> Iterator[None]:
    with ExitStack() as stack:
        patches = Patches()
        stack.callback(patches.restore)
        for name in ("log", "log_dict"):  # outside of the loop they warn or raise, inside it they would log
            patches.set(module, name, _nothing)
        trainer = module._trainer
        if trainer is not None:
            stack.enter_context(_no_loggers(trainer))
            if trainer.world_size > 1:
                patches.set(module, "all_gather", _refuse_all_gather)
        for part in module.modules():
            if isinstance(part, Metric):
                stack.enter_context(_unchanged_metric(part))
            elif isinstance(part, MetricCollection):
                stack.enter_context(_unchanged_collection(part))
            elif isinstance(part, nn.SyncBatchNorm):
                patches.set(part, "forward", partial(_BatchNorm.forward, part))
        yield


def _nothing(*_: Any, **__: Any) -> None: ...


def _refuse_all_gather(*_: Any, **__: Any) -> None:
    raise ConfigurationError(
        "training_step calls all_gather, and rank 0 measures the curvature alone: nobody would answer. Leave CurvatureProbe"
        " out, or compute the loss from what one worker has."
    )


@contextmanager
def _no_loggers(trainer: pl.Trainer) -> Iterator[None]:
    """Put the loggers aside, as Lightning's own tuner does."""
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


@contextmanager
def _unchanged_metric(metric: Metric) -> Iterator[None]:
    """Put a metric's state back, and let nobody wait for it. In place: the metrics of a collection may share a state."""
    before = dict(vars(metric))
    states = [before[name] for name in metric._defaults]
    values: list[Any] = [state.detach().clone() if isinstance(state, Tensor) else list(state) for state in states]
    object.__setattr__(metric, "distributed_available_fn", lambda: False)
    try:
        yield
    finally:
        vars(metric).clear()
        vars(metric).update(before)
        with torch.no_grad():
            for state, value in zip(states, values, strict=True):
                if isinstance(state, Tensor):
                    state.copy_(value)
                else:
                    state[:] = value


@contextmanager
def _unchanged_collection(collection: MetricCollection) -> Iterator[None]:
    """Put back which metrics of a collection share their states: it finds out at its first update."""
    before = {**vars(collection), "_groups": copy.deepcopy(collection._groups)}
    try:
        yield
    finally:
        vars(collection).update(before)
