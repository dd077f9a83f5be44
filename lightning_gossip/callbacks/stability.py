"""How far a run is from the learning rate at which it diverges, from its measured staleness and the last curvature.

| strategy | largest stable learning rate, with h the largest curvature (weight decay included) and β the momentum |
|---|---|
| ``apsgd`` | limit(measured staleness, momentum)/(c h), with c the server's scale |
| ``adpsgd`` | :func:`~lightning_gossip.analysis.gossip_limit` of the topology, exchanges per step and momentum, over h |
| synchronous ones | 2 (1 + β)/h; with Nesterov's momentum 2 (1 + β)/((1 + 2β) h) |
| ``dpsgd``, overlapped | that times (1 + w_min)/2, w_min the least eigenvalue of W: a third on a ring of an even number |
| with outer steps | the limit of the rounds (analysis/second_moments/outer_steps.py), over h; unknown where the period adapts |

limit() is :func:`~lightning_gossip.analysis.random_staleness_limit`. Both are of a quadratic, in the mean square. A network's
curvature changes with its weights, so a margin below 1 means that it grows where it is, not that it will end in NaN.
"""

from __future__ import annotations

import math

import lightning.pytorch as pl
import numpy as np
from torch.optim import SGD

from lightning_gossip.algorithm.periodic_averaging.period import ConstantPeriod
from lightning_gossip.algorithm.staleness import StalenessHistogram
from lightning_gossip.algorithm.topology.generators import make_topology
from lightning_gossip.analysis.delays.delays import histogram
from lightning_gossip.analysis.mean.discrete import own_limit
from lightning_gossip.analysis.second_moments.adpsgd import gossip_limit
from lightning_gossip.analysis.second_moments.mean_square import random_staleness_limit
from lightning_gossip.analysis.second_moments.outer_steps import Rounds
from lightning_gossip.callbacks.curvature import CurvatureProbe
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.strategies.adpsgd import ADPSGDStrategy
from lightning_gossip.strategies.apsgd import APSGDStrategy
from lightning_gossip.strategies.dpsgd import DPSGDStrategy
from lightning_gossip.strategies.periodic_averaging import PeriodicAveragingStrategy

NEAR = 1.25  # a margin below it is warned of: curvatures of networks change by as much within an epoch


def probe_before(trainer: pl.Trainer, callback: pl.Callback) -> CurvatureProbe:
    """The probe whose measurements a callback is to use.

    Raises:
        ConfigurationError: if there is none, or only behind it.
    """
    before = trainer.callbacks[: trainer.callbacks.index(callback)]  # type: ignore[attr-defined]
    for other in reversed(before):
        if isinstance(other, CurvatureProbe):
            return other
    raise ConfigurationError(
        "GossipMonitor(stability=True) needs the curvature: put a CurvatureProbe() before it in Trainer(callbacks=[...])."
    )


def only_sgd(trainer: pl.Trainer) -> bool:
    """Whether all optimizers are plain SGD, with or without momentum."""
    return all(isinstance(getattr(optimizer, "optimizer", optimizer), SGD) for optimizer in trainer.optimizers)


def stability_margin(trainer: pl.Trainer, curvature: float, staleness: StalenessHistogram) -> float | None:
    """Largest stable learning rate over the present one, of the parameter group for which that is least.

    Args:
        trainer: with its strategy and optimizers.
        curvature: largest eigenvalue of the Hessian.
        staleness: measured so far; used under ``apsgd``.

    Returns:
        None where it is not known: without a positive curvature, before any update, for other optimizers than SGD.
    """
    if not curvature > 0.0 or not only_sgd(trainer):
        return None
    margins = []
    for group in (group for optimizer in trainer.optimizers for group in optimizer.param_groups):
        limit = _limit(trainer, staleness, group["momentum"], nesterov=group["nesterov"])
        if limit is None:
            return None
        if group["lr"] > 0.0:
            margins.append(limit / ((curvature + group["weight_decay"]) * float(group["lr"])))
    return min(margins, default=math.inf)


def _limit(trainer: pl.Trainer, staleness: StalenessHistogram, momentum: float, *, nesterov: bool) -> float | None:
    """Largest stable learning rate times curvature."""
    strategy, workers = trainer.strategy, trainer.world_size
    if workers > 1 and isinstance(strategy, APSGDStrategy):
        if not staleness.count:
            return None
        scale = strategy.server_options.scale or 1.0 / workers
        return random_staleness_limit(histogram(staleness.counts()), momentum=momentum, nesterov=nesterov) / scale
    own = own_limit(momentum, nesterov=nesterov)
    if workers > 1 and isinstance(strategy, ADPSGDStrategy):
        topology = make_topology(strategy.topology, workers)
        rate = strategy.exchanges_per_step
        limit = gossip_limit(topology, exchanges_per_step=rate, momentum=momentum, nesterov=nesterov)
        if strategy.outer is None or strategy.gossip_options.local_steps is None:
            return limit
        rounds = Rounds(strategy.outer, strategy.gossip_options.local_steps)
        return min(limit, rounds.limit(own, momentum=momentum, nesterov=nesterov))
    if workers > 1 and isinstance(strategy, DPSGDStrategy) and strategy.neighbour_options.overlap:
        sequence = strategy.neighbour_options.sequence(workers)
        if len(sequence) > 1:
            return None
        smallest = float(np.linalg.eigvalsh(sequence.matrix(0))[0])
        return own_limit(momentum, nesterov=nesterov, smallest_weight=smallest)
    if workers > 1 and isinstance(strategy, PeriodicAveragingStrategy) and strategy.outer is not None:
        if not isinstance(strategy.period, ConstantPeriod):
            return None
        return Rounds(strategy.outer, strategy.period.period).limit(own, momentum=momentum, nesterov=nesterov)
    return own
