"""Laws of the delay τ between reading a model and applying the gradient taken there, and their Laplace transforms.

The transform L(s) = E[e^{−sτ}] is all that the mean of delayed gradient descent sees of a law (stability.py). Laws of compute
times are those of :mod:`lightning_gossip.algorithm.laws`, and
:func:`~lightning_gossip.analysis.delays.conversion.delay_of` makes a delay of one:

| law | L(s) | finite for |
|---|---|---|
| constant τ, and measured delays τ_j of weight w_j | Σ_j w_j e^{−sτ_j} | all s |
| gamma of mean m and shape k: exponential (k = 1), Erlang | (1 + sm/k)^{−k} | Re s > −k/m |
| uniform on c ± w | e^{−sc} sinh(sw)/(sw) | all s |
| sum of independent delays (combined.py) | the product | where both are |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_positive, is_finite
from lightning_gossip.algorithm.laws import FloatArray
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError

ComplexArray = npt.NDArray[np.complex128]

_AT_ONCE = 1 << 17  # numbers e^{−sτ} in memory: quickest, and of ten thousand delays at ten thousand s no gigabytes


class Delay(ABC):
    """A law of a delay τ ≥ 0, in any unit of time: seconds, or steps of the server."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """E[τ]."""

    @property
    @abstractmethod
    def variance(self) -> float:
        """E[(τ − E[τ])²]."""

    @property
    def left(self) -> float:
        """The transform is finite for Re s above it; −∞ if everywhere."""
        return -math.inf

    @property
    def reach(self) -> float:
        """A delay that is hardly ever exceeded: e^{−sτ} turns no faster than Im s · reach."""
        return self.mean + 8.0 * math.sqrt(self.variance)

    @abstractmethod
    def transform(self, s: Any) -> ComplexArray:
        """L(s) = E[e^{−sτ}].

        Args:
            s: complex, of any shape, right of :attr:`left`; in 1/time.

        Returns:
            The same shape.
        """

    @abstractmethod
    def slope(self, s: Any) -> ComplexArray:
        """L'(s) = −E[τ e^{−sτ}]; as :meth:`transform`."""


