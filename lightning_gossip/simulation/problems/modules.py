"""Any torch module on any data set as an objective: the network that is really trained, its loss, its gradients by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.problems.objectives import Batch, Objective

_SEEDS = 2**63


class ModuleObjective(Objective):
    """A module's loss on samples of a data set.

    A model is flat: the parameters that are trained, then the floating-point buffers (running statistics), which no optimizer
    moves: what a forward pass changes of them is their part of a gradient, with the sign changed.

    Args:
        build: makes the module, with initial values by torch's global generator.
        loss: of a module on a batch, a scalar; in training mode or in evaluation mode, as the module is.
        samples: how many there are to train on.
        batch: of samples by their indices, as ``loss`` takes it.
        held_out: batches whose mean loss is that of a model, in evaluation mode; all count alike.
        parameters: names of those that are trained, in the order that they have in a model; None for all that require a
            gradient in their own order.
        labels: of the samples; None if they have none.
        accuracy: of a module in evaluation mode, in [0, 1]; None for no such thing.

    Raises:
        ConfigurationError: for a module without trainable parameters, or of several types.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        samples: int,
        batch: Callable[[Sequence[int]], Any],
        held_out: Sequence[Any],
        parameters: Sequence[str] | None = None,
        labels: Sequence[int] | None = None,
        accuracy: Callable[[nn.Module], float] | None = None,
    ) -> None:
        self._build = build
        self._module = build()
        self._loss = loss
        self._batch = batch
        self._held_out = held_out
        self._accuracy = accuracy
        self.samples = samples
        self.labels = labels
        named = dict(self._module.named_parameters())
        self._names = list(parameters or [name for name, parameter in named.items() if parameter.requires_grad])
        self._parameters = [named[name] for name in self._names]
        self._buffers = [buffer for buffer in self._module.buffers() if buffer.is_floating_point()]
        dtypes = {tensor.dtype for tensor in (*self._parameters, *self._buffers)}
        if not self._parameters or len(dtypes) > 1:
            found = "none" if not self._parameters else " and ".join(sorted(map(str, dtypes)))
            raise ConfigurationError(
                f"a module is simulated whose trained values are of one type, and this one's are: {found}."
            )
        (self.dtype,) = dtypes
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self.statistics = sum(buffer.numel() for buffer in self._buffers)
        self.numel = sum(self._sizes) + self.statistics

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the parameters, in the order of a model."""
        return [parameter.shape for parameter in self._parameters]

    @override
    def start(self, generator: torch.Generator) -> Tensor:
        with _randomness(generator.initial_seed()):
            module = self._build()
        named = dict(module.named_parameters())
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        return torch.cat([value.detach().flatten() for value in (*(named[name] for name in self._names), *buffers)])

    @override
    def gradients(
        self, models: Tensor, ranks: Sequence[int], batches: Sequence[Batch], generators: Sequence[np.random.Generator]
    ) -> Tensor:
        out = torch.zeros_like(models)
        self._module.train()
        for model, row, batch, generator in zip(models, out, batches, generators, strict=True):
            if not batch:
                raise ConfigurationError("batch_size: a module's gradient needs at least one sample of its data set.")
            self._load(model)
            for parameter, part in zip(self._parameters, self._parts(row), strict=True):
                parameter.grad = part  # to which autograd adds
            with _randomness(int(generator.integers(_SEEDS))), torch.enable_grad():
                self._loss(self._module, self._batch(batch)).backward()  # type: ignore[no-untyped-call]
            if self.statistics:
                row[-self.statistics :] = model[-self.statistics :] - self._flat_buffers()
        for parameter in self._parameters:
            parameter.grad = None
        return out

    @torch.no_grad()
    @override
    def loss(self, model: Tensor) -> float:
        """Mean over the held-out batches, in evaluation mode. What the loss draws at random is the same each time."""
        self._load(model)
        self._module.eval()
        with _randomness(0):
            return float(np.mean([float(self._loss(self._module, batch)) for batch in self._held_out]))

    @torch.no_grad()
    @override
    def accuracy(self, model: Tensor) -> float | None:
        if self._accuracy is None:
            return None
        self._load(model)
        self._module.eval()
        return self._accuracy(self._module)

    @torch.no_grad()
    def _load(self, model: Tensor) -> None:
        """Parameters become views of the model; buffers, which a forward pass changes, copies."""
        for parameter, part in zip(self._parameters, self._parts(model), strict=True):
            parameter.data = part
        start = self.numel - self.statistics
        for buffer in self._buffers:
            buffer.copy_(model[start : start + buffer.numel()].view_as(buffer))
            start += buffer.numel()

    def _parts(self, model: Tensor) -> list[Tensor]:
        parts = torch.split(model[: self.numel - self.statistics], self._sizes)
        return [part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)]

    def _flat_buffers(self) -> Tensor:
        return torch.cat([buffer.flatten() for buffer in self._buffers])


@contextmanager
def _randomness(seed: int) -> Iterator[None]:
    """Torch's global generator begins with this seed, and is afterwards as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
