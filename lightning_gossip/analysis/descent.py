"""Event-triggered SGD on a quadratic, played through: how often it sends depends on where it is.

A worker makes local steps v ← v − γ(h ∘ v + noise) from the model that it pulled, and pushes u = v − (model pulled) once ‖u‖
has reached the threshold. As the gradients shrink it takes more steps to get there, an unstable direction grows until it takes
fewer again, and with noise the threshold is reached by chance: no closed form. The quadratic is in its own eigenvectors, so a
step is a few numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_gossip.algorithm.server import EventTrigger
from lightning_gossip.analysis.play import Play, Tally
from lightning_gossip.analysis.problem import Problem


class Descent:
    """The workers' local steps; see :class:`~lightning_gossip.analysis.play.Work`.

    Args:
        problem: the quadratic.
        lr: γ.
        threshold: δ of ‖u‖.
        seed: of the noise.
    """

    def __init__(self, problem: Problem, lr: float, threshold: float, seed: int) -> None:
        self.start = torch.from_numpy(problem.distances.copy())
        self._h = torch.tensor(list(problem.eigenvalues), dtype=torch.float64)
        self._lr, self._noise, self._trigger = lr, problem.noise, EventTrigger(threshold=threshold)
        self._generator = np.random.default_rng([seed, 2])
        self._pulled: dict[int, Tensor] = {}
        self._local: dict[int, Tensor] = {}

    def pulled(self, rank: int, model: Tensor) -> None:
        """See :class:`~lightning_gossip.analysis.play.Work`."""
        self._pulled[rank], self._local[rank] = model.clone(), model.clone()

    def stepped(self, rank: int) -> Tensor | None:
        """See :class:`~lightning_gossip.analysis.play.Work`."""
        pulled, local = self._pulled[rank], self._local[rank]
        gradient = self._h * local
        if self._noise:
            gradient += torch.from_numpy(self._noise * self._generator.standard_normal(len(gradient)))
        local -= self._lr * gradient
        update = local - pulled
        return update if self._trigger.fires(float(update.norm()), float(pulled.norm())) else None

    def loss(self, model: Tensor) -> float:
        """½ Σ h_i x_i²."""
        return float(0.5 * self._h @ model.square())


@dataclass(frozen=True)
class Run:
    """One run down to a loss.

    Args:
        time_s: seconds until the loss first is no higher than the target; infinite if the run was given up.
        tally: of its updates.
    """

    time_s: float
    tally: Tally


def run_down(descent: Descent, play: Play, model: Tensor, target: float, latest_s: float) -> Run:
    """Play a descent until its loss is down.

    Args:
        descent: the local steps of ``play``.
        play: from its beginning.
        model: the server's, shape (d,), at the descent's start; changed as updates are applied.
        target: of the loss.
        latest_s: when the run is given up.
    """
    pushes, loss = 0, descent.loss(model)
    while play.now_s < latest_s and target < loss < math.inf:
        play.advance()
        if play.pushes > pushes:
            pushes, loss = play.pushes, descent.loss(model)
    return Run(play.now_s if loss <= target else math.inf, play.tally())
