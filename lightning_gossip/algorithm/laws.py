"""How long a step computes: laws of random times. The simulator draws from them; the analysis has their Laplace transforms.

A law draws blocks of times from a generator that it is given, so the same seed gives the same times to the bit, and a worker's
times do not depend on the others'.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_integer, check_not_negative, check_positive, is_finite
from lightning_gossip.arguments import clear_arguments, did_you_mean
from lightning_gossip.errors import ConfigurationError

FloatArray = npt.NDArray[np.float64]


def _check_share(name: str, value: object) -> None:
    check_not_negative(name, value)
    if value > 1.0:  # type: ignore[operator]
        raise ConfigurationError(f"{name}={value!r} is not in [0, 1]: steps would take negative time.")


class Law(ABC):
    """A law of the time, in seconds, that one step computes."""

    @abstractmethod
    def draw(self, generator: np.random.Generator, count: int, start: int) -> FloatArray:
        """Draw the next times.

        Args:
            generator: of the worker; its state advances.
            count: how many.
            start: how many were drawn before.

        Returns:
            Seconds, shape (count,).
        """


@clear_arguments
@dataclass(frozen=True)
class Constant(Law):
    """Every step takes ``mean_s`` seconds."""

    mean_s: float

    def __post_init__(self) -> None:
        check_positive("mean_s", self.mean_s)

    @override
    def draw(self, generator: np.random.Generator, count: int, start: int) -> FloatArray:
        return np.full(count, float(self.mean_s))


@clear_arguments
@dataclass(frozen=True)
class Exponential(Law):
    """Memoryless times: mean_s · (1 + spread · (E − 1)) with E exponential of mean 1; at least (1 − spread) · mean_s.

    Args:
        mean_s: seconds, above 0.
        spread: in [0, 1], the standard deviation over the mean; 1 for the exponential law itself.
    """

    mean_s: float
    spread: float = 1.0

    def __post_init__(self) -> None:
        check_positive("mean_s", self.mean_s)
        _check_share("spread", self.spread)

    @override
    def draw(self, generator: np.random.Generator, count: int, start: int) -> FloatArray:
        return self.mean_s * ((1.0 - self.spread) + self.spread * generator.standard_exponential(count))


@clear_arguments
@dataclass(frozen=True)
class Erlang(Law):
    """The sum of ``shape`` exponential times; its standard deviation is mean_s/√shape.

    Args:
        mean_s: seconds, above 0.
        shape: k, an integer of at least 1.
    """

    mean_s: float
    shape: int = 4

    def __post_init__(self) -> None:
        check_positive("mean_s", self.mean_s)
        check_integer("shape", self.shape, example=4)

    @override
    def draw(self, generator: np.random.Generator, count: int, start: int) -> FloatArray:
        return generator.standard_gamma(float(self.shape), count) * (self.mean_s / self.shape)


@clear_arguments
@dataclass(frozen=True)
class LogNormal(Law):
    """mean_s · e^{sigma z − sigma²/2}, z standard normal.

    Args:
        mean_s: seconds, above 0.
        sigma: of the logarithm, at least 0.
    """

    mean_s: float
    sigma: float = 0.5

    def __post_init__(self) -> None:
        check_positive("mean_s", self.mean_s)
        check_not_negative("sigma", self.sigma)

    @override
    def draw(self, generator: np.random.Generator, count: int, start: int) -> FloatArray:
        exponent = self.sigma * generator.standard_normal(count) - 0.5 * self.sigma**2
        return self.mean_s * np.exp(exponent)


@clear_arguments
@dataclass(frozen=True)
class Uniform(Law):
    """Uniform between (1 − spread) · mean_s and (1 + spread) · mean_s.

    Args:
        mean_s: seconds, above 0.
        spread: in [0, 1].
    """

    mean_s: float
    spread: float = 0.1

    def __post_init__(self) -> None:
        check_positive("mean_s", self.mean_s)
        _check_share("spread", self.spread)

    @override
    def draw(self, generator: np.random.Generator, count: int, start: int) -> FloatArray:
        return self.mean_s * (1.0 + self.spread * generator.uniform(-1.0, 1.0, count))


@clear_arguments
@dataclass(frozen=True)
class Samples(Law):
    """Law of measured times: draws one of them.

    Args:
        times_s: seconds, each above 0; at least one.
        order: ``"random"`` draws them independently; ``"given"`` takes them one after the other, from the first again after
            the last: a script.
    """

    times_s: Sequence[float]
    order: Literal["random", "given"] = "random"

    def __post_init__(self) -> None:
        try:
            times = tuple(self.times_s)
        except TypeError:
            times = ()
        if not times:
            raise ConfigurationError(f"times_s={self.times_s!r} holds no step time. Pass measured seconds: [0.1, 0.12].")
        for time_s in times:
            if not is_finite(time_s) or time_s <= 0.0:
                raise ConfigurationError(f"times_s holds {time_s!r}, which is not a number of seconds above 0.")
        if self.order not in ("random", "given"):
            raise ConfigurationError(f"order={self.order!r} is not one of 'random', 'given'.")
        object.__setattr__(self, "times_s", times)

    @override
    def draw(self, generator: np.random.Generator, count: int, start: int) -> FloatArray:
        times = np.asarray(self.times_s, dtype=np.float64)
        if self.order == "given":
            return times[np.arange(start, start + count) % len(times)]
        return times[generator.integers(len(times), size=count)]


LAWS: Mapping[str, Callable[..., Law]] = MappingProxyType(
    {
        "constant": Constant,
        "exponential": Exponential,
        "erlang": Erlang,
        "lognormal": LogNormal,
        "uniform": Uniform,
        "samples": Samples,
    }
)
"""Name → law. A new law is one class above and one row here."""


def make_law(name: str, **options: Any) -> Law:
    """A law by its name in `LAWS`.

    Raises:
        ConfigurationError: for an unknown name or option, or a value out of its range.

    >>> make_law("erlang", mean_s=0.2, shape=3)
    Erlang(mean_s=0.2, shape=3)
    """
    if name not in LAWS:
        hint = did_you_mean(name, LAWS)
        raise ConfigurationError(f"unknown law {name!r} of compute times; the known ones are {', '.join(LAWS)}.{hint}")
    return LAWS[name](**options)
