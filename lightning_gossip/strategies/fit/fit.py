"""One fit of one worker: sessions of training without a collective, and the synchronisation points between them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import Timeline, now_s
from lightning_gossip.runtime.islands.flags import StepFlag
from lightning_gossip.runtime.sync_point import (
    Agreement,
    Arrival,
    Purpose,
    SyncPoint,
    agree,
)
from lightning_gossip.runtime.workers import Workers
from lightning_gossip.strategies.data.epoch_progress import FitWork
from lightning_gossip.strategies.data.step_accounting import Account
from lightning_gossip.strategies.elastic.membership_changes import MembershipChanges
from lightning_gossip.strategies.fit import resume
from lightning_gossip.strategies.fit.meeting import Parts, meet
from lightning_gossip.strategies.fit.metrics import LocalMetrics, logs_something
from lightning_gossip.strategies.islands.in_fit import FitIsland
from lightning_gossip.strategies.lightning.asking import Ask, saves_passed
from lightning_gossip.strategies.lightning.csv_logger_takeover import local_log_dir
from lightning_gossip.strategies.lightning.loop_progress import (
    epochs_processed,
    has_skipped,
    mean_step,
    set_global_step,
    skip_validation,
)
from lightning_gossip.strategies.lightning.worker_processes import processes_of
from lightning_gossip.strategies.options import FitOptions
from lightning_gossip.strategies.state import checkpoint_contents
from lightning_gossip.strategies.state.averaged_weights import AveragedWeights
from lightning_gossip.strategies.state.local_model import OwnModel
from lightning_gossip.strategies.state.one_model import Rest
from lightning_gossip.strategies.state.shared_tensors import check_averaged_buffers
from lightning_gossip.strategies.state.step_watch import StepWatch
from lightning_gossip.strategies.warning_cache import warning_cache
from lightning_gossip.strategies.worker_algorithm import Algorithm, lr_read_by

log = logging.getLogger(__name__)


class Fit:
    """The state of one worker from ``Trainer.fit``'s setup to its teardown.

    Args:
        trainer: whose fit.
        workers: of the job.
        make_algorithm: makes what happens between two synchronisation points; None with a single worker, which trains plainly.
        options: of the strategy.
        timeline: where computing and waiting are recorded.
        restored: our part of the checkpoint that the fit resumes from, if any.
        restored_from: where that checkpoint lies.
        key: of the fit in the store, the same on all workers.
        seed: of the permutations of the data, the same on all workers.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        workers: Workers,
        make_algorithm: Callable[[], Algorithm] | None,
        options: FitOptions,
        *,
        timeline: Timeline,
        restored: dict[str, Any] | None,
        restored_from: str | os.PathLike[str] | None,
        key: str,
        seed: int,
    ) -> None:
        self.trainer = trainer
        self._strategy = strategy = processes_of(trainer)
        members = strategy.members
        self.account = Account(trainer.global_rank if members is None else members.me.initial_rank, timeline)
        self.in_session = False
        self.metrics = LocalMetrics(workers, lambda: not self.in_session)
        self.stop_requested = False
        self.aborted = False
        self.at_epoch_end: Callable[[], None] | None = None  # a schedule by epoch that waits for the epoch's end
        self.is_cut = False  # the epoch has ended, for all, before its last batch
        self.logs_nothing = False  # no worker had logged anything for the epoch when all met at its end
        self.log_dir: tuple[str | None, str | None] = (None, None)  # this worker's own, and rank 0's
        self._stopped_together = False
        self._make_algorithm = make_algorithm
        self._algorithm: Algorithm | None = None
        self._options = options
        self._restored = restored
        self._restored_from = restored_from
        self._sync_point = SyncPoint(strategy.collectives_device, workers)
        self._island = None if strategy.groups is None else FitIsland(strategy.groups)
        # where the model is averaged: with islands each rank averages its part with those that have the same part
        self._parts = self._sync_point if self._island is None else self._island.between_peers(self._sync_point)
        self._accounts: list[tuple[int, dict[str, Any]]] = []  # of all workers, at the last synchronisation point
        self._optimizer_stepped = False
        self._lr = 0.0
        self._in_batch = False
        self._skips = False  # on_train_batch_start has returned -1: the rest of this worker's epoch is skipped
        self._under_way = False  # an epoch that this worker has begun, and whose end all have not met at
        self._has_begun = False
        self._searches = False  # a tuner trains in the first hook of an epoch
        self._agreed_step: int | None = None  # while something is done together in the middle of an epoch
        self._asks: list[Ask] = []  # in the training step that is under way
        self._batches_in_epoch = 0
        self._own_model = OwnModel()
        self._model = strategy.shared_model(trainer.lightning_module, options.averaged_buffers)
        self._averages = AveragedWeights(trainer, options.averaged_buffers)
        self._steps = StepWatch(lambda: self._model.optimized)
        self._watches_steps = False
        self._has_opened = False  # whether the batch that begins is the first of its session
        self.work = FitWork(trainer, options.work_sharing, key=key, seed=seed, batch_s=lambda: self.account.batch_s)
        self.changes = MembershipChanges(trainer, self.work, self.account, self._model)

    # -- in the order of the training loop ---------------------------------------------------------------------------

    def resume_from(self, restored: dict[str, Any] | None, path: str | os.PathLike[str]) -> None:
        """Resume from a checkpoint that is loaded after the fit was set up.

        Args:
            restored: our part of the checkpoint, if any.
            path: where it lies.
        """
        self._restored, self._restored_from = restored, path

    def begin(self, *, searches: bool = False) -> None:
        """Begin to train, when all workers have loaded what there was to load; again if a tuner trains first.

        Args:
            searches: whether that is Lightning's tuner, which has put all callbacks aside, ours too. Each worker trains by
                itself then, and its schedule counts its own steps. It does so before the fit, or where an epoch begins.
        """
        if self._has_begun:
            self._begin_search()
            return
        self._has_begun = True
        check_averaged_buffers(self.trainer.lightning_module, self._options.averaged_buffers)
        self._strategy.barrier("fit begins")  # a worker that has ended is noticed here, and not in making the groups
        if self._make_algorithm is not None:
            self._algorithm = self._make_algorithm()
        if not searches:
            self.work.begin_fit()
        if self._restored is not None:
            resume.apply(self._restored, self._restored_from, self.trainer, self.work, self._algorithm)
            self._model.learn(self._restored.get("trained", ()))
        steps = self.trainer.global_step if self._restored is None else self._restored["steps"]
        self.account.begin(steps, self.work.planned_steps())
        self.work.reloaded = False
        own = local_log_dir(self.trainer)
        self.log_dir = own, self._strategy.broadcast(own)  # a joiner asks itself, and is admitted only then
        self.changes.begin_fit()
        if self._algorithm is not None:
            self._algorithm.start()

    def begin_epoch(self) -> None:
        """Begin an epoch, of which nobody has taken a batch yet: admit workers that wait."""
        self._under_way, self.is_cut, self._skips = True, False, False
        skip_validation(self.trainer, False)
        if self.changes.begin_epoch(self._algorithm):
            self._own_model.forget()  # it is of the time when this worker was outside
            if self._algorithm is not None:
                self._algorithm.begin_anew()
        if self.work.reloaded:
            self.work.reloaded = False
            done = {"epochs_done": epochs_processed(self.trainer), "steps_done": self.account.steps}
            self.account.plan_anew(self.work.planned_steps(**done))

    def before_batch(self, batch: Any) -> None:
        """Begin a batch that has been fetched; with the first one a session is opened."""
        self._under_way, self.is_cut, self.logs_nothing = True, False, False
        if not self.in_session:
            self._open_session()
        self.work.begin_batch(batch)
        self._in_batch = True
        self._batches_in_epoch += 1
        if self._algorithm is not None and self.account.forward_passes == 0:
            self._algorithm.begin_step()
        self._watch_steps()

    def after_backward(self) -> None:
        """Reduce the gradients of a whole step, where the algorithm does so."""
        if self._algorithm is None:
            return
        if not self.trainer.lightning_module.automatic_optimization or not self.trainer.fit_loop._should_accumulate():
            self._algorithm.reduce_gradients()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Note that Lightning has called an optimizer on the current batch."""
        self._optimizer_stepped = True
        self._lr = lr_read_by(self._algorithm, [optimizer], default=0.0)  # before the schedule moves on

    def after_batch(self) -> None:
        """End a batch, before its hooks: push and pull, and synchronise if somebody has requested it.

        Raises:
            SIGTERMException: if some worker was told to stop.
        """
        self._in_batch = False
        self._sync_point.workers.raise_failure()
        self.work.end_batch()
        self.account.end_batch(self._algorithm)
        if self._optimizer_stepped or self._has_stepped_unheard():
            step = self.account.count_step(lr=self._lr, epoch=self.trainer.current_epoch)
            if self._algorithm is not None:
                self._algorithm.step(step)
            if self._watches_steps:
                self._steps.mark(heard=self._optimizer_stepped)
            self._optimizer_stepped = False
        stops, meets = self.stop_requested, self._algorithm is not None and self._algorithm.sync_requested()
        if self._island is not None:
            stops, meets = self._agree_in_island(stops, meets)
            if not (stops or meets):
                return
        asks, self._asks = self._asks, []
        if stops:
            self.synchronize(Purpose.STOP, asks=asks, requests=True)
        elif asks:
            self._ask(asks)
        elif meets:
            self._synchronize(Purpose.REQUESTED)

    def _agree_in_island(self, stops: bool, meets: bool) -> tuple[bool, bool]:
        """What ranks of the island knew after the batch before: whether to stop, and to meet for another reason."""
        assert self._island is not None
        if not self.trainer.is_global_zero:
            self._asks = []
        asked = bool(self._asks)
        heard = self._island.after_batch(stop=stops, asked=asked, meets=meets)
        self.trainer.should_stop |= self._island.leaves
        return StepFlag.STOP in heard, bool(heard & (StepFlag.MEET | StepFlag.ASK))

    def after_batch_hooks(self) -> None:
        """Synchronise after a batch's hooks, at the epoch's end, and request that if this worker leaves it early."""
        if self._in_batch:
            return  # a tuner has put all callbacks aside, ours too: all meet when it has left its loop
        loop = self.trainer.fit_loop
        if self.trainer.is_last_batch or loop.epoch_loop._is_training_done:
            self.trainer.should_stop |= self._island is not None and self._island.wants_to_leave
            asks, self._asks = self._asks, []
            self.synchronize(Purpose.EPOCH_END, asks=asks)
            return
        if self._island is not None and self.trainer.should_stop and not self._island.leaves:
            self._island.wants_to_leave, self.trainer.should_stop = True, False  # its mates are in the next step already
        leaves = bool(self.trainer.should_stop and loop._can_stop_early)
        if leaves:
            self.synchronize(Purpose.EPOCH_END, requests=True)

    def synchronize(self, purpose: Purpose, *, asks: Sequence[Ask] = (), requests: bool = False) -> None:
        """Wait until all workers have come for this: the model becomes the exact mean. Nothing between two epochs.

        If some worker was told to stop, all of them end, as after a SIGTERM to each: here if the epoch has batches left,
        otherwise after its validation, where Lightning does so.

        Args:
            purpose: the epoch's end, a validation or a stop.
            asks: what is to be done together first, if this is rank 0.
            requests: whether to request it of the others after their current step.

        Raises:
            SIGTERMException: on all workers.
        """
        while self._under_way and not self.aborted:
            if self._synchronize(purpose, asks=asks, requests=requests).over:
                return
            asks, requests = (), False

    def end_epoch(self) -> None:
        """End an epoch whose batches Lightning has left; usually all workers have met before.

        Raises:
            ConfigurationError: if this worker had no batch in it.
        """
        self.leave_epoch()
        if self._algorithm is not None and self._batches_in_epoch == 0 and not self.trainer.should_stop:
            raise ConfigurationError(
                f"Rank {self.trainer.global_rank} had no batch in epoch {self.trainer.current_epoch}. Each worker needs at"
                " least one: use a smaller batch_size, fewer workers, or a data set that has something for each."
            )
        self._batches_in_epoch = 0

    def leave_epoch(self) -> None:
        """Meet the others when Lightning's loop has ended, perhaps early and for a reason that they do not know."""
        self._skips = has_skipped(self.trainer)
        self._in_batch = False
        self.synchronize(Purpose.EPOCH_END, requests=bool(self.trainer.should_stop))

    def end(self) -> None:
        """End the fit, or a tuner's training, as all workers do.

        Raises:
            SIGTERMException: on a worker that was told to stop too late for the others to hear of it.
        """
        if self._searches:
            self._end_search()
            return
        self._has_begun = False
        self.changes.end_fit()
        self.close(together=True)
        if self.stop_requested and not self._stopped_together:
            self.aborted = True  # nobody else stops
            raise SIGTERMException

    # -- from outside the training loop ------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Note that this worker was told to stop (SIGTERM). Called by a signal handler: only sets a flag."""
        self.stop_requested = True

    def ask(self, ask: Ask) -> None:
        """Do what a user asks for inside an epoch, together with all workers: now, or after the step that is under way.

        Rank 0's word counts. Where workers are at different steps, what other ranks ask for is what rank 0 asks for at another
        time, and nothing is done. Where they are in lockstep, or the epoch has no batch yet, all come.

        Args:
            ask: what to do.

        Raises:
            SIGTERMException: if some worker was told to stop; what rank 0 was asked for has been done.
        """
        if self._algorithm is None or self.aborted:
            ask.carry_out(self.trainer)
        elif self._in_batch:
            warning_cache.warn(
                f"In a training step {ask.name} cannot be done: it needs all workers. It is done after the step."
            )
            self._asks.append(ask)
        elif not self.in_session:
            self._synchronize(Purpose.SAVE, asks=[ask], requests=self.trainer.is_global_zero)
        elif self._island is not None:
            self._asks.append(ask)  # the other ranks of the island hear of it after the next step
        else:
            self._ask([ask])

    def synchronize_for(self, what: str, *, warns: bool = True) -> bool:
        """Bring all workers together for a collective that somebody outside the algorithm makes.

        Args:
            what: is made.
            warns: where they cannot, say that each worker gets its own value.

        Returns:
            False if they cannot be brought together: inside an epoch of which each worker trains on as much as it can, in a
            training step, and after a failure.

        Raises:
            SIGTERMException: if another worker came to stop instead.
        """
        if self.aborted:
            return False
        if not self.in_session:
            return True
        if self._in_batch or self.work.shared is not None:
            if warns:
                warning_cache.warn(
                    f"Inside an epoch {what} needs all workers, but {self.why_not_lockstep}. Each worker gets its own value."
                )
            return False
        while True:
            agreement = self._synchronize(Purpose.COLLECTIVE, what=what)
            if agreement.over:
                return not agreement.stop

    def gather_in_batch(self, tensor: Tensor, *, sync_grads: bool) -> Tensor | None:
        """The tensors of all workers in the training step under way; None if there is none, or the algorithm cannot do it."""
        if self._algorithm is None or not self._in_batch or self.aborted:
            return None
        return self._algorithm.gather(tensor, sync_grads=sync_grads)

    @property
    def is_inside_epoch(self) -> bool:
        """Whether other workers may be at other steps: from an epoch's first hook to its end, where they are not together."""
        return self.in_session or (self._under_way and self._batches_in_epoch == 0 and bool(self.trainer.training))

    @property
    def is_lockstep(self) -> bool:
        """Whether all workers make their steps together."""
        return self._algorithm is not None and self._algorithm.is_lockstep

    @property
    def why_not_lockstep(self) -> str:
        """A clause for warnings: why nobody can be sure in a training step that all workers come to the same call."""
        if self.is_lockstep:
            return "one that has ended its batches makes no more steps, and would not come"
        return "each of them is at a step of its own"

    def abort(self) -> None:
        """Note that an exception has ended the fit on this worker: it comes to no synchronisation point any more."""
        if self._island is not None:
            self._island.forget()
        self.aborted = not self._stopped_together

    def close(self, *, together: bool | None = None) -> None:
        """End the algorithm's threads. May be called twice.

        Args:
            together: whether all workers do so; None: if they have agreed to stop.
        """
        self._own_model.forget()
        self.work.close()
        if self._algorithm is not None:
            self._algorithm.close(together=self._stopped_together if together is None else together)
            self._algorithm = None

    @property
    def collectives_made(self) -> int:
        """Collectives of the algorithm's own so far."""
        return 0 if self._algorithm is None else self._algorithm.collectives_made

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def extend_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Add our part to a checkpoint that all workers write together. Called again if rank 0 fails meanwhile."""
        replicas = self._options.checkpoint == "replicas"
        checkpoint[checkpoint_contents.KEY] = resume.describe(
            self.trainer,
            self.work,
            self._algorithm,
            steps=self.account.steps,
            global_step=self.trainer.global_step if self._agreed_step is None else self._agreed_step,
            replicas=replicas,
        )
        checkpoint[checkpoint_contents.KEY]["trained"] = sorted(self._model.trained)
        if self._algorithm is not None and "optimizer_states" in checkpoint:  # and not weights only
            adopts = self._options.at_rendezvous == "adopt" and not replicas
            strategy = self._strategy
            tensors = self._algorithm.common_tensors(self._parts, adopts=adopts, keeps=lambda: strategy.writes)
            checkpoint[checkpoint_contents.KEY]["tensors"] = tensors if strategy.keeps_states(strategy.writers) else {}
        if self.trainer.is_global_zero:
            resume.mark_as_unfinished(checkpoint)
        if replicas:
            with self._own_in_place():
                own = self._strategy.own_state()
                if self._algorithm is not None:
                    tensors = self._algorithm.own_tensors()
                    # of all ranks that resume from the same file
                    own["tensors"] = tensors if self._strategy.is_sharded else self._model.whole(tensors)
                rank, writes = self._strategy.own_file
                if writes:
                    checkpoint_contents.save_replica(path, rank, own)

    @contextmanager
    def _own_in_place(self) -> Iterator[None]:
        """This worker's own model in its tensors for a while, where the mean stands. Collective in an island."""
        with self._own_model.in_place():
            self._hand_round_own()
            yield
        self._hand_round_own()

    def _hand_round_own(self) -> None:
        """Ranks of an island have put their own parts in place of the mean's, or back."""
        if self._island is not None and self._options.at_rendezvous == "evaluate":
            self._model.hand_round_all()

    # -- details -----------------------------------------------------------------------------------------------------

    def _begin_search(self) -> None:
        """A tuner trains in the first hook of an epoch, on all workers, by the algorithm that is there."""
        while self.in_session and not self._synchronize(Purpose.COLLECTIVE, what="a tuner's search").over:
            pass
        self._searches = True
        self.work.pause_schedules()

    def _end_search(self) -> None:
        """The tuner puts everything back, and the epoch begins."""
        self._searches, self._under_way = False, True
        self.work.resume_schedules()

    def _open_session(self) -> None:
        self._own_model.put_back()
        if self.work.batches is not None:
            self.work.batches.forget_agreement()
        self._model.open()
        self._hand_round_own()  # all ranks of an island, whatever each has had to put back
        if self._algorithm is not None:
            self._algorithm.open(self._model)
        self.account.open_session()
        self.in_session = self._has_opened = True

    def _watch_steps(self) -> None:
        """A batch is about to be trained on: look for steps of which Lightning does not hear, where there can be any."""
        module = self.trainer.lightning_module
        opens, self._has_opened = self._has_opened, False
        if opens:
            self._watches_steps = not module.automatic_optimization or is_overridden("optimizer_step", module)
        if self._watches_steps and opens:
            self._steps.begin()
        elif self._watches_steps and module.automatic_optimization:
            self._steps.mark()  # what a hook has changed between two batches (clipped weights) is no step

    def _has_stepped_unheard(self) -> bool:
        if not self._watches_steps or not self._steps.has_stepped():
            return False
        self._lr = lr_read_by(self._algorithm, self.trainer.optimizers, default=self._lr)
        return True

    def _ask(self, asks: Sequence[Ask]) -> None:
        """Synchronise, and do this with all workers, if this is rank 0; in lockstep the others come, and do what it asks."""
        assert self._algorithm is not None
        if self.trainer.is_global_zero or self._algorithm.is_lockstep:
            self._synchronize(Purpose.SAVE, asks=asks, requests=True)
        elif (elsewhere := f"{asks[0].name} elsewhere") not in warning_cache:
            warning_cache.add(elsewhere)
            log.info("Rank %d leaves %s inside an epoch to rank 0.", self.trainer.global_rank, asks[0].name)

    def _synchronize(self, purpose: Purpose, *, what: str = "", asks: Sequence[Ask] = (), requests: bool = False) -> Agreement:
        """Synchronise once, and do what rank 0 was asked for. The epoch goes on afterwards if the agreement is not over.

        Raises:
            SIGTERMException: on all workers, if some worker was told to stop and the epoch has batches left.
            StopIteration: on a worker that was excluded.
        """
        if not self.in_session:
            self._open_session()
        if requests and self._algorithm is not None:
            self._algorithm.request_sync()
        agreement = self._agree(purpose, what, tuple(asks) if self.trainer.is_global_zero else ())
        self.in_session = False
        self.metrics.forget()
        self.account.close_session()
        if agreement.should_stop and not self.trainer.should_stop:
            rank_zero_info("Another worker asked to stop: all leave the epoch after the current step.")
            self.trainer.should_stop = True
        if agreement.lost_store:
            self.changes.lose_store()
            if self._algorithm is not None and not agreement.stop:
                self._algorithm.follow_members()  # to the store where all are now
        if self.changes.is_excluded and not agreement.over:
            raise StopIteration  # Lightning leaves the epoch, whose batches are the others'; they admit this worker later
        if agreement.asked:
            self._carry_out(agreement)
        if not agreement.over:
            self._open_session()
        elif purpose is not Purpose.COLLECTIVE or agreement.stop:
            self._end_stretch(purpose, agreement)
        return agreement

    def _agree(self, purpose: Purpose, what: str, asks: tuple[Ask, ...]) -> Agreement:
        algorithm, batches = self._algorithm, self.work.batches
        lost = (algorithm is not None and algorithm.lost_store) or (batches is not None and batches.lost_store)
        steps, leaves = self.trainer.global_step, bool(self.trainer.should_stop)
        arrival = Arrival(purpose, steps, leaves, what, asks, lost, self._skips, self.work.share)
        if algorithm is None:
            return agree([arrival])
        arrived_s = now_s()
        parts = None
        if self._island is not None:
            self._island.arrive()
            parts = Parts(self._parts, self._island.size, self._island.is_first)

        def set_aside(rest: Rest) -> None:
            if self._options.at_rendezvous == "evaluate":
                self._own_model.set_aside(self._model.tensors, rest.tensors)

        def tell() -> tuple[int, dict[str, Any], bool]:
            return *self.account.described(self.work, algorithm), logs_something(self.trainer)

        met = meet(
            algorithm,
            self._model,
            self.account,
            self._sync_point,
            arrival,
            arrived_s=arrived_s,
            tell=tell,
            parts=parts,
            flag=self._averages.are_there,
            before=set_aside,
        )
        self._own_model.is_replaced()
        if algorithm.was_given:
            self._own_model.forget()
        self._accounts = [(steps, account) for steps, account, _ in met.told]
        self.logs_nothing = not any(logs for _, _, logs in met.told)
        if met.flag:
            self._averages.unite(self._sync_point, steps=mean_step(met.agreement.optimizer_steps))
        return met.agreement

    def _carry_out(self, agreement: Agreement) -> None:
        """Do what rank 0 was asked for; all workers do, in the middle of the epoch, with one view of what is left of it."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        own = progress.is_last_batch
        self.changes.collect_lost_batches()
        self._agree_on_what_is_left()
        self._agreed_step = mean_step(agreement.optimizer_steps)
        try:
            for ask in agreement.asked:
                ask.carry_out(self.trainer)
        finally:
            progress.is_last_batch = own
            self._agreed_step = None

    def _end_stretch(self, purpose: Purpose, agreement: Agreement) -> None:
        """All have come to the end of a stretch of training: an epoch's, a validation, a stop."""
        self._under_way = purpose is Purpose.VALIDATE and not agreement.should_stop
        set_global_step(self.trainer, mean_step(agreement.optimizer_steps))
        if self.changes.collect_lost_batches() and not agreement.stop and self.changes.make_up_lost_batches(self._algorithm):
            self.at_epoch_end = None
            return  # to the make-up batches of the epoch
        if agreement.stop:
            self._stop_together()
        if agreement.skips and not self._skips:  # whoever skips does not come to the validation
            skip_validation(self.trainer, True)
        pending = (agreement.stop or agreement.should_stop) and self._agree_on_what_is_left()
        self.is_cut = pending
        if agreement.stop or purpose is Purpose.EPOCH_END:
            self.work.end_epoch(agreement.share, left=pending, skipped=agreement.skips)
        if self.at_epoch_end is not None and not pending:
            self.at_epoch_end()
        self.at_epoch_end = None
        if purpose is Purpose.EPOCH_END and not agreement.stop and not self.is_lockstep:
            passed = saves_passed(self.trainer, agreement.optimizer_steps[0], self.trainer.global_step)
            if passed:
                self._carry_out(replace(agreement, asked=passed))
        everyones = self._accounts or [self.account.described(self.work, self._algorithm)]
        island = 1 if self._island is None else self._island.size
        self.account.publish(everyones, lost=self._sync_point.workers.excluded, island=island)
        if agreement.stop and pending:
            raise SIGTERMException

    def _stop_together(self) -> None:
        """All workers leave their loops at the same point."""
        self._under_way = False
        self._stopped_together = True
        self.changes.end_fit()
        self.trainer._signal_connector.received_sigterm = True

    def _agree_on_what_is_left(self) -> bool:
        """Whether the epoch has batches left. Collective.

        Lightning's progress has each worker's own view of that, and rank 0's goes into a checkpoint: make it that of all.
        """
        batches, loop = self.work.batches, self.trainer.fit_loop.epoch_loop
        kind = "what is left of the epoch"
        if batches is not None:
            position = self.changes.position(self._sync_point.workers)
            pending = bool(position.pending or position.pieces)
        else:
            pending = any(self._sync_point.workers.gather(not loop.batch_progress.is_last_batch, kind=kind))
        loop.batch_progress.is_last_batch = not pending
        return pending
