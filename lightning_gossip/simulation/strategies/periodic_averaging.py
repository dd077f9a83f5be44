"""Local SGD under virtual time: local steps, then one exact average: CPSGD, ADPSGD (arXiv 2007.06134), post-local SGD.

When to average is decided by the package's own period controllers. Between two averagings every worker has its own clock; at
one, all wait for the last, and the ring all-reduce takes its time. Overlapped, an averaging begins when the last worker has
come to its step and ends a ring all-reduce later; its result is applied as a difference, so many steps later on every worker:

    x_i ← x_i + (w̄ − w_i),     w̄ = (1/n) Σ_j w_j
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_gossip.algorithm.checks import check_choice
from lightning_gossip.algorithm.compression.error_feedback_mean import CompressedMean, MeanWire, mean_bytes
from lightning_gossip.algorithm.periodic_averaging.adaptive_period import AdaptivePeriod
from lightning_gossip.algorithm.periodic_averaging.period import ConstantPeriod, Observation, PeriodController
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.cluster.collective_costs import all_reduce_bytes, ring_all_reduce_s
from lightning_gossip.simulation.problems.batch_assignment import Task
from lightning_gossip.simulation.run import Process, Run
from lightning_gossip.simulation.strategies.adpsgd import AtRendezvous, check_at_rendezvous
from lightning_gossip.simulation.strategies.synchronous import Lockstep, Rounds, stall_if_failed


@dataclass(frozen=True, kw_only=True)
class PeriodicAveraging(Lockstep):
    """Averaging now and then; the options of :class:`~lightning_gossip.strategies.PeriodicAveragingStrategy`.

    Args:
        period: steps between two averagings, or the controller that decides them.
        optimizer_state: of the momentum at an averaging: ``"keep"``, ``"average"`` or ``"reset"``.
        overlap: how many steps an averaging may run behind; ``True`` for as many as there are until the next.
        wire: how models are sent; see :mod:`lightning_gossip.algorithm.compression.error_feedback_mean`.
        at_rendezvous: ``"adopt"`` makes every worker take the mean at an epoch's end; ``"evaluate"`` only looks at it.
    """

    name = "periodic_averaging"

    period: int | PeriodController = 8
    optimizer_state: Literal["keep", "average", "reset"] = "keep"
    overlap: bool | int = False
    wire: MeanWire = "float32"
    at_rendezvous: AtRendezvous = "adopt"

    def __post_init__(self) -> None:
        if not isinstance(self.period, PeriodController):
            object.__setattr__(self, "period", ConstantPeriod(self.period))
        check_choice("wire", self.wire, get_args(MeanWire))
        check_choice("optimizer_state", self.optimizer_state, ("keep", "average", "reset"))
        if not isinstance(self.overlap, int) or self.overlap < 0:
            raise ConfigurationError(f"overlap={self.overlap!r} is neither True, False nor a whole number of at least 0.")
        if self.overlap is not False and self.optimizer_state == "reset":
            raise ConfigurationError("overlap with optimizer_state='reset' would throw away the momentum of later steps.")
        check_at_rendezvous(self.at_rendezvous)

    def rounds(self, run: Run) -> Rounds:
        """See :meth:`Lockstep.rounds`."""
        return AveragingRounds(self, run)


@dataclass(frozen=True, kw_only=True)
class AdaptiveAveraging(PeriodicAveraging):
    """ADPSGD: the period adapts; see :class:`~lightning_gossip.algorithm.AdaptivePeriod`."""

    name = "adaptive_averaging"

    period: int | PeriodController = field(default_factory=AdaptivePeriod)


@dataclass
class _Pending:
    """An averaging under way."""

    models: Tensor  # that it is of
    step: int  # after which it began
    ends_s: float
    lr: float


class AveragingRounds(Rounds):
    """All workers' local steps of one run."""

    def __init__(self, strategy: PeriodicAveraging, run: Run) -> None:
        assert isinstance(strategy.period, PeriodController)
        self._run = run
        self._controller = strategy.period
        self._control = self._controller.init()
        self._rule = strategy.optimizer_state
        self._overlap = math.inf if strategy.overlap is True else int(strategy.overlap)
        self._adopts = strategy.at_rendezvous == "adopt"
        self._means = _Means(strategy.wire, run)
        self._clocks_s = np.zeros(run.workers)
        self._step = 0
        self._deviation: tuple[float, float] | None = None  # S_k and γ_k, not yet seen by the controller
        self._pending: _Pending | None = None
        run.averagings = 0

    def round(self, epoch: int, tasks: Sequence[Task]) -> Process:
        """See :meth:`Rounds.round`."""
        run, starts_s = self._run, self._clocks_s
        for rank, task in enumerate(tasks):
            run.models.begin(rank, task.batch)
        ends_s = starts_s + np.array([times.next_s() for times in run.compute_times])
        if stall_if_failed(run, ends_s.tolist()):
            return
        lr = run.lr
        if run.models.numel:
            run.models.optimizer.step(slice(None), run.models.gradients(), lr)
        for rank, (task, start_s, end_s) in enumerate(zip(tasks, starts_s.tolist(), ends_s.tolist(), strict=True)):
            run.record.compute(rank, start_s, end_s)
            run.record.event(end_s, "step", rank)
            run.count_step(rank, task.size)
        self._clocks_s = ends_s
        self._after_step(epoch, lr)
        yield run.environment.timeout(max(0.0, float(self._clocks_s.max()) - run.environment.now))
        run.evaluate_if_due(run.workers)

    def end_session(self) -> Process:
        """See :meth:`Rounds.end_session`."""
        run = self._run
        self._finish()
        distance = run.distance(run.models.x)
        earlier = self._deviation
        compresses = self._means.compresses
        self._begin(run.lr)
        if compresses:  # an exact one follows, with what rounding has kept back
            self._send(run.nbytes)
        self._finish(adopts=self._adopts, settles=True)
        self._means.begin(run.models.x)
        assert self._deviation is not None
        if self._adopts:
            self._control = self._controller.restart(self._control, *self._deviation)
        self._deviation = earlier
        yield run.environment.timeout(max(0.0, float(self._clocks_s.max()) - run.environment.now))
        self._wait_until(np.full(run.workers, run.environment.now))
        run.end_session(distance)

    def _after_step(self, epoch: int, lr: float) -> None:
        """As the strategy does it: an averaging that is due ends, the controller decides, the next one begins."""
        self._step += 1
        if self._pending is not None and self._step >= self._pending.step + self._overlap:
            self._finish()
        deviation, deviation_lr = self._deviation or (None, 0.0)
        self._deviation = None
        run = self._run
        average_now, self._control = self._controller.update(
            self._control, Observation(self._step, epoch, run.progress, deviation=deviation, lr=deviation_lr)
        )
        if average_now:
            self._finish()
            self._begin(lr)
            if self._overlap == 0:
                self._finish()

    def _begin(self, lr: float) -> None:
        run = self._run
        came_s = float(self._clocks_s.max())
        self._pending = _Pending(run.models.x.clone(), self._step, came_s, lr)
        run.record.event(came_s, "average", -1)
        self._send(self._means.nbytes)

    def _send(self, nbytes: int) -> None:
        """A ring all-reduce of the averaging under way."""
        run, pending = self._run, self._pending
        assert pending is not None
        pending.ends_s += ring_all_reduce_s(run.links, run.workers, nbytes, at_s=pending.ends_s, seed=run.seed)
        for account in run.record.accounts:
            account.bytes_sent += all_reduce_bytes(run.workers, nbytes)

    def _finish(self, *, adopts: bool = True, settles: bool = False) -> None:
        """Wait for the averaging under way, if there is one, and apply it, or only look at it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._wait_until(np.maximum(self._clocks_s, pending.ends_s))
        run = self._run
        mean = self._means.settled(pending.models) if settles else self._means.of(pending.models)
        difference = mean - pending.models
        deviation = float(torch.linalg.vector_norm(difference, dim=1, dtype=torch.float64).square().sum()) / run.workers
        self._deviation = (deviation, pending.lr)
        if not adopts:
            return
        assert run.averagings is not None
        run.averagings += 1
        if pending.step == self._step:
            run.models.x.copy_(mean)
        else:
            run.models.x.add_(difference)
        momentum = run.models.optimizer.momentum
        if momentum is not None and self._rule == "average":
            momentum.copy_(momentum.sum(0).div_(run.workers))
        elif momentum is not None and self._rule == "reset":
            momentum.zero_()

    def _wait_until(self, clocks_s: np.typing.NDArray[np.float64]) -> None:
        for rank, (before_s, after_s) in enumerate(zip(self._clocks_s.tolist(), clocks_s.tolist(), strict=True)):
            self._run.record.wait(rank, before_s, after_s)
        self._clocks_s = clocks_s


class _Means:
    """The mean of all workers' models, as it is sent."""

    def __init__(self, wire: MeanWire, run: Run) -> None:
        self._wire = wire
        self._run = run
        self.compresses = False  # the next one, as differences to a mean that all know
        self._codes: list[CompressedMean] = []
        self.begin(run.models.x)

    @property
    def nbytes(self) -> int:
        """Of the vector that the next mean sends round the ring."""
        nbytes, itemsize = self._run.nbytes, self._run.models.x.element_size()
        return mean_bytes(self._wire, nbytes // itemsize, self._run.workers) if self.compresses else nbytes

    def begin(self, models: Tensor) -> None:
        """A session begins: differences refer to the models, if they are equal, else to the first mean, an exact one."""
        self.compresses = False
        if bool((models == models[0]).all()):
            self._refer_to(models[0])

    def of(self, models: Tensor) -> Tensor:
        """Shape (d,), from (n, d)."""
        if not self.compresses or not models.numel():
            mean = models.sum(0).div_(self._run.workers)
            self._refer_to(mean)
            return mean
        sent = [code.begin(vector) for code, vector in zip(self._codes, models, strict=True)]
        reduced = torch.stack(
            [code.reduce(torch.stack([theirs[owner] for theirs in sent])) for owner, code in enumerate(self._codes)]
        )
        means = [code.end(reduced) for code in self._codes]
        return means[0].clone()

    def settled(self, models: Tensor) -> Tensor:
        """The exact mean, with what rounding has kept back."""
        if self.compresses and models.numel():
            models = self.of(models).repeat(self._run.workers, 1)
            for code, vector in zip(self._codes, models, strict=True):
                code.settle(vector)
        return models.sum(0).div_(self._run.workers)

    def _refer_to(self, mean: Tensor) -> None:
        self.compresses = self._wire != "float32"
        if self.compresses and mean.numel():
            n = self._run.workers
            self._codes = [CompressedMean(mean.clone(), workers=n, rank=rank, wire=self._wire) for rank in range(n)]
