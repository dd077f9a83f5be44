"""What the workers train on: epochs of batches, shared or in equal parts, or just so many steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_gossip.algorithm.checks import check_integer, check_positive
from lightning_gossip.algorithm.islands.batches import groups
from lightning_gossip.algorithm.work_sharing import EpochPlan, OwnRate, at_least_one_each, check_enough_batches
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.problems.batch_assignment import (
    EqualShares,
    FreeSession,
    OwnShares,
    Session,
    SharedEpoch,
    Task,
    together,
)
from lightning_gossip.simulation.problems.label_skew import IntArray, label_skew


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Epochs of a number of batches, of all workers together.

    Args:
        number: of epochs, at least 1.
        batches: an epoch; None: as many as the objective's data set has.
        batch_size: samples of a batch.
        lookahead: batches that a worker holds ahead of the one in training: 1 for Lightning's own, and what the loader's
            processes prefetch.
        drop_last: leave out a last batch that is smaller than the rest.
        skew: α of a Dirichlet distribution: each worker has samples of its own, whose labels differ from the others'; see
            :mod:`~lightning_gossip.simulation.problems.label_skew`. None for batches of all samples.
        skew_seed: of these shares; None for the run's seed.
    """

    number: int = 1
    batches: int | None = None
    batch_size: int = 1
    lookahead: int = 1
    drop_last: bool = False
    skew: float | None = None
    skew_seed: int | None = None

    def __post_init__(self) -> None:
        check_integer("number", self.number, example=2)
        check_integer("batch_size", self.batch_size, example=16)
        check_integer("lookahead", self.lookahead, example=1)
        if self.batches is not None:
            check_integer("batches", self.batches, example=1000)
        if self.skew is not None:
            check_positive("skew", self.skew)


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class Steps:
    """So many steps of each worker, without an epoch's end between them; batches are drawn at random.

    Args:
        number: of steps, at least 1.
        batch_size: samples of a batch.
        skew: as of :class:`Epochs`.
    """

    number: int
    batch_size: int = 1
    skew: float | None = None
    skew_seed: int | None = None

    def __post_init__(self) -> None:
        check_integer("number", self.number, example=100)
        check_integer("batch_size", self.batch_size, example=16)
        if self.skew is not None:
            check_positive("skew", self.skew)


def shares_of(work: Epochs | Steps, labels: Sequence[int], workers: int, *, seed: int) -> list[IntArray] | None:
    """The samples of each worker, by rank, where it has its own; None where all draw from all.

    Args:
        work: whose ``skew`` and ``skew_seed``.
        labels: of the samples, shape (samples,).
        workers: n.
        seed: of the run.
    """
    if work.skew is None:
        return None
    return label_skew(labels, workers, alpha=work.skew, seed=seed if work.skew_seed is None else work.skew_seed)


