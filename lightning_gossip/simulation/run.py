"""One run under virtual time: what all strategies share while it goes on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any, ClassVar

import simpy
import torch
from simpy.events import Event
from torch import Tensor

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.topology.mixing import consensus_distance
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.cluster.cluster import Cluster
from lightning_gossip.simulation.cluster.compute_times import generator_of
from lightning_gossip.simulation.cluster.links import Links
from lightning_gossip.simulation.cluster.network import Network
from lightning_gossip.simulation.problems.batch_assignment import Session
from lightning_gossip.simulation.problems.objectives import Objective
from lightning_gossip.simulation.problems.optimizers import InnerOptimizer
from lightning_gossip.simulation.problems.stacked_models import Models
from lightning_gossip.simulation.problems.work import Epochs, Plan, Steps
from lightning_gossip.simulation.record import Distances, EpochRecord, Point, Recorder, Recording

_BATCHES = 3  # stream of the run's seed
_POINTS = 100

Process = Generator[Event, Any, None]


class Strategy(ABC):
    """What a strategy is told, as a frozen dataclass, and how its workers run.

    Attributes:
        name: in the registry of the package's strategies.
        shares_work: whether its workers may make different numbers of steps.
        server_rank: the rank whose port the others share; None for none.
    """

    name: ClassVar[str]
    shares_work: ClassVar[bool] = False
    server_rank: int | None = None

    def graph_name(self, workers: int) -> str | None:
        """What the graph of so many workers is called; None without one."""
        return None

    def island_size(self, links: Links) -> int:
        """How many ranks train together as one member.

        Args:
            links: between the ranks.

        Raises:
            ConfigurationError: if they do not say.
        """
        return 1

    def check_on(self, workers: int, links: Links) -> Islands:
        """Refuse what does not fit the workers and their links; returns which of them are together.

        Raises:
            ConfigurationError: naming the option.
        """
        islands = Islands(self.island_size(links))
        self.check(islands.count(workers))
        return islands

    @abstractmethod
    def check(self, workers: int) -> None:
        """Refuse what does not fit the number of workers, or of islands.

        Raises:
            ConfigurationError: naming the option.
        """

    @abstractmethod
    def start(self, run: Run) -> None:
        """Begin the run's processes."""


