"""How often updates arrive at the server, and how stale they are, for any law of the step times.

N activated workers of step times Y (mean μ, standard deviation cv·μ) that pull right after they push are N renewal processes:

- updates arrive at the rate λ = N/μ in the long run, whatever the law; their superposition looks like a Poisson process for
  many workers, which is all that the diffusion of stability.py needs;
- N_i(t) of one renewal process has the mean t/μ + (cv² − 1)/2 and the variance cv² t/μ for large t, so K updates of N workers
  take (K + N(1 − cv²)/2) μ/N on the average, with a standard deviation of cv·√K·μ/N                           (renewal theory)
- between a worker's pull and its push the others push N − 1 times on the average, whatever the law; the spread depends on it.

The distribution of the staleness has no closed form in general, and a bound on it, an event trigger or a limited link change
the rate as well: :func:`arrivals` plays them through, event by event, with the package's own
:class:`~lightning_gossip.algorithm.ParameterServer` deciding who may pull and push. Where none of them is used
:func:`free_arrivals` draws all renewals at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lightning_gossip.algorithm.checks import check_integer, is_finite
from lightning_gossip.algorithm.laws import Law
from lightning_gossip.algorithm.server import OnStale, ParameterServer
from lightning_gossip.analysis.conversion import delay_of
from lightning_gossip.analysis.delays import Atoms, Delay, histogram
from lightning_gossip.analysis.play import Link, Play, Steps, Tally
from lightning_gossip.analysis.stability import of_staleness
from lightning_gossip.errors import ConfigurationError

_SETTLING = 50  # rounds that are left out at the beginning: all workers start in phase


def arrival_rate(workers: int, compute: Law) -> float:
    """λ = N/μ, updates a second of N workers that never wait."""
    check_integer("workers", workers, example=4)
    return workers / delay_of(compute).mean


@dataclass(frozen=True)
class RunTime:
    """How long K updates take.

    Args:
        mean_s: seconds.
        deviation_s: standard deviation, seconds.
    """

    mean_s: float
    deviation_s: float


def run_time(updates: int, workers: int, compute: Law) -> RunTime:
    """Time to K updates of N workers that begin together and never wait, for large K/N; see the renewal theory above.

    Args:
        updates: K.
        workers: N.
        compute: law of the step times.
    """
    check_integer("updates", updates, example=1000)
    law, rate = delay_of(compute), arrival_rate(workers, compute)
    squared = law.variance / law.mean**2
    return RunTime((updates + 0.5 * workers * (1.0 - squared)) / rate, math.sqrt(squared * updates) / rate)


@dataclass(frozen=True)
class Arrivals:
    """The updates of a while.

    Args:
        rate: λ, applied updates a second.
        staleness: how many applied updates had each staleness.
        dropped: share of the updates that came too stale and were thrown away.
        computing: share of the workers' time in which they compute.
    """

    rate: float
    staleness: Mapping[int, int]
    dropped: float = 0.0
    computing: float = 1.0

    @property
    def delay(self) -> Delay:
        """In steps of the server, what the analysis takes with a rate of 1: the staleness and half a step."""
        return of_staleness(self.law)

    @property
    def law(self) -> Atoms:
        """Of the staleness."""
        return histogram(self.staleness)


def free_arrivals(workers: int, compute: Law, *, updates: int = 20_000, seed: int = 0) -> Arrivals:
    """N workers that never wait, exactly.

    Args:
        workers: N.
        compute: law of the step times.
        updates: about how many are drawn, after those that are left out while the workers still are in phase.
        seed: of the draws.
    """
    check_integer("workers", workers, example=4)
    check_integer("updates", updates, example=20_000)
    generators = np.random.default_rng(seed).spawn(workers)
    rounds = _SETTLING + math.ceil(updates / workers) + 10
    times = np.stack([np.cumsum(compute.draw(generator, rounds, 0)) for generator in generators])
    order = np.empty(times.size, dtype=np.int64)
    order[np.argsort(times, axis=None, kind="stable")] = np.arange(times.size)
    position = order.reshape(times.shape)
    staleness = np.diff(position, axis=1) - 1  # of a worker's update: the others' since its own before
    end_s = times[:, -1].min()  # afterwards not all workers are there any more
    counted = (times[:, 1:] <= end_s) & (np.arange(1, rounds) >= _SETTLING)
    counts = np.bincount(staleness[counted])
    return Arrivals(arrival_rate(workers, compute), {k: int(n) for k, n in enumerate(counts) if n})


def arrivals(
    workers: int,
    compute: Law,
    *,
    active_workers: int | None = None,
    max_staleness: int | None = None,
    on_stale: OnStale = "drop",
    steps_per_update: float = 1.0,
    link: Link | None = None,
    updates: int = 5_000,
    seed: int = 0,
) -> Arrivals:
    """Workers of a parameter server, played through event by event.

    Args:
        workers: n; the first one is the server's own and uses no link.
        compute: law of the step times, seconds.
        active_workers, max_staleness, on_stale: see :class:`~lightning_gossip.algorithm.ServerOptions`.
        steps_per_update: m, local steps between two pushes that an event trigger leaves, in the mean; at least 1.
        link: of the server; None for one that takes no time.
        updates: how many pushes are counted, after those in which the workers still are in phase.
        seed: of the draws.

    Raises:
        ConfigurationError: naming what cannot be.
    """
    check_integer("workers", workers, example=4)
    check_integer("updates", updates, example=5_000)
    if not is_finite(steps_per_update) or steps_per_update < 1.0:
        raise ConfigurationError(f"steps_per_update={steps_per_update!r} is not a number of at least 1: a push follows a step.")
    constrained = link is not None or max_staleness is not None or active_workers is not None
    if not constrained and steps_per_update == 1.0:
        return free_arrivals(workers, compute, updates=updates, seed=seed)
    server = ParameterServer(
        torch.zeros(1), workers=workers, active_workers=active_workers, max_staleness=max_staleness, on_stale=on_stale
    )
    play = Play(server, Steps(steps_per_update, seed), workers, compute, link or Link(), seed)
    before = play.until(_SETTLING * workers)
    seen = play.until(_SETTLING * workers + updates).since(before)
    return arrivals_of(seen, workers)


def arrivals_of(seen: Tally, workers: int) -> Arrivals:
    """What a tally says of so many workers."""
    return Arrivals(
        rate=seen.applied / seen.time_s,
        staleness=seen.staleness,
        dropped=1.0 - seen.applied / seen.pushed,
        computing=min(1.0, seen.computed_s / (seen.time_s * workers)),
    )
