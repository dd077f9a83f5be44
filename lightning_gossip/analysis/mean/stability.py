"""Does delayed gradient descent converge, and how fast? The mean of the error, for any law of the delay.

A reconstruction of the framework of Yu, Chen and Poor (arXiv 2406.11159) from standard theory: asynchronous SGD as a stochastic
delay differential equation. It is not the paper's own text. Updates are applied at a rate λ, each moves the model by −η times a
gradient taken τ earlier:

    dX(t) = −ηλ ∇F(X(t − τ)) dt + η√λ Σ^{1/2} dB(t)

Along a Hessian eigenvector of eigenvalue h, with the **damping coefficient** a = ηλh, the mean of the error obeys x'(t) =
−a E[x(t − τ)], whose solutions are e^{st} with

    s + a·E[e^{−sτ}] = 0                                                                     (characteristic equation)

The rightmost root s₀ decides: the error decays as e^{Re s₀ t}, and oscillates if s₀ is not real. For a constant delay s₀ =
W₀(−aτ)/τ (Lambert W): aτ ≤ 1/e converges without oscillation and faster than without delay, e times so at 1/e; aτ ≥ π/2
diverges.

| letter | name here |
|---|---|
| η | ``step_size``, of one *applied* update: the learning rate times the server's scale, 1/n by default |
| λ | ``rate``, of applied updates |
| h | ``eigenvalue`` |
| a | ``damping`` |
| τ | ``delay`` |

Time has any unit. In steps of the server (λ = 1) the delay is the staleness plus ½ (:func:`of_staleness`): an Euler step stands
in the middle of its interval, and the continuous root is then within 0.5 % of the exact discrete one for a staleness of 4 and
more and aτ ≤ 1.

Roots tell of the *mean* of the error. For random delays its root mean square decays more slowly: mean_square.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

from lightning_gossip.algorithm.checks import check_positive, is_finite
from lightning_gossip.algorithm.laws import Law
from lightning_gossip.analysis.delays.combined import Sum
from lightning_gossip.analysis.delays.conversion import delay_of
from lightning_gossip.analysis.delays.delays import Atoms, Delay, Gamma, constant
from lightning_gossip.analysis.mean.roots import rightmost_root
from lightning_gossip.errors import ConfigurationError

_BEYOND = 24  # dampings tried beyond the double root
_HIGHEST = 1e4  # a damping·mean above it counts as infinite: its steps are ten thousand times too long for SGD itself


def damping(step_size: float, rate: float, eigenvalue: float) -> float:
    """a = ηλh, in 1/time.

    Args:
        step_size: η of one applied update, above 0.
        rate: λ, applied updates in a unit of time, above 0.
        eigenvalue: h, above 0.
    """
    check_positive("step_size", step_size)
    check_positive("rate", rate)
    check_positive("eigenvalue", eigenvalue)
    return step_size * rate * eigenvalue


def of_staleness(staleness: Delay | Law) -> Delay:
    """The delay, in steps of the server, of updates with this staleness: half a step more."""
    return Sum(constant(0.5), delay_of(staleness))


def staleness_of(delay: Delay) -> Atoms | None:
    """The staleness of which this is :func:`of_staleness`; None for any other delay."""
    if not isinstance(delay, Sum) or not isinstance(delay.first, Atoms) or not isinstance(delay.second, Atoms):
        return None
    whole = bool((delay.second.times == np.round(delay.second.times)).all())
    return delay.second if delay.first.constant == 0.5 and whole else None


def dominant_root(a: float, delay: Delay | Law) -> complex:
    """s₀, the rightmost root of s + a·E[e^{−sτ}] = 0, imaginary part at least 0.

    Args:
        a: damping coefficient, above 0, in 1/time.
        delay: law of τ.

    Returns:
        Re s₀ < 0 iff the mean converges. Where no root lies right of where the law's transform ends, that end: the error
        decays as the law's tail does.

    >>> round(dominant_root(1.0, constant(1.0)).real, 4)
    -0.3181
    """
    check_positive("damping", a)
    delay = delay_of(delay)
    time = _constant_time(delay)
    if time is not None:
        return _lambert(a, time)
    root = rightmost_root(a, delay)
    return complex(delay.left) if root is None else root


def decay_rate(a: float, delay: Delay | Law) -> float:
    """−Re s₀, in 1/time: the error's mean decays as e^{−decay·t}; negative if it diverges."""
    return -dominant_root(a, delay).real


def stability_limit(delay: Delay | Law) -> float:
    """The mean converges for every damping coefficient below this one, and not just above it.

    Where roots cross the axis, iω + a·L(iω) = 0: Re L(iω) = 0 and a = −ω/Im L(iω). The smallest such a is the limit; since
    |L| ≤ 1 it is at least ω, which ends the search.

    Args:
        delay: law of τ.

    Returns:
        In 1/time. π/(2τ) for a constant delay, k·tan(π/2k)/cos^k(π/2k) over the mean for Erlang-k; infinite for exponential
        delays, for τ = 0, and above 10⁴ over the mean delay.
    """
    delay = delay_of(delay)
    if isinstance(delay, Gamma):
        if delay.shape <= 1.0:
            return math.inf
        angle = math.pi / (2.0 * delay.shape)
        return float(delay.shape * math.tan(angle) / math.cos(angle) ** delay.shape / delay.mean)
    if delay.mean == 0.0:
        return math.inf
    step, limit, height = 0.05 / delay.reach, math.inf, 0.0
    while height < min(limit, _HIGHEST / delay.mean):
        heights = height + step * np.arange(4097)
        along = delay.transform(1j * heights).real
        for where in np.flatnonzero((along[:-1] > 0.0) != (along[1:] > 0.0)):
            crossing = optimize.brentq(lambda w: float(delay.transform(1j * w).real), heights[where], heights[where + 1])
            sine = -float(delay.transform(1j * crossing).imag)
            if sine > 0.0:
                limit = min(limit, crossing / sine)
        height = float(heights[-1])
        step *= 1.5  # far out only atoms still oscillate, and no limit of use is there
    return limit if limit * delay.mean <= _HIGHEST else math.inf


