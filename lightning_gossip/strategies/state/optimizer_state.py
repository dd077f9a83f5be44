"""What becomes of momentum and the like when models are averaged: kept, averaged, or begun anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


class Slot(NamedTuple):
    """One floating-point (or complex) tensor of an optimizer's state, described so that other workers can have the same."""

    optimizer: int
    parameter: int  # counted over the groups
    name: str
    shape: tuple[int, ...]
    dtype: str


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
            Slot(number, index, name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
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
        optimizer = self._optimizers[slot.optimizer]
        parameter = self._parameters[slot.optimizer][slot.parameter]
        state = optimizer.state[parameter]
        if not isinstance(state.get(slot.name), Tensor):
            of_parameter = slot.shape == tuple(parameter.shape)
            state[slot.name] = torch.zeros(
                slot.shape, dtype=getattr(torch, slot.dtype), device=parameter.device if of_parameter else "cpu"
            )
        value: Tensor = state[slot.name]
        return torch.view_as_real(value) if value.is_complex() else value


def is_averaged(value: object) -> bool:
    """Whether a value of an optimizer's state is a quantity of which there is a mean, and a dense one."""
    return isinstance(value, Tensor) and value.layout == torch.strided and (value.is_floating_point() or value.is_complex())
