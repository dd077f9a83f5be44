"""The root mean square of a parameter server's model, exactly, for memoryless workers with heavy-ball momentum.

On a quadratic of eigenvalue h, with g = γh, worker i holds the model v_i that it pulled and the velocity m_i. When it finishes,

    m_i ← β m_i + v_i ;   z ← z − c·g m_i ;   v_i ← z

with c the server's scale; with Nesterov's momentum, as torch has it, z ← z − c·g (v_i + β m_i) with the new m_i. Workers are
alike, so eleven second moments close: those of (z, v, m) of one worker, and of (v, m) of two. Without momentum they are the
four of :mod:`~lightning_gossip.analysis.second_moments.second_moments`. [Derived here; checked against the simulator.]
"""

from __future__ import annotations

import math

import numpy as np

from lightning_gossip.algorithm.checks import check_integer, check_positive
from lightning_gossip.algorithm.laws import FloatArray
from lightning_gossip.analysis.mean.discrete import check_momentum


def own_step(moved: float, momentum: float, *, nesterov: bool) -> FloatArray:
    """What a worker's step does to (model, model read, velocity), as a matrix.

    Args:
        moved: of the model, per velocity: g, or c·g.
        momentum: β.
        nesterov: Nesterov's in place of heavy ball.
    """
    read, before = (1.0 + momentum, momentum**2) if nesterov else (1.0, momentum)
    moves = [1.0, -moved * read, -moved * before]
    return np.array([moves, moves, [0.0, 1.0, momentum]])


def server_rms_decay(g: float, workers: int, *, scale: float, momentum: float = 0.0, nesterov: bool = False) -> float:
    """Decay of the root mean square of a server's model, per applied update; negative if it diverges.

    Without momentum it is :func:`~lightning_gossip.analysis.rms_decay_rate` at g·scale.

    Args:
        g: γh, above 0.
        workers: N in flight.
        scale: c of an update at the server.
        momentum: β in [0, 1), of each worker's own optimizer.
        nesterov: whether it is Nesterov's.
    """
    check_positive("g", g)
    check_positive("scale", scale)
    check_integer("workers", workers, example=4)
    check_momentum(momentum)
    n, turn = workers, own_step(scale * g, momentum, nesterov=nesterov)

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
