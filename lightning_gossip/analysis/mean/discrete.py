"""Delayed gradient descent step by step, x_{k+1} = x_k − g·x_{k−τ_k} with g = ηh: exact limits, no continuous time.

Constant staleness τ is what round-robin workers of constant step times have, τ = N − 1. Its characteristic polynomial is
z^{τ+1} − z^τ + g, stable iff g < 2 sin(π/(2(2τ+1))), fastest at g = τ^τ/(τ+1)^{τ+1} with the radius τ/(τ+1) [derived].

Random staleness, drawn anew for each step: the mean obeys z − 1 + g Σ_j p_j z^{−j} = 0.
"""

from __future__ import annotations

import math

import numpy as np

from lightning_gossip.algorithm.checks import check_integer, check_positive, is_finite
from lightning_gossip.analysis.delays.delays import Atoms
from lightning_gossip.errors import ConfigurationError


def constant_staleness_limit(staleness: int) -> float:
    """The mean (and, delays being constant, the mean square) converges iff ηh is below it.

    Args:
        staleness: τ in steps, at least 0.

    >>> round(constant_staleness_limit(1), 12)
    1.0
    """
    check_integer("staleness", staleness, at_least=0, example=3)
    return 2.0 if staleness == 0 else 2.0 * math.sin(math.pi / (2.0 * (2 * staleness + 1)))


def constant_staleness_fastest(staleness: int) -> tuple[float, float]:
    """The best ηh, and the factor by which it shrinks the error in each step in the long run.

    Args:
        staleness: τ in steps, at least 0.

    >>> constant_staleness_fastest(1)
    (0.25, 0.5)
    """
    check_integer("staleness", staleness, at_least=0, example=3)
    if staleness == 0:
        return 1.0, 0.0
    return math.exp(staleness * math.log(staleness) - (staleness + 1) * math.log(staleness + 1)), staleness / (staleness + 1)


def check_momentum(momentum: float, name: str = "momentum") -> None:
    """Refuse what is no share of a velocity that is kept.

    Raises:
        ConfigurationError: if it is not in [0, 1).
    """
    if not is_finite(momentum) or not 0.0 <= momentum < 1.0:
        raise ConfigurationError(f"{name}={momentum!r} is not in [0, 1). Write for example 0.9.")


def own_limit(momentum: float, *, nesterov: bool = False, smallest_weight: float = 1.0) -> float:
    """Without staleness gradient descent with momentum converges iff γh is below it.

    Heavy ball: z² − (1 + β − γh) z + β = 0, so 2 (1 + β). Nesterov's, as torch has it: z² − (1 + β)(1 − γh) z + β (1 − γh) = 0,
    so 2 (1 + β)/(1 + 2β).

    Args:
        momentum: β in [0, 1).
        nesterov: whether it is Nesterov's.
        smallest_weight: w_min, of the matrix that averages the models of before the step (overlapped D-PSGD); 1 for one model.
            The limit is (1 + w_min)/2 of the other.
    """
    check_momentum(momentum)
    return (1.0 + smallest_weight) * (1.0 + momentum) / (1.0 + 2.0 * momentum if nesterov else 1.0)


def spectral_radius(step: float, staleness: int | Atoms) -> float:
    """The factor by which the mean of the error grows or shrinks in each step in the long run.

    Args:
        step: g = ηh, above 0.
        staleness: τ in steps, or its law on whole steps.
    """
    check_positive("step", step)
    law = staleness if isinstance(staleness, Atoms) else Atoms([staleness])
    if (law.times != np.round(law.times)).any():
        raise ConfigurationError("a staleness is a whole number of steps; for other delays use decay_rate.")
    polynomial = np.zeros(int(law.times[-1]) + 2)  # z^{τ+1} − z^τ + g Σ p_j z^{τ−j}, highest power first
    polynomial[:2] = 1.0, -1.0
    polynomial[1 + law.times.astype(int)] += step * law.weights
    return float(np.abs(np.roots(polynomial)).max())
