"""The parameters of a replicated island as views of flat vectors, of which each rank owns one k-th."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gossip.algorithm.islands.places import share_numel
from lightning_gossip.errors import ConfigurationError


@dataclass(frozen=True)
class _Part:
    """Where a parameter lies.

    Args:
        parameter: the module's own object, whose data is a view.
        view: of the flat vector, with the strides that the parameter had.
    """

    parameter: nn.Parameter
    view: Tensor

    @property
    def is_in_place(self) -> bool:
        data = self.parameter.data
        return data.data_ptr() == self.view.data_ptr() and data.stride() == self.view.stride()


class FlatParameters:
    """The trained parameters of a module, moved into one flat vector for each of their types.

    Made before DistributedDataParallel looks at the parameters, which are its parameters still: only their memory moves, with
    their strides. So a rank's share is one slice, and handing shares round copies nothing.

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
            self._move([parameter for _, parameter in named if parameter.dtype == dtype])

    def _move(self, parameters: list[nn.Parameter]) -> None:
        numel = sum(parameter.numel() for parameter in parameters)
        share = share_numel(numel, self._size)
        vector = torch.zeros(share * self._size, dtype=parameters[0].dtype, device=parameters[0].device)
        at = 0
        for parameter in parameters:
            view = _view(vector, at, parameter)
            at += parameter.numel()
            view.copy_(parameter.data)
            parameter.data = view
            self._parts.append(_Part(parameter, view))
        self._vectors.append(vector)

    def share(self, index: int) -> list[Tensor]:
        """What the rank of this index owns: a slice of each vector, shape (⌈numel / k⌉,)."""
        return [self._slice(vector, index) for vector in self._vectors]

    @torch.no_grad()
    def take_back(self) -> None:
        """Where somebody has given a parameter other memory since: its value into the vector, and the view in its place."""
        for part in self._parts:
            if not part.is_in_place:
                part.view.copy_(part.parameter.data)
                part.parameter.data = part.view

    @torch.no_grad()
    def hand_round(self) -> None:
        """Each rank gives its share to its mates. Collective in the island, on the default group.

        One broadcast per owner, all at once: on Gloo an all-gather of as many bytes takes five times as long.
        """
        works = [
            dist.broadcast(self._slice(vector, owner), group_src=owner, async_op=True)
            for vector in self._vectors
            for owner in range(self._size)
        ]
        for work in works:
            assert work is not None
            work.wait()

    def _slice(self, vector: Tensor, index: int) -> Tensor:
        share = vector.numel() // self._size
        return vector[index * share : (index + 1) * share]


def _view(vector: Tensor, at: int, parameter: Tensor) -> Tensor:
    """A place in a vector for a parameter; with its strides, unless there are gaps between its elements."""
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():  # which keeps them where there are none
        return vector.as_strided(parameter.shape, parameter.stride(), at)
    return vector[at : at + parameter.numel()].view(parameter.shape)
