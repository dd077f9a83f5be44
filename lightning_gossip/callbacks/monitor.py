"""What the cluster does, in the loggers of the run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_gossip.algorithm.staleness import StalenessHistogram
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.callbacks.curvature import CurvatureProbe
from lightning_gossip.callbacks.histograms import log_histogram
from lightning_gossip.callbacks.panels import WALL, arrange
from lightning_gossip.callbacks.stability import NEAR, only_sgd, probe_before, stability_margin
from lightning_gossip.strategies.report import FitReport

MARGIN = "analysis/stability_margin"


@clear_arguments
class GossipMonitor(Callback):
    """Logs what the workers did, at the end of each epoch, without a collective of its own.

    The values are those of ``trainer.strategy.report``, which the strategy fills at each synchronisation point, where all
    workers are together anyway. ``time/wall_s`` is logged with the validation metrics too, and where the logger is Weights &
    Biases, they are plotted against it. With a strategy that keeps no report, such as Lightning's DDP,
    what is known there is logged: steps and time. A logger that fails here does not end the training; it is told once.

    | name | what |
    |---|---|
    | ``gossip/consensus_distance`` | (1/n) Σ ‖x_i − x̄‖² before the last synchronisation point made all models equal |
    | ``gossip/staleness_mean`` | changes of a published model between pull and push of a step, mean over all steps so far |
    | ``gossip/staleness`` | its whole histogram, all workers together (Weights & Biases and TensorBoard only) |
    | ``gossip/exchanges``, ``gossip/bytes_sent`` | sums over the workers so far; an exchange counts at both ends |
    | ``gossip/exchanges_per_step`` | their number per optimizer step; below the option where links are too slow for it |
    | ``gossip/refused_nonfinite`` | exchanges (parameter server: updates) refused because a model was not finite |
    | ``gossip/dropped`` | updates that a parameter server threw away as too stale, so far |
    | ``averaging/period``, ``averaging/deviation`` | steps between two averagings, and S_k at the last one |
    | ``averaging/count`` | averagings so far; those of the synchronisation point too, where they are adopted |
    | ``worker/<rank>/steps`` | optimizer steps so far |
    | ``worker/<rank>/cores`` | cores of the CPU that its process kept busy since the synchronisation point before |
    | ``worker/<rank>/memory_gb`` | the most of its host's memory that its process has had so far |
    | ``worker/<rank>/device_memory_gb`` | the most of its GPU's memory that PyTorch has had there so far |
    | ``time/wall_s`` | seconds of training so far, those before a resume included |
    | ``analysis/stability_margin`` | with ``stability``: largest stable learning rate over the present one |

    Args:
        stability: log how far the run is from diverging, by the measured staleness and the curvature that a
            :class:`CurvatureProbe` before this callback measured last, and warn once when that is near; see
            ``callbacks/stability.py``. For SGD only.

    Raises:
        ConfigurationError: when fit begins, for ``stability`` without a probe.
    """

    def __init__(self, *, stability: bool = False) -> None:
        self._stability = stability
        self._has_warned = False
        self._probe: CurvatureProbe | None = None
        self._before_s = 0.0  # seconds of training in the runs that this one resumes
        self._started_s: float | None = None
        self._warned: set[int] = set()  # loggers that have failed

    @property
    def wall_s(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return self._before_s + (0.0 if self._started_s is None else time.monotonic() - self._started_s)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # it is rank 0's on purpose
        warnings.filterwarnings("ignore", f".*self.log\\('{WALL}', ..., sync_dist=True\\)")
        if self._stability and stage == "fit":
            self._probe = probe_before(trainer, self)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started_s = time.monotonic()
        if self._stability and not only_sgd(trainer):
            rank_zero_warn(f"GossipMonitor(stability=True) logs no {MARGIN}: it is known for torch.optim.SGD only.")
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                with self._unharmed_by(logger):
                    arrange(logger)

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            # in the same row as the validation metrics; rank 0's clock, so nothing is reduced
            pl_module.log(WALL, self.wall_s, on_epoch=True, rank_zero_only=True)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        position = {WALL: self.wall_s, "epoch": trainer.current_epoch}
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in trainer.loggers:  # rank 0's write, the others' do nothing
            with self._unharmed_by(logger):
                logger.log_metrics({**position, **metrics(trainer)}, step=step)
        histogram = staleness(trainer)
        margin = self._margin(trainer, histogram)
        if margin is not None:
            for logger in trainer.loggers:
                logger.log_metrics({MARGIN: margin, **position}, step=step)
        if histogram.count and trainer.is_global_zero:
            for logger in trainer.loggers:
                with self._unharmed_by(logger):
                    log_histogram(logger, "gossip/staleness", histogram.counts(), step=step, beside=position)

    @contextmanager
    def _unharmed_by(self, logger: Logger) -> Iterator[None]:
        """What is logged here is not worth a run: a logger that fails is told once, and tried again in the next epoch."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a logger may raise
            if id(logger) not in self._warned:
                self._warned.add(id(logger))
                rank_zero_warn(
                    f"GossipMonitor: {type(logger).__name__} failed ({type(error).__name__}: {error}). Training goes on, and"
                    " this logger lacks what GossipMonitor would have written; it is tried again in each epoch."
                )

    def _margin(self, trainer: pl.Trainer, histogram: StalenessHistogram) -> float | None:
        """Where the probe has measured: on rank 0."""
        if self._probe is None or self._probe.last is None:
            return None
        margin = stability_margin(trainer, self._probe.last.largest, histogram)
        if margin is not None and margin < NEAR and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"The learning rate is near the largest stable one: {MARGIN}={margin:.2f}, at a curvature of"
                f" {self._probe.last.largest:.3g}; below 1 the loss grows where the model is. Lower the learning rate, or the"
                " staleness (active_workers, max_staleness)."
            )
        return margin

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"wall_s": self.wall_s}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before_s = state_dict["wall_s"]


