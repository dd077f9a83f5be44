"""Simulated delayed recursions, and how their decay is measured."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def constant_staleness(step: float, staleness: int, steps: int) -> FloatArray:
    """x_{k+1} = x_k − g x_{k−τ} from x = 1; shape (steps + 1,)."""
    x = np.ones(steps + 1 + staleness)
    for k in range(staleness, staleness + steps):
        x[k + 1] = x[k] - step * x[k - staleness]
    return x[staleness:]


def random_staleness(step: float, weights: FloatArray, steps: int) -> FloatArray:
    """E x_{k+1} = E x_k − g Σ_j p_j E x_{k−j} from x = 1; shape (steps + 1,)."""
    reach = len(weights) - 1
    x = np.ones(steps + 1 + reach)
    for k in range(reach, reach + steps):
        x[k + 1] = x[k] - step * float(weights @ x[k - reach : k + 1][::-1])
    return x[reach:]


def workers(step: float, number: int, shape: int, updates: int, *, runs: int, seed: int) -> tuple[FloatArray, FloatArray]:
    """N workers of Erlang-k step times on a quadratic: the mean of z and of z², by updates, over many runs.

    Returns:
        Each of shape (updates + 1,), at every N-th part of a round.
    """
    rng, rows = np.random.default_rng(seed), np.arange(runs)
    z, v = np.ones(runs), np.ones((runs, number))
    phase = rng.integers(shape, size=(runs, number))
    mean, square = [1.0], [1.0]
    for event in range(updates * shape):
        i = rng.integers(number, size=runs)
        after = phase[rows, i] + 1
        pushes = after == shape
        own = v[rows, i]
        z = np.where(pushes, z - step * own, z)
        v[rows, i] = np.where(pushes, z, own)
        phase[rows, i] = np.where(pushes, 0, after)
        if (event + 1) % shape == 0:
            mean.append(float(z.mean()))
            square.append(float((z * z).mean()))
    return np.array(mean), np.array(square)


def prony(x: FloatArray, *, lag: int, burn: int) -> complex:
    """The dominant root e^s of a sequence that is left with one root or one pair: a two-term Prony fit.

    With y_j = x at multiples of the lag, y_{j+2} = p y_{j+1} − q y_j; least squares over all starts, each triple scaled by its
    size so that a decaying sequence counts everywhere alike.

    Returns:
        s, imaginary part at least 0, per step.
    """
    a, b, c = x[burn : -2 * lag], x[burn + lag : -lag], x[burn + 2 * lag :]
    scale = 1.0 / np.sqrt(a * a + b * b)
    (p, q), *_ = np.linalg.lstsq(np.stack([b * scale, -a * scale], axis=1), c * scale, rcond=None)
    roots = np.roots([1.0, -p, q])
    largest = roots[int(np.argmax(np.abs(roots)))]
    return complex(np.log(complex(largest.real, abs(largest.imag))) / lag)
