"""The model of one rank of a sharded island: its shards, and of what its mates have too only what it owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override

from lightning_gossip.algorithm.tensors.flat import common_dtype
from lightning_gossip.runtime.islands.groups import IslandGroups
from lightning_gossip.runtime.workers import Workers
from lightning_gossip.strategies.islands.sharding import TENSOR, Sharding, reshard, sharded_modules
from lightning_gossip.strategies.state.shared_tensors import (
    Place,
    SharedModel,
    by_kind,
    check_same_tensors,
    layout,
    places,
    retention,
)


class ShardPlace(Place):
    """Where a module keeps a tensor of which this rank has a shard, or all.

    A forward pass puts the whole parameter in the place of its shards for a while; the shards stay where they are, so they are
    looked at once.

    Args:
        place: in the module, which holds the shards now.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(
            place.name,
            place._owner,
            place._key,
            is_buffer=place.is_buffer,
            is_average=place.is_average,
            is_cumulative=place.is_cumulative,
        )
        whole = place.tensor
        self.whole = whole
        self._shard = local(whole) if isinstance(whole, DTensor) else None

    @property
    @override
    def tensor(self) -> Tensor:
        return super().tensor if self._shard is None else self._shard

    @property
    @override
    def requires_grad(self) -> bool:
        return self.whole.requires_grad

    @property
    def is_sharded(self) -> bool:
        """Whether ranks of an island have different parts of it."""
        return self._shard is not None