@clear_arguments
@dataclass(frozen=True, eq=False)
class Atoms(Delay):
    """Finitely many delays, each with its probability: constant delays, measured ones, a histogram.

    Args:
        times: shape (m,), each at least 0.
        weights: shape (m,), not negative; divided by their sum. Equal ones if None.
    """

    times: FloatArray
    weights: FloatArray

    def __init__(self, times: Sequence[float] | FloatArray, weights: Sequence[float] | FloatArray | None = None) -> None:
        values = np.asarray(times, dtype=np.float64).ravel()
        shares = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64).ravel()
        if not values.size or not shares.sum() > 0.0:
            raise ConfigurationError("there are no delays: the sample is empty. Pass measured delays: [0.1, 0.12].")
        if values.shape != shares.shape or (shares < 0.0).any() or not np.isfinite(shares).all():
            raise ConfigurationError(f"the {values.size} delays need as many weights of at least 0; got {shares.tolist()}.")
        if not np.isfinite(values).all() or (values < 0.0).any():
            raise ConfigurationError(f"delays must be finite and at least 0; got {values.min():g} to {values.max():g}.")
        distinct, where = np.unique(values, return_inverse=True)
        object.__setattr__(self, "times", distinct)
        object.__setattr__(self, "weights", np.bincount(where, shares) / shares.sum())

    @property
    @override
    def mean(self) -> float:
        return float(self.weights @ self.times)

    @property
    @override
    def variance(self) -> float:
        return float(self.weights @ (self.times - self.mean) ** 2)

    @property
    @override
    def reach(self) -> float:
        return float(self.times[-1])

    @property
    def constant(self) -> float | None:
        """The delay, if it is always the same."""
        return float(self.times[0]) if len(self.times) == 1 else None

    @override
    def transform(self, s: Any) -> ComplexArray:
        return self._sum(s, self.weights)

    @override
    def slope(self, s: Any) -> ComplexArray:
        return self._sum(s, -self.weights * self.times)

    def _sum(self, s: Any, of: FloatArray) -> ComplexArray:
        """Σ_j of_j e^{−sτ_j}."""
        places, factors = np.asarray(s, dtype=np.complex128), of.astype(np.complex128)
        parts = -(-places.size * len(self.times) // _AT_ONCE)
        if parts <= 1:
            return self._turned(places) @ factors
        sums = [self._turned(part) @ factors for part in np.array_split(places.ravel(), parts)]
        return np.concatenate(sums).reshape(places.shape)

    def _turned(self, s: ComplexArray) -> ComplexArray:
        turned: ComplexArray = np.exp(-np.multiply.outer(s, self.times))
        return turned


@clear_arguments
@dataclass(frozen=True)
class Gamma(Delay):
    """Gamma-distributed delays: exponential for shape 1, Erlang for a whole shape.

    Args:
        mean_time: of the delay, above 0.
        shape: k above 0; the standard deviation is mean_time/√k.
    """

    mean_time: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        check_positive("mean_time", self.mean_time)
        check_positive("shape", self.shape)

    @property
    @override
    def mean(self) -> float:
        return self.mean_time

    @property
    @override
    def variance(self) -> float:
        return self.mean_time**2 / self.shape

    @property
    @override
    def left(self) -> float:
        return -self.shape / self.mean_time

    @override
    def transform(self, s: Any) -> ComplexArray:
        return (1.0 + np.asarray(s, dtype=np.complex128) * (self.mean_time / self.shape)) ** -self.shape

    @override
    def slope(self, s: Any) -> ComplexArray:
        return -self.mean_time * (1.0 + np.asarray(s, dtype=np.complex128) * (self.mean_time / self.shape)) ** (-self.shape - 1)


@clear_arguments
@dataclass(frozen=True)
class Flat(Delay):
    """Uniformly distributed delays on centre ± half_width.

    Args:
        centre: above 0.
        half_width: above 0, at most the centre.
    """

    centre: float
    half_width: float

    def __post_init__(self) -> None:
        check_positive("half_width", self.half_width)
        if not is_finite(self.centre) or self.centre < self.half_width:
            raise ConfigurationError(f"centre={self.centre!r} below half_width={self.half_width!r} gives negative delays.")

    @property
    @override
    def mean(self) -> float:
        return self.centre

    @property
    @override
    def variance(self) -> float:
        return self.half_width**2 / 3.0

    @property
    @override
    def reach(self) -> float:
        return self.centre + self.half_width

    @override
    def transform(self, s: Any) -> ComplexArray:
        return self._parts(s)[0]

    @override
    def slope(self, s: Any) -> ComplexArray:
        return self._parts(s)[1]

    def _parts(self, s: Any) -> tuple[ComplexArray, ComplexArray]:
        s = np.asarray(s, dtype=np.complex128)
        x = s * self.half_width
        small = np.abs(x) < 1e-2
        safe = np.where(small, 1.0, x)
        value = np.where(small, 1.0 + x**2 / 6.0 + x**4 / 120.0, np.sinh(safe) / safe)  # error 1e-16 at 1e-2
        growth = np.where(small, x / 3.0 + x**3 / 30.0 + x**5 / 840.0, (np.cosh(safe) - value) / safe)
        shift = np.exp(-s * self.centre)
        return shift * value, shift * (self.half_width * growth - self.centre * value)


def constant(time: float) -> Atoms:
    """A delay that is always the same.

    Args:
        time: at least 0.
    """
    return Atoms([time])


def histogram(counts: Mapping[int, int]) -> Atoms:
    """The delay in steps that a run's staleness gives.

    Args:
        counts: how many updates had each staleness.
    """
    if not counts:
        raise ConfigurationError("the histogram of staleness is empty: no update was counted. Train an epoch first.")
    return Atoms(list(counts), [float(count) for count in counts.values()])
