"""Worker processes that have a shard of a model each: islands on Lightning's ModelParallelStrategy.

The default process group and ``self.device_mesh`` are the island's, so a ``configure_model`` written for that strategy (FSDP2,
tensor parallelism) runs as it is, and so do gradient clipping, distributed checkpoints and the user's own collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint
from lightning.fabric.strategies.model_parallel import _setup_device_mesh
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_choice, check_integer
from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.process_end import end_groups_at_exit
from lightning_gossip.strategies.islands.sharded_checkpoint import (
    gathered,
    in_one_file,
    load_own_shards,
    mean_state,
    own_shards,
    read_tensors,
    remove,
    write_shards,
)
from lightning_gossip.strategies.islands.sharded_model import ShardedModel, start_equal_shards
from lightning_gossip.strategies.islands.sharding import Sharding, reshard, sharded_modules
from lightning_gossip.strategies.lightning.worker_processes import BatchesOfRank, WorkerProcesses
from lightning_gossip.strategies.state.checkpoint_contents import KEY
from lightning_gossip.strategies.state.shared_tensors import SharedModel

Size = int | Literal["auto"]


class ShardedProcesses(WorkerProcesses, ModelParallelStrategy):
    """Islands of ``data_parallel_size`` × ``tensor_parallel_size`` ranks, each with one model in shards.

    Args:
        data_parallel_size: ranks of an island that train on batches of their own; ``"auto"``: those of a node, divided by
            ``tensor_parallel_size``.
        tensor_parallel_size: ranks that compute one batch together.
        save_distributed_checkpoint: each rank of one island writes its shard, into a folder; otherwise one file is written.
        start_method: ``"popen"`` only, as with Lightning's ModelParallelStrategy.
        processes: see :class:`~lightning_gossip.strategies.lightning.worker_processes.WorkerProcesses`.

    Raises:
        ConfigurationError: for a value that cannot work, and for an unknown argument.
    """

    island = "mesh"
    is_sharded = True

    def __init__(
        self,
        *,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = 1,
        save_distributed_checkpoint: bool = True,
        start_method: Literal["popen"] = "popen",
        **processes: Any,
    ) -> None:
        for name, size in (("data_parallel_size", data_parallel_size), ("tensor_parallel_size", tensor_parallel_size)):
            if size != "auto":
                check_integer(name, size, example=8, otherwise=", or 'auto'")
        check_choice("save_distributed_checkpoint", save_distributed_checkpoint, (True, False))
        if start_method != "popen":
            raise ConfigurationError(
                f"start_method={start_method!r} is not possible with {type(self).__name__}: a model in shards cannot be handed"
                " back to the process that starts the workers. Leave it out, and run a script (not a notebook)."
            )
        super().__init__(
            {
                "data_parallel_size": data_parallel_size,
                "tensor_parallel_size": tensor_parallel_size,
                "save_distributed_checkpoint": save_distributed_checkpoint,
            },
            **processes,
        )

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """Data-parallel and tensor-parallel ranks of an island; known before there are processes.

        Raises:
            ConfigurationError: if the ranks of a node are no multiple of what an ``"auto"`` size has to fill up.
        """
        data, tensor = self._data_parallel_size, self._tensor_parallel_size
        if data != "auto" and tensor != "auto":
            return int(data), int(tensor)
        known = 1 if tensor == "auto" and data == "auto" else int(tensor if data == "auto" else data)
        filled, rest = divmod(self.num_processes, known)
        if rest:
            name, of = ("data", "tensor") if data == "auto" else ("tensor", "data")
            raise ConfigurationError(
                f"{name}_parallel_size='auto' fills up a node, whose {self.num_processes} ranks are no multiple of"
                f" {of}_parallel_size={known}. Write a number."
            )
        return (filled, known) if data == "auto" and tensor != "auto" else (known, filled)

    @property
    @override
    def islands(self) -> Islands:
        data, tensor = self.mesh_shape
        return Islands(data * tensor)

    @property
    @override
    def units(self) -> int:
        (data, tensor), size = self.mesh_shape, self.islands.size
        if self.workers % size:
            fitting = ", ".join(str(one) for one in range(1, self.workers + 1) if self.workers % one == 0)
            raise ConfigurationError(
                f"data_parallel_size={data} × tensor_parallel_size={tensor} ranks an island do not divide the {self.workers}"
                f" ranks of the job. Choose sizes whose product does: {fitting}."
            )
        return self.workers // size

    @property
    @override
    def batches_of_rank(self) -> BatchesOfRank:
        data, tensor = self.mesh_shape
        index = self._index_in_island
        return BatchesOfRank(data, index // tensor, None if data * tensor == 1 else index == 0)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        (island, islands), batches = self.share_of_work, self.batches_of_rank
        return {"num_replicas": islands * batches.island, "rank": island * batches.island + batches.index}

    # -- setup ---------------------------------------------------------------------------------------------------------

    @override
    def preflight(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        if not is_overridden("configure_model", model):
            raise ConfigurationError(
                f"{type(self).__name__} needs the hook configure_model in {type(model).__name__}, which shards the model:"
                ' fully_shard(self.net, mesh=self.device_mesh["data_parallel"]). For a model that fits each rank use'
                " ADPSGDStrategy(island=...)."
            )
        if trainer.precision == "16-mixed":
            raise ConfigurationError(
                "precision='16-mixed' does not work with FSDP2, whose gradients Lightning's scaler cannot read. Use"
                " precision='bf16-mixed', or fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))."
            )
        if self._layer_sync is not None:
            raise ConfigurationError(
                "Trainer(sync_batchnorm=True) does nothing with a sharded model. Call"
                " torch.nn.SyncBatchNorm.convert_sync_batchnorm(self.net) in configure_model, before fully_shard."
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ConfigurationError(
                    f"{type(callback).__name__} keeps a second model, and cannot with one in shards. Leave it out; the"
                    " checkpoints hold the mean of all islands."
                )
        super().preflight(trainer, model)

    @property
    @override
    def _said_of_one_island(self) -> str:
        return (
            f"All {self.workers} ranks are one island, which has nobody to gossip with: Lightning's ModelParallelStrategy does"
            " the same. Choose data_parallel_size × tensor_parallel_size smaller than the number of ranks."
        )

    @override
    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        self.setup_distributed()
        if not dist.is_initialized():
            self._process_group_backend = self._get_process_group_backend()
            self._make_group(HashStore(), 0, 1)
            end_groups_at_exit()
        data, tensor = self.mesh_shape
        self._device_mesh = _setup_device_mesh(data, tensor, data * tensor, self.root_device)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @override
    def _connect_all(self) -> None:
        raise ConfigurationError(f"{type(self).__name__} needs a strategy whose members are watched.")

    @property
    def sharding(self) -> Sharding:
        """How the model lies on the ranks of the island."""
        return Sharding(self.device_mesh)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.model is not None
        self.sharding.check(self.model)
        super().setup(trainer)
        if self.units > 1:
            self.start_equal()

    @override
    def start_equal(self) -> None:
        assert self.model is not None
        assert self.groups is not None
        start_equal_shards(self.model, self.all_workers, self.groups, self.sharding, self.device_mesh)

    @property
    @override
    def group_of_part(self) -> dist.ProcessGroup | None:
        return self.all_workers.group if self.groups is None else self.groups.peers

    @override
    def shared_model(self, module: Module, averaged_buffers: Sequence[str]) -> SharedModel:
        return ShardedModel(
            module,
            averaged_buffers,
            sharding=lambda: self.sharding,
            mesh=lambda: self.device_mesh,
            islands=self.units,
        )

    @property
    @override
    def own_file(self) -> tuple[int, bool]:
        island = self.islands.island_of(self.global_rank)  # rank 0's, also where it comes back, and is none while outside
        return self.islands.rank(island, self._index_in_island), True

    @override
    def own_state(self) -> dict[str, Any]:
        assert self.model is not None
        reshard(sharded_modules(self.model))
        shards: dict[str, Any] = own_shards(super().own_state())
        return shards

    @override
    def load_own_state(self, state: dict[str, Any]) -> None:
        assert self.model is not None
        reshard(sharded_modules(self.model))
        assert self.lightning_module is not None
        load_own_shards(state, self.lightning_module, self.optimizers)
        if state["precision"]:
            self.precision_plugin.load_state_dict(state["precision"])

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def keeps_states(self, writers: Sequence[WorkerId]) -> bool:
        return self._is_with(writers)

    @property
    def _is_first(self) -> bool:
        return dist.get_rank() == 0

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        full = not self._save_distributed_checkpoint
        if full and self.is_aborted:
            return {}  # nobody else comes to gather it
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=full, cpu_offload=True))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self._save_distributed_checkpoint and self.is_aborted:
            return {}
        return super().optimizer_state(optimizer)

    @override
    def mean_optimizer_state(self, optimizer: Optimizer, *, keeps: Callable[[], bool]) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        assert self.model is not None
        distributed = self._save_distributed_checkpoint
        reshard(sharded_modules(self.model))  # the optimizer's parameters are looked for in the model
        offloads = distributed and self.units == 1
        state = get_optimizer_state_dict(self.model, optimizer, options=StateDictOptions(cpu_offload=offloads))
        if self.units > 1:
            assert self.groups is not None
            state = mean_state(state, self.model, self.all_workers, self.groups, keeps=keeps)
        if distributed:
            return state
        return gathered(state, self.model, keep=self._is_first)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes shards to a folder, and has no storage_options. Leave them out.")
        if self.is_aborted:
            rank_zero_warn(f"No checkpoint is written to {filepath}: after a failure nobody brings the other shards.")
            return
        path = Path(self.broadcast(filepath))
        if not self.writes:
            return
        if self._save_distributed_checkpoint:
            write_shards(checkpoint, path, is_first=self._is_first)
            return
        checkpoint = in_one_file(checkpoint)
        if self._is_first:
            if path.is_dir():
                remove(path)
            self.checkpoint_io.save_checkpoint(checkpoint, path)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        path = Path(checkpoint_path)
        assert self.lightning_module is not None
        is_fit = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if is_fit and KEY in checkpoint and _is_sharded_checkpoint(path):
            assert self.model is not None
            checkpoint[KEY]["tensors"] = read_tensors(path, self.model)
        return checkpoint