def limit_of(decay: Callable[[float], float], highest: float) -> float:
    """Where a decay becomes negative, for decays that are known as numbers only.

    Args:
        decay: of a damping, above 0 for small ones.
        highest: damping that is looked at, above 0.

    Returns:
        To a thousandth; ``highest`` if it is still positive there.
    """
    if decay(highest) > 0.0:
        return highest
    low = 0.7 * highest
    while decay(low) <= 0.0:
        low *= 0.7
    return float(optimize.brentq(decay, low, low / 0.7, rtol=1e-3))


@dataclass(frozen=True)
class Fastest:
    """The damping coefficient with which the mean converges fastest.

    Args:
        damping: in 1/time.
        decay: −Re s₀ there, in 1/time.
    """

    damping: float
    decay: float


def fastest(delay: Delay | Law) -> Fastest:
    """Where the decay is largest: at the double real root, or, for delays of several kinds, sometimes beyond it.

    s + a·L(s) = 0 and 1 + a·L'(s) = 0 together: a is at its largest with a real root. 1/(eτ) for a constant delay,
    (k/(k+1))^{k+1} over the mean for Erlang-k. Beyond it the pair of roots is complex. For exponential delays the decay then
    stays the same.

    Args:
        delay: law of τ; its mean above 0.
    """
    delay = delay_of(delay)
    if delay.mean == 0.0:
        raise ConfigurationError("without any delay a larger damping is always faster: there is no fastest one.")
    best = _double_root(delay)
    beyond = best.damping * np.geomspace(1.05, 16.0, _BEYOND)
    decays = [decay_rate(float(a), delay) for a in beyond]
    top = int(np.argmax(decays))
    if decays[top] > best.decay * (1.0 + 1e-9):
        around = beyond[max(0, top - 1)], beyond[min(_BEYOND - 1, top + 1)]
        found = optimize.minimize_scalar(lambda a: -decay_rate(a, delay), bounds=around, method="bounded")
        best = Fastest(float(found.x), -float(found.fun))
    return best


def _double_root(delay: Delay) -> Fastest:
    def balance(x: float) -> float:  # of the sign of the slope of −x/L(x), whose largest value over x < 0 is a
        return float((x * delay.slope(x) - delay.transform(x)).real)

    high, low = -1e-9 / delay.mean, max(-0.5 / delay.mean, delay.left * (1.0 - 1e-12))
    while balance(low) <= 0.0 and (further := max(2.0 * low, delay.left * (1.0 - 1e-12))) < low:
        low = further
    x = optimize.brentq(balance, low, high, xtol=1e-15 / delay.mean)
    return Fastest(-x / float(delay.transform(x).real), -x)


def convergence_speed(eigenvalues: Iterable[float], step_size: float, rate: float, delay: Delay | Law) -> float:
    """Decay of the slowest direction, min over the spectrum of −Re s₀(ηλh).

    Args:
        eigenvalues: of the Hessian, all above 0.
        step_size, rate: see :func:`damping`.
        delay: law of τ in the unit of 1/rate.

    Returns:
        In 1/time; negative if some direction diverges.

    Raises:
        ConfigurationError: for a spectrum without a positive eigenvalue, or with a negative one.
    """
    return min(decay_rate(damping(step_size, rate, h), delay) for h in spectrum(eigenvalues))


def spectrum(eigenvalues: Iterable[float]) -> Sequence[float]:
    """The eigenvalues that the analysis can use, ascending: positive ones. Zeros are directions in which nothing happens.

    Raises:
        ConfigurationError: naming what is wrong and what to do.
    """
    values = sorted(eigenvalues)
    for value in values:
        if not is_finite(float(value)):
            raise ConfigurationError(f"the spectrum holds {value!r}, which is no finite number.")
    if not values or values[-1] <= 0.0:
        raise ConfigurationError(
            f"the spectrum {values!r} has no positive eigenvalue, so no learning rate is too large for it and none converges."
            " Measure the curvature where the loss has a minimum nearby: after an epoch of training, or on more batches."
        )
    if values[0] < -1e-6 * values[-1]:
        raise ConfigurationError(
            f"the spectrum has a negative eigenvalue, {values[0]:g}: the loss is a saddle there, and the analysis is of a"
            " minimum. Pass the positive ones."
        )
    return [float(value) for value in values if value > 0.0]


def _constant_time(delay: Delay) -> float | None:
    if isinstance(delay, Atoms):
        return delay.constant
    if isinstance(delay, Sum):
        first, second = _constant_time(delay.first), _constant_time(delay.second)
        return None if first is None or second is None else first + second
    return None


def _lambert(a: float, time: float) -> complex:
    if time == 0.0:
        return complex(-a)
    argument = -a * time
    # scipy's is nan at the branch point itself, where W = −1
    w = complex(special.lambertw(argument)) if argument != -math.exp(-1.0) else complex(-1.0)
    return complex(-1.0 if math.isnan(w.real) else w.real, 0.0 if math.isnan(w.imag) else abs(w.imag)) / time
