"""The training of one worker under Fabric: sessions of a user's loop, and the synchronisation points between them.

| phase | where the worker is | ends by |
|---|---|---|
| ``SETUP`` | modules are set up, a checkpoint is loaded | the first loop, batch or epoch → ``TOGETHER`` |
| ``TOGETHER`` | where all are: before the first batch, or all have met | a session is opened → ``OPEN`` |
| ``OPEN`` | in a session, before its first batch | a batch is fetched → ``BATCH``; all meet → ``TOGETHER`` |
| ``BATCH`` | in a batch that is not counted yet | its step, or the next batch → ``BETWEEN`` |
| ``BETWEEN`` | between two batches of a session, at a step of its own | the next batch → ``BATCH``; all meet → ``TOGETHER`` |
| ``CLOSED`` | the process ends | |

A worker that is outside, because the others go on without it, is ``SETUP`` or ``TOGETHER``: its loops are empty until the
others take it in, at the beginning of an epoch.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Any

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.utilities.data import _extract_batch_size
from torch import nn
from torch.utils.data import DataLoader

from lightning_gossip.errors import ConfigurationError, PeerError, reason_of
from lightning_gossip.runtime.clock import Timeline, now_s
from lightning_gossip.runtime.membership import uses
from lightning_gossip.runtime.process_end import call_at_exit
from lightning_gossip.runtime.sync_point import Agreement, Arrival, Purpose, SyncPoint, agree
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.data.batch_samplers import EpochBatches
from lightning_gossip.strategies.data.step_accounting import Account
from lightning_gossip.strategies.elastic.lost_batches import LostBatches
from lightning_gossip.strategies.fabric.checkpoint import Restored, Standing
from lightning_gossip.strategies.fabric.joining import Joining, Snapshot
from lightning_gossip.strategies.fabric.work import LoopWork
from lightning_gossip.strategies.fit.fit import warn_once
from lightning_gossip.strategies.fit.meeting import meet
from lightning_gossip.strategies.fit.metrics import LocalMetrics
from lightning_gossip.strategies.state.shared_tensors import check_averaged_buffers
from lightning_gossip.strategies.state.step_watch import StepWatch
from lightning_gossip.strategies.worker_algorithm import Algorithm

log = logging.getLogger(__name__)

_LOOP = "for epoch in fabric.strategy.epochs_left(EPOCHS, state)"


class Phase(Enum):
    """Where a worker is in its training; the module's table says what ends each."""

    SETUP = "setup"
    TOGETHER = "together"
    OPEN = "open"
    BATCH = "batch"
    BETWEEN = "between"
    CLOSED = "closed"


