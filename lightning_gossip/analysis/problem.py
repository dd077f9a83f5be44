"""The quadratic that the loss is taken for: eigenvalues of the Hessian, distances along its eigenvectors, gradient noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from lightning_gossip.algorithm.checks import check_integer, check_not_negative, check_positive
from lightning_gossip.algorithm.laws import FloatArray
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class Problem:
    """A quadratic to be minimized: F(x) = ½ Σ_i h_i x_i², with gradients of variance Σ in each coordinate.

    Args:
        eigenvalues: h_i, above 0.
        start: x_i(0); 1 everywhere if None.
        noise: √Σ, standard deviation of one worker's gradient in each coordinate.
    """

    eigenvalues: Sequence[float]
    start: Sequence[float] | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "eigenvalues", tuple(float(value) for value in self.eigenvalues))  # of an array, too
        for value in self.eigenvalues:
            check_positive("an eigenvalue", value)
        if not self.eigenvalues:
            raise ConfigurationError("eigenvalues is empty. Pass those of the Hessian: [0.1, 1.0].")
        if self.start is not None:
            object.__setattr__(self, "start", tuple(float(value) for value in self.start))
            if not np.isfinite(self.start).all():
                raise ConfigurationError(f"start={self.start} holds what is no finite number.")
        if self.start is not None and len(self.start) != len(self.eigenvalues):
            raise ConfigurationError(
                f"start has {len(self.start)} coordinates and there are {len(self.eigenvalues)} eigenvalues."
            )
        check_not_negative("noise", self.noise)

    @classmethod
    def grouped(
        cls,
        eigenvalues: Sequence[float] | FloatArray,
        start: Sequence[float] | FloatArray,
        *,
        groups: int = 16,
        noise: float = 0.0,
    ) -> Problem:
        """Many directions as a few of about the same eigenvalue and together the same loss; the largest eigenvalue stays.

        Args:
            eigenvalues: of the Hessian, any number; those below a millionth of the largest are left out.
            start: x_i(0) along their eigenvectors.
            groups: at most so many, of equal width on a logarithmic scale.
            noise: as above.
        """
        h, x = np.asarray(eigenvalues, dtype=np.float64), np.asarray(start, dtype=np.float64)
        check_integer("groups", groups, example=16)
        if h.shape != x.shape or not h.size or not h.max() > 0.0:
            raise ConfigurationError(
                f"eigenvalues of shape {h.shape} and start of shape {x.shape}: as many of both are needed, and a positive one."
            )
        kept = h > 1e-6 * h.max()
        h, losses = h[kept], 0.5 * h[kept] * x[kept] ** 2
        edges = np.geomspace(h.min(), h.max(), groups + 1)[1:-1]
        group = np.digitize(h, edges)
        values, distances = [], []
        for number in np.unique(group):
            own, loss = h[group == number], losses[group == number]
            top = number == group.max()
            value = float(own.max() if top or not loss.sum() > 0.0 else own @ loss / loss.sum())
            values.append(value)
            distances.append(math.sqrt(2.0 * float(loss.sum()) / value))
        return cls(eigenvalues=values, start=distances, noise=noise)

    @property
    def distances(self) -> FloatArray:
        """|x_i(0)| to the minimum."""
        return np.ones(len(self.eigenvalues)) if self.start is None else np.abs(np.asarray(self.start, dtype=np.float64))

    @property
    def losses(self) -> FloatArray:
        """½ h_i x_i(0)², the parts of the loss at the beginning."""
        return 0.5 * np.asarray(self.eigenvalues, dtype=np.float64) * self.distances**2

    def flow_time(self, target: float) -> float:
        """How long gradient flow, x' = −∇F, takes to a loss: learning rate times steps, for short ones without noise or delay.

        What the same takes on a network, over this, says how much longer the network's way is: for any short steps, whatever
        their strategy.

        Args:
            target: of the loss, above 0.

        Returns:
            0 if the loss is no higher at the beginning.
        """
        check_positive("target", target)
        losses, rates = self.losses, 2.0 * np.asarray(self.eigenvalues, dtype=np.float64)
        total = float(losses.sum())
        if total <= target:
            return 0.0
        end = math.log(total / target) / float(rates.min())
        return float(optimize.brentq(lambda t: float(losses @ np.exp(-rates * t)) - target, 0.0, end))
