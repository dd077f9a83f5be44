"""What one worker does alone: its batches and steps between two synchronisation points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from torch.optim import Optimizer

from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.sync_point import Agreement, Arrival, Purpose, SyncPoint, agree
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.data.step_accounting import Account
from lightning_gossip.strategies.fabric.work import LoopWork
from lightning_gossip.strategies.fit.meeting import meet
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from lightning_gossip.strategies.state.step_watch import StepWatch
from lightning_gossip.strategies.worker_algorithm import Algorithm, lr_read_by


class Phase(Enum):
    """Where a worker is in its session; the table of :class:`Session` says what ends each."""

    OPEN = "open"
    BATCH = "batch"
    BETWEEN = "between"


class Session:
    """A worker's training from one synchronisation point to the next. Nobody waits for another, unless the algorithm does.

    | phase | where the worker is | ends by |
    |---|---|---|
    | ``OPEN`` | before the first batch | a batch is fetched → ``BATCH`` |
    | ``BATCH`` | in a batch that is not counted yet | its step, or the next batch → ``BETWEEN`` |
    | ``BETWEEN`` | between two batches | the next batch → ``BATCH`` |

    In each phase all may meet, which ends the session.

    Args:
        strategy: whose optimizers step.
        algorithm: exchanges models or gradients; None with a single worker, which trains plainly.
        model: of this worker.
        work: its batches.
        account: its counts and times.
        watch: of the model, for steps that nobody says.
    """

    def __init__(
        self,
        strategy: DecentralizedStrategy,
        algorithm: Algorithm | None,
        *,
        model: SharedModel,
        work: LoopWork,
        account: Account,
        watch: StepWatch,
    ) -> None:
        self._strategy = strategy
        self._algorithm = algorithm
        self._model = model
        self._work = work
        self._account = account
        self._watch = watch
        self._phase = Phase.OPEN
        if work.batches is not None:
            work.batches.forget_agreement()
        model.open()
        if algorithm is not None:
            algorithm.open(model)
        account.open_session()

    @property
    def is_in_batch(self) -> bool:
        """Whether a batch is being trained on: no other worker is waited for."""
        return self._phase is Phase.BATCH

    def begin_batch(self) -> None:
        """Begin a batch that has been fetched."""
        is_first, self._phase = self._phase is Phase.OPEN, Phase.BATCH
        self._work.begin_batch()
        if self._algorithm is not None and self._account.forward_passes == 0:
            self._algorithm.begin_step()
        if is_first:
            self._watch.begin()

    def end_batch(self) -> bool:
        """End the batch under way, since the next one is asked for, or there is none; count a step of it that nobody has said.

        Returns:
            Whether there was one that was not counted yet.
        """
        if self._phase is Phase.BETWEEN:
            self._watch.mark(heard=True)  # what was changed since its step (clipped weights) is none
        if not self.is_in_batch:
            return False
        self._count_batch()
        if self._watch.has_stepped():
            self._count_step(self._strategy._optimizers)
            self._watch.mark()
        return True

    def step(self, optimizer: Optimizer) -> None:
        """Follow a step of an optimizer: publish the model, and take over merges."""
        if self.is_in_batch:
            self._count_batch()
        self._count_step([optimizer])
        self._watch.mark(heard=True)

    def meet(self, sync_point: SyncPoint, purpose: Purpose, *, asks: tuple[Any, ...] = (), requests: bool = False) -> Agreement:
        """Meet all workers: the model becomes the exact mean, and the session ends. Collective.

        Args:
            sync_point: the collectives of all workers.
            purpose: for which this worker comes.
            asks: what rank 0 wants done together.
            requests: whether to request it of the others after their current step.
        """
        algorithm, account = self._algorithm, self._account
        lost = (algorithm is not None and algorithm.lost_store) or self._work.lost_store
        arrival = Arrival(purpose, account.steps, asks=asks, lost_store=lost)
        if algorithm is None:
            agreement = agree([arrival])
        else:
            if requests:
                algorithm.request_sync()
            met = meet(
                algorithm,
                self._model,
                account,
                sync_point,
                arrival,
                arrived_s=now_s(),
                tell=lambda: account.described(self._work, algorithm),
            )
            account.publish(met.told, lost=sync_point.workers.excluded)
            agreement = met.agreement
        account.close_session()
        return agreement

    def _count_batch(self) -> None:
        """Count the batch under way: at its optimizer's step, or, if it has none, at its end."""
        self._phase = Phase.BETWEEN
        self._strategy.all_workers.raise_failure()
        self._work.end_batch()
        self._account.end_batch(self._algorithm)

    def _count_step(self, optimizers: Sequence[Optimizer]) -> None:
        lr = lr_read_by(self._algorithm, optimizers, default=0.0)
        # a second optimizer's step on the same batch is a step too
        self._account.forward_passes = max(1, self._account.forward_passes)
        step = self._account.count_step(lr=lr, epoch=self._work.passes)
        share = self._work.share_of_run
        if share is not None:
            step = replace(step, progress=share)
        if self._algorithm is not None:
            self._algorithm.step(step)
