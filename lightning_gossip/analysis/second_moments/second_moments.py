"""Second moments of asynchronous SGD with N workers whose step times are Erlang-k: a linear map, one event at a time.

On a quadratic of eigenvalue h with g = ηh, worker i holds the model v_i that it pulled; when it finishes,

    z ← z − g·v_i ;   v_i ← z

Erlang-k step times are k memoryless phases in a row, so in the order of events "a worker drawn uniformly ends its phase" is the
whole dynamics (the times between events do not depend on which). Workers are alike: how many of them are in each phase, c, is a
Markov chain, and with it the second moments close exactly:

    A(c) = E[z²; c]                         B_p(c) = E[Σ_{i in p} z v_i; c]
    C_p(c) = E[Σ_{i in p} v_i²; c]          D_pq(c) = E[Σ_{i in p, j in q, i ≠ j} v_i v_j; c]

A worker of phase p, one of c_p, moves on to phase p + 1, or from the last one to phase 0 with the update. For k = 1 there is
one c, and A, B, C, D are four numbers. Σ p·c_p mod k moves on by one in each event. [Derived here; checked against simulated
workers.]
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import sparse


def count(workers: int, shape: int) -> int:
    """How many moments there are, at most."""
    return math.comb(workers + shape - 1, shape - 1) * _each(shape)


@dataclass(frozen=True)
class Event:
    """The map of one event: M₀ + g M₁ + g² M₂.

    Args:
        powers: M₀, M₁, M₂.
        classes: Σ p·c_p mod k of each moment, shape (moments,).
    """

    powers: tuple[sparse.csr_matrix, sparse.csr_matrix, sparse.csr_matrix]
    classes: npt.NDArray[np.int64]

    def at(self, step: float) -> sparse.csr_matrix:
        """The map for a step size times eigenvalue."""
        zeroth, first, second = self.powers
        return zeroth + step * first + step**2 * second


@lru_cache(maxsize=8)
def event(workers: int, shape: int) -> Event:
    """The map of one event of N workers with k phases."""
    states = _states(workers, shape)
    where = {c: number * _each(shape) for number, c in enumerate(states)}
    entries = _Entries(workers)
    for c, place in where.items():
        for phase in range(shape):
            if c[phase]:
                entries.columns = place
                entries.rows = where[_after(c, phase)]
                _those_that_stay(entries, c, phase)
                if phase < shape - 1:
                    _moves_on(entries, phase, shape)
                    entries.put(0, 0, 0, c[phase])
                else:
                    _updates(entries, c, shape)
    exists = _exists(states)
    size = len(exists)
    matrices = []
    for power in range(3):
        values, rows, columns = entries.of(power)
        matrices.append(sparse.csr_matrix((values, (rows, columns)), shape=(size, size))[exists][:, exists])
    classes = np.repeat((np.array(states) @ np.arange(shape)) % shape, _each(shape))[exists]
    return Event((matrices[0], matrices[1], matrices[2]), classes)


@dataclass
class _Entries:
    """Entries of the three matrices; ``put`` takes places within the moments of one c."""

    workers: int
    rows: int = 0
    columns: int = 0
    lists: list[tuple[int, int, int, float]] = field(default_factory=list)

    def put(self, power: int, to: int, of: int, choices: float) -> None:
        self.lists.append((power, self.rows + to, self.columns + of, choices / self.workers))

    def of(self, power: int) -> tuple[list[float], list[int], list[int]]:
        chosen = [entry for entry in self.lists if entry[0] == power]
        return [entry[3] for entry in chosen], [entry[1] for entry in chosen], [entry[2] for entry in chosen]


def _those_that_stay(entries: _Entries, c: tuple[int, ...], phase: int) -> None:
    """Moments of workers other than the one that was drawn, with each other."""
    shape = len(c)
    for p in range(shape):
        choices = c[phase] - (p == phase)  # that leave a given worker of phase p alone
        entries.put(0, _b(p), _b(p), choices)
        entries.put(0, _c(p, shape), _c(p, shape), choices)
        for q in range(shape):
            entries.put(0, _d(p, q, shape), _d(p, q, shape), choices - (q == phase))


def _moves_on(entries: _Entries, phase: int, shape: int) -> None:
    """The one that was drawn, into its next phase."""
    onward = phase + 1
    entries.put(0, _b(onward), _b(phase), 1.0)
    entries.put(0, _c(onward, shape), _c(phase, shape), 1.0)
    for q in range(shape):
        entries.put(0, _d(onward, q, shape), _d(phase, q, shape), 1.0)
        entries.put(0, _d(q, onward, shape), _d(q, phase, shape), 1.0)


def _updates(entries: _Entries, c: tuple[int, ...], shape: int) -> None:
    """z' = z − g v_i, and v_i' = z'."""
    last = shape - 1
    for to in (0, _b(0), _c(0, shape)):  # z'², with itself and with the model pulled
        entries.put(0, to, 0, c[last])
        entries.put(1, to, _b(last), -2.0)
        entries.put(2, to, _c(last, shape), 1.0)
    for q in range(shape):
        entries.put(1, _b(q), _d(last, q, shape), -1.0)  # z' with the others' models
        for to in (_d(0, q, shape), _d(q, 0, shape)):  # and the model pulled with them
            entries.put(0, to, _b(q), c[last] - (q == last))
            entries.put(1, to, _d(last, q, shape), -1.0)


def _each(shape: int) -> int:
    return 1 + 2 * shape + shape**2


def _b(phase: int) -> int:
    return 1 + phase


def _c(phase: int, shape: int) -> int:
    return 1 + shape + phase


def _d(first: int, second: int, shape: int) -> int:
    return 1 + 2 * shape + first * shape + second


def _states(workers: int, shape: int) -> list[tuple[int, ...]]:
    """Every c: how many workers are in each phase."""
    firsts = itertools.product(range(workers + 1), repeat=shape - 1)
    return [(*first, workers - sum(first)) for first in firsts if sum(first) <= workers]


def _after(c: tuple[int, ...], phase: int) -> tuple[int, ...]:
    moved = list(c)
    moved[phase] -= 1
    moved[(phase + 1) % len(c)] += 1
    return tuple(moved)


def _exists(states: list[tuple[int, ...]]) -> npt.NDArray[np.bool_]:
    """Which moments are sums over somebody, shape (states · moments,)."""
    c = np.array(states)
    somebody = c > 0
    pairs = somebody[:, :, None] & somebody[:, None, :]
    phases = range(c.shape[1])
    pairs[:, phases, phases] = c > 1
    everybody = np.ones((len(c), 1), dtype=bool)
    return np.concatenate([everybody, somebody, somebody, pairs.reshape(len(c), -1)], axis=1).ravel()
