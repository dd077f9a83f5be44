"""The parameters of a replicated island as views of flat vectors, of which each rank owns one k-th."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gossip.algorithm.islands.places import share_numel
from lightning_gossip.algorithm.tensors.flat import FlatModel
from lightning_gossip.errors import ConfigurationError

_ALIGNMENT_BYTES = 64  # of a cache line; kernels of devices read 16 at once


@dataclass(frozen=True)
class _Part:
    """Where a parameter lies.

    Args:
        name: of the parameter.
        parameter: the module's own object, whose data is a view.
        view: of the flat vector, with the strides that the parameter had.
        vector: the number of that vector.
        at: the parameter's first element in it.
    """

    name: str
    parameter: nn.Parameter
    view: Tensor
    vector: int
    at: int

    @property
    def is_in_place(self) -> bool:
        return self.parameter.data_ptr() == self.view.data_ptr() and self.parameter.stride() == self.view.stride()


class FlatParameters:
    """The trained parameters of a module, moved into one flat vector for each of their types.

    Made before DistributedDataParallel looks at the parameters, which are its parameters still: only their memory moves, with
    their strides. So a rank's share is one slice, and handing shares round copies nothing. Each parameter and each share begins
    at a multiple of 64 bytes, as in memory of its own: kernels choose by that, and a scalar would shift all that come after it.
    The zeros between them take part in averages, and nobody reads them.

    Whoever sets ``parameter.data`` (SAM, recurrent nets that lay their weights together on a GPU, ``vector_to_parameters``)
    takes it out of its vector. So each use of the vectors looks where the parameters are, and copies back what has gone: 0.1 ms
    for 300 that are in their places.

    Args:
        module: whose parameters that require a gradient.
        size: ranks of the island, k.

    Attributes:
        names: of the parameters.

    Raises:
        ConfigurationError: for complex parameters.
    """

    @torch.no_grad()
    def __init__(self, module: nn.Module, size: int) -> None:
        self._size = size
        self._parts: list[_Part] = []
        self._vectors: list[Tensor] = []
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.names = frozenset(name for name, _ in named)
        for name, parameter in named:
            if not parameter.is_floating_point():
                raise ConfigurationError(
                    f"The parameter {name} is of type {parameter.dtype}, which islands do not average yet. Store its real and"
                    " imaginary parts (torch.view_as_real), or leave island=... out."
                )
        for dtype in dict.fromkeys(parameter.dtype for _, parameter in named):
            self._move([(name, parameter) for name, parameter in named if parameter.dtype == dtype])

    def _move(self, named: list[tuple[str, nn.Parameter]]) -> None:
        first = named[0][1]
        unit = max(1, _ALIGNMENT_BYTES // first.element_size())
        ends = list(itertools.accumulate(-(-parameter.numel() // unit) * unit for _, parameter in named))
        share = share_numel(ends[-1] // unit, self._size) * unit
        vector = torch.zeros(share * self._size, dtype=first.dtype, device=first.device)
        for (name, parameter), at in zip(named, [0, *ends[:-1]], strict=True):
            view = _view(vector, at, parameter)
            view.copy_(parameter.data)
            parameter.data = view
            self._parts.append(_Part(name, parameter, view, len(self._vectors), at))
        self._vectors.append(vector)

    def share(self, index: int) -> list[Tensor]:
        """What the rank of this index owns, as it is now: a slice of each vector, a k-th of it."""
        self._take_back()
        return [self._slice(vector, index) for vector in self._vectors]

    @torch.no_grad()
    def _take_back(self) -> None:
        """Where somebody has given a parameter other memory since: its value into the vector, and the view in its place."""
        for part in self._parts:
            if not part.is_in_place:
                part.view.copy_(part.parameter.data)
                part.parameter.data = part.view

    @torch.no_grad()
    def hand_round(self) -> None:
        """Each rank gives its share to its mates. Collective in the island, on the default group."""
        self._take_back()
        hand_round_shares(self._vectors, self._size)

    @torch.no_grad()
    def whole(self, shares: Sequence[Tensor]) -> dict[str, Tensor]:
        """What the ranks of the island have for their shares, put together and cut into what it is for each parameter.

        Collective in the island, on the default group.

        Args:
            shares: shaped like :meth:`share`, where the parameters are.
        """
        vectors = []
        for share in shares:
            vectors.append(share.new_empty(share.numel() * self._size))
            dist.all_gather(list(vectors[-1].chunk(self._size)), share.contiguous())
        return {part.name: _view(vectors[part.vector], part.at, part.view) for part in self._parts}

    @torch.no_grad()
    def cut(self, whole: Mapping[str, Tensor], index: int) -> list[Tensor] | None:
        """The share of the rank of this index in something that each parameter has; None if a parameter has none of its shape.

        Args:
            whole: by the parameters' names, as :meth:`whole` makes it.
        """
        kind = next(iter(whole.values())).dtype if whole else None
        vectors = [torch.zeros_like(vector, dtype=kind) for vector in self._vectors]
        for part in self._parts:
            value = whole.get(part.name)
            if value is None or value.shape != part.view.shape:
                return None
            _view(vectors[part.vector], part.at, part.view).copy_(value)
        return [self._slice(vector, index).clone() for vector in vectors]

    def _slice(self, vector: Tensor, index: int) -> Tensor:
        return share_of(vector, index, self._size)


class FlatStates:
    """The states of an island's optimizers in one flat vector, of which each rank averages one k-th.

    They are whole on each rank, and the same; so a k-th of them is enough to send between islands, too.

    Args:
        tensors: of the states, the same on all ranks; looked up anew at each use.
        index: of this rank in its island.
        size: ranks of the island, k.

    Attributes:
        share: this rank's, shape (⌈numel / k⌉,).
    """

    def __init__(self, tensors: Sequence[Tensor], index: int, size: int) -> None:
        numel = sum(tensor.numel() for tensor in tensors)
        device = tensors[0].device if tensors else None
        self._tensors = tensors
        self._size = size
        self._flat = FlatModel(tensors, device=device, room=share_numel(numel, size) * size - numel)
        self.share = share_of(self._flat.flat, index, size)

    def read(self) -> None:
        """The vector ← the states, as they are now."""
        self._flat.read(self._tensors)

    @torch.no_grad()
    def hand_round(self) -> None:
        """Each rank gives its share to its mates, and all ranks' states become the vector. Collective in the island."""
        hand_round_shares([self._flat.flat], self._size)
        self._flat.write(self._tensors)


def share_of(vector: Tensor, index: int, size: int) -> Tensor:
    """The share of the rank of this index in a vector whose length is a multiple of the ranks'."""
    share = vector.numel() // size
    return vector[index * share : (index + 1) * share]


def hand_round_shares(vectors: Sequence[Tensor], size: int) -> None:
    """Each rank gives its share of some vectors to its mates. Collective in the island, on the default group.

    One broadcast per owner, all at once: on Gloo an all-gather of as many bytes takes five times as long.
    """
    works = [
        dist.broadcast(share_of(vector, owner, size), group_src=owner, async_op=True)
        for vector in vectors
        if vector.numel()
        for owner in range(size)
    ]
    for work in works:
        assert work is not None
        work.wait()


def _view(vector: Tensor, at: int, parameter: Tensor) -> Tensor:
    """A place in a vector for a parameter; with its strides, unless there are gaps between its elements."""
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():  # which keeps them where there are none
        return vector.as_strided(parameter.shape, parameter.stride(), at)
    return vector[at : at + parameter.numel()].view(parameter.shape)
