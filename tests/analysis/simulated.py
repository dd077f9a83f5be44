"""How fast the simulator's runs decay."""

from __future__ import annotations

import numpy as np

from lightning_gossip.algorithm.laws import Law
from lightning_gossip.simulation import SGD, Cluster, Quadratic, Recording, Steps, Strategy, simulate


def rms_rate(strategy: Strategy, law: Law, g: float, *, momentum: float = 0.0, workers: int = 4, steps: int = 100) -> float:
    """Of the mean model in simulated runs, per step of every worker: the slope of the logarithm."""
    losses = []
    for seed in range(12):
        result = simulate(
            strategy,
            Cluster(workers, law),
            work=Steps(number=steps),
            objective=Quadratic([1.0]),
            optimizer=SGD(lr=g, momentum=momentum),
            seed=seed,
            recording=Recording(evaluate_every=workers),
        )
        losses.append([point.loss for point in result.points][:steps])
    mean = np.mean([own[: min(map(len, losses))] for own in losses], axis=0)
    first = 20 if momentum else 3
    return float(-0.5 * np.polyfit(np.arange(first, len(mean)), np.log(mean[first:]), 1)[0])
