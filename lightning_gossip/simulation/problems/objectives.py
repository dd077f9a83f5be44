"""What the workers minimise: small problems whose gradients at many models are one batched computation.

An objective computes the gradients of several workers at once, each at its own model and on its own batch. How many are
computed together is up to the caller and does not change what any of them is drawn from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_integer, check_not_negative, is_finite
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError

Batch = Sequence[int] | None


class Objective(ABC):
    """A function of a flat model, and its stochastic gradients on many workers.

    Attributes:
        numel: d, elements of a model.
        dtype: of the models.
        samples: of the data set; None if gradients are not drawn from one.
        labels: of its samples, integers; None if they have none.
        statistics: elements at a model's end that no optimizer moves (running statistics): their part of a gradient is
            subtracted as it is.
    """

    numel: int
    dtype: torch.dtype = torch.float64
    samples: int | None = None
    labels: Sequence[int] | None = None
    statistics: int = 0

    @abstractmethod
    def start(self, generator: torch.Generator) -> Tensor:
        """The model that all workers begin with, shape (d,)."""

    @abstractmethod
    def gradients(
        self, models: Tensor, ranks: Sequence[int], batches: Sequence[Batch], generators: Sequence[np.random.Generator]
    ) -> Tensor:
        """The workers' stochastic gradients.

        Args:
            models: shape (k, d), one row a worker.
            ranks: of these workers, in [0, n).
            batches: their samples, as indices; None if the objective has no data set.
            generators: of these workers, for noise that no data set gives; each advances by its own worker's draws only.

        Returns:
            Shape (k, d).
        """

    @abstractmethod
    def loss(self, model: Tensor) -> float:
        """The loss at a model, shape (d,): of the whole problem, without noise."""

    def accuracy(self, model: Tensor) -> float | None:
        """Share of test samples classified right; None if there is no such thing."""
        return None

    def check(self, workers: int) -> None:
        """Refuse what does not fit the number of workers."""
        check_integer("workers", workers, example=4)


@clear_arguments
class Quadratic(Objective):
    """F(x) = ½ Σ_k h_k x_k², seen by worker i as ½ Σ_k h_k (x_k − b_ik)² and through noise.

    The mean of all F_i has its minimum at 0, since Σ_i b_i = 0. Worker i's gradient is h ∘ (x − b_i) + noise · z with z
    standard normal, so its variance is noise² per coordinate.

    Args:
        spectrum: h, the eigenvalues of the Hessian, each at least 0.
        noise: standard deviation of the gradient per coordinate, at least 0.
        heterogeneity: standard deviation over the workers of each coordinate of b_i, at least 0.
        start_at: the model at the beginning: every coordinate, or each one.
        workers: n; needed for heterogeneity.
        seed: of b.

    Raises:
        ConfigurationError: naming the key.

    >>> problem = Quadratic([1.0, 4.0])
    >>> problem.loss(torch.ones(2, dtype=torch.float64))
    2.5
    """

    def __init__(
        self,
        spectrum: Sequence[float],
        *,
        noise: float = 0.0,
        heterogeneity: float = 0.0,
        start_at: float | Sequence[float] = 1.0,
        workers: int | None = None,
        seed: int = 0,
    ) -> None:
        values = list(spectrum)
        if not values or not all(is_finite(h) and h >= 0.0 for h in values):
            raise ConfigurationError(f"spectrum={spectrum!r} is not a list of eigenvalues of at least 0, such as [0.1, 1.0].")
        check_not_negative("noise", noise)
        check_not_negative("heterogeneity", heterogeneity)
        start = [start_at] * len(values) if isinstance(start_at, (int, float)) else list(start_at)
        if len(start) != len(values) or not all(map(is_finite, start)):
            raise ConfigurationError(
                f"start_at={start_at!r} is not a finite number, or one for each of {len(values)} eigenvalues."
            )
        self.numel = len(values)
        self._h = torch.tensor(values, dtype=self.dtype, device="cpu")
        self._noise = noise
        self._start = torch.tensor(start, dtype=self.dtype, device="cpu")
        self._minima: Tensor | None = None
        if heterogeneity > 0.0:
            if workers is None:
                raise ConfigurationError("heterogeneity needs workers: how many different minima are there?")
            check_integer("workers", workers, example=4)
            draw = torch.randn(
                workers, self.numel, generator=torch.Generator().manual_seed(seed), dtype=self.dtype, device="cpu"
            )
            self._minima = heterogeneity * (draw - draw.mean(0))

    @override
    def start(self, generator: torch.Generator) -> Tensor:
        return self._start.clone()

    @override
    def gradients(
        self, models: Tensor, ranks: Sequence[int], batches: Sequence[Batch], generators: Sequence[np.random.Generator]
    ) -> Tensor:
        shifted = models if self._minima is None else models - self._minima[list(ranks)]
        gradients = shifted * self._h
        if self._noise:
            draws = np.stack([generator.standard_normal(self.numel) for generator in generators])
            gradients.add_(torch.from_numpy(draws), alpha=self._noise)
        return gradients

    @override
    def loss(self, model: Tensor) -> float:
        return float(0.5 * (self._h * model.square()).sum())

    @override
    def check(self, workers: int) -> None:
        super().check(workers)
        if self._minima is not None and len(self._minima) != workers:
            raise ConfigurationError(f"the objective is made for workers={len(self._minima)}, and the cluster has {workers}.")
