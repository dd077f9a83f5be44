"""What all decentralized strategies are to Lightning.

Translate, delegate, return: everything that lasts for one fit is in :class:`~lightning_gossip.strategies.fit.fit.Fit`, and what
the strategies differ in is in their :class:`~lightning_gossip.strategies.worker_algorithm.Algorithm`.
"""

from __future__ import annotations

import os
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.algorithm.options import AtRendezvous, WorkSharing
from lightning_gossip.errors import ConfigurationError, reason_of
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.membership import uses
from lightning_gossip.strategies.data.exact_evaluation import share_evaluation
from lightning_gossip.strategies.fit.fit import Fit
from lightning_gossip.strategies.fit.loop_hooks import (
    StrategyHooks,
    free_epoch_loop,
    move_schedulers,
    synchronize_results,
)
from lightning_gossip.strategies.fit.metrics import LocalMetrics
from lightning_gossip.strategies.fit.slurm_requeue import Requeue
from lightning_gossip.strategies.fit.user_collectives import UserCollectives
from lightning_gossip.strategies.lightning import asking
from lightning_gossip.strategies.lightning.patches import Patches
from lightning_gossip.strategies.lightning.worker_processes import WorkerProcesses
from lightning_gossip.strategies.options import (
    CheckpointKind,
    FitOptions,
)
from lightning_gossip.strategies.report import FitReport
from lightning_gossip.strategies.state import checkpoint_contents
from lightning_gossip.strategies.state.shared_tensors import check_averaged_buffers
from lightning_gossip.strategies.worker_algorithm import Algorithm
from lightning_gossip.transport.peer_errors import is_of_the_network


