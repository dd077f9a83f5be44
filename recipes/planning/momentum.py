"""Heavy-ball momentum as a delay.

Momentum β applies a gradient again after each further own step, β^j of it after j of them. Altogether that is a learning rate
of γ/(1 − β) and a delay that is longer by j own steps with probability (1 − β) β^j. The steps of a worker are independent of
each other, with the transform L of one of them:

    E[e^{−sτ}] = (1 − β) / (1 − β L(s))

:class:`~lightning_gossip.analysis.Geometric` is the same for steps that are always equally long; for random ones it is too slow
by up to half. [Derived here; checked against the simulator.]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import optimize

from lightning_gossip.algorithm.checks import check_not_negative
from lightning_gossip.analysis import Delay
from lightning_gossip.analysis.delays import ComplexArray
from lightning_gossip.errors import ConfigurationError


@dataclass(frozen=True)
class Repeated(Delay):
    """The sum of j independent steps, with probability (1 − share) share^j.

    Args:
        step: law of one own step; its mean above 0.
        share: β in [0, 1).
    """

    step: Delay
    share: float

    def __post_init__(self) -> None:
        check_not_negative("share", self.share)
        if self.share >= 1.0:
            raise ConfigurationError(f"share={self.share!r} is not in [0, 1).")

    @property
    def mean(self) -> float:
        """See :class:`Delay`."""
        return self.step.mean * self.share / (1.0 - self.share)

    @property
    def variance(self) -> float:
        """See :class:`Delay`."""
        share = self.share
        return self.step.variance * share / (1.0 - share) + self.step.mean**2 * share / (1.0 - share) ** 2

    @cached_property
    def left(self) -> float:
        """Where β L(s) = 1."""
        if self.share == 0.0:
            return -math.inf

        def beyond(s: float) -> float:
            return self.share * float(self.step.transform(s).real) - 1.0

        low = max(-1.0 / self.step.mean, end := self.step.left * (1.0 - 1e-12))
        while beyond(low) < 0.0 and low > end:
            low = max(2.0 * low, end)
        return float(optimize.brentq(beyond, low, 0.0))

    def transform(self, s: Any) -> ComplexArray:
        """See :class:`Delay`."""
        return (1.0 - self.share) / (1.0 - self.share * self.step.transform(s))

    def slope(self, s: Any) -> ComplexArray:
        """See :class:`Delay`."""
        turned = 1.0 - self.share * self.step.transform(s)
        return (1.0 - self.share) * self.share * self.step.slope(s) / np.square(turned)
