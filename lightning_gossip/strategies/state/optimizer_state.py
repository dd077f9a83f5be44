"""What becomes of momentum and the like when models are averaged: kept, averaged, or begun anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class Slot(NamedTuple):
    """One floating-point (or complex) tensor of an optimizer's state, described so that other workers can have the same."""

    optimizer: int
    parameter: int  # counted over the groups
    name: str
    shape: tuple[int, ...]
    dtype: str
    with_parameter: bool  # whether it is on the parameter's device; else it is on the host


class OptimizerStates:
    """The states of one worker's optimizers.

    Args:
        optimizers: the same on all workers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._parameters: list[list[Tensor]] = [
            [parameter for group in optimizer.param_groups for parameter in group["params"]] for optimizer in optimizers
        ]

    def slots(self) -> list[Slot]:
        """The floating-point tensors that there are."""
        return [
            Slot(
                number,
                index,
                name,
                tuple(value.shape),
                str(value.dtype).removeprefix("torch."),
                value.device == parameter.device,
            )
            for number, optimizer in enumerate(self._optimizers)
            for index, parameter in enumerate(self._parameters[number])
            for name, value in sorted(optimizer.state.get(parameter, {}).items(), key=lambda item: item[0])
            if is_averaged(value)
        ]

    def tensors(self, slots: Sequence[Slot]) -> list[Tensor]:
        """The tensors of these slots; what this worker has not got (it never used the parameter) is made, as zeros."""
        return [self._tensor(slot) for slot in slots]

    def reset(self) -> None:
        """Reset the states, as if the optimizers were new."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def _tensor(self, slot: Slot) -> Tensor:
        state = self._optimizers[slot.optimizer].state[self._parameters[slot.optimizer][slot.parameter]]
        if not isinstance(state.get(slot.name), Tensor):
            parameter, dtype = self._parameters[slot.optimizer][slot.parameter], getattr(torch, slot.dtype)
            state[slot.name] = zeros_for(parameter, slot.shape, dtype, with_parameter=slot.with_parameter)
        own = own_part(state[slot.name])
        return torch.view_as_real(own) if own.is_complex() else own


def zeros_for(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, with_parameter: bool) -> Tensor:
    """Zeros for a parameter's state.

    Args:
        parameter: whose. What has its shape lies on the ranks as it does.
        shape: of all of it.
        dtype: its type.
        with_parameter: whether it is on the parameter's device; otherwise it is on the host.
    """
    if shape == tuple(parameter.shape) and with_parameter:
        return torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.contiguous_format)
    return torch.zeros(shape, dtype=dtype, device=parameter.device if with_parameter else "cpu")


def own_part(value: Tensor) -> Tensor:
    """What this rank has of a tensor: its shard, if it is in shards."""
    return value.to_local() if isinstance(value, DTensor) else value


def is_averaged(value: object) -> bool:
    """Whether a value of an optimizer's state is a quantity of which there is a mean, and a dense one."""
    return isinstance(value, Tensor) and value.layout == torch.strided and (value.is_floating_point() or value.is_complex())
