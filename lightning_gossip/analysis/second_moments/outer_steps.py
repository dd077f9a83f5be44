"""Outer steps on a quadratic: how fast the mean model falls, up to which learning rate, and what noise keeps up.

Along an eigenvector with g = γh a worker has four numbers: x, the inner momentum m, its own progress in the round p = x − φ,
and the outer momentum v. In units of γ for x and p:

    own step:      m ← β m + g x + ξ ;  x ← x − m ;  p ← p − m            (Nesterov's inner step as elsewhere)
    outer step:    v ← μ v + p ;  o = (η − 1) p + η μ v  or  η v − p ;  x ← x + o ;  p ← 0       after each H own steps

All is linear, and merges change x only: under gossip the outer momentum sees own progress, so the mean of all workers obeys the
same recursion, as it does with an exact mean before each outer step. The round map is R = O Tᴴ; per own step the mean decays
by −ln ρ(R)/H. [Derived here; checked against simulated workers.]

With inner momentum a direction swings, with a period of about 2π/√g steps. Where half of that is near H, outer steps push the
swing on: for β = 0.9 and (η, μ) = (1, 0.5) directions with g from 0.08 to 0.11 grow at H = 10, from 0.12 to 0.17 at H = 8, and
none below 3.5 at H ≥ 20, after which the inner momentum is forgotten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_gossip.algorithm.laws import FloatArray
from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.analysis.second_moments.gradient_noise import own_step

_STATES = 4  # x, m, p, v
_LEAST = 1e-3  # of the largest damping: the least that is looked at for a band that grows
_RATIO = 1.02  # of two that are looked at


@dataclass(frozen=True)
class Rounds:
    """Rounds of local steps with an outer step at the end of each.

    Args:
        outer: η, μ and the form.
        local_steps: H.
    """

    outer: Outer
    local_steps: int

    @property
    def turn(self) -> FloatArray:
        """What an outer step does to (x, m, p, v), shape (4, 4)."""
        lr, mu = self.outer.lr, self.outer.momentum
        of_p, of_v = (lr - 1.0 + lr * mu, lr * mu * mu) if self.outer.nesterov else (lr - 1.0, lr * mu)
        return np.array([[1.0, 0.0, of_p, of_v], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, mu]])

    @property
    def memory(self) -> float:
        """The outer momentum as one of own steps: what is left of it after each."""
        return float(self.outer.momentum ** (1.0 / self.local_steps))

    def steps(self, g: FloatArray, momentum: float, nesterov: bool) -> tuple[FloatArray, FloatArray]:
        """What an own step does to (x, m, p, v), and the moments that noise adds; shapes (k, 4, 4)."""
        own, noise = own_step(g, momentum, nesterov)
        turn = np.zeros((len(g), _STATES, _STATES))
        turn[:, :2, :2] = own
        turn[:, 2, :2] = own[:, 0] - np.array([1.0, 0.0])
        turn[:, 2, 2] = turn[:, 3, 3] = 1.0
        moved = noise[0, 0, 1]  # x, for a unit of m
        push = np.array([moved, 1.0, moved, 0.0])
        return turn, np.broadcast_to(np.outer(push, push), turn.shape)

    def decay(self, g: float, *, momentum: float = 0.0, nesterov: bool = False) -> float:
        """Decay rate of the mean model's error, per own step; negative if it grows."""
        turn, _ = self.steps(np.array([g]), momentum, nesterov)
        radius = np.abs(np.linalg.eigvals(self.turn @ np.linalg.matrix_power(turn[0], self.local_steps))).max()
        return -math.log(max(float(radius), 1e-12)) / self.local_steps

    def limit(self, highest: float, *, momentum: float = 0.0, nesterov: bool = False) -> float:
        """The least g at which the mean model grows, to two per cent; ``highest`` if there is none below.

        A network has directions of all curvatures up to its largest, so one that grows is met however narrow its band is.
        """
        g: FloatArray = np.geomspace(_LEAST, 1.0, math.ceil(-math.log(_LEAST) / math.log(_RATIO))) * highest
        turns, _ = self.steps(g, momentum, nesterov)
        radii = np.abs(np.linalg.eigvals(self.turn @ np.linalg.matrix_power(turns, self.local_steps))).max(axis=1)
        growing = np.flatnonzero(radii >= 1.0)
        return float(g[growing[0]]) if growing.size else highest

    def variance(self, g: FloatArray, *, momentum: float = 0.0, nesterov: bool = False) -> FloatArray:
        """E x² of one worker alone, the mean over a round's steps, in units of γ²σ²; infinite where it grows.

        Args:
            g: γh, shape (k,).
            momentum: β.
            nesterov: whether it is Nesterov's.
        """
        turns, noises = self.steps(g, momentum, nesterov)
        found = np.full(len(g), math.inf)
        for place, (turn, noise) in enumerate(zip(turns, noises, strict=True)):
            added = np.zeros((_STATES, _STATES))
            for _ in range(self.local_steps):
                added = turn @ added @ turn.T + noise
            whole = self.turn @ np.linalg.matrix_power(turn, self.local_steps)
            if np.abs(np.linalg.eigvals(whole)).max() >= 1.0:
                continue
            size = _STATES**2
            added = self.turn @ added @ self.turn.T
            moments = np.linalg.solve(np.eye(size) - np.kron(whole, whole), added.reshape(size)).reshape(_STATES, _STATES)
            total = 0.0
            for _ in range(self.local_steps):
                total += moments[0, 0]
                moments = turn @ moments @ turn.T + noise
            found[place] = total / self.local_steps
        return found