class FabricTraining:
    """One worker's training, from ``fabric.launch()`` to the end of its process.

    A session is open from a loader's first batch to its last. In it no worker waits for another, unless the algorithm does. At
    its end all meet, and the model is the exact mean.

    Args:
        strategy: whose processes are connected, and whose algorithm trains.
        take_part: in what rank 0 does together with all workers between two batches, given what it says of it.
    """

    def __init__(self, strategy: DecentralizedStrategy, take_part: Callable[[Any], object]) -> None:
        self._strategy = strategy
        self._take_part = take_part
        self._timeline = strategy.timeline = Timeline()
        members = strategy.members
        self.account = Account(strategy.global_rank if members is None else members.me.initial_rank, self._timeline)
        self.accumulates = False  # whether the gradients of the backward pass under way are not a whole step's
        self.planned_epochs: int | None = None  # of the whole run
        self.work = LoopWork(strategy, batch_s=lambda: self.account.batch_s)
        self.algorithm: Algorithm | None = None
        self._phase = Phase.SETUP
        self._modules = nn.ModuleList()
        self._model = strategy.shared_model(self._modules, strategy.fit_options.averaged_buffers)
        self._sync_point = SyncPoint(strategy.collectives_device, strategy.all_workers)
        self._restored: Restored | None = None
        self._epoch: int | None = None  # of the user's loop, if that is over epochs_left
        self._passes_before = 0  # that epoch
        self._lost = LostBatches(self.work, lambda: strategy.members)
        self._followed = 0  # the generation of members that the algorithm knows
        self._steps = StepWatch(lambda: self._model.optimized)
        self._asked: list[tuple[Callable[[], None], Any]] = []  # in the step under way, of what all do together
        self._metrics = LocalMetrics(strategy.all_workers, lambda: not self._in_session)
        self._metrics.install()
        self._joining = Joining(strategy, self, about=lambda: self.work.about, modules=self._modules, model=self._model)
        call_at_exit(lambda: self.close(getattr(sys, "last_value", None)))

    # -- what is trained -----------------------------------------------------------------------------------------------

    def add(self, module: nn.Module) -> None:
        """A module is set up.

        Raises:
            ConfigurationError: if another one trains already.
        """
        if self._phase is not Phase.SETUP:
            raise ConfigurationError("A module is set up after training has begun. Call fabric.setup for all of them before.")
        self._modules.append(module)

    @property
    def place(self) -> tuple[int, int]:
        """This worker's rank, and how many workers there are."""
        return self._strategy.share_of_work

    @property
    def progress(self) -> float:
        """Loops over loaders that all have ended, with the share of the one under way."""
        return self.work.passes + self.work.share

    @property
    def is_outside(self) -> bool:
        """Whether the others go on without this worker: it comes later, or they have excluded it."""
        return self._strategy.members is not None and self._strategy.members.outside

    @property
    def _in_session(self) -> bool:
        return self._phase in (Phase.OPEN, Phase.BATCH, Phase.BETWEEN)

    # -- epochs of the user's loop -------------------------------------------------------------------------------------

    @property
    def first_epoch(self) -> int:
        """The epoch that this worker begins with: 0, or that of the checkpoint that was loaded."""
        return 0 if self._restored is None else self._restored.standing.epoch

    def begin_epoch(self, epoch: int, state: dict[str, Any]) -> int:
        """An epoch of the user's loop begins: take in the workers that wait, or wait to be taken in. All workers call it.

        Args:
            epoch: that would be the next one.
            state: what a worker that is taken in gets beside the model and the optimizers' states.

        Returns:
            The epoch that begins.
        """
        self.end_pass()
        members, is_first = self._strategy.members, self._epoch is None
        self._epoch = epoch
        if members is not None and members.outside:
            self._joining.join(members, state)
            if self.algorithm is not None:
                self.algorithm.begin_anew()
        elif members is not None and is_first:
            members.open_admission()
        elif members is not None:
            self._joining.admit(members, state)
        self._start()
        self._follow_members()
        self._passes_before = self.work.passes
        return self._epoch

    def end_epoch(self) -> int:
        """The user's loop has come to its end, or to the next epoch, which is returned."""
        assert self._epoch is not None
        self.end_pass()
        self._epoch += 1
        return self._epoch

    def end_epochs(self) -> None:
        """The user's loop has ended: nobody is taken in any more."""
        if self._strategy.members is not None:
            self._strategy.members.close_admission()

    def snapshot(self) -> Snapshot:
        """Where the training stands, for workers that are taken in."""
        work = self.work
        return Snapshot(work.key, self._epoch or 0, work.passes, self.account.steps, work.loaders, work.assignments())

    def apply(self, snapshot: Snapshot) -> None:
        """Stand where the others stand, who take this worker in."""
        self._restored = None
        self._epoch, self.account.steps = snapshot.epoch, snapshot.steps
        self.work.follow(snapshot.key, snapshot.passes, snapshot.loaders, snapshot.assignments)

    # -- in the order of a loop over a loader --------------------------------------------------------------------------

    def begin_pass(self) -> bool:
        """A loop over a loader begins, and no other one is under way; False if it is empty, since this worker is outside.

        Raises:
            ConfigurationError: if this worker comes later than the others, and its script takes nobody in.
        """
        self.end_pass()
        if self.is_outside:
            if self._epoch is None:
                raise ConfigurationError(
                    f"Rank {self._strategy.global_rank} comes later than the others. They take it in where an epoch begins, if"
                    f" the script says where that is: write '{_LOOP}' for the loop over epochs. Or start all of the job, from"
                    " its last checkpoint."
                )
            return False
        self._start()
        self._follow_members()
        return True

    def session(self, loader: DataLoader[Any], batches: EpochBatches | None, number: int) -> Iterator[Any]:
        """The batches of one loop over a loader; all workers meet at its end.

        Args:
            loader: reads them.
            batches: which; None where they are the user's own.
            number: of the loader.
        """
        with self.work.looping(batches, number):
            while True:
                for batch in loader:
                    if self.is_outside:
                        return
                    self._begin_batch()
                    self.work.samples += next((size for size in _extract_batch_size(batch) if size is not None), 1)
                    yield batch
                    self._end_batch()
                if not self._meet_at_end():
                    return

    def before_backward(self) -> None:
        """A loop that iterates over something else begins its session here."""
        if not self._in_session and not self.is_outside:
            self._begin_batch()

    def after_backward(self) -> None:
        """A backward pass has ended."""
        if self.algorithm is not None and not self.accumulates and self._in_session:
            self.algorithm.reduce_gradients()

    def step(self, lr: float) -> None:
        """An optimizer has stepped: publish the model, take over merges, and meet the others if one of them asks for it."""
        if self.is_outside:
            return
        if not self._in_session:  # of gradients that a loop has left over
            self._open()
        self._count_batch()
        self._count_step(lr)
        self._steps.mark(heard=True)
        self._after_step()

    def _count_step(self, lr: float) -> None:
        # a second optimizer's step on the same batch is a step too
        self.account.forward_passes = max(1, self.account.forward_passes)
        step = self.account.count_step(lr=lr, epoch=self.work.passes)
        if self.planned_epochs is not None:
            step = replace(step, progress=min(1.0, self.progress / self.planned_epochs))
        if self.algorithm is not None:
            self.algorithm.step(step)

    def _after_step(self) -> None:
        """Do what waits for the end of a step: of this worker's asking, or of another's."""
        asked, self._asked = self._asked, []
        for do, says in asked:
            self.do_together(do, says)
        if self._in_session and self.algorithm is not None and self.algorithm.sync_requested():
            self._synchronize(Purpose.REQUESTED)

    def end_pass(self) -> None:
        """All workers meet; nothing where no session is open."""
        self._end_batch()
        while self._in_session:
            self._meet_at_end()

    @property
    def is_inside(self) -> bool:
        """Whether this worker is between the first batch of a loop and its end, where each is at a step of its own."""
        return self._in_session

    # -- what needs all workers ------------------------------------------------------------------------------------------

    def is_together(self, what: str, *, warns: bool = True) -> bool:
        """Whether a collective can be made now: not between two batches, where each worker is at a step of its own.

        Args:
            what: is made.
            warns: if it cannot.
        """
        if not self._in_session or (self.algorithm is not None and self.algorithm.in_step):
            return True
        if warns and warn_once(what):
            rank_zero_warn(
                f"Between two batches {what} needs all workers, and each is at a step of its own. Each worker gets its own"
                " value. Make it when the loader has ended, or after fabric.strategy.synchronize()."
            )
        return False

    def do_together(self, do: Callable[[], None], says: Any) -> None:
        """Do something that needs all workers: at once where they are together, else all meet for it, if this is rank 0.

        Other ranks do it when rank 0 asks for it.

        Args:
            do: what.
            says: tells the others what they take part in.
        """
        if not self._in_session:
            do()
        elif self._phase is Phase.BATCH:
            if warn_once("a checkpoint in a step"):
                rank_zero_warn("In a training step a checkpoint cannot be written: it needs all workers. It is after the step.")
            self._asked.append((do, says))
        elif self._strategy.global_rank == 0:
            self._synchronize(Purpose.SAVE, asks=(says,), requests=True, do=do)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def resume(self, state: dict[str, Any]) -> None:
        """A checkpoint is loaded: go on where it stands, if nothing has been trained yet."""
        if self._phase is Phase.SETUP:
            self._restored = Restored(state)

    def standing(self, *, is_inside: bool) -> tuple[Standing, dict[str, Any]]:
        """Where the training stands, and the tensors of the algorithm's state. Collective.

        Args:
            is_inside: whether all have met in the middle of a loop over a loader.
        """
        position = None
        if is_inside and self.work.batches is not None:
            position = self.work.position(self._lost.position(self._strategy.all_workers))
        epoch = passes = self.work.passes
        if self._epoch is not None:
            epoch = self._epoch + (not is_inside and passes > self._passes_before)
        elif self._phase is Phase.SETUP and self._restored is not None:  # saved again before anything is trained
            epoch = self._restored.standing.epoch
        tensors = {} if self.algorithm is None else self.algorithm.common_tensors(self._sync_point, adopts=True)
        return Standing(epoch, passes, self.account.steps, position, sorted(self._model.trained)), tensors

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None) -> None:
        """This worker's process ends. May be called twice.

        Args:
            error: by which, if there is one.
        """
        if self._phase is Phase.CLOSED:
            return
        in_session, self._phase = self._in_session, Phase.CLOSED
        members = self._strategy.members
        if error is not None or in_session:
            uses.abort()
        if members is not None and (error is not None or in_session):
            members.abort("It has ended in the middle of an epoch." if error is None else reason_of(error))
        self.work.close()
        self._metrics.restore()
        if self.algorithm is not None:
            self.algorithm.close(together=error is None and not in_session)
        if members is not None:
            members.rest()  # rank 0 may hold the store: it does not leave before the others

    # -- details -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Training is about to begin: all workers are here, or take this one in. Collective, once."""
        if self._phase is not Phase.SETUP:
            return
        self._phase = Phase.TOGETHER
        check_averaged_buffers(self._modules, self._strategy.fit_options.averaged_buffers)
        if not self.work.key:
            self.work.key = self._strategy.all_workers.broadcast(uuid.uuid4().hex[:12])
            self._begin_at()
        if self._strategy.workers > 1:
            self.algorithm = self._strategy.algorithm(self._timeline)
            if self._restored is not None:
                self._restored.load_algorithm(self.algorithm, self._strategy)
            self.algorithm.start()
        self._followed = self._generation

    def _begin_at(self) -> None:
        """Begin where the checkpoint stands that all have loaded, or at the beginning."""
        standing = Standing(0, 0, 0, None, []) if self._restored is None else self._restored.standing
        for rank, (epoch, passes) in enumerate(
            self._strategy.all_workers.gather((standing.epoch, standing.passes), kind="where the training begins")
        ):
            if (epoch, passes) != (standing.epoch, standing.passes):
                raise ConfigurationError(
                    f"Rank {self._strategy.global_rank} begins with epoch {standing.epoch}, and rank {rank} with epoch {epoch}."
                    " Call fabric.load with the same checkpoint on every rank."
                )
        self.work.passes, self.work.restored = standing.passes, self._restored
        self._model.learn(standing.trained)
        self.account.begin(standing.steps, None)

    @property
    def _generation(self) -> int:
        return 0 if self._strategy.members is None else self._strategy.members.generation

    def _follow_members(self) -> None:
        """Ranks may have changed since the last session: the algorithm follows, on all members."""
        if self.algorithm is not None and self._generation != self._followed:
            self.algorithm.follow_members()
            self._followed = self._generation

    def _open(self) -> None:
        self._start()
        if self.work.batches is not None:
            self.work.batches.forget_agreement()
        self._model.open()
        if self.algorithm is not None:
            self.algorithm.open(self._model)
        self.account.open_session()
        self._phase = Phase.OPEN

    def _begin_batch(self) -> None:
        if not self._in_session:
            self._open()
        is_first, self._phase = self._phase is Phase.OPEN, Phase.BATCH
        self.work.begin_batch()
        if self.algorithm is not None and self.account.forward_passes == 0:
            self.algorithm.begin_step()
        if is_first:
            self._steps.begin()

    def _end_batch(self) -> None:
        """The next batch is asked for, or there is none: see whether the one under way has made a step that nobody has said."""
        if self._phase is Phase.BETWEEN:
            self._steps.mark(heard=True)  # what was changed since its step (clipped weights) is none
        if self._phase is not Phase.BATCH:
            return
        self._count_batch()
        if self._steps.has_stepped():
            groups = [group for optimizer in self._strategy._optimizers for group in optimizer.param_groups]
            self._count_step(max((float(group["lr"]) for group in groups if "lr" in group), default=0.0))
            self._steps.mark()
        self._after_step()

    def _count_batch(self) -> None:
        """Count the batch under way: at its optimizer's step, or, if it has none, at its end."""
        if self._phase is not Phase.BATCH:
            return
        self._phase = Phase.BETWEEN
        if self._strategy.members is not None:
            self._strategy.members.monitor.raise_failure()
        self.work.end_batch()
        self.account.end_batch(self.algorithm)

    def _meet_at_end(self) -> bool:
        """Meet the others at the end of the epoch; whether it goes on, with batches that a worker has left that has failed."""
        if not self._in_session:
            if self.is_outside:
                return False
            self._open()
        while not self._synchronize(Purpose.EPOCH_END).over:
            if self.is_outside:
                return False
        if self.is_outside:
            return False
        if self._makes_up():
            return True
        self.work.end()
        return False

    def _synchronize(
        self,
        purpose: Purpose,
        *,
        asks: tuple[Any, ...] = (),
        requests: bool = False,
        do: Callable[[], None] | None = None,
    ) -> Agreement:
        """Meet once: the model becomes the exact mean. Those in the middle of an epoch go on afterwards."""
        algorithm = self.algorithm
        lost = (algorithm is not None and algorithm.lost_store) or self.work.lost_store
        arrival = Arrival(purpose, self.account.steps, asks=asks, lost_store=lost)
        if algorithm is None:
            agreement = agree([arrival])
        else:
            if requests:
                algorithm.request_sync()
            agreement = self._meet(algorithm, arrival)
        self._phase = Phase.TOGETHER
        self._metrics.forget()
        self.account.close_session()
        if agreement.lost_store:
            self._lost.lose_store()
            if algorithm is not None:
                algorithm.follow_members()
        if self.is_outside:
            self._leave_others()
            return agreement
        if agreement.asked:
            if do is not None:
                do()
            else:
                self._take_part(agreement.asked[0])
        if not agreement.over:
            self._open()
        return agreement

    def _leave_others(self) -> None:
        """The others have excluded this worker, and go on.

        Raises:
            PeerError: if the script takes nobody in.
        """
        self.work.batches = None
        what = "This worker sent no heartbeat for so long that the others go on without it (peer_timeout_s)."
        if self._epoch is None:
            raise PeerError(
                f"{what} They take it in again where an epoch begins, if the script says where that is: write '{_LOOP}' for"
                " the loop over epochs. Or start all of the job from its last checkpoint."
            )
        log.warning("%s It asks them to take it in again when its loop begins the next epoch.", what)

    def _meet(self, algorithm: Algorithm, arrival: Arrival) -> Agreement:
        met = meet(
            algorithm,
            self._model,
            self.account,
            self._sync_point,
            arrival,
            arrived_s=now_s(),
            tell=lambda: self.account.described(self.work, algorithm),
        )
        self.account.publish(met.told, lost=self._sync_point.workers.excluded)
        self._strategy.report = self.account.report
        return met.agreement

    def _makes_up(self) -> bool:
        """Assign what a worker that has failed has left of the epoch; False if there is nothing. All members call it."""
        members, batches = self._strategy.members, self.work.batches
        if members is None:
            return False
        goes_on = False
        if batches is not None and not self._lost.are_assigned_to(members.generation):
            self._lost.collect(members)
            position = self._lost.position(members)
            goes_on = bool(position.pending or position.pieces)
            batches.rank, batches.workers = self._strategy.share_of_work
            if goes_on:
                batches.resume(position)
        self._follow_members()
        return goes_on
