"""Laws of step times as laws of delays.

The log-normal law itself has no transform left of the imaginary axis: its mean error decays more slowly than any exponential,
for delays that a run of ten thousand updates hardly sees. They are moved to the cut.
"""

from __future__ import annotations

from functools import singledispatch

import numpy as np
from scipy import stats

from lightning_gossip.algorithm.laws import Constant, Erlang, Exponential, Law, LogNormal, Samples, Uniform
from lightning_gossip.analysis.delays.combined import Sum
from lightning_gossip.analysis.delays.delays import Atoms, Delay, Flat, Gamma, constant
from lightning_gossip.errors import ConfigurationError

_CUT = 1e-4  # probability of the log-normal delays that are moved to the cut: hardly one update in ten thousand
_NODES = 320  # of the log-normal law's Gauss-Legendre rule over the normal variable: 1e-9 of L for |s|·mean up to 12


@singledispatch
def delay_of(law: Law | Delay) -> Delay:
    """A law of compute times as a law of delays.

    Raises:
        ConfigurationError: for a law that has no transform here.

    >>> delay_of(Erlang(0.2, 4)).transform(0.0)
    np.complex128(1+0j)
    """
    raise ConfigurationError(
        f"{law!r} is no law of times: use one of lightning_gossip.algorithm.laws, or Atoms of measured delays."
    )


@delay_of.register
def _(law: Delay) -> Delay:
    return law


@delay_of.register
def _(law: Constant) -> Delay:
    return constant(law.mean_s)


@delay_of.register
def _(law: Exponential) -> Delay:
    if law.spread == 0.0:
        return constant(law.mean_s)
    memoryless = Gamma(law.mean_s * law.spread, 1.0)
    return memoryless if law.spread == 1.0 else Sum(constant(law.mean_s * (1.0 - law.spread)), memoryless)


@delay_of.register
def _(law: Erlang) -> Delay:
    return Gamma(law.mean_s, float(law.shape))


@delay_of.register
def _(law: Uniform) -> Delay:
    return Flat(law.mean_s, law.mean_s * law.spread) if law.spread else constant(law.mean_s)


@delay_of.register
def _(law: LogNormal) -> Delay:
    if law.sigma == 0.0:
        return constant(law.mean_s)
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    low, cut = -9.0, float(stats.norm.isf(_CUT))
    z = 0.5 * (cut - low) * nodes + 0.5 * (cut + low)
    density = 0.5 * (cut - low) * weights * stats.norm.pdf(z)
    times = law.mean_s * np.exp(law.sigma * np.append(z, cut) - 0.5 * law.sigma**2)
    return Atoms(times, np.append(density, _CUT))


@delay_of.register
def _(law: Samples) -> Delay:
    return Atoms(law.times_s)
