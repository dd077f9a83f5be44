"""Delays that are made of others: sums, and what momentum does to a delay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import optimize
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_not_negative
from lightning_gossip.analysis.delays.delays import ComplexArray, Delay
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError


@clear_arguments
@dataclass(frozen=True)
class Sum(Delay):
    """The sum of two independent delays."""

    first: Delay
    second: Delay

    @property
    @override
    def mean(self) -> float:
        return self.first.mean + self.second.mean

    @property
    @override
    def variance(self) -> float:
        return self.first.variance + self.second.variance

    @property
    @override
    def left(self) -> float:
        return max(self.first.left, self.second.left)

    @property
    @override
    def reach(self) -> float:
        return self.first.reach + self.second.reach

    @override
    def transform(self, s: Any) -> ComplexArray:
        return self.first.transform(s) * self.second.transform(s)

    @override
    def slope(self, s: Any) -> ComplexArray:
        return self.first.slope(s) * self.second.transform(s) + self.first.transform(s) * self.second.slope(s)


@clear_arguments
@dataclass(frozen=True)
class Repeated(Delay):
    """The sum of j independent steps, with probability (1 − share) share^j: what momentum does to a gradient.

    Heavy-ball momentum β applies a gradient again at each further own step, β^j of it after j of them: altogether as much as a
    learning rate of γ/(1 − β) and this delay, with share = β. With L the transform of a step,

        E[e^{−sτ}] = (1 − β)/(1 − β L(s))                                                                       [derived here]

    Nesterov's momentum applies 1 + β of a gradient at once and β^{j+1} after j steps: with the probability 1 − β there is no
    delay, and with β this one.

    Args:
        step: law of one own step; its mean above 0.
        share: β in [0, 1).
        nesterov: whether it is Nesterov's.
    """

    step: Delay
    share: float
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_not_negative("share", self.share)
        if self.share >= 1.0:
            raise ConfigurationError(f"share={self.share!r} is not in [0, 1).")

    @property
    @override
    def mean(self) -> float:
        return self._delayed * self.step.mean * self.share / (1.0 - self.share)

    @property
    @override
    def variance(self) -> float:
        share = self.share
        second = self.step.variance * share / (1.0 - share) + self.step.mean**2 * share * (1.0 + share) / (1.0 - share) ** 2
        return self._delayed * second - self.mean**2

    @property
    def _delayed(self) -> float:
        return self.share if self.nesterov else 1.0

    @cached_property
    def left(self) -> float:
        """The left end of the transform's domain: the real s at which β L(s) = 1."""
        if self.share == 0.0:
            return -math.inf

        def beyond(s: float) -> float:
            return self.share * float(self.step.transform(s).real) - 1.0

        low = max(-1.0 / self.step.mean, end := self.step.left * (1.0 - 1e-12))
        while beyond(low) < 0.0 and low > end:
            low = max(2.0 * low, end)
        return float(optimize.brentq(beyond, low, 0.0))

    @override
    def transform(self, s: Any) -> ComplexArray:
        repeated: ComplexArray = (1.0 - self.share) / (1.0 - self.share * self.step.transform(s))
        return self._delayed * repeated + (1.0 - self._delayed)

    @override
    def slope(self, s: Any) -> ComplexArray:
        turned = 1.0 - self.share * self.step.transform(s)
        return self._delayed * (1.0 - self.share) * self.share * self.step.slope(s) / np.square(turned)
