"""How often updates arrive at the server, and how stale they are, for any law of the step times.

N activated workers of step times Y (mean μ, standard deviation cv·μ) that pull right after they push are N renewal processes:

- updates arrive at the rate λ = N/μ in the long run, whatever the law; their superposition looks like a Poisson process for
  many workers, which is all that the diffusion of stability.py needs;
- N_i(t) of one renewal process has the mean t/μ + (cv² − 1)/2 and the variance cv² t/μ for large t, so K updates of N workers
  take (K + N(1 − cv²)/2) μ/N on the average, with a standard deviation of cv·√K·μ/N                           (renewal theory)
- between a worker's pull and its push the others push N − 1 times on the average, whatever the law; the spread depends on it.

The distribution of the staleness has no closed form in general, and a bound on it, an event trigger or a limited link change
the rate as well: :func:`arrivals` simulates them, times only. Where none of them is used :func:`free_arrivals` draws all
renewals at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from lightning_gossip.algorithm.apsgd import OnStale
from lightning_gossip.algorithm.checks import check_integer, is_finite
from lightning_gossip.algorithm.laws import FloatArray, Law
from lightning_gossip.algorithm.staleness import StalenessHistogram
from lightning_gossip.analysis.delays.conversion import delay_of
from lightning_gossip.analysis.delays.delays import Atoms, Delay, histogram
from lightning_gossip.analysis.mean.stability import of_staleness
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import APSGD, Cluster, Epochs, Links, Recording, Result, simulate

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
        """Law of the staleness."""
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
    links: Links | None = None,
    model_bytes: int = 0,
    updates: int = 5_000,
    seed: int = 0,
) -> Arrivals:
    """Workers of a parameter server, in the simulator.

    Args:
        workers: n.
        compute: law of the step times, seconds.
        active_workers, max_staleness, on_stale: see :class:`~lightning_gossip.algorithm.ServerOptions`.
        steps_per_update: m, local steps between two pushes that an event trigger leaves, in the mean; at least 1.
        links: between the workers; None for some that take no time.
        model_bytes: of a model on its way.
        updates: how many pushes are counted, after those in which the workers still are in phase.
        seed: of the draws.

    Raises:
        ConfigurationError: naming what cannot be.
    """
    check_integer("workers", workers, example=4)
    check_integer("updates", updates, example=5_000)
    if not is_finite(steps_per_update) or steps_per_update < 1.0:
        raise ConfigurationError(f"steps_per_update={steps_per_update!r} is not a number of at least 1: a push follows a step.")
    if links is None and max_staleness is None and active_workers is None and steps_per_update == 1.0:
        return free_arrivals(workers, compute, updates=updates, seed=seed)
    result = simulate(
        APSGD(active_workers=active_workers, max_staleness=max_staleness, on_stale=on_stale),
        Cluster(workers, compute if steps_per_update == 1.0 else _Several(compute, steps_per_update)),
        work=Epochs(number=1, batches=_SETTLING * workers + updates),
        links=links,
        model_bytes=model_bytes,
        seed=seed,
        recording=Recording(trace=True, staleness=True),
    )
    assert result.trace is not None and result.staleness_in_order is not None  # noqa: PT018 - as was asked for
    pushes = [event.time_s for event in result.trace if event.kind == "push"][_SETTLING * workers :]
    settled = StalenessHistogram()
    for own in result.staleness_in_order:
        for staleness in own[_SETTLING:-1]:  # the last one may have met others that were done
            settled.record(staleness)
    whole = arrivals_of(result)
    return replace(whole, rate=(1.0 - whole.dropped) * (len(pushes) - 1) / (pushes[-1] - pushes[0]), staleness=settled.counts())


def arrivals_of(result: Result) -> Arrivals:
    """What a simulated run of a parameter server says, from its beginning to its end."""
    pushed = sum(worker.exchanges for worker in result.workers)
    dropped = sum(worker.dropped for worker in result.workers)
    busy_s = sum(worker.busy_s for worker in result.workers)
    return Arrivals(
        rate=(pushed - dropped) / result.time_s,
        staleness=result.staleness.counts(),
        dropped=dropped / pushed if pushed else 0.0,
        computing=min(1.0, busy_s / (result.time_s * len(result.workers))),
    )


@dataclass(frozen=True)
class _Several(Law):
    """The time of several steps in a row, a whole number of them, m in the mean."""

    step: Law
    mean: float

    def draw(self, generator: np.random.Generator, count: int, start: int) -> FloatArray:
        whole = int(self.mean)
        numbers = whole + (generator.random(count) < self.mean - whole)
        times = self.step.draw(generator, int(numbers.sum()), start)
        return np.add.reduceat(times, np.cumsum(numbers) - numbers)
