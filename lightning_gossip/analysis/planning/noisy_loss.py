"""How the loss of the mean model falls when gradients are noisy and models are apart, on a quadratic.

Each direction k has a part B_k of the loss left from the beginning, which falls as e^{−2δ_k t}, and one that noise keeps up,
N_k. A worker's gradient has noise of variance s (the trace of its covariance), of which the direction has the share w_k. With
the second moments of :mod:`~lightning_gossip.analysis.second_moments.gradient_noise`, mean_k and apart_k in units of γ² s w_k,

    dB_k/dt = −2δ_k B_k            dN_k/dt = −2δ_k (N_k − ½ h_k γ² w_k mean_k · s)
    F = Σ B_k + N_k                U = ½ γ² Σ h_k w_k apart_k · s  =  u s

F is the loss of the mean model, F + U what a worker's own model has in the mean, which is where gradients are computed. Of
networks that can fit their data the noise falls with the loss: s = s₀ ((1 − ω) + ω (F + U)), losses in units of that at the
beginning. Solved for s,

    s = s₀ ((1 − ω) + ω F) / (1 − ω s₀ u)

so all is linear in (B, N). With ω s₀ u ≥ 1 models part further with each step: the distance makes the noise that makes the
distance. [Derived here; U follows noise at once, since it is forgotten sooner than the mean's.]

A network's curvature falls with its loss, too, and with it what a distance costs. The cross-entropy's is that of the softmax:
p (1 − p) is below the loss −ln p of a sample that is fitted. So where s falls with the loss, the h_k in u are lower, as well,
by the factor (1 − ω) + ω F of some loss F on the way. The mean model's own fall has its curvature from where the loss is, and
what noise keeps up of it hardly depends on h: ½ h γ² mean ≈ γ/(4 (1 − β)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from lightning_gossip.algorithm.checks import check_not_negative, check_positive, is_finite
from lightning_gossip.algorithm.laws import FloatArray
from lightning_gossip.errors import ConfigurationError

_POINTS = 512  # at which a loss is looked at
_SLOW = 1e-9  # of the fastest rate: a decay below it is none


@dataclass(frozen=True)
class Noise:
    """The noise of one worker's gradients.

    Args:
        variance: tr Σ of a gradient of one batch, at the beginning; at least 0.
        loss: excess of the loss at the beginning, in the loss's own unit; above 0.
        shares: w_k of each eigenvalue of the problem, of sum 1.
        with_loss: ω, the share of the variance, and of the curvature, that falls in proportion to the loss, in [0, 1]: 1 where
            the model can fit its data; 0 for noise that stays, which leaves a floor.
    """

    variance: float
    loss: float
    shares: Sequence[float]
    with_loss: float = 1.0

    def __post_init__(self) -> None:
        check_not_negative("variance", self.variance)
        check_positive("loss", self.loss)
        if not is_finite(self.with_loss) or not 0.0 <= self.with_loss <= 1.0:
            raise ConfigurationError(f"with_loss={self.with_loss!r} is not a share between 0 and 1.")

    @property
    def relative(self) -> float:
        """s₀: the variance in units of the loss at the beginning."""
        return self.variance / self.loss

    def falling(self, loss: float) -> float:
        """(1 − ω) + ωF: variance, and curvature along a distance of models, at a loss, in units of those at the beginning."""
        return 1.0 - self.with_loss * (1.0 - loss)


def shares_of(eigenvalues: Sequence[float], seen: float) -> tuple[float, ...]:
    """w_k ∝ h_k^α, with α such that the noise sees a given curvature, Σ w_k h_k.

    Args:
        eigenvalues: h_k.
        seen: tr(HΣ)/tr Σ, clipped to what there is.
    """
    h = np.asarray(eigenvalues, dtype=np.float64) / max(eigenvalues)

    def shares(power: float) -> FloatArray:
        weights: FloatArray = h**power / (h**power).sum()
        return weights

    def excess(power: float) -> float:
        return float(shares(power) @ h) - seen / max(eigenvalues)

    low, high = -3.0, 12.0
    if excess(low) >= 0.0:
        power = low
    elif excess(high) <= 0.0:
        power = high
    else:
        power = float(optimize.brentq(excess, low, high))
    return tuple(shares(power).tolist())


@dataclass(frozen=True)
class NoisyLoss:
    """The loss of the mean model against time, in units of that at the beginning.

    Args:
        parts: B_k at the beginning, of sum 1 or more.
        decays: δ_k, in 1/time.
        kept: ½ h_k γ² w_k mean_k, the part of N_k that a unit of s keeps up.
        apart: u = ½ γ² Σ h_k w_k apart_k, the distance's part that a unit of s keeps up, with the curvatures of some loss.
        noise: s₀ and ω.
    """

    parts: FloatArray
    decays: FloatArray
    kept: FloatArray
    apart: float
    noise: Noise

    @property
    def holds_together(self) -> bool:
        """Whether the models' distance stays in proportion to the loss."""
        return math.isfinite(self.apart) and self.noise.with_loss * self.noise.relative * self.apart < 1.0

    @property
    def converges(self) -> bool:
        """Whether the loss comes to rest."""
        if not self.holds_together or not np.isfinite(self.kept).all() or self.decays.min() <= 0.0:
            return False
        rates = np.linalg.eigvals(self._map[len(self.parts) : -1, len(self.parts) : -1])
        return bool(rates.real.max() < -_SLOW * self.decays.max())

    @property
    def floor(self) -> float:
        """What noise leaves for ever; infinite if the loss does not come to rest."""
        if not self.converges:
            return math.inf
        constant, following = self._driven()
        total = float(self.kept.sum())
        return constant * total / (1.0 - following * total)

    def variance_at(self, loss: float) -> float:
        """s when the mean model has a loss, in units of the loss at the beginning."""
        constant, following = self._driven()
        return constant + following * loss

    def share_apart(self, loss: float) -> float:
        """U/(F + U): the share of a worker's own loss that comes from its distance to the mean, when that has a loss."""
        if not self.holds_together:
            return 1.0
        distance = self.apart * self.variance_at(loss)
        return distance / (loss + distance)

    def hitting_time(self, target: float) -> float:
        """The last time that the loss is above a target; infinite if it is for ever.

        Args:
            target: share of the loss at the beginning.
        """
        if not self.converges or target <= self.floor:
            return math.inf
        rates, modes = np.linalg.eig(self._map)
        size = len(self.parts)
        start = np.concatenate([self.parts, np.zeros(size), [1.0]]).astype(complex)
        weights = np.linalg.solve(modes, start) * modes[: 2 * size].sum(axis=0)

        def above(times: FloatArray) -> FloatArray:
            exponents = np.outer(np.minimum(rates.real, 0.0) + 1j * rates.imag, times)
            values: FloatArray = (weights @ np.exp(exponents)).real
            return values - target

        end = 1.0 / float(self.decays.max())
        while float(above(np.array([end, 1.5 * end, 2.0 * end])).max()) > 0.0:
            end *= 2.0
        times = np.linspace(0.0, end, _POINTS)
        over = np.flatnonzero(above(times) > 0.0)
        if not over.size:
            return 0.0
        last = int(over[-1])
        if last == _POINTS - 1:
            return end
        return float(optimize.brentq(lambda t: float(above(np.array([t]))[0]), times[last], times[last + 1]))

    def _driven(self) -> tuple[float, float]:
        """s = constant + following · F."""
        noise = self.noise
        nearer = 1.0 - noise.with_loss * noise.relative * self.apart
        return noise.relative * (1.0 - noise.with_loss) / nearer, noise.relative * noise.with_loss / nearer

    @property
    def _map(self) -> FloatArray:
        """d/dt of (B, N, 1)."""
        size = len(self.parts)
        constant, following = self._driven()
        rate = 2.0 * self.decays
        matrix = np.zeros((2 * size + 1, 2 * size + 1))
        own = np.arange(2 * size)
        matrix[own, own] = -np.tile(rate, 2)
        matrix[size : 2 * size, : 2 * size] += (rate * self.kept * following)[:, None]
        matrix[size : 2 * size, -1] = rate * self.kept * constant
        return matrix
