"""Delays that are made of others: sums, and what momentum does to a delay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_gossip.algorithm.checks import check_not_negative, check_positive
from lightning_gossip.analysis.delays import ComplexArray, Delay
from lightning_gossip.errors import ConfigurationError


@dataclass(frozen=True)
class Sum(Delay):
    """The sum of two independent delays."""

    first: Delay
    second: Delay

    @property
    def mean(self) -> float:
        """See :class:`Delay`."""
        return self.first.mean + self.second.mean

    @property
    def variance(self) -> float:
        """See :class:`Delay`."""
        return self.first.variance + self.second.variance

    @property
    def left(self) -> float:
        """See :class:`Delay`."""
        return max(self.first.left, self.second.left)

    @property
    def reach(self) -> float:
        """See :class:`Delay`."""
        return self.first.reach + self.second.reach

    def transform(self, s: Any) -> ComplexArray:
        """See :class:`Delay`."""
        return self.first.transform(s) * self.second.transform(s)

    def slope(self, s: Any) -> ComplexArray:
        """See :class:`Delay`."""
        return self.first.slope(s) * self.second.transform(s) + self.first.transform(s) * self.second.slope(s)


@dataclass(frozen=True)
class Geometric(Delay):
    """j · step with probability (1 − share) share^j: what momentum does to a gradient.

    Heavy-ball momentum β applies a gradient again after j own steps, β^j of it: as much as a learning rate of η/(1 − β) and
    this delay, with share = β [D].

    Args:
        step: time of one own step, above 0.
        share: β in [0, 1).
    """

    step: float
    share: float

    def __post_init__(self) -> None:
        check_positive("step", self.step)
        check_not_negative("share", self.share)
        if self.share >= 1.0:
            raise ConfigurationError(f"share={self.share!r} is not in [0, 1).")

    @property
    def mean(self) -> float:
        """See :class:`Delay`."""
        return self.step * self.share / (1.0 - self.share)

    @property
    def variance(self) -> float:
        """See :class:`Delay`."""
        return self.step**2 * self.share / (1.0 - self.share) ** 2

    @property
    def left(self) -> float:
        """See :class:`Delay`."""
        return math.log(self.share) / self.step if self.share else -math.inf

    def transform(self, s: Any) -> ComplexArray:
        """See :class:`Delay`."""
        return (1.0 - self.share) / (1.0 - self._turned(s))

    def slope(self, s: Any) -> ComplexArray:
        """See :class:`Delay`."""
        turned = self._turned(s)
        return -(1.0 - self.share) * self.step * turned / (1.0 - turned) ** 2

    def _turned(self, s: Any) -> ComplexArray:
        turned: ComplexArray = np.exp(-np.asarray(s, dtype=np.complex128) * self.step)
        return turned * complex(self.share)
