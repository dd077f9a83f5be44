"""What the workers' inner optimizers have in common, whatever their rule: a learning rate by the run's progress, and steps."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor
from typing_extensions import override


class StackedOptimizer(ABC):
    """The optimizers of all workers, on rows of their stacked models."""

    @abstractmethod
    def step(self, row: int | slice, gradient: Tensor, lr: float) -> None:
        """Make a step of one worker or, with a slice, of several at once. A worker always steps in the same company.

        Args:
            row: whose.
            gradient: of the same shape as these rows; may be overwritten.
            lr: now.
        """

    @abstractmethod
    def reset(self) -> None:
        """Momentum and the like begin anew, on all workers."""

    @abstractmethod
    def states(self) -> list[Tensor]:
        """Momentum and the like of all workers, as far as there is any yet: each of shape (n, k), to be changed in place."""


class InnerOptimizer(ABC):
    """Options of the optimizer that each worker has."""

    @abstractmethod
    def lr_at(self, progress: float) -> float:
        """The learning rate when a share of the run, in [0, 1], is done."""

    @abstractmethod
    def stacked(self, models: Tensor) -> StackedOptimizer:
        """The optimizers of all workers.

        Args:
            models: x of all, shape (n, d); rows are changed in place.
        """


class BesideStatistics(StackedOptimizer):
    """An optimizer of models that end with running statistics, which it leaves alone.

    Args:
        optimizer: of what is before them.
        models: x of all, shape (n, d).
        statistics: elements at the end of each.
    """

    def __init__(self, optimizer: StackedOptimizer, models: Tensor, statistics: int) -> None:
        self._optimizer = optimizer
        self._models = models
        self._trained = models.shape[1] - statistics

    @override
    def step(self, row: int | slice, gradient: Tensor, lr: float) -> None:
        self._models[row][..., self._trained :] -= gradient[..., self._trained :]
        self._optimizer.step(row, gradient[..., : self._trained], lr)

    @override
    def reset(self) -> None:
        self._optimizer.reset()

    @override
    def states(self) -> list[Tensor]:
        return self._optimizer.states()
