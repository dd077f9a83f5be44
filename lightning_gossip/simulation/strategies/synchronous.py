"""Synchronous SGD under virtual time: all workers average their gradients after every step.

- :class:`AllReduce`: DDP, AllReduce-SGD, FULLSGD. The all-reduce costs what
  :mod:`lightning_gossip.simulation.cluster.collective_costs` says, after the backward pass or overlapped with it.
- :class:`QSGD`: the gradients go as :class:`~lightning_gossip.algorithm.compression.qsgd.Quantizer` packs them, and every
  worker gathers everybody's (Alistarh et al. 2017, arXiv 1610.02132).

With workers that begin together at t and compute for c_i, of it the backward pass for β c_i, and an average that takes m:

    t' = max_i (t + c_i) + m                                          after the backward pass
    t' = max( max_i (t + c_i),  max_i (t + (1 − β) c_i) + m )         overlapped: begun with the last worker's backward pass

The overlap is the best that buckets of gradients could do. Rounds are the only events, so one process makes them all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_choice
from lightning_gossip.algorithm.compression.qsgd import Norm, Quantizer
from lightning_gossip.algorithm.compression.quantized_mean import QuantizedMean, message_bytes
from lightning_gossip.algorithm.options import EpochEndOptions
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.simulation.cluster.collective_costs import all_gather_s, all_reduce_bytes, all_reduce_s
from lightning_gossip.simulation.problems.batch_assignment import Session, Task
from lightning_gossip.simulation.run import Process, Run, Strategy


class Rounds(ABC):
    """One run of a synchronous strategy, round by round."""

    @abstractmethod
    def round(self, epoch: int, tasks: Sequence[Task]) -> Process:
        """Make one step of every worker.

        Args:
            epoch: of the round, from 0.
            tasks: by rank.
        """

    @abstractmethod
    def end_session(self) -> Process:
        """All workers have ended the epoch."""


class Synchronous(Strategy):
    """Base of the strategies whose workers make the same steps, one round after the other."""

    @override
    def check(self, workers: int) -> None:
        """Any number will do."""

    @override
    def start(self, run: Run) -> None:
        run.environment.process(_all_rounds(run, self.rounds(run)))

    @abstractmethod
    def rounds(self, run: Run) -> Rounds:
        """The rounds of one run."""


def _all_rounds(run: Run, rounds: Rounds) -> Process:
    for epoch in range(run.plan.sessions):
        session = run.plan.open(epoch, run.living)
        while (tasks := next_round(run, session)) is not None:
            yield from rounds.round(epoch, tasks)
            if run.ended is not None:
                return
        yield from rounds.end_session()
        run.evaluate()
    run.finish("done")


def next_round(run: Run, session: Session) -> list[Task] | None:
    """What all workers train on next; None if they are done. In lock-step either all have something or none has."""
    tasks = [session.next(rank, None) for rank in range(run.workers)]
    return None if tasks[0] is None else [task for task in tasks if task is not None]


def step_times_s(run: Run, starts_s: Sequence[float]) -> list[float]:
    """Seconds that each worker's next step computes.

    Args:
        run: whose.
        starts_s: when each begins it, by rank.
    """
    return [times.next_s(start_s) for times, start_s in zip(run.compute_times, starts_s, strict=True)]


def stall_if_failed(run: Run, ends_s: Sequence[float]) -> bool:
    """Whether a worker fails before it ends its step; nobody can go on without it, so the run ends there.

    Args:
        run: whose.
        ends_s: when each would end it.
    """
    failing = [(at_s, rank) for rank, at_s in run.cluster.failures.items() if at_s < ends_s[rank]]
    if not failing:
        return False
    at_s, rank = min(failing)
    run.record.accounts[rank].failed_s = at_s
    run.living.remove(rank)
    run.record.event(at_s, "fail", rank)
    run.finish("stalled")
    return True


class GradientAveraging(Synchronous):
    """Every step all workers apply the mean of their gradients."""

    overlap: bool = False

    @override
    def rounds(self, run: Run) -> Rounds:
        return GradientRounds(self, run)

    @abstractmethod
    def cost(self, run: Run, at_s: float) -> tuple[float, int]:
        """Seconds of an average that begins at a time, and bytes that each worker sends for it."""

    @abstractmethod
    def averager(self, run: Run) -> Callable[[Tensor], Tensor]:
        """For one run: from the gradients, shape (n, d), to their mean as all workers get it, shape (d,)."""


class GradientRounds(Rounds):
    """The rounds of one run."""

    def __init__(self, strategy: GradientAveraging, run: Run) -> None:
        self._strategy = strategy
        self._run = run
        self._mean = strategy.averager(run)

    @override
    def round(self, epoch: int, tasks: Sequence[Task]) -> Process:
        strategy, run = self._strategy, self._run
        start_s = run.environment.now
        for rank, task in enumerate(tasks):
            run.models.begin(rank, task.batch)
        times_s = [times.next_s() for times in run.compute_times]
        if stall_if_failed(run, [start_s + time_s for time_s in times_s]):
            return
        longest_s = max(times_s)
        average_s, nbytes = strategy.cost(run, start_s + longest_s)
        begins_s = (1.0 - run.cluster.backward_share) * longest_s if strategy.overlap else longest_s
        yield run.environment.timeout(max(longest_s, begins_s + average_s))
        end_s = run.environment.now
        if run.models.numel:
            gradient = self._mean(run.models.gradients())
            run.models.optimizer.step(slice(None), gradient.expand(run.workers, -1), run.lr)
        for rank, (task, time_s) in enumerate(zip(tasks, times_s, strict=True)):
            run.record.compute(rank, start_s, start_s + time_s)
            run.record.wait(rank, start_s + time_s, end_s)
            run.record.accounts[rank].bytes_sent += nbytes
            run.record.event(end_s, "step", rank)
            run.count_step(rank, task.size)
        run.evaluate_if_due(run.workers)

    @override
    def end_session(self) -> Process:
        self._run.end_session(None)
        yield from ()


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class AllReduce(GradientAveraging):
    """DDP: the exact mean of the gradients by an all-reduce.

    Args:
        overlap: the all-reduce goes on during the backward pass, as DDP does it; ``False``: after it.
    """

    name = "ddp"

    overlap: bool = True

    def __post_init__(self) -> None:
        check_choice("overlap", self.overlap, (True, False))

    @override
    def cost(self, run: Run, at_s: float) -> tuple[float, int]:
        seconds = all_reduce_s(run.links, run.living, run.nbytes, at_s=at_s, seed=run.seed)
        return seconds, all_reduce_bytes(run.workers, run.nbytes)

    @override
    def averager(self, run: Run) -> Callable[[Tensor], Tensor]:
        return lambda gradients: gradients.sum(0).div_(run.workers)


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class QSGD(EpochEndOptions, GradientAveraging):
    """All-reduce SGD with quantized gradients; the options of :class:`~lightning_gossip.strategies.QSGDStrategy`.

    Args:
        bits, levels, bucket_size, norm: see :class:`~lightning_gossip.algorithm.compression.qsgd.Quantizer`.
        seed: of the rounding; None for the run's.
        at_rendezvous: makes no difference: the models are equal.
    """

    name = "qsgd"

    bits: int = 4
    levels: int | None = None
    bucket_size: int = 512
    norm: Norm = "max"
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.quantizer  # noqa: B018 - refuses what cannot work

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of the gradients."""
        return Quantizer(bits=self.bits, levels=self.levels, bucket_size=self.bucket_size, norm=self.norm)

    @override
    def cost(self, run: Run, at_s: float) -> tuple[float, int]:
        numel = math.ceil(run.nbytes / run.models.x.element_size())
        payload = message_bytes(self.quantizer, numel)
        seconds = all_gather_s(run.links, run.workers, payload, at_s=at_s, seed=run.seed)
        return seconds, (run.workers - 1) * payload

    @override
    def averager(self, run: Run) -> Callable[[Tensor], Tensor]:
        seed = run.seed if self.seed is None else self.seed
        workers = [QuantizedMean(self.quantizer, seed=seed, rank=rank) for rank in range(run.workers)]

        def mean(gradients: Tensor) -> Tensor:
            messages = [worker.message(gradient) for worker, gradient in zip(workers, gradients, strict=True)]
            replaced = torch.empty_like(gradients[0])
            workers[0].mean(messages, out=replaced)  # the same on all
            return replaced

        return mean
