"""The root mean square of asynchronous SGD with heavy-ball momentum, exactly, for memoryless workers; also under gossip.

On a quadratic of eigenvalue h, with g = γh, γ the learning rate and β the momentum, worker i read the model v_i and holds the
velocity m_i. When it finishes:

    m_i ← β m_i + v_i ;   the model moves by −g m_i ;   v_i ← the model that it then reads

- **AD-PSGD**: each worker's own model x_i moves and is what it reads: *with its own update at full weight*, while the mean
  model has taken over 1/n of it. This look-ahead makes up for most of the delay: the mean decays as without delay, by γh a
  step, and not as a server's would with a staleness of n − 1. (x_i, v_i, m_i) of all workers are a linear system under
  random steps and random exchanges x_i, x_j ← (x_i + x_j)/2.
- **A server**: z ← z − c·g m_i with scale c; every worker reads z.

Steps of memoryless workers, and exchanges between them, form Poisson processes, so the second moments obey a linear recursion,
whose largest eigenvalue ρ (of a step of every worker) is the factor of the mean square. Narrower laws of step times decay
faster (measured: up to a tenth at γh = 0.3, a third at 0.6), so these rates are on the safe side. [Derived here; checked
against the simulator.]
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.sparse.linalg import LinearOperator, eigs

from lightning_gossip.algorithm.topology import Topology

FloatArray = npt.NDArray[np.float64]


def gossip_rms_decay(g: float, topology: Topology, *, exchanges_per_step: float = 1.0, momentum: float = 0.0) -> float:
    """Decay of the root mean square of AD-PSGD's models, per own step of a worker; negative if it diverges.

    Args:
        g: γh, above 0, with γ the learning rate of each worker.
        topology: who averages with whom, a uniformly drawn edge at a time.
        exchanges_per_step: averagings that a worker takes part in per own step.
        momentum: β in [0, 1).
    """
    n = topology.n
    exchanges = 0.5 * exchanges_per_step * n if n > 1 else 0.0  # a step of everybody; two workers take part in one
    events = n + exchanges
    turn = np.array([[1.0, -g, -g * momentum], [1.0, -g, -g * momentum], [0.0, 1.0, momentum]])
    ends = np.array(topology.edges, dtype=np.int64).reshape(-1, 2)
    laplacian = _laplacian(n, ends, np.ones(len(ends)))
    share = exchanges / events / max(1, len(ends))

    def event(packed: FloatArray) -> FloatArray:
        square = packed.reshape(3 * n, 3 * n)
        moments = (0.5 * (square + square.T)).reshape(3, n, 3, n)  # what, whose, what, whose
        moments = _steps(moments, turn, 1.0 / events, n)
        after: FloatArray = _exchanged(moments, laplacian, ends, share) if exchanges else moments
        return after.ravel()

    size, start = (3 * n) ** 2, np.eye(3 * n).ravel()
    operator = LinearOperator((size, size), matvec=event, dtype=np.float64)
    largest = eigs(operator, k=1, which="LM", v0=start, tol=1e-9, return_eigenvectors=False)
    return -0.5 * events * math.log(float(np.abs(largest[0])))


def _steps(moments: FloatArray, turn: FloatArray, share: float, n: int) -> FloatArray:
    """One worker of n, drawn with this probability each, ends a step."""
    turned = np.einsum("ab,bicj->aicj", turn, moments)
    after: FloatArray = (1.0 - 2.0 * share) * moments + share * (turned + turned.transpose(2, 3, 0, 1))
    own = np.arange(n)
    mine = moments[:, own, :, own]  # (worker, what, what)
    after[:, own, :, own] = (1.0 - share) * mine + share * (turn @ mine @ turn.T)
    return after


def _exchanged(moments: FloatArray, laplacian: FloatArray, ends: npt.NDArray[np.int64], share: float) -> FloatArray:
    """One edge, drawn with this probability each: W P W of the models, W P of models with all else."""
    after = moments.copy()
    moved = -0.5 * share * np.einsum("ij,jck->ick", laplacian, moments[0])
    after[0] += moved
    after[:, :, 0, :] += moved.transpose(1, 2, 0)
    models = moments[0, :, 0, :]
    i, j = ends.T
    apart = models[i, i] + models[j, j] - 2.0 * models[i, j]
    after[0, :, 0, :] += 0.25 * share * _laplacian(len(models), ends, apart)
    return after


def _laplacian(n: int, ends: npt.NDArray[np.int64], weights: FloatArray) -> FloatArray:
    matrix = np.zeros((n, n))
    i, j = ends.T
    np.add.at(matrix, (i, j), -weights)
    np.add.at(matrix, (j, i), -weights)
    np.add.at(matrix, (i, i), weights)
    np.add.at(matrix, (j, j), weights)
    return matrix


def server_rms_decay(g: float, workers: int, *, scale: float, momentum: float = 0.0) -> float:
    """Decay of the root mean square of a server's model, per applied update; negative if it diverges.

    Without momentum it is :func:`lightning_gossip.analysis.rms_decay_rate` at g·scale.

    Args:
        g: γh, above 0.
        workers: N in flight.
        scale: c of an update at the server.
        momentum: β in [0, 1), of each worker's own optimizer.
    """
    n, moved = workers, scale * g
    # (z, v, m) of the worker that ends its step
    turn = np.array([[1.0, -moved, -moved * momentum], [1.0, -moved, -moved * momentum], [0.0, 1.0, momentum]])

    def update(packed: FloatArray) -> FloatArray:
        zz, zw = packed[0], packed[1:3]
        same, other = packed[3:7].reshape(2, 2), packed[7:11].reshape(2, 2)
        mine = np.block([[np.full((1, 1), zz), zw[None]], [zw[:, None], same]])
        mine, theirs = turn @ mine @ turn.T, turn @ np.vstack([zw, other])
        return np.concatenate(
            [
                mine[:1, 0],
                (mine[0, 1:] + (n - 1) * theirs[0]) / n,
                ((mine[1:, 1:] + (n - 1) * same) / n).ravel(),
                ((theirs[1:] + theirs[1:].T + (n - 2) * other) / n if n > 1 else 0.0 * other).ravel(),
            ]
        )

    matrix = np.stack([update(column) for column in np.eye(11)], axis=1)
    radius = float(np.abs(np.linalg.eigvals(matrix)).max())
    return -0.5 * math.log(radius) if radius > 0.0 else math.inf
