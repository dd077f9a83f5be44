"""What the noise of gradients does to a quadratic's models: the mean model's variance, and how far each model is from the mean.

Along an eigenvector of eigenvalue h, with g = γh, a worker's step adds noise ξ of variance σ² to its gradient:

    m ← β m + h x + ξ ;   x ← x − γ m              (Nesterov's, as torch has it: x ← x − γ (h x + ξ + β m) with the new m)

Steps of all workers are taken to be simultaneous, and a model is what its worker's gradient is of: as it is before the step.
The mean of all models obeys the recursion of one worker with an n-th of the noise, however they are averaged: gradients of a
quadratic are linear. The distances from the mean are where strategies differ:

| strategy | between two steps |
|---|---|
| ddp, qsgd | none: one model |
| periodic averaging | after each p-th step, and at an epoch's end, x_i ← x̄; m_i stays, or is averaged as well |
| dpsgd | x ← W x, so mode by mode: m ← β m + h x + ξ ; x ← w x − γ m for each eigenvalue w of W but the first |
| adpsgd | ½ e n exchanges at random: C ← Σ_e p_e W_e C W_e for the covariance of the x_i; at an epoch's end x_i ← x̄ |
| apsgd | none that counts: a worker's model is a server's model of before |

Momentum is each worker's own and not averaged, so with β = 0.9 models part further than the noise of one step would say.
[Derived here; checked against simulated workers.]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightning_gossip.algorithm.laws import FloatArray
from lightning_gossip.algorithm.topology.mixing import MixingWeights, mixing_matrix
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.analysis.delays.delays import Delay

if TYPE_CHECKING:
    from lightning_gossip.analysis.second_moments.outer_steps import Rounds

_MEMORIES = 6.0  # of momentum, or of the exchanges: what began so long ago is gone
_LONGEST = 512  # steps that are followed
_PROMPT = 0.01  # damping times delay: below it a delay changes the variance by as little
_REACH = 1e3  # of the frequencies, over and under the rates that there are
_FREQUENCIES = 1500
_OWN = 2  # x and m: moments are in this order


@dataclass(frozen=True)
class Spread:
    """Second moments that gradient noise keeps up, in units of γ²σ²; arrays over g.

    Args:
        mean: E x̄² of the mean model; infinite where it grows for ever.
        apart: (1/n) Σ_i E (x_i − x̄)², the mean over the steps at which gradients are computed.
    """

    mean: FloatArray
    apart: FloatArray


def synchronous_spread(g: FloatArray, workers: int, *, momentum: float = 0.0, nesterov: bool = False) -> Spread:
    """All workers' gradients in one step of one model.

    Args:
        g: γh, shape (k,).
        workers: n.
        momentum: β in [0, 1).
        nesterov: whether it is Nesterov's.

    >>> synchronous_spread(np.array([0.1]), 4).mean.round(4).tolist()  # γ/(h (2 − g))/n
    [1.3158]
    """
    return Spread(_stationary(g, momentum, nesterov) / workers, np.zeros(len(g)))


def periodic_spread(
    g: FloatArray,
    workers: int,
    *,
    period: int,
    epoch_steps: int,
    momentum: float = 0.0,
    nesterov: bool = False,
    keeps_momentum: bool = True,
    rounds: Rounds | None = None,
) -> Spread:
    """Local steps, and an exact average after each p-th of them and at each epoch's end.

    Args:
        g, workers, momentum, nesterov: as for :func:`synchronous_spread`.
        period: p.
        epoch_steps: of a worker.
        keeps_momentum: whether each worker keeps its own momentum at an average.
        rounds: with an outer step of the mean model after each average; None for none.
    """
    turn, kick = own_step(g, momentum, nesterov)
    cycle = [step % period == 0 or step == epoch_steps for step in range(1, min(epoch_steps, _whole(period)) + 1)]
    moments, total = np.zeros((len(g), _OWN, _OWN)), np.zeros(len(g))
    for last in _cycles(len(cycle), momentum):
        for averages in cycle:
            if last:
                total += moments[:, 0, 0]
            moments = turn @ moments @ turn.transpose(0, 2, 1) + kick
            if averages:
                kept = moments[:, 1, 1].copy() if keeps_momentum else 0.0
                moments = np.zeros_like(moments)
                moments[:, 1, 1] = kept
    alone = _stationary(g, momentum, nesterov) if rounds is None else rounds.variance(g, momentum=momentum, nesterov=nesterov)
    return Spread(alone / workers, (1.0 - 1.0 / workers) * total / len(cycle))


def neighbours_spread(
    g: FloatArray,
    topology: Topology,
    *,
    weights: MixingWeights = "metropolis",
    momentum: float = 0.0,
    nesterov: bool = False,
) -> Spread:
    """An average with all neighbours in each step (D-PSGD).

    Args:
        g, momentum, nesterov: as for :func:`synchronous_spread`.
        topology: who averages with whom.
        weights: of the mixing matrix.
    """
    others = np.linalg.eigvalsh(mixing_matrix(topology, weights))[:-1]
    each = [_stationary(g, momentum, nesterov, weight=float(w)) for w in others]
    mean = _stationary(g, momentum, nesterov) / topology.n
    return Spread(mean, np.sum(each, axis=0) / topology.n if each else np.zeros(len(g)))


def gossip_spread(
    g: FloatArray,
    topology: Topology,
    *,
    exchanges_per_step: float,
    epoch_steps: int,
    momentum: float = 0.0,
    nesterov: bool = False,
    push_every: int = 1,
    rounds: Rounds | None = None,
) -> Spread:
    """Exchanges of random pairs, and an exact average at each epoch's end (AD-PSGD).

    Args:
        g, momentum, nesterov: as for :func:`synchronous_spread`.
        topology: who averages with whom; a uniformly drawn edge at a time.
        exchanges_per_step: that a worker takes part in per own step.
        epoch_steps: of a worker between two exact averages.
        push_every: steps between two pushes: what is exchanged meanwhile comes in together.
        rounds: with outer steps, all workers' at once; None for none.
    """
    n, k = topology.n, len(g)
    turn, kick = own_step(g, momentum, nesterov) if rounds is None else rounds.steps(g, momentum, nesterov)
    states, memory = turn.shape[-1], momentum if rounds is None else max(momentum, rounds.memory)
    adjacency = np.zeros((n, n))
    for i, j in topology.edges:
        adjacency[i, j] = adjacency[j, i] = 1.0
    exchanges = 0.5 * exchanges_per_step * n * push_every
    pieces = max(1, math.ceil(4.0 * exchanges / n))  # of what is exchanged in a step, small enough for Euler's rule
    share = exchanges / pieces / max(1, len(topology.edges))
    differs = np.eye(n) - 1.0 / n
    noise = kick[:, :, :, None, None] * differs
    moments, total = np.zeros((k, states, states, n, n)), np.zeros(k)  # g, what, what, whose, whose
    length = min(epoch_steps, _LONGEST)
    for last in _cycles(length, memory):
        for step in range(length):
            if last:
                total += np.einsum("kii->k", moments[:, 0, 0]) / n
            moments = np.einsum("kab,kbcij,kdc->kadij", turn, moments, turn, optimize=True) + noise
            if step + 1 == length:
                moments[:, 0], moments[:, :, 0] = 0.0, 0.0  # own progress and momenta stay
                continue
            if exchanges and (step + 1) % push_every == 0:
                for _ in range(pieces):
                    moments = _exchanged(moments, adjacency, share)
            if rounds is not None and (step + 1) % rounds.local_steps == 0:
                moments = np.einsum("ab,kbcij,dc->kadij", rounds.turn, moments, rounds.turn, optimize=True)
    alone = _stationary(g, momentum, nesterov) if rounds is None else rounds.variance(g, momentum=momentum, nesterov=nesterov)
    return Spread(alone / n, total / length)


def server_spread(g: FloatArray, delay: Delay, *, limit: float, scale: float, momentum: float = 0.0) -> Spread:
    """A parameter server, whose updates are delayed: (1/2π) ∫ dω/|iω + aL(iω)|² of the noise's variance, as in hitting.py.

    Args:
        g, momentum: as for :func:`synchronous_spread`.
        delay: of an update, in updates, its mean above 0; with momentum the repetitions are in it.
        limit: :func:`~lightning_gossip.analysis.stability_limit` of this delay.
        scale: c, of an update at the server.
    """
    gain = scale / (1.0 - momentum)
    dampings = gain * g
    grows = dampings >= limit
    found = np.where(grows, math.inf, 0.5 / np.where(dampings > 0.0, dampings, 1.0))  # without delay
    for number in np.flatnonzero(~grows & (dampings * delay.mean >= _PROMPT)):
        found[number] = _variance(float(dampings[number]), delay)
    return Spread(gain**2 * found, np.zeros(len(g)))


def _variance(a: float, delay: Delay) -> float:
    """(1/2π) ∫ dω/|iω + a·L(iω)|², by the trapezoidal rule in ln ω."""
    high = _REACH * max(a, 1.0 / delay.mean)
    frequencies = np.geomspace(a / _REACH, high, _FREQUENCIES)
    heights = frequencies / np.abs(1j * frequencies + a * delay.transform(1j * frequencies)) ** 2
    below = frequencies[0] / a**2  # where the integrand is 1/a²
    return float(np.trapezoid(heights, np.log(frequencies)) + below + 1.0 / high) / math.pi


def own_step(g: FloatArray, momentum: float, nesterov: bool, weight: float = 1.0) -> tuple[FloatArray, FloatArray]:
    """What a step does to (x/γσ, m/σ): a matrix, shape (k, 2, 2), and the moments that noise adds, shape (k, 2, 2).

    Args:
        g, momentum, nesterov: as for :func:`synchronous_spread`.
        weight: that x is multiplied by.
    """
    read, before = (1.0 + momentum, momentum**2) if nesterov else (1.0, momentum)
    turn = np.empty((len(g), _OWN, _OWN))
    turn[:, 0, 0], turn[:, 0, 1] = weight - read * g, -before
    turn[:, 1, 0], turn[:, 1, 1] = g, momentum
    push = np.array([-read, 1.0])
    return turn, np.broadcast_to(np.outer(push, push), turn.shape)


def _stationary(g: FloatArray, momentum: float, nesterov: bool, weight: float = 1.0) -> FloatArray:
    """E x² of one worker whose model is multiplied by a weight in each step; infinite where it grows for ever."""
    turn, kick = own_step(g, momentum, nesterov, weight)
    grows = np.abs(np.linalg.eigvals(turn)).max(axis=1) >= 1.0
    turn = np.where(grows[:, None, None], 0.0, turn)
    size = _OWN**2
    maps = np.eye(size) - np.einsum("kab,kcd->kacbd", turn, turn).reshape(len(g), size, size)
    moments = np.linalg.solve(maps, kick.reshape(len(g), size, 1))[:, 0, 0]
    return np.where(grows, math.inf, moments)


def _exchanged(moments: FloatArray, adjacency: FloatArray, share: float) -> FloatArray:
    """So many exchanges on each edge, in expectation: W C W of the models, W C of models with momentum."""
    after = moments.copy()
    moved = -0.5 * share * (_laplacian(adjacency) @ moments[:, 0])
    after[:, 0] += moved
    after[:, :, 0] += moved.swapaxes(-1, -2)
    models = moments[:, 0, 0]
    own = np.diagonal(models, axis1=1, axis2=2)
    after[:, 0, 0] += 0.25 * share * _laplacian(adjacency * (own[:, :, None] + own[:, None, :] - 2.0 * models))
    return after


def _laplacian(adjacency: FloatArray) -> FloatArray:
    """Row sums on the diagonal minus the matrix, of each matrix; shape (..., n, n)."""
    laplacian: FloatArray = np.eye(adjacency.shape[-1]) * adjacency.sum(axis=-1, keepdims=True) - adjacency
    return laplacian


def _whole(period: int) -> int:
    return min(period, _LONGEST)


def _cycles(length: int, momentum: float) -> list[bool]:
    """How often a cycle is followed until momentum is what it is in the long run; True for the last time."""
    before = math.ceil(_MEMORIES / (1.0 - momentum) / length)
    return [False] * before + [True]
