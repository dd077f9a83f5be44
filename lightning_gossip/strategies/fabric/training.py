"""The training of one worker under Fabric: what all workers do together, where it begins and ends and wherever they meet.

| a worker is | until |
|---|---|
| not training yet: modules are set up, a checkpoint is loaded | its first loop, batch or epoch |
| in a session: each worker is at a step of its own | all meet |
| between two sessions: all are together | the next batch |
| outside: it comes later, or the others go on without it | the others take it in, at the beginning of an epoch |
| closed: its process ends | |

While a worker is outside, its loops yield no batch.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_gossip.errors import ConfigurationError, PeerError, reason_of
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.membership import uses
from lightning_gossip.runtime.process_end import call_at_exit, forget_at_exit
from lightning_gossip.runtime.sync_point import Agreement, Purpose, SyncPoint
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.data.batch_samplers import EpochBatches
from lightning_gossip.strategies.data.step_accounting import Account, samples_in
from lightning_gossip.strategies.elastic.lost_batches import LostBatches
from lightning_gossip.strategies.fabric.checkpoint import Restored, Standing
from lightning_gossip.strategies.fabric.epochs import LOOP, UserEpochs
from lightning_gossip.strategies.fabric.session import Session
from lightning_gossip.strategies.fabric.work import LoopWork
from lightning_gossip.strategies.fit.metrics import LocalMetrics
from lightning_gossip.strategies.state.shared_tensors import check_averaged_buffers
from lightning_gossip.strategies.state.step_watch import StepWatch
from lightning_gossip.strategies.warning_cache import warning_cache
from lightning_gossip.strategies.worker_algorithm import Algorithm

log = logging.getLogger(__name__)


class FabricTraining:
    """One worker's training, from ``fabric.launch()`` to the end of its process.

    A session lasts from a batch until all meet, at a loader's end, or before where somebody asks for it; then the model is the
    exact mean.

    Args:
        strategy: whose processes are connected, and whose algorithm trains.
        take_part: in what rank 0 does together with all workers between two batches, given what it says of it.
        epochs: asked how many the whole run has; None if nobody knows.

    Attributes:
        account: this worker's counts and times.
        work: its batches.
        algorithm: what happens in its sessions; None before it trains, and with a single worker.
        accumulates: whether the gradients of the backward pass under way are not a whole step's.
    """

    def __init__(
        self, strategy: DecentralizedStrategy, take_part: Callable[[Any], object], *, epochs: Callable[[], int | None]
    ) -> None:
        self._strategy = strategy
        self._take_part = take_part
        self._timeline = Timeline()
        members = strategy.members
        self.account = Account(strategy.global_rank if members is None else members.me.initial_rank, self._timeline)
        self.work = LoopWork(strategy, batch_s=lambda: self.account.batch_s, epochs=epochs)
        self.algorithm: Algorithm | None = None
        self.accumulates = False
        self._has_begun = False
        self._has_ended = False
        self._session: Session | None = None  # that is open
        self._modules = nn.ModuleList()
        self._model = strategy.shared_model(self._modules, strategy.fit_options.averaged_buffers)
        self._watch = StepWatch(lambda: self._model.optimized)
        self._sync_point = SyncPoint(strategy.collectives_device, strategy.all_workers)
        self._restored: Restored | None = None
        self._epochs = UserEpochs(strategy, self.work, self.account, modules=self._modules, model=self._model)
        self._lost = LostBatches(self.work, lambda: strategy.members)
        self._followed = 0  # the generation of members that the algorithm knows
        self._asked: list[tuple[Callable[[], None], Any]] = []  # in the step under way, of what all do together
        self._metrics = LocalMetrics(strategy.all_workers, lambda: not self.is_inside)

    def start(self) -> None:
        """Let the strategy report of this training, keep metrics local, and end the training with the process."""
        self._strategy.timeline, self._strategy.report = self._timeline, self.account.report
        self._metrics.install()
        call_at_exit(self._close_at_exit)

    # -- what is trained -----------------------------------------------------------------------------------------------

    def add(self, module: nn.Module) -> None:
        """Add a module that is set up.

        Raises:
            ConfigurationError: if another one trains already.
        """
        if self._has_begun:
            raise ConfigurationError("A module is set up after training has begun. Call fabric.setup for all of them before.")
        self._modules.append(module)

    @property
    def place(self) -> tuple[int, int]:
        """This worker's rank, and how many workers there are."""
        return self._strategy.share_of_work

    @property
    def is_outside(self) -> bool:
        """Whether the others go on without this worker: it comes later, or they have excluded it."""
        return self._strategy.members is not None and self._strategy.members.outside

    @property
    def is_inside(self) -> bool:
        """Whether a session is open: from the first batch of a loop to its end each worker is at a step of its own."""
        return self._session is not None

    # -- epochs of the user's loop -------------------------------------------------------------------------------------

    @property
    def first_epoch(self) -> int:
        """The epoch that this worker begins with: 0, or that of the checkpoint that was loaded."""
        return 0 if self._restored is None else self._restored.standing.epoch

    def begin_epoch(self, epoch: int, state: dict[str, Any]) -> int:
        """Begin an epoch of the user's loop: take in the workers that wait, or wait to be taken in. All workers call it.

        Args:
            epoch: that would be the next one.
            state: what a worker that is taken in gets beside the model and the optimizers' states.

        Returns:
            The epoch that begins.
        """
        self.end_pass()
        if self._epochs.begin(epoch, state):
            self._restored = None
            if self.algorithm is not None:
                self.algorithm.begin_anew()
        self._begin()
        self._follow_members()
        assert self._epochs.epoch is not None
        return self._epochs.epoch

    def end_epoch(self) -> int:
        """End an epoch of the user's loop; returns the number of the next one."""
        self.end_pass()
        assert self._epochs.epoch is not None
        self._epochs.epoch += 1
        return self._epochs.epoch

    def end_epochs(self) -> None:
        """End the user's loop: nobody is taken in any more."""
        self._epochs.end()

    # -- in the order of a loop over a loader --------------------------------------------------------------------------

    def begin_pass(self) -> bool:
        """Begin a loop over a loader, no other one being under way; False if it is empty, since this worker is outside.

        Raises:
            ConfigurationError: if this worker comes later than the others, and its script takes nobody in.
        """
        self.end_pass()
        if self.is_outside:
            if self._epochs.epoch is None:
                raise ConfigurationError(
                    f"Rank {self._strategy.global_rank} comes later than the others. They take it in where an epoch begins, if"
                    f" the script says where that is: write '{LOOP}' for the loop over epochs. Or start all of the job, from"
                    " its last checkpoint."
                )
            return False
        self._begin()
        self._follow_members()
        return True

    def batches_of_pass(self, loader: DataLoader[Any], batches: EpochBatches | None, number: int) -> Iterator[Any]:
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
                    self._open_session().begin_batch()
                    self.work.samples += samples_in(batch)
                    yield batch
                    self._end_batch()
                if not self._meet_at_end():
                    return

    def before_backward(self) -> None:
        """Begin a session, if the loop iterates over something else than a loader of Fabric's."""
        if not self.is_inside and not self.is_outside:
            self._open_session().begin_batch()

    def after_backward(self) -> None:
        """Reduce the gradients of a whole step, where the algorithm does so."""
        if self.algorithm is not None and not self.accumulates and self.is_inside:
            self.algorithm.reduce_gradients()

    def step(self, optimizer: Optimizer) -> None:
        """Follow a step of an optimizer: the algorithm exchanges models, and all meet if one of them asks for it."""
        if self.is_outside:
            return
        self._open_session().step(optimizer)  # which may be of gradients that a loop has left over
        self._after_step()

    def _end_batch(self) -> None:
        """The next batch is asked for, or there is none."""
        if self._session is not None and self._session.end_batch():
            self._after_step()

    def _after_step(self) -> None:
        """Do what waits for the end of a step: of this worker's asking, or of another's."""
        asked, self._asked = self._asked, []
        for do, says in asked:
            self.do_together(do, says)
        if self.is_inside and self.algorithm is not None and self.algorithm.sync_requested():
            self._synchronize(Purpose.REQUESTED)

    def end_pass(self) -> None:
        """Meet all workers; nothing where no session is open."""
        self._end_batch()
        while self.is_inside:
            self._meet_at_end()

    # -- what needs all workers ------------------------------------------------------------------------------------------

    def is_together(self, what: str, *, warns: bool = True) -> bool:
        """Whether a collective can be made now: not between two batches, where each worker is at a step of its own.

        Args:
            what: is made.
            warns: if it cannot.
        """
        if not self.is_inside or (self.algorithm is not None and self.algorithm.is_lockstep):
            return True
        if warns:
            warning_cache.warn(
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
        if self._session is None:
            do()
        elif self._session.is_in_batch:
            warning_cache.warn("In a training step a checkpoint cannot be written: it needs all workers. It is after the step.")
            self._asked.append((do, says))
        elif self._strategy.global_rank == 0:
            self._synchronize(Purpose.SAVE, asks=(says,), requests=True, do=do)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint stands that is loaded, if nothing has been trained yet."""
        if not self._has_begun:
            self._restored = Restored(state)

    def standing(self, *, is_inside: bool) -> tuple[Standing, dict[str, Any]]:
        """Where the training stands, and the tensors of the algorithm's state. Collective.

        Args:
            is_inside: whether all have met in the middle of a loop over a loader.
        """
        position = None
        if is_inside and self.work.batches is not None:
            position = self.work.position(self._lost.position(self._strategy.all_workers))
        work, epoch = self.work, self.work.passes
        if self._epochs.epoch is not None:
            epoch = self._epochs.epoch + (not is_inside and work.passes_in_epoch > 0)
        elif not self._has_begun and self._restored is not None:  # saved again before anything is trained
            epoch = self._restored.standing.epoch
        tensors = (
            {}
            if self.algorithm is None
            else self.algorithm.common_tensors(self._sync_point, adopts=True, keeps=lambda: self._strategy.writes)
        )
        return Standing(epoch, work.passes, self.account.steps, position, sorted(self._model.trained)), tensors

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None) -> None:
        """End the training, since this worker's process ends or another Fabric is launched. May be called twice.

        Args:
            error: by which, if there is one.
        """
        if self._has_ended:
            return
        forget_at_exit(self._close_at_exit)
        in_session, self._has_ended, self._session = self.is_inside, True, None
        members = self._strategy.members
        if error is not None or in_session:
            uses.abort()
        if members is not None and (error is not None or in_session):
            members.abort("It has ended in the middle of an epoch." if error is None else reason_of(error))
        self.work.close()
        self._metrics.restore()
        if self.algorithm is not None:
            self.algorithm.close(together=error is None and not in_session)
            self.algorithm = None  # and the models that it has published
        if members is not None:
            members.changed.clear()
            members.rest()  # rank 0 may hold the store: it does not leave before the others

    def _close_at_exit(self) -> None:
        self.close(getattr(sys, "last_value", None))

    # -- details -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Training is about to begin: all workers are here, or take this one in. Collective, once."""
        if self._has_begun:
            return
        self._has_begun = True
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

    def _open_session(self) -> Session:
        """The session that is open; a new one if there is none."""
        if self._has_ended:
            raise ConfigurationError(
                "This Fabric has ended, since another one has been launched in this process. Train with the last one."
            )
        if self._session is None:
            self._begin()
            self._session = Session(
                self._strategy,
                self.algorithm,
                model=self._model,
                work=self.work,
                account=self.account,
                watch=self._watch,
            )
        return self._session

    def _meet_at_end(self) -> bool:
        """Meet the others at the end of the epoch; whether it goes on, with batches that a worker has left that has failed."""
        if self._session is None and self.is_outside:
            return False
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
        agreement = self._open_session().meet(self._sync_point, purpose, asks=asks, requests=requests)
        self._session = None
        self._metrics.forget()
        if agreement.lost_store:
            self._lost.lose_store()
            if self.algorithm is not None:
                self.algorithm.follow_members()
        if self.is_outside:
            self._leave_others()
            return agreement
        if agreement.asked:
            if do is not None:
                do()
            else:
                self._take_part(agreement.asked[0])
        if not agreement.over:
            self._open_session()
        return agreement

    def _leave_others(self) -> None:
        """The others have excluded this worker, and go on.

        Raises:
            PeerError: if the script takes nobody in.
        """
        self.work.batches = None
        what = "This worker sent no heartbeat for so long that the others go on without it (peer_timeout_s)."
        if self._epochs.epoch is None:
            raise PeerError(
                f"{what} They take it in again where an epoch begins, if the script says where that is: write '{LOOP}' for"
                " the loop over epochs. Or start all of the job from its last checkpoint."
            )
        log.warning("%s It asks them to take it in again when its loop begins the next epoch.", what)

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
