"""The links between the workers: latency, bandwidth, slow ones, one bottleneck that all share.

Every worker has one full-duplex port of the same bandwidth, and every pair a link through the two ports. A slow link or a slow
port divides the bandwidth and multiplies the latency by its factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_gossip.algorithm.checks import check_integer, check_not_negative, check_positive, is_finite
from lightning_gossip.errors import ConfigurationError

_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class RandomSlowdowns:
    """Links that are slow at random: in each period each link is slow with a probability, independently of all else.

    What a transfer finds when it begins holds until it ends.

    Args:
        probability: that a link is slow in a period, in [0, 1].
        factor: by how much, ≥ 1.
        period_s: seconds that a link stays as it is, above 0.
    """

    probability: float
    factor: float
    period_s: float

    def __post_init__(self) -> None:
        if not is_finite(self.probability) or not 0.0 <= self.probability <= 1.0:
            raise ConfigurationError(f"slowdowns.probability={self.probability!r} is not in [0, 1]. Write for example 0.01.")
        if not is_finite(self.factor) or self.factor < 1.0:
            raise ConfigurationError(f"slowdowns.factor={self.factor!r} is not a factor of at least 1. Write for example 10.0.")
        check_positive("slowdowns.period_s", self.period_s)

    def factor_of(self, seed: int, low: int, high: int, at_s: float) -> float:
        """The factor of the link between two ranks at a time: a hash and not a generator, so that nobody's draw moves it."""
        if self.probability <= 0.0:
            return 1.0
        word = seed & _MASK
        for value in (low, high, int(at_s / self.period_s)):
            word = _mix(word ^ _mix(value))
        return self.factor if word / 2.0**64 < self.probability else 1.0


@dataclass(frozen=True, kw_only=True)
class Links:
    """How long what is sent takes. The default costs nothing.

    Args:
        latency_s: seconds of a message between any two workers, at least 0.
        bandwidth: bytes a second of each worker's port, in each direction, above 0; infinity for no limit.
        slow: factor ≥ 1 of a link, by the pair of its ranks, or of a worker's port, by its rank.
        shared: bytes a second of a bottleneck that all transfers share fairly; None for none.
        slowdowns: at random; None for none.

    Raises:
        ConfigurationError: naming the key.
    """

    latency_s: float = 0.0
    bandwidth: float = math.inf
    slow: Mapping[int | tuple[int, int], float] = field(default_factory=dict)
    shared: float | None = None
    slowdowns: RandomSlowdowns | None = None

    def __post_init__(self) -> None:
        check_not_negative("latency_s", self.latency_s)
        if self.bandwidth != math.inf:
            check_positive("bandwidth", self.bandwidth)
        if self.shared is not None and self.shared != math.inf:
            check_positive("shared", self.shared)
        if not isinstance(self.slow, Mapping):
            raise ConfigurationError(f"slow={self.slow!r} is not a mapping. Write for example slow={{(0, 1): 10.0}}.")
        slow: dict[int | tuple[int, int], float] = {}
        for key, factor in self.slow.items():
            if not is_finite(factor) or factor < 1.0:
                raise ConfigurationError(f"slow[{key!r}]={factor!r} is not a factor of at least 1.")
            slow[_ordered(key)] = float(factor)
        object.__setattr__(self, "slow", slow)

    @classmethod
    def one_slow(cls, i: int, j: int, factor: float, **options: Any) -> Links:
        """Equal links but the one between ranks i and j."""
        return cls(slow={(i, j): factor}, **options)

    def check(self, workers: int) -> None:
        """Refuse links of workers that do not exist.

        Raises:
            ConfigurationError: naming them.
        """
        for key in self.slow:
            if max(key if isinstance(key, tuple) else (key,)) >= workers:
                raise ConfigurationError(f"slow names {key!r}, and there are {workers} workers: ranks are 0 to {workers - 1}.")

    def factor(self, i: int, j: int, at_s: float, seed: int) -> float:
        """How many times slower the link between two ranks is at a time."""
        factor = 1.0
        low, high = (i, j) if i < j else (j, i)
        if self.slow:
            slow = self.slow
            factor = max(slow.get((low, high), 1.0), slow.get(low, 1.0), slow.get(high, 1.0))
        if self.slowdowns is not None:
            factor *= self.slowdowns.factor_of(seed, low, high, at_s)
        return factor


def _ordered(key: object) -> int | tuple[int, int]:
    ends = tuple(key) if isinstance(key, (tuple, list)) else (key,)
    for rank in ends:
        check_integer("a rank in slow", rank, at_least=0, example=0)
    if len(ends) == 1:
        return int(ends[0])
    if len(ends) != 2 or ends[0] == ends[1]:
        raise ConfigurationError(f"slow names {key!r}, which is neither a rank nor a pair of ranks. Write for example (0, 1).")
    return (min(ends), max(ends))


def _mix(word: int) -> int:
    """SplitMix64's output function (Steele, Lea, Flood 2014): every bit of the word changes half of the result's."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