class ShardedModel(SharedModel):
    """The model of a sharded island.

    A rank shares its shard of each trained parameter, and its own averaged buffers (as BatchNorm's), which fully_shard leaves
    to each rank. What is replicated over tensor-parallel ranks has one owner among them.

    Args:
        module: the module that trains.
        averaged_buffers: patterns of the names of buffers that are averages.
        sharding: tells how it lies on the ranks, once ``configure_model`` has distributed it.
        mesh: tells the island's device mesh.
        islands: how many there are.
    """

    def __init__(
        self,
        module: nn.Module,
        averaged_buffers: Sequence[str],
        *,
        sharding: Callable[[], Sharding],
        mesh: Callable[[], DeviceMesh],
        islands: int,
    ) -> None:
        super().__init__(module, averaged_buffers)
        self._sharding = sharding
        self._mesh = mesh
        self._islands = islands
        self._shared: list[ShardPlace] = []  # owned or not: parameters and buffers
        self._whole_parameters = 0  # of them
        self._handed_round: list[ShardPlace] = []
        self._modules: list[FSDPModule] = []

    @override
    def find(self) -> list[Place]:
        self._modules = sharded_modules(self.module)
        reshard(self._modules)
        return [ShardPlace(place) for place in super().find()]

    @override
    def fingerprint(self) -> int:
        reshard(sharded_modules(self.module))  # full copies may be of another type
        return super().fingerprint()

    @override
    def open(self) -> ShardedModel:
        super().open()
        sharding = self._sharding()
        self._shared, self._whole_parameters = [p for p in self._places if isinstance(p, ShardPlace)], self.parameters
        self._handed_round = [place for place in self._shared if sharding.is_handed_round(place.whole)]
        self.parameters = sum(sharding.owns(place.whole) for place in self._shared[: self.parameters])
        self._places = [place for place in self._shared if sharding.owns(place.whole)]
        self.names = [place.name for place in self._places]
        self.layout = layout(list(zip(self.names, self.tensors, strict=True)))
        self.retention = retention(self.module, self.names)
        return self

    @override
    def rest(self) -> list[Place]:
        return [place for place in self._unshared() if not place.is_sharded]

    @override
    def rest_in_parts(self) -> list[Place]:
        return [place for place in self._unshared() if place.is_sharded]

    def _unshared(self) -> list[ShardPlace]:
        known = {place.name for place in self._shared}
        return [place for place in self.find() if isinstance(place, ShardPlace) and place.name not in known]

    @property
    @override
    def shared_parameters(self) -> list[Place]:
        return list(self._shared[: self._whole_parameters])

    @property
    @override
    def optimized(self) -> list[Tensor]:
        return [place.tensor for place in self.shared_parameters if place.name in self._with_gradient]

    @override
    def whole(self, tensors: Mapping[str, Tensor], kinds: Sequence[str] = ()) -> dict[str, Tensor]:
        """In shards still: DTensors, as the parameters are."""
        found, own = {}, by_kind(tensors)
        places = self._shared[: self._whole_parameters]
        dtype = common_dtype([place.tensor for place in places])  # whatever this rank owns
        for kind in dict.fromkeys((*kinds, *own)):
            named = own.get(kind, {})
            handed = {place: torch.empty_like(place.tensor, dtype=dtype) for place in self._handed_round if place in places}
            for place, on_device in handed.items():
                if place.name in named:
                    on_device.copy_(named[place.name])
            hand_round(list(handed.values()), self._mesh())
            for place in places:
                part = handed[place] if place in handed else named[place.name]
                found[f"{kind}/{place.name}"] = on_host_as(part, place.whole.detach())
        return found

    @override
    def part(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {place.name: place for place in self._places if not place.is_buffer}
        found = {}
        for kind, named in by_kind(tensors).items():
            for place in self._shared[: self._whole_parameters]:  # in one order, and all ranks
                given = named.get(place.name)
                part = None if given is None else _part_of(given, place)
                if part is not None and place.name in own:
                    found[f"{kind}/{place.name}"] = part
        return found

    @override
    def hand_round(self) -> None:
        hand_round([place.tensor for place in self._handed_round], self._mesh())
        reshard(self._modules)

    @override
    def hand_round_all(self) -> None:
        if self._islands > 1:  # a single island is what FSDP2 makes of it
            _average_inside([place.tensor for place in self._shared if place.is_buffer and not place.is_sharded])
        self.hand_round()


def as_whole(part: Tensor, whole: Tensor) -> Tensor:
    """A rank's part of something that lies on the ranks as a parameter does."""
    if not isinstance(whole, DTensor):
        return part
    made: Tensor = DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


@torch.no_grad()
def on_host_as(part: Tensor, whole: Tensor) -> Tensor:
    """A rank's part of something that lies on the ranks as a tensor does, in host memory, though the mesh is of devices.

    Args:
        part: of this rank, in host memory or on the device.
        whole: the tensor; its shards are not looked at.
    """
    if not isinstance(whole, DTensor):
        return part.cpu()
    made = torch.empty_like(whole, dtype=part.dtype, device="cpu")
    assert isinstance(made, DTensor)
    local(made).copy_(part)
    return made


@torch.no_grad()
def _part_of(given: Tensor, place: ShardPlace) -> Tensor | None:
    """This rank's part of something in shards, or of all of it in host memory; what has its shape already is returned."""
    if isinstance(given, DTensor):
        given = local(given)
    elif given.shape != place.tensor.shape and given.shape == place.whole.shape and isinstance(place.whole, DTensor):
        on_device = given.to(place.tensor.device)
        given = local(distribute_tensor(on_device, place.whole.device_mesh, place.whole.placements, src_data_rank=None))
    return given if given.shape == place.tensor.shape else None


def local(tensor: DTensor) -> Tensor:
    """This rank's shard, in the memory that the optimizer and the next forward pass use."""
    detached = tensor.detach()
    assert isinstance(detached, DTensor)
    return detached.to_local()


@torch.no_grad()
def hand_round(tensors: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Give tensors from the first rank along the tensor-parallel dimension to the others. Collective along it.

    Args:
        tensors: the same on these ranks, by shape; contiguous ones are written to in place.
        mesh: of the island.
    """
    group = mesh.get_group(TENSOR) if tensors else None
    works = []
    for tensor in tensors:
        sent = tensor.contiguous()
        works.append((dist.broadcast(sent, group=group, group_src=0, async_op=True), sent, tensor))
    for work, sent, tensor in works:
        assert work is not None
        work.wait()
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)


@torch.no_grad()
def _average_inside(buffers: Sequence[Tensor]) -> None:
    """Replace buffers, of which each rank has its own, by their means over the island. Collective in it."""
    for buffer in buffers:
        sent = buffer.contiguous()
        dist.all_reduce(sent)
        sent /= dist.get_world_size()
        if sent.data_ptr() != buffer.data_ptr():
            buffer.copy_(sent)


def start_equal_shards(model: nn.Module, workers: Workers, groups: IslandGroups, sharding: Sharding, mesh: DeviceMesh) -> None:
    """Copy the first island's shards to the same ranks of the others, and rank 0's whole tensors to all. Collective.

    Raises:
        ConfigurationError: if the model is not built of the same tensors everywhere.
    """
    reshard(sharded_modules(model))  # some ranks may have full copies, which may be of another type
    check_same_tensors(model, workers)
    found = [ShardPlace(place) for place in places(model)]

    @torch.no_grad()
    def copy() -> None:
        for place in found:
            if place.tensor.numel() == 0:
                continue
            tensor = place.real.detach()
            host = tensor.cpu().contiguous()
            dist.broadcast(host, group=groups.peers if place.is_sharded else workers.group, group_src=0)
            if host.data_ptr() != tensor.data_ptr():
                tensor.copy_(host)
        hand_round([place.tensor for place in found if place.is_sharded and sharding.is_handed_round(place.whole)], mesh)

    workers.attempt(copy)
