"""The root mean square of AD-PSGD's models, exactly, for memoryless workers and exchanges.

On a quadratic of eigenvalue h, with g = γh, γ each worker's learning rate and β its momentum, worker i read the model v_i and
holds the velocity m_i. When it finishes a step, and reads its model again,

    m_i ← β m_i + v_i ;   x_i ← x_i − g m_i ;   v_i ← x_i              (Nesterov's: memoryless.py)

and an exchange makes x_i, x_j ← (x_i + x_j)/2. A worker reads *its own update at full weight*, of which the mean model has
1/n so far. This look-ahead makes up for most of the delay: the mean decays by about γh a step, as without delay, and not as a
server's model with a staleness of n − 1.

Steps and exchanges of memoryless workers form Poisson processes, so the second moments of (x_i, v_i, m_i) obey a linear
recursion, whose largest eigenvalue ρ (of a step of every worker) is the factor of the mean square. Narrower laws of step times
decay faster (measured: up to a tenth at γh = 0.3, a third at 0.6). The limit is some percent, on a ring of 8 a ninth, above
where simulated workers diverge. [Derived here; checked against the simulator.]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from scipy.sparse.linalg import ArpackError, LinearOperator, eigs

from lightning_gossip.algorithm.checks import check_not_negative, check_positive
from lightning_gossip.algorithm.laws import FloatArray
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.analysis.mean.discrete import check_momentum, own_limit
from lightning_gossip.analysis.mean.stability import limit_of
from lightning_gossip.analysis.second_moments.memoryless import own_step

_DENSE = 144  # moments up to which a dense matrix is quicker, and has no trouble with eigenvalues that lie upon each other
_POWERS = 2_000  # of the map


def gossip_rms_decay(
    g: float, topology: Topology, *, exchanges_per_step: float = 1.0, momentum: float = 0.0, nesterov: bool = False
) -> float:
    """Decay of the root mean square of AD-PSGD's models, per own step of a worker; negative if it diverges.

    Args:
        g: γh, above 0, with γ the learning rate of each worker.
        topology: who averages with whom, a uniformly drawn edge at a time.
        exchanges_per_step: averagings that a worker takes part in per own step.
        momentum: β in [0, 1).
        nesterov: whether it is Nesterov's.
    """
    check_positive("g", g)
    check_not_negative("exchanges_per_step", exchanges_per_step)
    check_momentum(momentum)
    n = topology.n
    exchanges = 0.5 * exchanges_per_step * n if n > 1 else 0.0  # a step of everybody; two workers take part in one
    events = n + exchanges
    turn = own_step(g, momentum, nesterov=nesterov)
    ends = np.array(topology.edges, dtype=np.int64).reshape(-1, 2)
    incidence = np.zeros((len(ends), n))
    incidence[np.arange(len(ends))[:, None], ends] = (1.0, -1.0)
    share = exchanges / events / max(1, len(ends))

    def event(packed: FloatArray) -> FloatArray:
        square = packed.reshape(*packed.shape[:-1], 3 * n, 3 * n)
        moments = (0.5 * (square + square.swapaxes(-2, -1))).reshape(*packed.shape[:-1], 3, n, 3, n)  # what, whose, what, whose
        after = _steps(moments, turn, 1.0 / events, n)
        if exchanges:  # an event is one or the other
            after += _exchanged(moments, incidence, share) - moments
        return after.reshape(packed.shape)

    return -0.5 * events * math.log(_radius(event, 3 * n))


def _radius(event: Callable[[FloatArray], FloatArray], sides: int) -> float:
    """The largest eigenvalue, which is real: of a map that keeps covariances what they are, to one of which it belongs."""
    size, start = sides**2, np.eye(sides).ravel()
    if size <= _DENSE:  # covariances are known by what is on and above the diagonal
        row, column = np.triu_indices(sides)
        units = np.zeros((len(row), sides, sides))
        units[np.arange(len(row)), row, column] = units[np.arange(len(row)), column, row] = 1.0
        after = event(units.reshape(-1, size)).reshape(units.shape)
        return float(np.abs(np.linalg.eigvals(after[:, row, column])).max())
    operator = LinearOperator((size, size), matvec=event, dtype=np.float64)
    try:
        found = eigs(operator, k=1, which="LM", v0=start, tol=1e-9, return_eigenvectors=False)
        return float(np.abs(found[0]))
    except ArpackError:  # hardly any exchange, so that eigenvalues lie upon each other
        for _ in range(_POWERS):
            start = event(start)
            start /= (radius := float(np.linalg.norm(start)))
        return radius


@lru_cache(maxsize=64)
def gossip_limit(
    topology: Topology, *, exchanges_per_step: float = 1.0, momentum: float = 0.0, nesterov: bool = False
) -> float:
    """The mean square of AD-PSGD's models converges below this γh.

    Args:
        topology: who averages with whom; at least two workers.
        exchanges_per_step, nesterov: as for :func:`gossip_rms_decay`.
        momentum: β in [0, 1).
    """

    def decay(g: float) -> float:
        return gossip_rms_decay(g, topology, exchanges_per_step=exchanges_per_step, momentum=momentum, nesterov=nesterov)

    return limit_of(decay, own_limit(momentum, nesterov=nesterov))


def _steps(moments: FloatArray, turn: FloatArray, share: float, n: int) -> FloatArray:
    """One worker of n, drawn with this probability each, ends a step."""
    turned = np.einsum("ab,...bicj->...aicj", turn, moments)
    after: FloatArray = (1.0 - 2.0 * share) * moments + share * (turned + np.moveaxis(turned, (-4, -3), (-2, -1)))
    own = np.arange(n)
    mine = moments[..., :, own, :, own]  # (worker, ..., what, what)
    after[..., :, own, :, own] = (1.0 - share) * mine + share * (turn @ mine @ turn.T)
    return after


def _exchanged(moments: FloatArray, incidence: FloatArray, share: float) -> FloatArray:
    """One edge, drawn with this probability each: W P W of the models, W P of models with all else."""
    after = moments.copy()
    moved = -0.5 * share * np.einsum("ij,...jck->...ick", incidence.T @ incidence, moments[..., 0, :, :, :])
    after[..., 0, :, :, :] += moved
    after[..., :, :, 0, :] += np.moveaxis(moved, -3, -1)
    apart = ((incidence @ moments[..., 0, :, 0, :]) * incidence).sum(-1)  # mean square between the ends of each edge
    after[..., 0, :, 0, :] += 0.25 * share * (incidence.T * apart[..., None, :]) @ incidence
    return after
