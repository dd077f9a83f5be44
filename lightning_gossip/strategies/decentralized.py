"""What all decentralized strategies are to Lightning.

Translate, delegate, return: everything that lasts for one fit is in :class:`~lightning_gossip.strategies.fit.Fit`, and what the
strategies differ in is in their :class:`~lightning_gossip.strategies.algorithm.Algorithm`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import lightning.pytorch as pl
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

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.peers import answering
from lightning_gossip.runtime.rendezvous import Purpose, gather, together
from lightning_gossip.strategies import checkpoints
from lightning_gossip.strategies.algorithm import Algorithm
from lightning_gossip.strategies.fit import Fit
from lightning_gossip.strategies.hooks import StrategyHooks
from lightning_gossip.strategies.logging import LocalMetrics
from lightning_gossip.strategies.loops import defer_epoch_schedulers, free_epoch_loop, synchronize_results
from lightning_gossip.strategies.model import check_averaged_buffers
from lightning_gossip.strategies.options import (
    AtRendezvous,
    CheckpointKind,
    FitOptions,
    WorkSharing,
)
from lightning_gossip.strategies.patches import Patches
from lightning_gossip.strategies.processes import WorkerProcesses
from lightning_gossip.strategies.reports import FitReport
from lightning_gossip.strategies.requeue import Requeue


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
        processes: see :class:`~lightning_gossip.strategies.processes.WorkerProcesses`.

    Raises:
        ConfigurationError: for a value that cannot work, and for an unknown argument.
    """

    name: str  # what the strategy is called in Trainer(strategy=...)
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
        options = FitOptions(work_sharing, at_rendezvous, checkpoint, averaged_buffers)
        if not self.shares_work and work_sharing is True:
            raise ConfigurationError(
                f"work_sharing=True is not possible with {type(self).__name__}: its workers make the same number of steps."
                " Leave it out, or use the strategy 'adpsgd' or 'apsgd'."
            )
        self.fit_options = options if self.shares_work else replace(options, work_sharing=False)
        self.report = FitReport()
        self.timeline = Timeline()
        self._fit: Fit | None = None
        self._patches = Patches()
        self._local_metrics: LocalMetrics | None = None
        self._loaded: tuple[dict[str, Any], _PATH] | None = None

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

    # -- setup and teardown ------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        synchronize_results(trainer, self._patches, meet=self._end_session)
        if trainer.state.fn == TrainerFn.FITTING:
            self._begin_fit(trainer)
        super().setup(trainer)

    def _end_session(self) -> None:
        if self._fit is not None:
            self._fit.rendezvous(Purpose.EPOCH_END)

    def _begin_fit(self, trainer: pl.Trainer) -> None:
        timeline = Timeline()
        loaded, path = self._loaded or ({}, None)
        self._fit = fit = Fit(
            trainer,
            (lambda: self.algorithm(timeline)) if self.workers > 1 else None,
            self.fit_options,
            timeline=timeline,
            restored=loaded.get(checkpoints.KEY),
            restored_from=path,
        )
        self._loaded = None
        self.report, self.timeline = fit.account.report, timeline
        fit.work.loader.install(self._patches)
        self._local_metrics = LocalMetrics(
            trainer.lightning_module, lambda: not fit.in_session, survives=self.members is not None
        )
        trainer.callbacks.insert(0, StrategyHooks(fit, Requeue(trainer, self._patches, fit.request_stop)))  # type: ignore[attr-defined]
        free_epoch_loop(trainer, fit, self._patches, forward_signal=self.signal_started_workers)
        if self.members is not None:
            defer_epoch_schedulers(trainer, fit, self._patches)
            self.members.changed[:] = [self.members_changed, fit.changes.note]

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with self._running_fit.work.nominal_batches():
            super().setup_optimizers(trainer)

    @override
    def teardown(self) -> None:
        if self._fit is not None:
            self._fit.close()
            trainer = self._fit.trainer
            trainer.callbacks[:] = [c for c in trainer.callbacks if not isinstance(c, StrategyHooks)]  # type: ignore[attr-defined]
            self._fit = None
        if self._local_metrics is not None:
            self._local_metrics.restore()
        self._patches.restore()
        self._loaded = None
        super().teardown()

    # -- training ----------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._fit.work.process(dataloader) if self._fit is not None else dataloader

    @override
    def on_train_start(self) -> None:
        self._running_fit.begin()

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
        self._running_fit.optimizer_stepped(max(float(group["lr"]) for group in optimizer.param_groups))
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
        if self.members is not None and not isinstance(exception, SIGTERMException):
            self.members.watch.failed(f"{type(exception).__name__}: {exception}")
            self.members.watch.rest()  # it has said so when this returns
        if self._fit is not None and not isinstance(exception, SIGTERMException):
            self._fit.fail()

    # What Lightning, its callbacks and users synchronise through the strategy. Between two rendezvous there is nobody to
    # answer: inside a step the worker gets its own value, with a warning; between steps (a callback that saves) all meet first.
    # A worker that has failed waits for nobody.

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._all_are_here("a barrier"):
            if self.members is not None:
                gather(None)
            else:
                with answering("a barrier"):
                    super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not self._all_are_here("a broadcast (trainer.log_dir makes one)"):
            return obj
        if self.members is not None:
            return self.members.broadcast(obj, src)
        with answering("a broadcast"):
            return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        if not self._all_are_here("a reduction"):
            return tensor
        if group is not None or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        return together(lambda: super(DecentralizedStrategy, self).reduce(tensor.clone(), group, reduce_op))

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if not self._all_are_here("all_gather"):
            raise ConfigurationError(
                "all_gather in a training step needs all workers at the same step, and nobody waits for anybody inside an"
                " epoch. Use what this worker has, or gather in on_train_epoch_end."
            )
        if group is not None or sync_grads:
            return super().all_gather(tensor, group, sync_grads)
        return together(lambda: super(DecentralizedStrategy, self).all_gather(tensor, group, sync_grads))

    def _all_are_here(self, what: str) -> bool:
        if self._fit is not None:
            return self._fit.meet_for(what)
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
        self._loaded = (checkpoint, checkpoint_path)
        return checkpoint

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._fit is not None:
            self._fit.rendezvous(Purpose.SAVE)
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if self._fit is None or self._fit.failed or not _distributed_is_initialized():
            return state
        return checkpoints.mean_optimizer_state(state, self.root_device)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self._fit is not None and not self._fit.failed:
            self._fit.extend_checkpoint(checkpoint, filepath)
        members = self.members
        if members is None or self._fit is None or self._fit.failed:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        writer = None
        while writer not in members.members:  # killed while it wrote: the next one does
            writer = members.members[0]
            super().save_checkpoint(checkpoint, filepath, storage_options)
            gather(None)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            checkpoints.remove_replicas(filepath)
