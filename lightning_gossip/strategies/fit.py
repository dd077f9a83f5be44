"""One fit of one worker: sessions of training without a collective, and the rendezvous between them."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import Timeline, now_s
from lightning_gossip.runtime.rendezvous import Agreement, Purpose, Rendezvous, gather
from lightning_gossip.strategies import checkpoints, resume
from lightning_gossip.strategies.account import Account
from lightning_gossip.strategies.algorithm import Algorithm
from lightning_gossip.strategies.averaged_weights import AveragedWeights
from lightning_gossip.strategies.changes import Changes
from lightning_gossip.strategies.model import SharedModel, check_averaged_buffers
from lightning_gossip.strategies.nonfinite import warn_of_mean
from lightning_gossip.strategies.one_model import compare_rest, unite
from lightning_gossip.strategies.options import FitOptions
from lightning_gossip.strategies.own_model import OwnModel
from lightning_gossip.strategies.progress import mean_steps, set_global_step
from lightning_gossip.strategies.steps import StepWatch
from lightning_gossip.strategies.work import FitWork

_warned: set[str] = set()


class Fit:
    """The state of one worker from ``Trainer.fit``'s setup to its teardown.

    Args:
        trainer: whose fit.
        make_algorithm: makes what happens between two rendezvous; None with a single worker, which trains plainly.
        options: of the strategy.
        timeline: where computing and waiting are recorded.
        restored: our part of the checkpoint that the fit resumes from, if any.
        restored_from: where that checkpoint lies.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        make_algorithm: Callable[[], Algorithm] | None,
        options: FitOptions,
        *,
        timeline: Timeline,
        restored: dict[str, Any] | None,
        restored_from: str | os.PathLike[str] | None,
    ) -> None:
        strategy = trainer.strategy
        self.trainer = trainer
        self.account = Account(trainer.global_rank, timeline)
        self.in_session = False
        self.stop_requested = False
        self.failed = False
        self.at_epoch_end: Callable[[], None] | None = None  # a schedule by epoch that waits for the epoch's end
        self._stopped_together = False
        self._make_algorithm = make_algorithm
        self._algorithm: Algorithm | None = None
        self._options = options
        self._restored = restored
        self._restored_from = restored_from
        self._meeting = Rendezvous(strategy.root_device)
        self._optimizer_stepped = False
        self._lr = 0.0
        self._in_step = False
        self._batches_in_epoch = 0
        self._own_model = OwnModel()
        self._model = SharedModel(trainer.lightning_module, options.averaged_buffers)
        self._averages = AveragedWeights(trainer, options.averaged_buffers)
        self._steps = StepWatch(lambda: self._model.optimized)
        self._watches_steps = False
        key, seed = strategy.broadcast((uuid.uuid4().hex[:12], int(os.environ.get("PL_GLOBAL_SEED", 0))))
        self.work = FitWork(trainer, options.work_sharing, key=key, seed=seed, batch_s=lambda: self.account.batch_s)
        self.changes = Changes(trainer, self.work, self.account, self._model)

    # -- in the order of the training loop ---------------------------------------------------------------------------

    def begin(self) -> None:
        """All workers have loaded what there was to load and start to train; again if a tuner trains first."""
        check_averaged_buffers(self.trainer.lightning_module, self._options.averaged_buffers)
        self.trainer.strategy.barrier("fit begins")  # a worker that has ended is noticed here, and not in making the groups
        if self._make_algorithm is not None:
            self._algorithm = self._make_algorithm()
        self.work.begin_fit()
        if self._restored is not None:
            resume.apply(self._restored, self._restored_from, self.trainer, self.work, self._algorithm)
            self._model.learn(self._restored.get("trained", ()))
        steps = self.trainer.global_step if self._restored is None else self._restored["steps"]
        self.account.begin(steps, self.work.planned_steps())
        self.changes.begin_fit()
        if self._algorithm is not None:
            self._algorithm.start()

    def begin_epoch(self) -> None:
        """Nobody has taken a batch of the epoch yet."""
        if self.changes.begin_epoch(self._algorithm):
            self._own_model.forget()  # it is of the time when this worker was left behind

    def before_batch(self, batch: Any) -> None:
        """A batch has been fetched and is about to be trained on."""
        opens = not self.in_session
        if opens:
            self._open_session()
        self.work.begin_batch(batch)
        self._in_step = True
        self._batches_in_epoch += 1
        if self._algorithm is not None and self.account.forward_passes == 0:
            self._algorithm.begin_step()
        self._watch_steps(opens=opens)

    def after_backward(self) -> None:
        """A backward pass has ended."""
        last = not self.trainer.lightning_module.automatic_optimization or not self.trainer.fit_loop._should_accumulate()
        if self._algorithm is not None and last:
            self._algorithm.reduce_gradients()

    def optimizer_stepped(self, lr: float) -> None:
        """Lightning has called an optimizer on the current batch, with this learning rate."""
        self._optimizer_stepped = True
        self._lr = lr

    def after_batch(self) -> None:
        """The batch has been trained on: push and pull, and go to the rendezvous if it is time."""
        self._in_step = False
        self.changes.raise_failure()
        self.work.end_batch()
        if not self.in_session:
            return  # a checkpoint saved inside the step has ended the session; the next batch opens one
        self.account.end_batch(self._algorithm)
        if self._optimizer_stepped or self._has_stepped_unheard():
            step = self.account.count_step(lr=self._lr, epoch=self.trainer.current_epoch)
            if self._algorithm is not None:
                self._algorithm.step(step)
            if self._watches_steps:
                self._steps.mark(heard=self._optimizer_stepped)
            self._optimizer_stepped = False
        if self.stop_requested or (self._algorithm is not None and self._algorithm.meeting_called()):
            self._stop()
        elif self.trainer.is_last_batch or self.trainer.fit_loop.epoch_loop._is_training_done:
            self.rendezvous(Purpose.EPOCH_END)

    def rendezvous(self, purpose: Purpose) -> None:
        """Meet all workers, if a session is open: the model becomes the exact mean.

        If some worker was told to stop, all of them end, as after a SIGTERM to each: here if the epoch has batches left,
        otherwise after its validation, where Lightning does so.

        Raises:
            SIGTERMException: on all workers.
        """
        if not self.in_session or self.failed:
            return
        steps = self.trainer.global_step
        agreement = Agreement(purpose is Purpose.STOP, self.trainer.should_stop, (steps,))
        if self._algorithm is not None:
            agreement = self._meet(self._algorithm, purpose, steps)
        self.in_session = False
        self.account.close_session()
        self.trainer.should_stop = self.trainer.should_stop or agreement.should_stop
        set_global_step(self.trainer, mean_steps(agreement.optimizer_steps))
        if self.changes.inherit() and not agreement.stop and self.changes.go_on(self._algorithm):
            self.at_epoch_end = None
            return  # to the appendix of the epoch
        pending = agreement.stop and self._prepare_stop()
        if self.at_epoch_end is not None and not pending:
            self.at_epoch_end()
        self.at_epoch_end = None
        if not pending and (agreement.stop or purpose is Purpose.EPOCH_END):
            self.work.end_epoch()
        self.account.publish(self.work, self._algorithm)
        if pending:
            raise SIGTERMException

    def end_epoch(self) -> None:
        """Lightning has left the batches of the epoch; usually all workers have met before.

        Raises:
            ConfigurationError: if this worker had no batch in it, so that the others wait for it in vain.
        """
        self.rendezvous(Purpose.EPOCH_END)  # only if the loop was left before the last batch
        if self._algorithm is not None and self._batches_in_epoch == 0:
            raise ConfigurationError(
                f"Rank {self.trainer.global_rank} had no batch in epoch {self.trainer.current_epoch}. Each worker needs at"
                " least one: use a smaller batch_size, fewer workers, or a data set that has something for each."
            )
        self._batches_in_epoch = 0

    def end(self) -> None:
        """All workers have ended the fit.

        Raises:
            SIGTERMException: on a worker that was told to stop too late for the others to hear of it.
        """
        self.changes.end_fit()
        self.close(together=True)
        if self.stop_requested and not self._stopped_together:
            self.failed = True  # nobody else stops
            raise SIGTERMException

    # -- from outside the training loop ------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """This worker was told to stop (SIGTERM). Called by a signal handler: only sets a flag."""
        self.stop_requested = True

    def meet_for(self, what: str) -> bool:
        """Bring all workers together for a collective that somebody outside the algorithm makes.

        Args:
            what: is made, for the warning.

        Returns:
            False if they cannot be brought together: in a training step, and after a failure.

        Raises:
            SIGTERMException: if another worker came to stop instead.
        """
        if self.failed:
            return False
        if self.in_session and self._in_step:
            if what not in _warned:
                _warned.add(what)
                rank_zero_warn(
                    f"In a training step {what} would make all workers wait for each other, and they are at different steps."
                    " Each worker gets its own value."
                )
            return False
        self.rendezvous(Purpose.SAVE)
        return True

    def fail(self) -> None:
        """This worker has failed: it meets nobody any more."""
        self.failed = not self._stopped_together

    def close(self, *, together: bool | None = None) -> None:
        """End threads; may be called twice. Without ``together``: together if all workers have agreed to stop."""
        self._own_model.forget()
        if self._algorithm is not None:
            self._algorithm.close(together=self._stopped_together if together is None else together)
            self._algorithm = None

    @property
    def collectives_made(self) -> int:
        """Collectives of the algorithm's own so far."""
        return 0 if self._algorithm is None else self._algorithm.collectives_made

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def extend_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Add our part to a checkpoint that all workers are writing together."""
        replicas = self._options.checkpoint == "replicas"
        checkpoint[checkpoints.KEY] = resume.describe(
            self.trainer, self.work, self._algorithm, steps=self.account.steps, replicas=replicas
        )
        checkpoint[checkpoints.KEY]["trained"] = sorted(self._model.trained)
        if replicas:
            with self._own_model.in_place():
                checkpoints.save_replica(path, self.trainer.global_rank, checkpoints.own_state(self.trainer))

    # -- details -----------------------------------------------------------------------------------------------------

    def _open_session(self) -> None:
        self._own_model.put_back()
        self._model.open()
        if self._algorithm is not None:
            self._algorithm.open(self._model)
        self.account.open_session()
        self.in_session = True

    def _watch_steps(self, *, opens: bool) -> None:
        """A batch is about to be trained on: look for steps of which Lightning does not hear, where there can be any."""
        module = self.trainer.lightning_module
        if opens:
            self._watches_steps = not module.automatic_optimization or is_overridden("optimizer_step", module)
        if self._watches_steps and opens:
            self._steps.begin()
        elif self._watches_steps and module.automatic_optimization:
            self._steps.mark()  # what a hook has changed between two batches (clipped weights) is no step

    def _has_stepped_unheard(self) -> bool:
        if not self._watches_steps or not self._steps.has_stepped():
            return False
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        self._lr = max((float(group["lr"]) for group in groups if "lr" in group), default=self._lr)
        return True

    def _meet(self, algorithm: Algorithm, purpose: Purpose, steps: int) -> Agreement:
        arrived_s = now_s()
        algorithm.arrive()
        agreement = self._meeting.agree(purpose, should_stop=self.trainer.should_stop, optimizer_steps=steps)
        self.account.waited(arrived_s, algorithm)
        algorithm.settle()
        rest = compare_rest(self._model, self._meeting, flag=self._averages.are_there)
        if self._options.at_rendezvous == "evaluate":
            self._own_model.set_aside(self._model.tensors, rest.tensors)
        self.account.own.distance = algorithm.average(self._meeting)
        if not math.isfinite(self.account.own.distance):
            warn_of_mean(self._model.tensors)
        self.account.own.distance += unite(rest, self._meeting)
        self._own_model.is_replaced()
        if rest.flag:
            self._averages.unite(self._meeting, steps=mean_steps(agreement.optimizer_steps))
        self.account.report.consensus_distance = self._meeting.mean(self.account.own.distance)
        return agreement

    def _stop(self) -> None:
        if self.stop_requested and self._algorithm is not None:
            self._algorithm.call_meeting()
        self.rendezvous(Purpose.STOP)

    def _prepare_stop(self) -> bool:
        """Make all workers leave their loops at the same point; returns whether the epoch has batches left.

        Whether it has is each worker's own view in Lightning's progress, and rank 0's goes into a checkpoint: make it that
        of all.
        """
        self._stopped_together = True
        self.changes.end_fit()
        self.trainer._signal_connector.received_sigterm = True
        batches, loop = self.work.batches, self.trainer.fit_loop.epoch_loop
        if batches is not None:
            unstepped = [position for theirs in gather(batches.unstepped()) for position in theirs]
            position = batches.position(unstepped)
            pending = bool(position.pending or position.pieces)
        else:
            pending = any(gather(not loop.batch_progress.is_last_batch))
        loop.batch_progress.is_last_batch = not pending
        return pending