def metrics(trainer: pl.Trainer) -> dict[str, float]:
    """Metrics of the workers after a synchronisation point, by their names in loggers; only those that the strategy has."""
    report = getattr(trainer.strategy, "report", None)
    if not isinstance(report, FitReport) or not report.workers:
        return {f"worker/{rank}/steps": trainer.global_step for rank in range(trainer.world_size)}
    workers = report.workers
    values: dict[str, float] = {f"worker/{worker.rank}/steps": worker.steps for worker in workers}
    for worker in workers:
        for name, value in (
            ("cores", worker.cores),
            ("memory_gb", None if worker.memory_bytes is None else worker.memory_bytes / 1e9),
            ("device_memory_gb", None if worker.device_memory_bytes is None else worker.device_memory_bytes / 1e9),
        ):
            if value is not None:
                values[f"worker/{worker.rank}/{name}"] = value
    if report.consensus_distance is not None:
        values["gossip/consensus_distance"] = report.consensus_distance
    stale = [(w.steps, w.staleness_mean) for w in workers if w.staleness_mean is not None and w.steps]
    if stale:
        values["gossip/staleness_mean"] = sum(n * mean for n, mean in stale) / sum(n for n, _ in stale)
    exchanges = [w.exchanges for w in workers if w.exchanges is not None]
    if exchanges:
        values["gossip/exchanges"] = sum(exchanges)
        values["gossip/exchanges_per_step"] = sum(exchanges) / max(1, sum(w.steps for w in workers))
    for name in ("bytes_sent", "dropped", "refused_nonfinite"):
        counts = [getattr(w, name) for w in workers if getattr(w, name) is not None]
        if counts:
            values[f"gossip/{name}"] = sum(counts)
    first = workers[0]  # the averagings are everybody's
    averaging = {"period": first.period, "deviation": first.deviation, "count": first.averagings}
    values.update({f"averaging/{name}": value for name, value in averaging.items() if value is not None})
    return values


def staleness(trainer: pl.Trainer) -> StalenessHistogram:
    """Staleness of all workers' steps up to the last synchronisation point; empty where the strategy has none."""
    report = getattr(trainer.strategy, "report", None)
    everyones = StalenessHistogram()
    for worker in report.workers if isinstance(report, FitReport) else ():
        own = StalenessHistogram()
        own.load_state_dict({"counts": worker.staleness_counts or []})
        everyones.merge(own)
    return everyones
