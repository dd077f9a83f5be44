"""The root mean square of asynchronous SGD's error, exactly, for N workers with memoryless, Erlang or constant step times.

Random delays make the error itself random, and its root mean square decays more slowly than its mean, which is all that
characteristic roots tell of. The second moments close (second_moments.py), and the largest eigenvalue ρ of their map over one
update is the factor of the mean square: it converges iff ρ < 1. For memoryless workers g = ηh must be below 0.843 for N = 4 and
0.386 for 16; round-robin workers (constant step times) have no randomness, and their limit is that of a constant staleness of
N − 1: 0.445 and 0.101.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize
from scipy.sparse.linalg import LinearOperator, eigs

from lightning_gossip.algorithm.checks import check_integer, check_not_negative, check_positive
from lightning_gossip.analysis import second_moments
from lightning_gossip.analysis.discrete import constant_staleness_limit
from lightning_gossip.analysis.second_moments import FloatArray
from lightning_gossip.errors import ConfigurationError

_LARGEST = 60_000  # moments: about a second
_DENSE = 64  # moments of one class up to which a dense matrix is quicker
_CONSTANT = 0.02  # coefficient of variation below which step times count as constant


def rms_decay_rate(step: float, workers: int, *, shape: int = 1) -> float:
    """Decay of the error's root mean square per update, −½ ln ρ; negative if it diverges.

    Args:
        step: g = ηh, above 0, with η of one applied update.
        workers: N, at least 1.
        shape: k of the Erlang step times; 1 for memoryless ones.

    Raises:
        ConfigurationError: if k phases of N workers have too many moments; see :func:`largest_shape`.
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


def largest_shape(workers: int, variation: float) -> int | None:
    """The Erlang shape whose step times have this coefficient of variation, or the largest that can be computed.

    A smaller shape is a wider law, whose limits are lower: the safe side.

    Args:
        workers: N.
        variation: standard deviation over mean of the step times, at least 0.

    Returns:
        None for (almost) constant times: round-robin.
    """
    check_not_negative("variation", variation)
    if variation < _CONSTANT:
        return None
    shape = max(1, round(variation**-2))
    while shape > 1 and second_moments.count(workers, shape) > _LARGEST:
        shape -= 1
    return shape


def _check(workers: int, shape: int) -> None:
    check_integer("workers", workers, example=4)
    check_integer("shape", shape, example=1)
    moments = second_moments.count(workers, shape)
    if moments > _LARGEST:
        raise ConfigurationError(
            f"shape={shape} of {workers} workers has {moments:,} second moments; at most {_LARGEST:,} are computed."
            f" Use shape={largest_shape(workers, shape**-0.5)} or fewer workers."
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
