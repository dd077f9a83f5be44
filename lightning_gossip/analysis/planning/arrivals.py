"""How often updates arrive at the server, and how stale they are, for any law of the step times.

N activated workers of step times Y (mean μ, standard deviation cv·μ) that pull right after they push are N renewal processes:

- updates arrive at the rate λ = N/μ in the long run, whatever the law; their superposition looks like a Poisson process for
  many workers, which is all that the diffusion of stability.py needs;
- N_i(t) of one renewal process has the mean t/μ + (cv² − 1)/2 and the variance cv² t/μ for large t, so K updates of N workers
  take (K + N(1 − cv²)/2) μ/N on the average, with a standard deviation of cv·√K·μ/N                           (renewal theory)
- between a worker's pull and its push the others push N − 1 times on the average, whatever the law; the spread depends on it.

Workers may differ, each with a law of its own (``compute`` is then a sequence). With λ_i = 1/μ_i the rate is λ = Σ λ_i, and
K updates take (K + Σ (1 − cv_i²)/2)/λ with a standard deviation of √(K Σ cv_i² λ_i/λ)/λ. The updates of worker i are
(λ − λ_i)/λ_i stale on the average, so the mean over all updates is N − 1 still: a slow worker's few are very stale.

The distribution of the staleness has no closed form in general, and a bound on it, an event trigger or a limited link change
the rate as well: :func:`arrivals` simulates them, times only. Where none of them is used :func:`free_arrivals` draws all
renewals at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_gossip.algorithm.apsgd.options import OnStale
from lightning_gossip.algorithm.checks import check_integer, is_finite
from lightning_gossip.algorithm.laws import FloatArray, Law
from lightning_gossip.algorithm.staleness import StalenessHistogram
from lightning_gossip.analysis.delays.conversion import delay_of
from lightning_gossip.analysis.delays.delays import Atoms, Delay, histogram
from lightning_gossip.analysis.mean.stability import of_staleness
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import APSGD, Cluster, Epochs, Links, Recording, Result, simulate

_SETTLING = 50  # rounds that are left out at the beginning: all workers start in phase


def laws_of(workers: int, compute: Law | Sequence[Law]) -> tuple[Law, ...]:
    """The law of each worker's step times.

    Args:
        workers: N.
        compute: one law for all, or one for each.

    Raises:
        ConfigurationError: if there are more laws or fewer.
    """
    check_integer("workers", workers, example=4)
    if isinstance(compute, Law):
        return (compute,) * workers
    if not isinstance(compute, Sequence) or len(compute) != workers or not all(isinstance(law, Law) for law in compute):
        raise ConfigurationError(
            f"compute={compute!r} is neither a law of step times nor one for each of {workers} workers. Write for example"
            " compute=Constant(0.1)."
        )
    return tuple(compute)


def arrival_rate(workers: int, compute: Law | Sequence[Law]) -> float:
    """λ = Σ 1/μ_i, updates a second of N workers that never wait."""
    laws = laws_of(workers, compute)
    if isinstance(compute, Law):
        return workers / delay_of(compute).mean
    return math.fsum(1.0 / delay_of(law).mean for law in laws)


@dataclass(frozen=True)
class RunTime:
    """How long K updates take.

    Args:
        mean_s: seconds.
        deviation_s: standard deviation, seconds.
    """

    mean_s: float
    deviation_s: float


def run_time(updates: int, workers: int, compute: Law | Sequence[Law]) -> RunTime:
    """Time to K updates of N workers that begin together and never wait, for large K/N; see the renewal theory above.

    Args:
        updates: K.
        workers: N.
        compute: law of the step times, of all or one for each.
    """
    check_integer("updates", updates, example=1000)
    laws, rate = [delay_of(law) for law in laws_of(workers, compute)], arrival_rate(workers, compute)
    squares = [law.variance / law.mean**2 for law in laws]
    spread = math.fsum(squared / law.mean for squared, law in zip(squares, laws, strict=True)) / rate
    ahead = 0.5 * math.fsum(1.0 - squared for squared in squares)
    return RunTime((updates + ahead) / rate, math.sqrt(spread * updates) / rate)


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
        """The delay in steps of the server, as the analysis takes it with a rate of 1: the staleness and half a step."""
        return of_staleness(self.law)

    @property
    def law(self) -> Atoms:
        """Law of the staleness."""
        return histogram(self.staleness)


def free_arrivals(workers: int, compute: Law | Sequence[Law], *, updates: int = 20_000, seed: int = 0) -> Arrivals:
    """N workers that never wait, exactly.

    Args:
        workers: N.
        compute: law of the step times, of all or one for each.
        updates: about how many are drawn, after those that are left out while the workers still are in phase.
        seed: of the draws.
    """
    laws, rate = laws_of(workers, compute), arrival_rate(workers, compute)
    check_integer("updates", updates, example=20_000)
    generators = np.random.default_rng(seed).spawn(workers)
    share = updates / workers
    shares = [share if isinstance(compute, Law) else updates / (rate * delay_of(law).mean) for law in laws]
    settling = [_SETTLING if own == share else math.ceil(_SETTLING * own / share) for own in shares]
    rounds = [settled + math.ceil(own) + 10 for settled, own in zip(settling, shares, strict=True)]
    times = [np.cumsum(law.draw(generator, r, 0)) for law, generator, r in zip(laws, generators, rounds, strict=True)]
    every = np.concatenate(times)
    order = np.empty(every.size, dtype=np.int64)
    order[np.argsort(every, kind="stable")] = np.arange(every.size)
    end_s = min(float(own[-1]) for own in times)  # afterwards not all workers are there any more
    counts = np.zeros(every.size, dtype=np.int64)
    for own, position, settled in zip(times, np.split(order, np.cumsum(rounds)[:-1]), settling, strict=True):
        staleness = np.diff(position) - 1  # of a worker's update: the others' since its own before
        counts += np.bincount(staleness[(own[1:] <= end_s) & (np.arange(1, len(own)) >= settled)], minlength=every.size)
    return Arrivals(rate, {int(k): int(counts[k]) for k in np.flatnonzero(counts)})


def arrivals(
    workers: int,
    compute: Law | Sequence[Law],
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
        compute: law of the step times, seconds, of all or one for each.
        active_workers, max_staleness, on_stale: see :class:`~lightning_gossip.algorithm.ServerOptions`.
        steps_per_update: m, local steps between two pushes that an event trigger leaves, in the mean; at least 1.
        links: between the workers; None for some that take no time.
        model_bytes: of a model on its way.
        updates: how many pushes are counted, after those in which the workers still are in phase.
        seed: of the draws.

    Raises:
        ConfigurationError: naming what cannot be.
    """
    laws = laws_of(workers, compute)
    check_integer("updates", updates, example=5_000)
    if not is_finite(steps_per_update) or steps_per_update < 1.0:
        raise ConfigurationError(f"steps_per_update={steps_per_update!r} is not a number of at least 1: a push follows a step.")
    if links is None and max_staleness is None and active_workers is None and steps_per_update == 1.0:
        return free_arrivals(workers, compute, updates=updates, seed=seed)
    result = simulate(
        APSGD(active_workers=active_workers, max_staleness=max_staleness, on_stale=on_stale),
        Cluster(workers, laws if steps_per_update == 1.0 else [_Several(law, steps_per_update) for law in laws]),
        work=Epochs(number=1, batches=_SETTLING * workers + updates),
        links=links,
        model_bytes=model_bytes,
        seed=seed,
        recording=Recording(trace=True, staleness=True),
    )
    assert result.trace is not None and result.staleness_in_order is not None  # noqa: PT018 - as was asked for
    pushes = [event.time_s for event in result.trace if event.kind == "push"][_SETTLING * workers :]
    settled = StalenessHistogram()
    each = sum(len(own) for own in result.staleness_in_order) / workers
    for own in result.staleness_in_order:
        begin = _SETTLING if isinstance(compute, Law) else math.ceil(_SETTLING * len(own) / each)
        for staleness in own[begin:-1]:  # the last one may have met others that were done
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
