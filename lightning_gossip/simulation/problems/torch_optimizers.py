"""The workers' inner optimizer is one of torch's own, on flat models, with clipping and a learning rate for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_positive, is_finite
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.problems.optimizers import InnerOptimizer, StackedOptimizer

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
)
"""Each element is moved by its own gradient alone, so that one flat tensor is moved as the tensors that it was made of."""

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, kw_only=True)
class TorchOptimizer(InnerOptimizer):
    """One of torch's optimizers for each worker.

    Args:
        kind: which; one of `ELEMENTWISE`.
        groups: its parameter groups, one after the other from the model's first element: elements, and options with an ``lr``.
        lrs: learning rate of the first group at each step that a worker makes if all are equally fast; those of the others keep
            their ratio to it.
        clip_norm: the largest norm of a gradient as the optimizer gets it: of a worker's own, or of the mean of all; None for
            no such bound.

    Raises:
        ConfigurationError: for another kind of optimizer, or values out of their range.
    """

    kind: type[Optimizer]
    groups: Sequence[tuple[int, Mapping[str, Any]]]
    lrs: Sequence[float]
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ELEMENTWISE:
            known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise ConfigurationError(
                f"the optimizer {self.kind.__name__} is not simulated: it does not move each element by itself. Those that are:"
                f" {known}."
            )
        if not self.lrs or not all(is_finite(lr) and lr >= 0.0 for lr in self.lrs):
            raise ConfigurationError("lrs are not finite learning rates of at least 0, one for each step.")
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)

    @override
    def lr_at(self, progress: float) -> float:
        return self.lrs[min(int(progress * len(self.lrs) + 1e-6), len(self.lrs) - 1)]

    @override
    def stacked(self, models: Tensor) -> StackedTorch:
        return StackedTorch(self, models)


class StackedTorch(StackedOptimizer):
    """The optimizers of all workers; those that always step together are one.

    Args:
        options: of each.
        models: x of all, shape (n, d); rows are changed in place.
    """

    def __init__(self, options: TorchOptimizer, models: Tensor) -> None:
        self._options = options
        self._models = models
        self._optimizers: dict[tuple[int, int], Optimizer] = {}  # by first and last row + 1
        first = options.groups[0][1]["lr"]
        self._scales = [settings["lr"] / first if first else 1.0 for _, settings in options.groups]

    @torch.no_grad()
    @override
    def step(self, row: int | slice, gradient: Tensor, lr: float) -> None:
        optimizer = self._of(*((row, row + 1) if isinstance(row, int) else row.indices(len(self._models))[:2]))
        gradient = self._clipped(gradient.reshape(-1, gradient.shape[-1]))
        start = 0
        for group, scale in zip(optimizer.param_groups, self._scales, strict=True):
            (elements,) = group["params"]
            elements.grad = gradient[:, start : start + elements.shape[1]]
            group["lr"] = lr * scale
            start += elements.shape[1]
        optimizer.step()

    @override
    def reset(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.state.clear()

    @override
    def states(self) -> list[Tensor]:
        together = self._optimizers.get((0, len(self._models)))  # one that steps by itself has nothing of the others
        states = [] if together is None else together.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim() == 2]

    def _of(self, first: int, end: int) -> Optimizer:
        if (first, end) not in self._optimizers:
            groups, start = [], 0
            for elements, settings in self._options.groups:
                groups.append({**settings, "params": [self._models[first:end, start : start + elements]]})
                start += elements
            self._optimizers[first, end] = self._options.kind(groups)  # type: ignore[call-arg]
        return self._optimizers[first, end]

    def _clipped(self, gradient: Tensor) -> Tensor:
        """By its norm, shape (k, d), each row for itself."""
        if self._options.clip_norm is None:
            return gradient
        norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        clipped: Tensor = gradient * (self._options.clip_norm / (norms + _CLIP_EPSILON)).clamp_(max=1.0)
        return clipped
