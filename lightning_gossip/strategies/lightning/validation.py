"""What cannot work is refused before any process is started, with the reason and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn import Module, SyncBatchNorm

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.strategies.lightning.asking import is_asked_for


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse options of the Trainer that make all workers wait for each other inside an epoch.

    Raises:
        ConfigurationError: naming the option, and what to use instead.
    """
    seconds = getattr(trainer, "_val_check_time_interval", None)
    if seconds is not None:
        raise ConfigurationError(
            f"val_check_interval of {seconds:g} s is a time: each worker would validate at a moment of its own."
            " Use val_check_interval=1.0 (once an epoch), or a number of batches."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None and not is_asked_for(callback):
            raise ConfigurationError(
                f"{type(callback).__name__}(train_time_interval=...) has an on_train_batch_end of its own and saves at a moment"
                " of each worker's own, and a checkpoint needs all of them. Use Lightning's ModelCheckpoint, or"
                " every_n_epochs=..."
            )


def check_model(model: Module, *, sync_batchnorm: bool) -> None:
    """Refuse layers that communicate in every forward pass.

    Raises:
        ConfigurationError: if there is a SyncBatchNorm, or ``Trainer(sync_batchnorm=True)``.
    """
    where = _sync_batchnorm(model, sync_batchnorm)
    if where is not None:
        raise ConfigurationError(
            f"{where} is a SyncBatchNorm: it makes all workers wait for each other in every forward pass. Use BatchNorm; its"
            " running statistics are averaged with the model."
        )


def check_model_of_islands(model: Module, *, sync_batchnorm: bool, on_cpu: bool) -> None:
    """Refuse a SyncBatchNorm, which an island may have, where torch has none.

    Raises:
        ConfigurationError: if there is one, or ``Trainer(sync_batchnorm=True)``, on a CPU.
    """
    where = _sync_batchnorm(model, sync_batchnorm)
    if where is not None and on_cpu:
        raise ConfigurationError(
            f"{where} is a SyncBatchNorm, which torch computes on devices only. On a CPU use BatchNorm, with the statistics of"
            " a rank's own batch; the first rank of an island has the running ones, and they are averaged with the model."
        )


def check_unfreezing(trainer: pl.Trainer) -> None:
    """Refuse Lightning's BackboneFinetuning, and warn of its kind, where islands have DistributedDataParallel inside.

    Raises:
        ConfigurationError: if the backbone would require a gradient in one of the epochs.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, BaseFinetuning):
            continue
        name = type(callback).__name__
        if not isinstance(callback, BackboneFinetuning):
            rank_zero_warn(
                f"If {name} lets parameters require a gradient after the fit has begun, the fit ends there: the"
                " DistributedDataParallel of an island would not know of them. Set their learning rate to 0 until then, or"
                " leave island=... out."
            )
        elif trainer.max_epochs in (None, -1) or callback.unfreeze_backbone_at_epoch < trainer.max_epochs:
            raise ConfigurationError(
                f"{name} lets the backbone require a gradient in epoch {callback.unfreeze_backbone_at_epoch}, of which the"
                " DistributedDataParallel of an island would not know. Leave the callback out and set the backbone's learning"
                " rate to 0 until then, or leave island=... out."
            )


def _sync_batchnorm(model: Module, everywhere: bool) -> str | None:
    """Where there is one, in words."""
    name = next((name for name, module in model.named_modules() if isinstance(module, SyncBatchNorm)), None)
    if name is not None:
        return f"the layer {name!r} of the model"
    return "Trainer(sync_batchnorm=True)" if everywhere else None


def check_plugins(**plugins: Any) -> None:
    """Refuse objects of Fabric or of the ``pytorch_lightning`` package.

    Raises:
        ConfigurationError: naming the argument.
    """
    for name, plugin in plugins.items():
        for item in plugin if isinstance(plugin, Iterable) and not isinstance(plugin, str) else [plugin]:
            if type(item).__module__.split(".")[0] == "pytorch_lightning":
                raise ConfigurationError(
                    f"{name}={item!r} comes from the package pytorch_lightning, whose classes differ from those of"
                    " lightning.pytorch. Import it, and the Trainer, from lightning.pytorch."
                )


def why_static_shares(trainer: pl.Trainer) -> str | None:
    """The reason, if any, why every worker must make the same number of steps in an epoch, as under DDP."""
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        return "training_step takes the data loader's iterator itself"
    if trainer.max_steps != -1:
        return f"max_steps={trainer.max_steps} counts the steps of each worker"
    if trainer.min_steps is not None:
        return f"min_steps={trainer.min_steps} counts the steps of each worker"
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        return "overfit_batches is set"
    if trainer.limit_train_batches != 1.0:
        return f"limit_train_batches={trainer.limit_train_batches} counts the batches of each worker"
    if trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch is None:
        return f"val_check_interval={trainer.val_check_interval} validates inside the epoch"
    if not trainer._accelerator_connector.use_distributed_sampler:
        return "use_distributed_sampler=False leaves the samples to the user"
    if not trainer.lightning_module.automatic_optimization and trainer.lr_scheduler_configs:
        return "manual optimization steps its own schedules"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            return "StochasticWeightAveraging needs to know the number of batches"
        if isinstance(callback, ModelCheckpoint) and callback._every_n_train_steps and not is_asked_for(callback):
            return f"{type(callback).__name__} has an on_train_batch_end of its own and saves at the same step of each worker"
    return None


def check_nodes_are_equal(ranks: int, nodes: int, *, started: str) -> None:
    """Refuse nodes with unequal numbers of ranks, from which neither Lightning's ranks nor islands come out.

    Args:
        ranks: of this node.
        nodes: ``num_nodes``.
        started: how many ranks the job has, as whoever started them or another one of its processes says.

    Raises:
        ConfigurationError: with what to start instead.
    """
    if started != str(ranks * nodes):
        raise ConfigurationError(
            f"devices={ranks} on this node × num_nodes={nodes} are {ranks * nodes} ranks, and the job has {started}. Each node"
            " needs equally many: where some have more devices, start several groups of equal size there, each as a node of its"
            " own (torchrun --nproc-per-node=2 once for every two devices, and num_nodes=the number of groups)."
        )
