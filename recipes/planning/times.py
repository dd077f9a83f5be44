"""How fast a strategy's steps are on a number of workers: the simulator's answer, for times only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_gossip import ConfigurationError
from lightning_gossip.algorithm.staleness import StalenessHistogram
from lightning_gossip.analysis import Atoms, Law, histogram
from lightning_gossip.simulation import Cluster, Epochs, Links, Nodes, Strategy, simulate

_STEPS = 64  # of a worker; of few asynchronous workers more, for the law of their staleness
_UPDATES = 600
ENDLESS = 1_000_000_000
"""Steps of an epoch that never ends."""
_LONGEST = 256  # steps of an epoch: what happens at its end is less than a step's worth of that, but on the slowest links


@dataclass(frozen=True)
class Machines:
    """Workers and links of any number, from those that are known.

    Args:
        cluster: as it is now.
        links: between any workers.
        model_bytes: of a model on its way.
        batch_size: samples of a worker's step.
        seed: of random times.
        epoch_batches: of all workers together in an epoch; None for an epoch without end.
    """

    cluster: Cluster
    links: Links
    model_bytes: int
    batch_size: int
    seed: int = 0
    epoch_batches: int | None = None

    @property
    def laws(self) -> Sequence[Law]:
        """Laws of the known workers' step times, by rank."""
        assert not isinstance(self.cluster.compute, Law)
        return self.cluster.compute

    def workers(self, n: int) -> Cluster:
        """A cluster of so many workers: the first known ones, or all over and over; a slow rank stays the only one."""
        laws = [self.laws[rank % len(self.laws)] for rank in range(n)]
        slowdown = {rank: factor for rank, factor in self.cluster.slowdown.items() if rank < n}
        slow_periods = [period for period in self.cluster.slow_periods if period.rank < n]
        return Cluster(n, laws, slowdown=slowdown, backward_share=self.cluster.backward_share, slow_periods=slow_periods)

    def epoch_steps(self, n: int) -> int:
        """Steps of each of n workers between two exact averages of all at an epoch's end, in the mean."""
        return ENDLESS if self.epoch_batches is None else max(1, round(self.epoch_batches / n))

    def links_of(self, n: int) -> Links:
        """The links without those to workers that are not there; on as many nodes as so many workers fill."""
        nodes = None if self.links.nodes is None else self.links.nodes.for_workers(n)
        slow = {key: factor for key, factor in self.links.slow.items() if _last(key) < n}
        return replace(self.links, slow=slow, nodes=nodes)

    def check_nodes(self, n: int) -> None:
        """Refuse a number of workers that fills a node in part, beside others.

        Raises:
            ConfigurationError: naming numbers that do.
        """
        size = self.node_size
        if size is not None and n > size and n % size:
            raise ConfigurationError(
                f"{n} workers are no whole number of nodes of {size}. Write for example workers=[{size},{2 * size},{4 * size}]."
            )

    @property
    def node_size(self) -> int | None:
        """Ranks of a node, where all have as many; None without nodes."""
        nodes = self.links.nodes
        return nodes.sizes[0] if nodes is not None and len(set(nodes.sizes)) == 1 else None

    @property
    def take_time(self) -> bool:
        """Whether what is sent takes any."""
        links = self.links
        return links.latency_s > 0.0 or links.bandwidth < math.inf or links.shared is not None or links.nodes is not None

    def ideal(self) -> Machines:
        """The machines with links that take no time."""
        nodes = self.links.nodes
        return replace(self, links=Links(nodes=None if nodes is None else Nodes(sizes=nodes.sizes)))


def _last(key: int | tuple[int, int]) -> int:
    return max(key) if isinstance(key, tuple) else key


@dataclass(frozen=True)
class Times:
    """What the simulator says of a strategy, without a loss.

    Args:
        workers: n.
        steps_per_s: of every worker, in the mean: all workers' steps a second over n.
        samples_per_s: of all workers.
        staleness: of its steps; empty where the algorithm has no such thing.
        dropped: share of the steps whose update was thrown away.
        exchanges_per_step: averagings, or pushes, of a worker per step of its own, as many as there are time for.
        period: steps between two exact averages of all models, in the mean; None where they are not counted.
        waiting: share of the workers' time in which they wait.
    """

    workers: int
    steps_per_s: float
    samples_per_s: float
    staleness: StalenessHistogram
    dropped: float
    exchanges_per_step: float
    period: float | None
    waiting: float

    @property
    def updates_per_s(self) -> float:
        """Updates a second that a server applies, of all workers."""
        return self.steps_per_s * self.workers * self.exchanges_per_step * (1.0 - self.dropped)

    @property
    def law(self) -> Atoms:
        """The law of the staleness."""
        return histogram(self.staleness.counts())


def timed(
    strategy: Strategy, machines: Machines, n: int, *, on_progress: Callable[[float], None] | None = None, steps: int = _STEPS
) -> Times:
    """Some simulated epochs, of as many steps as the recipe's have.

    Args:
        strategy: the simulator's description.
        machines: that it runs on.
        n: how many workers.
        on_progress: told which share is done.
        steps: of a worker in the mean, at least.
    """
    steps = max(steps, _UPDATES // n) if strategy.shares_work else steps
    own, longest = machines.epoch_batches, max(steps, _LONGEST) * n
    batches = steps * n if own is None else min(own, longest)
    work = Epochs(number=math.ceil(steps * n / batches), batches=batches, batch_size=machines.batch_size)
    result = simulate(
        strategy,
        machines.workers(n),
        work=work,
        links=machines.links_of(n),
        model_bytes=machines.model_bytes,
        seed=machines.seed,
        on_progress=on_progress,
    )
    busy_s = sum(worker.busy_s for worker in result.workers)
    total_s = n * result.time_s
    pushes = sum(worker.exchanges for worker in result.workers)
    return Times(
        workers=n,
        steps_per_s=result.steps / total_s,
        samples_per_s=result.steps * machines.batch_size / result.time_s,
        staleness=result.staleness,
        dropped=sum(worker.dropped for worker in result.workers) / pushes if pushes else 0.0,
        exchanges_per_step=result.exchanges_per_step or 0.0,
        period=result.steps / n / result.averagings if result.averagings else None,
        waiting=max(0.0, 1.0 - busy_s / total_s),
    )
