"""The model of one rank of an island: it trains all of it, and shares the part that it owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_gossip.algorithm.islands.places import Place
from lightning_gossip.algorithm.tensors.flat import LiveTensors
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.strategies.islands.flat_parameters import FlatParameters
from lightning_gossip.strategies.state.shared_tensors import Place as Where
from lightning_gossip.strategies.state.shared_tensors import SharedModel, by_kind, layout, retention


class ReplicatedModel(SharedModel):
    """The model of a replicated island.

    A rank shares its k-th of the trained parameters. The first one also shares the averaged buffers, since
    DistributedDataParallel sends its buffers to the others before each forward pass.

    Args:
        module: the module that trains.
        averaged_buffers: patterns of the names of buffers that are averages.
        flat: tells where its parameters are, once DistributedDataParallel is to look at them.
        place: of this rank.
        size: ranks of an island.
    """

    def __init__(
        self, module: nn.Module, averaged_buffers: Sequence[str], *, flat: Callable[[], FlatParameters], place: Place, size: int
    ) -> None:
        super().__init__(module, averaged_buffers)
        self.index = place.index
        self._size = size
        self._flat_parameters = flat
        self._found = self.tensors  # what the base class finds: all that is shared, by any rank
        self._shared: list[Where] = []  # parameters and buffers, of the whole island
        self._whole_parameters = 0  # of them

    @property
    def _flat(self) -> FlatParameters:
        return self._flat_parameters()

    @override
    def open(self) -> ReplicatedModel:
        self.tensors = self._found
        super().open()
        parameters = [place for place in self._places[: self.parameters] if place.name in self._flat.names]
        late = [p.name for p in self._places[: self.parameters] if p.name not in self._flat.names and p.tensor.requires_grad]
        if late:
            raise ConfigurationError(
                f"{', '.join(late[:5])} began to require a gradient after DistributedDataParallel had looked at the parameters,"
                " so it would train on each rank of an island alone. Let it require one when the fit begins (and set its"
                " learning rate to 0 until then), or leave island=... out."
            )
        buffers = self._places[self.parameters :]
        self._shared, self._whole_parameters = [*parameters, *buffers], len(parameters)
        share = self._flat.share(self.index)
        own_buffers = buffers if self.index == 0 else []
        named = [f"part {self.index + 1} of {self._size} of the parameters ({piece.dtype})" for piece in share]
        self.parameters = len(share)
        self.names = named + [place.name for place in own_buffers]
        self.tensors = LiveTensors(lambda: [*self._flat.share(self.index), *(place.real for place in own_buffers)])
        self.layout = layout([(place.name, place.real) for place in self._shared])
        self.retention = [1.0] * len(share) + retention(self.module, [place.name for place in own_buffers])
        return self

    @override
    def rest(self) -> list[Where]:
        known = {place.name for place in self._shared}
        return [place for place in super().rest() if place.name not in known]

    @property
    @override
    def shared_parameters(self) -> list[Where]:
        return self._shared[: self._whole_parameters]

    @property
    @override
    def optimized(self) -> list[Tensor]:
        return [place.tensor for place in self.shared_parameters if place.name in self._with_gradient]

    @override
    def whole(self, tensors: Mapping[str, Tensor], kinds: Sequence[str] = ()) -> dict[str, Tensor]:
        names = self.names[: self.parameters]
        return {
            f"{kind}/{name}": tensor
            for kind, named in by_kind(tensors).items()
            for name, tensor in self._flat.whole([named[name] for name in names]).items()
        }

    @override
    def part(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = self.names[: self.parameters]
        found = {}
        for kind, named in by_kind(tensors).items():
            shares = self._flat.cut(named, self.index)
            if shares is not None:
                found.update({f"{kind}/{name}": share for name, share in zip(names, shares, strict=True)})
        return found

    @override
    def hand_round(self) -> None:
        self._flat.hand_round()

    @override
    @torch.no_grad()
    def hand_round_all(self) -> None:
        self._flat.hand_round()
        for place in self._shared[self._whole_parameters :]:
            sent = place.real.contiguous()
            dist.broadcast(sent, group_src=0)
            if sent.data_ptr() != place.real.data_ptr():
                place.real.copy_(sent)
