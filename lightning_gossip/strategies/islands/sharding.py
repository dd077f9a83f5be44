"""How the parameters of a sharded model lie on the ranks of its island, and what cannot be gossiped is refused by name.

A parameter is a DTensor on the island's device mesh, or on one of its two dimensions. Along the first one, data parallel, it
has to be sharded, as ``fully_shard`` makes it. Along the second one, tensor parallel, it may be replicated: then the first rank
along it owns the tensor, exchanges it with other islands, and hands it round
(:func:`lightning_gossip.algorithm.islands.places.owns`).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_gossip.algorithm.islands.places import owns
from lightning_gossip.errors import ConfigurationError

DATA, TENSOR = "data_parallel", "tensor_parallel"
_DIMENSIONS = (DATA, TENSOR)
_DATA, _TENSOR = 0, 1  # their numbers


class Sharding:
    """The shards of one rank.

    Args:
        mesh: of the island, shape (data parallel, tensor parallel): what ``configure_model`` gets as ``self.device_mesh``.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._ranks = [
            (names, mesh[names if len(names) > 1 else names[0]].mesh.tolist()) for names in ((DATA,), (TENSOR,), _DIMENSIONS)
        ]
        self._sizes = [mesh[name].size() for name in _DIMENSIONS]
        self._coordinates = [mesh[name].get_local_rank() for name in _DIMENSIONS]

    def owns(self, tensor: Tensor) -> bool:
        """Whether this rank exchanges its shard of a parameter, or its own buffer, with other islands.

        The first one along the tensor-parallel dimension does for all that have the same. Along the data-parallel one shards
        differ, and so do buffers, which each rank has of its own batches.
        """
        return owns(self._coordinates, [_TENSOR] if self.is_handed_round(tensor) else [])

    def is_handed_round(self, tensor: Tensor) -> bool:
        """Whether mates along the tensor-parallel dimension have the same shard, or buffer."""
        return _TENSOR in self._replicated(tensor)

    def check(self, model: nn.Module) -> None:
        """Refuse parameters of which an element has no owner, or several.

        Raises:
            ConfigurationError: naming the parameter, with what to write instead.
        """
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise ConfigurationError(
                "The model is wrapped by FullyShardedDataParallel (FSDP1), whose shards are no DTensors. Instead, call"
                ' fully_shard(layer, mesh=self.device_mesh["data_parallel"]) in configure_model.'
            )
        for name, parameter in model.named_parameters():
            self._check(name, parameter)

    def _check(self, name: str, parameter: Tensor) -> None:
        kind = type(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
        if kind not in (Tensor, nn.Parameter):
            raise ConfigurationError(
                f"The parameter {name} is of the tensor subclass {kind.__name__}, and only plain numbers can be averaged. Keep"
                " the parameters in float32 or bfloat16, and quantize in the forward pass."
            )
        if parameter.is_complex():
            raise ConfigurationError(
                f"The parameter {name} is of type {parameter.dtype}, which islands do not average yet. Store its real and"
                " imaginary parts (torch.view_as_real)."
            )
        if isinstance(parameter, DTensor):
            if self._names(parameter) is None:
                raise ConfigurationError(
                    f"The parameter {name} lies on another device mesh ({parameter.device_mesh}) than that of its island. In"
                    ' configure_model pass mesh=self.device_mesh["data_parallel"] to fully_shard, and'
                    ' self.device_mesh["tensor_parallel"] to parallelize_module.'
                )
            if any(placement.is_partial() for placement in parameter.placements):
                raise ConfigurationError(
                    f"The parameter {name} has a Partial placement: its value is a sum over ranks, which no rank holds. Make it"
                    " Shard or Replicate: parameter.redistribute(placements=[...])."
                )
        if parameter.requires_grad and _DATA in self._replicated(parameter):
            raise ConfigurationError(
                f"The parameter {name} is whole on each of the {self._sizes[0]} data-parallel ranks of an island, where nothing"
                " keeps it equal. Shard the module that holds it, or the whole model: fully_shard(self.net,"
                ' mesh=self.device_mesh["data_parallel"]) in configure_model.'
            )

    def _replicated(self, tensor: Tensor) -> list[int]:
        """Dimensions of the island's mesh, larger than 1, along which ranks have the same shard."""
        names = self._names(tensor) if isinstance(tensor, DTensor) else ()
        placements = dict(zip(names or (), tensor.placements, strict=True)) if isinstance(tensor, DTensor) else {}
        return [
            dimension
            for dimension, name in enumerate(_DIMENSIONS)
            if self._sizes[dimension] > 1 and (name not in placements or placements[name].is_replicate())
        ]

    def _names(self, tensor: DTensor) -> tuple[str, ...] | None:
        """The dimensions of the island's mesh that a tensor lies on; None if it is on another mesh."""
        theirs = tensor.device_mesh.mesh.tolist()
        return next((names for names, ranks in self._ranks if ranks == theirs), None)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that ``fully_shard`` has made."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(modules: list[FSDPModule]) -> None:
    """Let the next forward pass gather its parameters from the shards, whatever was changed in these.

    Without it full copies may be left by a forward pass that no backward pass followed (validation), also in the root module,
    and they hide what is written to shards.

    An event after the optimizer, which ``set_post_optim_event`` has left for the next forward pass, would let that begin to
    gather before shards are complete: it is dropped, and the pass waits for all that the current stream has to do.
    """
    for module in modules:
        module.reshard()
        module._get_fsdp_state()._state_ctx.post_optim_event = None