class DecentralizedStrategy(WorkerProcesses):
    """Base of the strategies of this package. Behaves like Lightning's DDP wherever the workers are together.

    Args:
        work_sharing: ``"auto"`` shares each epoch's batches between the workers where that is possible (a map-style data set
            with an ordinary sampler), so that fast workers take more of them; ``True`` insists; ``False`` gives equal shares.
        at_rendezvous: ``"adopt"`` makes every worker go on from the mean model; ``"evaluate"`` validates and saves the mean,
            then puts each worker's own model back (for comparisons of algorithms).
        checkpoint: ``"mean"`` writes an ordinary Lightning checkpoint: the mean model and the mean of the optimizers' states;
            ``"replicas"`` also writes each worker's own state beside it, and resumes from it.
        averaged_buffers: patterns (``fnmatch``) of the names of buffers that are averages over batches, as
            ``("*.running_covariance",)``: they are averaged as parameters are. BatchNorm's statistics are so anyway. Of every
            other buffer all workers take the lowest rank's when they meet (docs/assumptions.md).
        processes: see :class:`~lightning_gossip.strategies.lightning.worker_processes.WorkerProcesses`.

    Raises:
        ConfigurationError: for a value that cannot work, and for an unknown argument.
    """

    shares_work: ClassVar[bool] = True  # whether workers may make different numbers of steps

    def __init__(
        self,
        *,
        work_sharing: WorkSharing = "auto",
        at_rendezvous: AtRendezvous = "adopt",
        checkpoint: CheckpointKind = "mean",
        averaged_buffers: Sequence[str] = (),
        **processes: Any,
    ) -> None:
        super().__init__(**processes)
        options = FitOptions(
            work_sharing=work_sharing, at_rendezvous=at_rendezvous, checkpoint=checkpoint, averaged_buffers=averaged_buffers
        )
        if not self.shares_work and work_sharing is True:
            raise ConfigurationError(
                f"work_sharing=True is not possible with {type(self).__name__}: its workers make the same number of steps."
                " Leave it out, or use the strategy 'adpsgd' or 'apsgd'."
            )
        self.fit_options = options if self.shares_work else replace(options, work_sharing=False)
        self.report = FitReport()
        self.timeline = Timeline()
        self._fit: Fit | None = None
        self._collectives = UserCollectives(self)
        self._patches = Patches()
        self._metrics: LocalMetrics | None = None  # outside of a fit, with islands
        self._has_saved = False  # a checkpoint, with all workers, since the last barrier
        self._kept_by: dict[int, tuple[WorkerId, ...]] = {}  # who has the mean of an optimizer's state, for a checkpoint
        self._loaded: tuple[dict[str, Any], _PATH] | None = None

    @property
    def name(self) -> str:
        """What the strategy is called in ``Trainer(strategy=...)``, and a checkpoint says that it was written by."""
        return type(self).__name__

    @abstractmethod
    def algorithm(self, timeline: Timeline) -> Algorithm:
        """A new worker's part of the algorithm, for one fit."""

    @property
    def epoch_progress(self) -> tuple[int, int] | None:
        """Batches of the epoch that all workers have taken, and all of them; None where the work is not shared."""
        queue = self._fit.work.shared.queue if self._fit is not None and self._fit.work.shared is not None else None
        return None if queue is None else (queue.taken, queue.batches)

    @property
    def collectives_made(self) -> int:
        """Collectives that the algorithm has made in this fit; Lightning's own are not among them."""
        return 0 if self._fit is None else self._fit.collectives_made

    @override
    def preflight(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        super().preflight(trainer, model)
        if not is_overridden("configure_model", model):  # else its layers come later
            check_averaged_buffers(model, self.fit_options.averaged_buffers)

    @property
    @override
    def is_aborted(self) -> bool:
        return self._fit is not None and self._fit.aborted

    # -- setup and teardown ------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        synchronize_results(
            trainer,
            self._patches,
            end_session=self._end_session,
            logs_nothing=lambda: self._fit is not None and self._fit.logs_nothing,
        )
        share_evaluation(trainer, self._patches)
        if trainer.state.fn == TrainerFn.FITTING:
            self._begin_fit(trainer)
        elif self.islands is not None:
            self._metrics = LocalMetrics(self.all_workers, lambda: True)
            self._metrics.install()
        super().setup(trainer)

    def _end_session(self) -> None:
        if self._fit is not None:
            self._fit.leave_epoch()

    def _begin_fit(self, trainer: pl.Trainer) -> None:
        timeline = Timeline()
        loaded, path = self._loaded or ({}, None)
        key, seed = self.broadcast((uuid.uuid4().hex[:12], int(os.environ.get("PL_GLOBAL_SEED", 0))))
        self._fit = fit = Fit(
            trainer,
            self.all_workers,
            (lambda: self.algorithm(timeline)) if self.workers > 1 else None,
            self.fit_options,
            timeline=timeline,
            restored=loaded.get(checkpoint_contents.KEY),
            restored_from=path,
            key=key,
            seed=seed,
        )
        self._loaded = None
        self.report, self.timeline = fit.account.report, timeline
        fit.work.install(self._patches)
        fit.metrics.install()
        trainer.callbacks.insert(0, StrategyHooks(fit, Requeue(trainer, self.all_workers, self._patches, fit.request_stop)))  # type: ignore[attr-defined]
        free_epoch_loop(trainer, fit, self._patches, forward_signal=self.signal_started_workers)
        move_schedulers(trainer, fit, self._patches)
        asking.install(trainer, fit, self._patches)
        if self.workers > 1:
            asking.refuse_other_runs(trainer, self._patches)
        if self.members is not None:
            self.members.changed[:] = [self.members_changed, fit.changes.note]

    @override
    def teardown(self) -> None:
        if self._fit is not None:
            self._fit.metrics.restore()
            self._fit.close()
            trainer = self._fit.trainer
            trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, StrategyHooks)]  # type: ignore[attr-defined]
            self._fit = None
            self._kept_by.clear()
        if self._metrics is not None:
            self._metrics.restore()
            self._metrics = None
        self._patches.restore()
        self._loaded = None
        if self.members is not None:
            self.members.changed.clear()  # it outlives this Trainer, whose model they hold
        super().teardown()

    # -- training ----------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._fit.work.process(dataloader) if self._fit is not None else dataloader

    @override
    def on_train_start(self) -> None:
        fit = self._running_fit
        fit.begin(searches=not any(isinstance(callback, StrategyHooks) for callback in fit.trainer.callbacks))  # type: ignore[attr-defined]

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._running_fit.before_batch(batch)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._running_fit.optimizer_stepped(optimizer)
        return output

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._fit is not None:
            self._fit.after_backward()

    @override
    def on_train_end(self) -> None:
        self._running_fit.end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.members is not None and self.islands is not None and is_of_the_network(exception):
            self.members.monitor.await_island()
        if not isinstance(exception, SIGTERMException):
            uses.abort()
            self.tell_once(exception)  # before the others hear of it, and fail by it
        if self.members is not None and not isinstance(exception, SIGTERMException):
            self.members.abort(reason_of(exception))
        if self._fit is not None and not isinstance(exception, SIGTERMException):
            self._fit.abort()

    # What Lightning, its callbacks and users synchronise through the strategy. Inside an epoch there is nobody to answer: the
    # worker gets its own value, with a warning; but between two steps of static shares, which all make, all meet first.
    # A worker that has failed waits for nobody.

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        has_saved, self._has_saved = self._has_saved, False
        if has_saved and args == ("Trainer.save_checkpoint",):
            return  # all have just heard that it is written
        if self._all_are_here("a barrier"):
            self._collectives.barrier()

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if self._fit is not None and self._fit.in_session and isinstance(obj, str) and (obj, src) == (self._fit.log_dir[0], 0):
            return cast(TBroadcast, self._fit.log_dir[1])  # trainer.log_dir broadcasts whenever it is read
        return self._collectives.broadcast(obj, src) if self._all_are_here("a broadcast") else obj

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        if not self._all_are_here("a reduction"):
            return tensor
        by_lightning = super().reduce  # type: ignore[safe-super]  # of the class behind the mixins
        return self._collectives.reduce(tensor, group, reduce_op, by_lightning=by_lightning)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not self._all_are_here("a decision"):
            return bool(decision) and not (all and self.world_size > 1)
        return self._collectives.decide(decision, all_have_to=all)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if group is dist.group.WORLD:  # what LightningModule.all_gather passes
            group = None
        if self._fit is not None and group is None:
            gathered = self._fit.gather_in_batch(tensor, sync_grads=sync_grads)
            if gathered is not None:
                return gathered
        if not self._all_are_here("all_gather", warns=False):
            why = "" if self._fit is None else f", and {self._fit.why_not_lockstep}"
            raise ConfigurationError(
                f"all_gather in a training step needs all workers at the same step{why}. Use what this worker has, gather in"
                " on_train_epoch_end, or train with strategy='ddp'."
            )
        return self._collectives.all_gather(tensor, group, sync_grads, by_lightning=super().all_gather)

    def _all_are_here(self, what: str, *, warns: bool = True) -> bool:
        if self._fit is not None:
            return self._fit.synchronize_for(what, warns=warns)
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        # a failure in setup, of which callbacks hear before the strategy does
        return trainer is None or trainer.state.status is not TrainerStatus.INTERRUPTED

    @property
    def _running_fit(self) -> Fit:
        if self._fit is None:
            raise ConfigurationError(
                f"{type(self).__name__} trains in Trainer.fit only. Call trainer.fit(model) of lightning.pytorch."
            )
        return self._fit

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._fit is not None and self.restore_checkpoint_after_setup:
            self._fit.resume_from(checkpoint.get(checkpoint_contents.KEY), checkpoint_path)
        else:
            self._loaded = (checkpoint, checkpoint_path)
        return checkpoint

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        # inside an epoch somebody dumps a checkpoint without saving it: this worker's own
        if self._fit is None or self._fit.aborted or self._fit.in_session or not _distributed_is_initialized():
            return super().optimizer_state(optimizer)

        def keeps() -> bool:
            self._kept_by[id(optimizer)] = self.writers
            return self.keeps_states(self.writers)

        return self.mean_optimizer_state(optimizer, keeps=keeps)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        fit, save = self._fit, super().save_checkpoint
        if fit is None or fit.aborted or fit.in_session:
            save(checkpoint, filepath, storage_options)
            return

        def collect() -> None:
            if self._lacks_states(checkpoint):
                checkpoint["optimizer_states"] = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
            fit.extend_checkpoint(checkpoint, filepath)

        self.all_workers.write_by_first(collect, lambda _: save(checkpoint, filepath, storage_options))
        self._has_saved = True

    def _lacks_states(self, checkpoint: dict[str, Any]) -> bool:
        """Whether those that had the means of the optimizers' states for a checkpoint have all failed."""
        writer = self.writers[0]
        kept = [self._kept_by.get(id(optimizer), (writer,)) for optimizer in self.optimizers]
        return "optimizer_states" in checkpoint and not all(writer in kept_by for kept_by in kept)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            checkpoint_contents.remove_replicas(filepath)
