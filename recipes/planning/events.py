"""Whether it pays that a worker of ``apsgd`` sends its update only when it has grown: where the link is what limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_gossip.analysis import Law, Samples, Server, Setting
from lightning_gossip.analysis.planning.dynamics import WORTH
from lightning_gossip.simulation import APSGD
from recipes.planning.choice import Candidate
from recipes.planning.known import Known

_SHARES = (0.1, 0.3, 1.0)  # of the first update's norm
_WAITING = 0.1  # share of the workers' time: with less there is little to gain


@dataclass(frozen=True)
class Trigger:
    """An event trigger that pays.

    Args:
        share: of the norm of a worker's first update after a pull, when training begins.
        gain: predicted time without over that with it.
    """

    share: float
    gain: float

    @property
    def words(self) -> str:
        """In a sentence."""
        return (
            f" Sending only updates that have grown to {self.share:g} of the norm of the first ones (strategy.event_trigger) is"
            f" predicted to be {self.gain:.2g} times as fast on these links."
        )


def trigger(known: Known, best: Candidate) -> Trigger | None:
    """The best event trigger; None if none pays, or where it is not predicted: with momentum, which goes on between sends.

    Args:
        known: what the plan starts from.
        best: what is recommended.
    """
    strategy, links = best.strategy, known.machines.links
    if not isinstance(strategy, APSGD) or known.momentum or not known.machines.take_time or best.times.waiting < _WAITING:
        return None
    if links.nodes is not None:  # the analysis has one port for all
        return None
    scale = 1.0 / best.workers if strategy.scale is None else strategy.scale
    problem = known.problem
    excess = float(problem.losses.sum())
    server = Server(
        problem, best.target * excess, _pooled(known), scale=scale, links=links, model_bytes=known.machines.model_bytes
    )
    first = float(np.linalg.norm(best.best_lr * np.asarray(problem.eigenvalues) * problem.distances))
    setting = Setting(lr=best.best_lr, active_workers=strategy.active_workers or best.workers)
    thresholds = [None, *(share * first for share in _SHARES)]
    times = [prediction.time_s for prediction in server.over_thresholds(setting, thresholds).predictions]
    soonest = int(np.argmin(times))
    worth = soonest > 0 and math.isfinite(times[0]) and times[soonest] * WORTH < times[0]
    return Trigger(_SHARES[soonest - 1], times[0] / times[soonest]) if worth else None


def _pooled(known: Known) -> Law:
    """One law for all workers, which the analysis takes to be alike."""
    laws = known.machines.laws
    if all(law == laws[0] for law in laws):
        return laws[0]
    generators = np.random.default_rng(known.machines.seed).spawn(len(laws))
    return Samples(np.concatenate([law.draw(own, 100, 0) for law, own in zip(laws, generators, strict=True)]).tolist())
