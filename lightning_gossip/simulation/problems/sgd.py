"""The workers' inner optimizer: SGD with momentum on rows of the stacked models, as ``torch.optim.SGD`` does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_not_negative, is_finite
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.problems.optimizers import InnerOptimizer, StackedOptimizer


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class SGD(InnerOptimizer):
    """Options of SGD.

    Args:
        lr: learning rate, at least 0: that of the *global* batch, all workers' together, since one worker's update moves the
            mean model by 1/n of itself.
        momentum: in [0, 1).
        nesterov: look ahead by one step.
        weight_decay: added to the gradient times x, at least 0.
        milestones: shares of the run in (0, 1) at which the learning rate is multiplied by ``gamma``.
        gamma: above 0.

    Raises:
        ConfigurationError: naming the key.
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    milestones: Sequence[float] = ()
    gamma: float = 0.1

    def __post_init__(self) -> None:
        check_not_negative("lr", self.lr)
        check_not_negative("weight_decay", self.weight_decay)
        if not is_finite(self.momentum) or not 0.0 <= self.momentum < 1.0:
            raise ConfigurationError(f"momentum={self.momentum!r} is not in [0, 1). Write for example momentum=0.9.")
        if not is_finite(self.gamma) or self.gamma <= 0.0:
            raise ConfigurationError(f"gamma={self.gamma!r} is not a number above 0. Write for example gamma=0.1.")
        for share in self.milestones:
            if not is_finite(share) or not 0.0 < share < 1.0:
                raise ConfigurationError(f"milestones holds {share!r}; each is a share of the run, between 0 and 1.")

    @override
    def lr_at(self, progress: float) -> float:
        return self.lr * self.gamma ** sum(progress >= share for share in self.milestones)

    @override
    def stacked(self, models: Tensor) -> StackedSGD:
        return StackedSGD(self, models)


class StackedSGD(StackedOptimizer):
    """The optimizers of all workers.

    Args:
        options: of each.
        models: x of all, shape (n, d); rows are changed in place.

    Attributes:
        options: of each.
    """

    def __init__(self, options: SGD, models: Tensor) -> None:
        self.options = options
        self._models = models
        self.momentum = torch.zeros_like(models) if options.momentum else None

    @torch.no_grad()
    @override
    def step(self, row: int | slice, gradient: Tensor, lr: float) -> None:
        """x ← x − lr · v with v ← μ v + g, for one worker or, with a slice, for several.

        Args:
            row: whose.
            gradient: g of the same shape as these rows; may be overwritten.
            lr: now.
        """
        x = self._models[row]
        options = self.options
        if options.weight_decay:
            gradient = gradient.add(x, alpha=options.weight_decay)
        if self.momentum is not None:
            v = self.momentum[row]
            v.mul_(options.momentum).add_(gradient)
            gradient = gradient.add(v, alpha=options.momentum) if options.nesterov else v
        x.add_(gradient, alpha=-lr)

    @override
    def reset(self) -> None:
        if self.momentum is not None:
            self.momentum.zero_()

    @override
    def states(self) -> list[Tensor]:
        return [] if self.momentum is None else [self.momentum]
