"""SLURM's warning that the time of the job is over: stop together, save, and queue the job again.

Lightning's own handler saves where the signal finds it, in the middle of a step perhaps, and all workers would have to be at
the same place to meet. Here the signal is only noted, as a SIGTERM is; what Lightning would do then is done when all have
stopped, at the same point of the epoch. The job that SLURM starts again finds the file by itself and goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_gossip.runtime.workers import Workers
from lightning_gossip.strategies.lightning.patches import Patches


class Requeue:
    """Requeues the job at the end of a fit, under SLURM with ``auto_requeue``; elsewhere it does nothing.

    Args:
        trainer: whose fit.
        workers: of the fit.
        patches: of that.
        stop: tells this worker to stop; only sets a flag.
    """

    def __init__(self, trainer: pl.Trainer, workers: Workers, patches: Patches, stop: Callable[[], None]) -> None:
        environment = trainer._accelerator_connector.cluster_environment
        self._applies = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self._save_and_requeue = trainer._signal_connector._slurm_sigusr_handler_fn
        self._workers = workers
        self._stop = stop
        self._signal: Any = None
        if self._applies:
            patches.set(trainer._signal_connector, "_slurm_sigusr_handler_fn", self._note)

    def stopped(self) -> None:
        """Save and queue the job again, when all workers have stopped, if one of them has had the signal. Collective."""
        if not self._applies:
            return
        everyones = self._workers.gather(self._signal, kind="the signals")
        signals = [signal for signal in everyones if signal is not None]
        if signals:
            self._save_and_requeue(signals[0], None)  # type: ignore[arg-type]

    def _note(self, signum: Any, _: Any) -> None:
        self._signal = signum
        self._stop()