class Run:
    """A run's clock, links, models, work and record.

    Args:
        strategy: that is run.
        cluster: its workers.
        links: between them.
        work: what they train on.
        objective: what they minimise; None for times only.
        optimizer: of each worker.
        model_bytes: of a vector on its way.
        seed: of everything that is drawn.
        recording: what to write down.
        target_loss: the run ends when a point of the loss is no higher; None for no such end.

    Attributes:
        environment: SimPy's; events are ordered by (time, priority, sequence).
        islands: which ranks are together; of one rank each where the strategy knows no islands.
        members: how many islands there are: those that have models of their own.
        ended: why the run has ended, or None.
        living: the ranks that have not failed, in ascending order.
        averagings: exact averagings of all models so far, of a strategy that counts them.
    """

    def __init__(
        self,
        *,
        strategy: Strategy,
        cluster: Cluster,
        links: Links,
        work: Epochs | Steps,
        objective: Objective | None,
        optimizer: InnerOptimizer,
        model_bytes: int,
        shares_work: bool,
        seed: int,
        recording: Recording,
        target_loss: float | None,
    ) -> None:
        self.environment = simpy.Environment()
        self.cluster = cluster
        self.links = links
        self.workers = cluster.workers
        self.islands = strategy.check_on(self.workers, links)
        self.members = self.islands.count(self.workers)
        if self.islands.size > 1 and cluster.failures:
            raise ConfigurationError("failures are of workers that are alone: with islands write failures={}.")
        if self.islands.size > 1 and work.skew is not None:
            raise ConfigurationError(f"skew={work.skew!r} is of workers that are alone: with islands leave it away.")
        self.seed = seed
        self.nbytes = model_bytes
        self.network = Network(self.environment, links, seed=seed, server=strategy.server_rank)
        self.models = Models(objective, optimizer, workers=self.workers, seed=seed)
        self.compute_times = cluster.compute_times(seed, lambda: self.environment.now)
        generators = [generator_of(seed, _BATCHES, rank) for rank in range(self.workers)]
        self.plan = Plan(
            work,
            samples=None if objective is None else objective.samples,
            labels=None if objective is None else objective.labels,
            workers=self.members,
            shared=shares_work,
            seed=seed,
            generators=generators,
            island=self.islands.size,
        )
        self.record = Recorder(self.workers, recording)
        self.living = list(range(self.workers))
        self.ended: str | None = None
        self.averagings: int | None = None
        self.steps = self.samples = 0
        self.current: Callable[[], Tensor] = lambda: self.models.x  # the models whose mean counts, shape (·, d)
        self._objective = objective
        self._optimizer = optimizer
        self._target_loss = target_loss
        self._evaluate_every = recording.evaluate_every or max(1, self.plan.steps // _POINTS)
        self._session_began_s = 0.0

    @property
    def progress(self) -> float:
        """Share of the run's steps that are done, in [0, 1]."""
        return min(1.0, self.steps / self.plan.steps)

    @property
    def lr(self) -> float:
        """The learning rate of a step that ends now: the same count for fast and slow workers."""
        return self._optimizer.lr_at(self.progress)

    @property
    def living_members(self) -> list[int]:
        """Numbers of the islands that have not failed."""
        return self.living if self.islands.size == 1 else list(range(self.members))

    def count_step(self, rank: int, samples: int) -> None:
        """Count a step that a worker has ended."""
        account = self.record.accounts[rank]
        account.steps += 1
        account.samples += samples
        self.steps += 1
        self.samples += samples

    def evaluate_if_due(self, steps: int = 1) -> None:
        """Add a point to the loss if the last ``steps`` steps have passed a multiple of ``evaluate_every``."""
        if self._objective is not None and self.steps // self._evaluate_every > (self.steps - steps) // self._evaluate_every:
            self.evaluate()

    def evaluate(self) -> None:
        """Add a point to the loss, and end the run if it is low enough, or not finite."""
        if self._objective is None:
            return
        mean = self.mean()
        loss = self._objective.loss(mean)
        self.record.points.append(
            Point(
                time_s=self.environment.now,
                steps=self.steps,
                samples=self.samples,
                loss=loss,
                consensus_distance=consensus_distance(self._living_models()),
                accuracy=self._objective.accuracy(mean),
            )
        )
        if not math.isfinite(loss):
            self.finish("diverged")
        elif self._target_loss is not None and loss <= self._target_loss:
            self.finish("target")

    def mean(self) -> Tensor:
        """Mean of the models that count, shape (d,)."""
        return self._living_models().mean(0)

    def _living_models(self) -> Tensor:
        models = self.current()
        return models[self.living] if len(models) == self.workers and 0 < len(self.living) < self.workers else models

    def distance(self, models: Tensor, *, to: Tensor | None = None) -> Distances | None:
        """‖x_i − x̄‖² of every worker's or island's model, x̄ the mean of the living ones'.

        Args:
            models: shape (n, d).
            to: another model in place of the mean, shape (d,).

        Returns:
            None without models.
        """
        if not self.models.numel:
            return None
        exact = models.to(torch.float64)
        living = self.living if len(models) == self.workers else self.living_members
        centre = exact[living].mean(0) if to is None else to
        squares = (exact - centre).square().sum(1).tolist()
        return tuple(square if rank in living else math.nan for rank, square in enumerate(squares))

    def end_session(self, distances: Distances | None) -> None:
        """Write down that all workers have met and averaged, from these distances to their mean."""
        now_s = self.environment.now
        self.record.epochs.append(EpochRecord(self._session_began_s, now_s, distances))
        self._session_began_s = now_s
        self.record.event(now_s, "meet", -1)

    def fail(self, rank: int, session: Session) -> None:
        """Take a worker out that has stopped for good."""
        self.record.accounts[rank].failed_s = self.environment.now
        self.record.event(self.environment.now, "fail", rank)
        self.living.remove(rank)
        self.models.forget(rank)
        session.lost(rank)
        if not self.living:
            self.finish("stalled")

    def finish(self, why: str) -> None:
        """End the run; the first reason counts."""
        self.ended = self.ended or why
