"""Worker processes that have a whole model each: a DDPStrategy without DDP, or, with islands, with DDP inside each.

Lightning treats its DDPStrategy specially (samplers, launchers, compiled models), so ours is one. It wraps nothing, unless
workers are islands: then the default group is the island's, and Lightning's own wrapping trains on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_choice
from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.strategies.islands.flat_parameters import FlatParameters
from lightning_gossip.strategies.islands.island_model import ReplicatedModel
from lightning_gossip.strategies.lightning.launchers import CheckedMultiProcessingLauncher, CheckedSubprocessLauncher
from lightning_gossip.strategies.lightning.validation import check_model, check_model_of_islands, check_plugins
from lightning_gossip.strategies.lightning.worker_processes import WorkerProcesses
from lightning_gossip.strategies.options import DDP_OPTIONS, IslandSize, StartMethod, check_island
from lightning_gossip.strategies.state import checkpoint_contents
from lightning_gossip.strategies.state.shared_tensors import SharedModel, start_equal


class ReplicatedProcesses(WorkerProcesses, DDPStrategy):
    """Workers with equal models at the start.

    Args:
        start_method: how Lightning starts the workers: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        island: ranks that train together as one worker: a number, or ``"node"`` for all of a node. They are a
            DistributedDataParallel group of their own, whose options are accepted then, too (docs/islands.md).
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for every Lightning strategy.
        processes: see :class:`~lightning_gossip.strategies.lightning.worker_processes.WorkerProcesses`.

    Raises:
        ConfigurationError: for a value that cannot work, and for an unknown argument.
    """

    def __init__(
        self,
        *,
        start_method: StartMethod = "popen",
        island: IslandSize = 1,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **processes: Any,
    ) -> None:
        check_island(type(self), island, allowed=self.has_islands)
        check_choice("start_method", start_method, get_args(StartMethod))
        if island != 1 and start_method != "popen":
            raise ConfigurationError(
                f"start_method={start_method!r} with island={island!r} is not possible yet. Leave it out ('popen'), or start"
                " the ranks with torchrun or srun."
            )
        check_plugins(
            accelerator=accelerator,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        of_ddp = {name: processes.pop(name) for name in DDP_OPTIONS.intersection(processes)} if island != 1 else {}
        super().__init__(
            {
                "accelerator": accelerator,
                "parallel_devices": parallel_devices,
                "cluster_environment": cluster_environment,
                "checkpoint_io": checkpoint_io,
                "precision_plugin": precision_plugin,
                "start_method": start_method,
                **of_ddp,
            },
            **processes,
        )
        self.island = island
        self.flat: FlatParameters | None = None  # of the present fit, with islands

    @property
    @override
    def islands(self) -> Islands | None:
        size = self.num_processes if self.island == "node" else self.island
        assert isinstance(size, int)
        return None if size == 1 else Islands(size)

    @override
    def preflight(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        synced = self._layer_sync is not None
        if self.islands is None:
            check_model(model, sync_batchnorm=synced)
        else:
            check_model_of_islands(model, sync_batchnorm=synced, on_cpu=self.root_device.type == "cpu")
        super().preflight(trainer, model)

    @override
    def _new_launcher(self) -> CheckedSubprocessLauncher | CheckedMultiProcessingLauncher:
        if self._start_method == "popen":
            return super()._new_launcher()
        return CheckedMultiProcessingLauncher(self, start_method=self._start_method)

    @override
    def _connect_all(self) -> None:
        DDPStrategy.setup_distributed(self)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.workers > 1:
            super().setup(trainer)
            if self.islands is not None and trainer.state.fn != TrainerFn.FITTING:
                self.start_equal()  # DDP has done so inside the island only
        else:
            super(DDPStrategy, self).setup(trainer)  # DDP's would broadcast on a group that does not exist

    @override
    def start_equal(self) -> None:
        assert self.lightning_module is not None
        start_equal(self.lightning_module, self.all_workers, in_host_memory=self.islands is not None)

    @override
    def _setup_model(self, model: Module) -> Module:  # type: ignore[override]
        return model if self.islands is None else super()._setup_model(model)

    @override
    def configure_ddp(self) -> None:
        assert isinstance(self.model, pl.LightningModule)
        self.start_equal()
        if self.islands is not None:
            self.flat = FlatParameters(self.model, self.islands.size)  # before DDP looks at the parameters
            super().configure_ddp()

    @override
    def shared_model(self, module: Module, averaged_buffers: Sequence[str]) -> SharedModel:
        if self.islands is None:
            return SharedModel(module, averaged_buffers)
        assert self.groups is not None

        def flat() -> FlatParameters:
            assert self.flat is not None
            return self.flat

        return ReplicatedModel(module, averaged_buffers, flat=flat, place=self.groups.place, size=self.islands.size)

    @override
    def mean_optimizer_state(self, optimizer: Optimizer, *, keeps: Callable[[], bool]) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        return checkpoint_contents.mean_optimizer_state(state, self.collectives_device, self.all_workers, keeps=keeps)
