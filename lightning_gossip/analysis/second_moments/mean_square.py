"""The root mean square of asynchronous SGD's error, exactly, for N workers with memoryless, Erlang or constant step times.

Random delays make the error itself random, and its root mean square decays more slowly than its mean, which is all that
characteristic roots tell of. The second moments close (second_moments.py), and the largest eigenvalue ρ of their map over one
update is the factor of the mean square: it converges iff ρ < 1. For memoryless workers g = ηh must be below 0.843 for N = 4 and
0.386 for 16; round-robin workers (constant step times) have no randomness, and their limit is that of a constant staleness of
N − 1: 0.445 and 0.101.

For any other law of the staleness, such as a measured or a bounded one, :func:`random_staleness_limit` takes it as drawn anew
for each update. Then x_{k+1} = x_k − g Σ_j p_j x_{k−j} − g ξ_k, where ξ_k is uncorrelated with all before and has the variance
Σ_j p_j x_{k−j}² − (Σ_j p_j x_{k−j})². With H(ω) = 1/(e^{iω} − 1 + g P(ω)), P the law's transform, the mean square is stable iff
the mean is and

    (g²/2π) ∫ |H|² (1 − |P|²) dω < 1                                                                          [derived here]

That is 5 to 14 % below the exact limit of memoryless workers, whose pulls are not independent: the safe side. Momentum β of the
workers' optimizers applies a gradient again at the worker's next updates, taken as N = 1 + mean staleness steps apart: M(ω) =
1/(1 − β e^{−iωN}) beside each g (Nesterov's: 1 + βM). That is exact to some percent for constant step times, 1.1 to 1.3 times
too low for narrow laws, up to 2 times for memoryless ones with β = 0.9 (measured); with steps of random length it would be too
high.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize
from scipy.sparse.linalg import LinearOperator, eigs

from lightning_gossip.algorithm.checks import check_integer, check_positive
from lightning_gossip.algorithm.laws import Constant, Erlang, Exponential, FloatArray, Law
from lightning_gossip.analysis.delays.delays import Atoms, ComplexArray
from lightning_gossip.analysis.mean.discrete import check_momentum, constant_staleness_limit, own_limit
from lightning_gossip.analysis.second_moments import second_moments
from lightning_gossip.errors import ConfigurationError

_LARGEST = 60_000  # moments: about a second
_DENSE = 64  # moments of one class up to which a dense matrix is quicker
_FREQUENCIES = 1 << 14  # of the integral: midpoints on (0, π)


def rms_decay_rate(step: float, workers: int, *, shape: int = 1) -> float:
    """Decay of the error's root mean square per update, −½ ln ρ; negative if it diverges.

    Args:
        step: g = ηh, above 0, with η of one applied update.
        workers: N, at least 1.
        shape: k of the Erlang step times; 1 for memoryless ones.

    Raises:
        ConfigurationError: if k phases of N workers have too many moments; see :func:`exact_limit`.
    """
    check_positive("step", step)
    _check(workers, shape)
    radius = _radius(step, workers, shape)
    return -0.5 * math.log(radius) if radius > 0.0 else math.inf


def mean_square_limit(workers: int, *, shape: int | None = 1) -> float:
    """The mean square of the error converges iff ηh is below it.

    Args:
        workers: N, at least 1.
        shape: k of the Erlang step times; 1 for memoryless ones, None for constant ones (round-robin).

    >>> round(mean_square_limit(4), 3), round(mean_square_limit(4, shape=None), 3)
    (0.843, 0.445)
    """
    if shape is None:
        check_integer("workers", workers, example=4)
        return constant_staleness_limit(workers - 1)
    _check(workers, shape)
    return float(optimize.brentq(lambda g: _radius(g, workers, shape) - 1.0, 1e-3 / workers, 2.5, xtol=1e-12))


def exact_limit(workers: int, compute: Law) -> float | None:
    """:func:`mean_square_limit` of workers that never wait, where it is known.

    Args:
        workers: N, at least 1.
        compute: law of their step times.

    Returns:
        None for laws other than the constant, the exponential and Erlang's, and for Erlang's with too many moments; then
        :func:`random_staleness_limit` of the staleness is on the safe side. (A wider law with as many workers is not: its limit
        is higher.)
    """
    shape = _shape_of(compute)
    if shape is None and not isinstance(compute, Constant):
        return None
    if shape is not None and second_moments.count(workers, shape) > _LARGEST:
        return None
    return mean_square_limit(workers, shape=shape)


def _shape_of(compute: Law) -> int | None:
    if isinstance(compute, Erlang):
        return compute.shape
    return 1 if isinstance(compute, Exponential) and compute.spread == 1.0 else None


def random_staleness_limit(staleness: Atoms, *, momentum: float = 0.0, nesterov: bool = False) -> float:
    """The mean square of the error converges below this ηh, if each update's staleness is drawn anew from a law.

    Args:
        staleness: its law, on whole steps.
        momentum: β in [0, 1) of the workers' optimizers; η is then the learning rate times the server's scale.
        nesterov: whether it is Nesterov's.
    """
    check_momentum(momentum)
    if staleness.constant is not None and not momentum:
        return constant_staleness_limit(round(staleness.constant))
    apart = 1.0 + staleness.mean

    def again_at(frequencies: FloatArray) -> ComplexArray:
        repeated = 1.0 / (1.0 - momentum * np.exp(-1j * apart * frequencies))
        again: ComplexArray = 1.0 + momentum * repeated if nesterov else repeated
        return again

    def on_circle(frequencies: FloatArray) -> ComplexArray:
        """The g at which e^{iω} is a root of the mean: real and positive at a crossing."""
        turned = np.exp(1j * frequencies)
        steps: ComplexArray = (1.0 - turned) / (staleness.transform(1j * frequencies) * again_at(frequencies))
        return steps

    top = min(own_limit(momentum, nesterov=nesterov), _first_crossing(on_circle))
    frequencies = (np.arange(_FREQUENCIES) + 0.5) * math.pi / _FREQUENCIES
    turned, along, again = np.exp(1j * frequencies), staleness.transform(1j * frequencies), again_at(frequencies)
    spread = (1.0 - np.abs(along) ** 2) * np.abs(again) ** 2

    def gain(step: float) -> float:
        return float(step**2 * np.mean(spread / np.abs(turned - 1.0 + step * again * along) ** 2))

    steps = np.geomspace(1e-3 * top, top, 60)
    beyond = next((number for number, step in enumerate(steps) if gain(float(step)) > 1.0), None)
    if beyond is None:
        return top
    return float(optimize.brentq(lambda step: gain(step) - 1.0, steps[max(0, beyond - 1)], steps[beyond]))


def _first_crossing(on_circle: Callable[[FloatArray], ComplexArray]) -> float:
    """The smallest g at which a root of the mean is on the unit circle."""
    frequencies = np.linspace(0.0, math.pi, _FREQUENCIES + 1)[1:]
    found = on_circle(frequencies)
    crossing = np.nonzero((found.imag[:-1] * found.imag[1:] < 0.0) & (found.real[:-1] > 0.0) & (found.real[1:] > 0.0))[0]
    limits = [float(found.real[-1])] if found.real[-1] > 0.0 else []  # ω = π, where every g is real
    if len(crossing):
        first = crossing[np.argmin(found.real[crossing])]
        frequency = optimize.brentq(
            lambda at: float(on_circle(np.array([at])).imag[0]), frequencies[first], frequencies[first + 1], xtol=1e-15
        )
        limits.append(float(on_circle(np.array([frequency])).real[0]))
    return min(limits)


def stationary_variance(step: float, workers: int) -> float:
    """Variance of the server's model under gradient noise, in units of η² times the noise's variance; memoryless workers.

    Args:
        step: g = ηh, above 0 and below :func:`mean_square_limit`.
        workers: N.

    Raises:
        ConfigurationError: if the mean square diverges.
    """
    check_positive("step", step)
    _check(workers, 1)
    one_update = second_moments.event(workers, 1).at(step).toarray()
    if np.abs(np.linalg.eigvals(one_update)).max() >= 1.0:
        raise ConfigurationError(
            f"step={step:g} has no stationary variance with {workers} workers: it must be below {mean_square_limit(workers):g}."
        )
    # the noise of an update does not depend on what was before: it is in z'², with itself and with the model pulled
    noise = np.array([1.0, 1.0, 1.0, 0.0])[: len(one_update)]
    return float(np.linalg.solve(np.eye(len(one_update)) - one_update, noise)[0])


def _check(workers: int, shape: int) -> None:
    check_integer("workers", workers, example=4)
    check_integer("shape", shape, example=1)
    moments = second_moments.count(workers, shape)
    if moments > _LARGEST:
        raise ConfigurationError(
            f"shape={shape} of {workers} workers has {moments:,} second moments; at most {_LARGEST:,} are computed."
            " Use a smaller shape or fewer workers, or random_staleness_limit of the staleness."
        )


def _radius(step: float, workers: int, shape: int) -> float:
    """ρ of one update: of k events, which map each class of moments to itself; one class tells all."""
    event = second_moments.event(workers, shape)
    matrix, classes = event.at(step), event.classes
    blocks = [matrix[classes == (number + 1) % shape][:, classes == number] for number in range(shape)]

    def update(moments: FloatArray) -> FloatArray:
        for block in blocks:
            moments = block @ moments
        return moments

    size = blocks[0].shape[1]
    if size < _DENSE:
        dense = np.stack([update(column) for column in np.eye(size)], axis=1)
        return float(np.abs(np.linalg.eigvals(dense)).max())
    operator = LinearOperator((size, size), matvec=update, dtype=np.float64)
    largest = eigs(operator, k=1, which="LM", return_eigenvectors=False, ncv=32, tol=1e-9, v0=np.ones(size))
    return float(np.abs(largest[0]))
