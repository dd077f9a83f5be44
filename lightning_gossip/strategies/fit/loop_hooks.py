"""The points of Lightning's loops at which a decentralized strategy acts and for which there is no strategy hook.

A callback, and replacements in one Trainer so that its loops make no collective inside an epoch; docs/assumptions.md says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_gossip.runtime.sync_point import Purpose
from lightning_gossip.strategies.fit.fit import Fit
from lightning_gossip.strategies.fit.metrics import SynchronizedResults
from lightning_gossip.strategies.fit.slurm_requeue import Requeue
from lightning_gossip.strategies.lightning.patches import Patches
from lightning_gossip.strategies.lightning.worker_processes import processes_of


class StrategyHooks(Callback):
    """Stands first among the callbacks of a fit, so that the others see the model as it is after the synchronisation point."""

    def __init__(self, fit: Fit, requeue: Requeue) -> None:
        self._fit = fit
        self._requeue = requeue

    @override
    def on_train_epoch_start(self, *_: Any) -> None:
        self._fit.begin_epoch()

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._fit.work.show_length()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._fit.after_batch()

    @override
    def on_train_epoch_end(self, *_: Any) -> None:
        self._fit.end_epoch()
        self._fit.work.show_nominal_length()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, SIGTERMException):
            self._fit.abort()
        elif not self._fit.aborted:  # all have stopped together
            self._requeue.stopped()


def synchronize_results(
    trainer: pl.Trainer, patches: Patches, *, end_session: Callable[[], None], logs_nothing: Callable[[], bool]
) -> None:
    """Give every epoch metric one value on all ranks, in every loop that logs.

    Args:
        end_session: brings all workers together, if they are not: a worker may leave the loop before its last batch.
        logs_nothing: whether all know that no value of the training epoch waits, before the hooks of its end.
    """
    train_loop = trainer.fit_loop.epoch_loop
    for loop in (train_loop, train_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        patches.set(loop, "_results", SynchronizedResults(training=loop is train_loop))
    connector = trainer._logger_connector

    def synchronize() -> None:
        if isinstance(trainer._results, SynchronizedResults):
            trainer._results.synchronize(processes_of(trainer).all_workers)

    epoch_end_reached, on_epoch_end = connector.epoch_end_reached, connector.on_epoch_end
    update_eval_epoch_metrics = connector.update_eval_epoch_metrics

    is_reduced = False  # what an evaluation has logged: no hook has run since

    def synchronized_epoch_end() -> None:  # before the hooks of the epoch's end
        end_session()
        epoch_end_reached()
        if trainer.training and not logs_nothing():  # an evaluation's are read by what follows, which reduces them
            synchronize()

    def synchronized_hooks() -> None:  # what the hooks of the end of a training or evaluation epoch have logged
        nonlocal is_reduced
        synchronize()
        on_epoch_end()
        is_reduced = not trainer.training

    def synchronized_eval_epoch() -> Any:  # of one loader; and once more when the hooks have run
        nonlocal is_reduced
        if not is_reduced:
            synchronize()
        is_reduced = False
        return update_eval_epoch_metrics()

    patches.set(connector, "epoch_end_reached", synchronized_epoch_end)
    patches.set(connector, "on_epoch_end", synchronized_hooks)
    patches.set(connector, "update_eval_epoch_metrics", synchronized_eval_epoch)


def free_epoch_loop(trainer: pl.Trainer, fit: Fit, patches: Patches, *, forward_signal: Callable[[Any], None]) -> None:
    """Take Lightning's own synchronisation out of the epoch, and put the synchronisation point where it is needed.

    Args:
        forward_signal: passes a SIGTERM on to worker processes that this one has started.
    """
    loop = trainer.fit_loop.epoch_loop
    run_validation = loop.val_loop.run

    def validate_after_sync() -> Any:
        fit.synchronize(Purpose.EPOCH_END if trainer.should_stop else Purpose.VALIDATE)
        return run_validation()  # not reached if another worker came to stop

    def note_sigterm(signum: Any, _: Any) -> None:
        if not fit.stop_requested:
            forward_signal(signum)
        fit.request_stop()

    connector = trainer._logger_connector
    end_batch = connector.on_batch_end

    def end_batch_after_hooks() -> None:  # the first thing after the hooks of the batch's end
        if trainer.training:
            fit.after_batch_hooks()
        end_batch()

    patches.set(connector, "on_batch_end", end_batch_after_hooks)
    patches.set(loop, "_broadcast_sigterm_tensor", lambda: None)
    patches.set(loop.val_loop, "run", validate_after_sync)
    patches.set(trainer._signal_connector, "_sigterm_notifier_fn", note_sigterm)


def move_schedulers(trainer: pl.Trainer, fit: Fit, patches: Patches) -> None:
    """Let schedules follow all workers: those by step the share of the epoch that all have done, those by epoch its end.

    Schedules by epoch step after the synchronisation point, which may add make-up batches to it, and not if all have left it
    before its last batch, whatever a worker has seen of it. Those that follow a metric by step are left to Lightning.
    """
    loop = trainer.fit_loop.epoch_loop
    update = loop.update_lr_schedulers

    def follow(interval: str, update_plateau_schedulers: bool) -> None:
        if interval == "step" and not update_plateau_schedulers and fit.work.move_schedules():
            return
        if interval == "epoch" and fit.is_cut:
            return
        if interval == "epoch" and not update_plateau_schedulers and fit.in_session:
            fit.at_epoch_end = lambda: update(interval, update_plateau_schedulers)
        else:
            update(interval, update_plateau_schedulers)

    patches.set(loop, "update_lr_schedulers", follow)