class Plan:
    """All sessions of a run.

    Args:
        work: epochs or steps.
        samples: of the objective's data set; None without one.
        labels: of these samples; None without.
        workers: n; with islands, how many of these.
        shared: whether epochs are shared by the claim rule; otherwise in equal shares.
        seed: of the permutations.
        generators: of the batches of :class:`Steps`, by rank.
        island: ranks of an island, which has a batch for each of them at once.

    Raises:
        ConfigurationError: if the epoch's length is not known, it has fewer batches than workers, or samples that have no
            labels are to be skewed by them.

    Attributes:
        shares: by rank, the samples of each worker, where it has its own; None for all.
    """

    def __init__(
        self,
        work: Epochs | Steps,
        *,
        samples: int | None,
        labels: Sequence[int] | None = None,
        workers: int,
        shared: bool,
        seed: int,
        generators: Sequence[np.random.Generator],
        island: int = 1,
    ) -> None:
        self._island = island
        self._work = work
        self._samples = samples
        self._workers = workers
        self._shared = shared
        self._generators = generators
        self._own_rates = [OwnRate(workers) for _ in range(workers)]
        self._epoch: EpochPlan | None = None
        self._seed = seed
        self.shares: list[IntArray] | None = None
        if work.skew is not None:
            if labels is None:
                raise ConfigurationError(f"skew={work.skew!r}: the objective has no samples with labels. Leave skew away.")
            self.shares = shares_of(work, labels, workers, seed=seed)
        if isinstance(work, Steps):
            self.sessions, self.steps = 1, work.number * workers * island
            self.batches = self.steps
            return
        if work.batches is None and samples is None:
            check_integer("batches", None, example=1000, otherwise=", since the objective has no data set")
        self.sessions = work.number
        self._epoch = EpochPlan(samples or 0, work.batch_size, shuffle=True, drop_last=work.drop_last, seed=seed)
        self.batches = work.batches if work.batches is not None else len(self._epoch)
        if samples is not None:
            check_integer("batches", self.batches, at_least=1, at_most=len(self._epoch), example=len(self._epoch))
        number = self.batches if island == 1 else len(self._groups_of_sizes())
        check_enough_batches(number, workers)
        if self.shares is not None:
            number = self.batches = workers * self._own_batches()
        self.steps = self.sessions * island * (number if shared else math.ceil(number / workers) * workers)

    def open(self, number: int, members: Sequence[int]) -> Session:
        """The session of this number, from 0, for the workers that are left."""
        if isinstance(self._work, Steps):
            return FreeSession(
                self._work.number, self._work.batch_size, self._samples, self._generators, self.shares, island=self._island
            )
        if self.shares is not None:
            return self._own_session(self.shares, number)
        tasks = self._tasks(number)
        return self._shares(tasks, members)

    def _own_batches(self) -> int:
        """Of each worker in an epoch, where it has samples of its own."""
        assert isinstance(self._work, Epochs)
        assert self.shares is not None
        largest = max(map(len, self.shares))
        number = largest // self._work.batch_size if self._work.drop_last else math.ceil(largest / self._work.batch_size)
        if self._work.batches is not None and self._epoch is not None and self._work.batches < len(self._epoch):
            number = min(number, math.ceil(self._work.batches / self._workers))
        return max(1, number)

    def _own_session(self, shares: Sequence[IntArray], epoch: int) -> Session:
        """Each worker's own samples in a new order; the first ones again where a share is smaller than the largest."""
        assert isinstance(self._work, Epochs)
        size, number, largest = self._work.batch_size, self._own_batches(), max(map(len, shares))
        batches = []
        for rank, share in enumerate(shares):
            order = np.random.default_rng([self._seed, epoch, rank]).permutation(share)
            order = np.concatenate([order, order[: largest - len(order)]]).tolist()
            batches.append([order[start : start + size] for start in range(0, len(order), size)][:number])
        return OwnShares(batches)

    def again(self, tasks: Sequence[Task], members: Sequence[int]) -> Session:
        """A session of what is left of an epoch, cut finer if there are fewer batches than workers."""
        if len(tasks) < len(members) and tasks[0].batch is not None:
            cut = at_least_one_each([list(task.batch or ()) for task in tasks], len(members))
            tasks = [Task(batch, len(batch)) for batch in cut]
        elif len(tasks) < len(members):
            samples = sum(task.size for task in tasks)
            sizes = [samples // len(members) + (place < samples % len(members)) for place in range(len(members))]
            tasks = [Task(None, max(1, size)) for size in sizes]
        return self._shares(tasks, members)

    def _shares(self, tasks: Sequence[Task], members: Sequence[int]) -> Session:
        assert isinstance(self._work, Epochs)
        if not self._shared:
            return EqualShares(tasks, members)
        return SharedEpoch(tasks, members=members, own_rates=self._own_rates, lookahead=self._work.lookahead)

    def _tasks(self, epoch: int) -> list[Task]:
        assert isinstance(self._work, Epochs)
        assert self._epoch is not None
        if self._samples is None:
            return self._groups_of_sizes() if self._island > 1 else [Task(None, self._work.batch_size)] * self.batches
        batches = self._epoch.batches(epoch)[: self.batches]
        if self._island > 1:
            return [together([Task(one, len(one)) for one in group.batches]) for group in groups(batches, self._island)]
        return [Task(batch, len(batch)) for batch in batches]

    def _groups_of_sizes(self) -> list[Task]:
        """The epoch of islands, without a data set: as :func:`~lightning_gossip.algorithm.islands.groups` cuts it."""
        assert isinstance(self._work, Epochs)
        size, island = self._work.batch_size, self._island
        whole, left = divmod(self.batches, island)
        usual = together([Task(None, size)] * island)
        cut = groups([[0] * size for _ in range(left + island * min(1, whole))], island)
        last = [together([Task(None, len(one)) for one in group.batches]) for group in cut]
        return [usual] * (whole - min(1, whole)) + last
