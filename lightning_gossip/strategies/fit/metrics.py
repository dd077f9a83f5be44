"""One value of every logged metric on all ranks, without a collective inside an epoch.

Lightning reduces a metric over ranks only where the user passed ``sync_dist=True``, and then also in the middle of an epoch
if the metric is logged on every step. Both are wrong here: workers in the middle of an epoch are at different steps, and at
its end a value that differs over ranks splits ReduceLROnPlateau, EarlyStopping and the best checkpoint's path. So inside the
epoch every value is the worker's own, and at its end all values are reduced at once, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_gossip.runtime.islands.host_collectives import gathered_list
from lightning_gossip.runtime.workers import Workers
from lightning_gossip.strategies.lightning.patches import Patches
from lightning_gossip.strategies.warning_cache import warning_cache


class SynchronizedResults(_ResultCollection):
    """Lightning's collection of logged values; epoch values are always reduced, training step values never."""

    @override
    def log(self, fx: str, name: str, value: Any, **kwargs: Any) -> None:
        if self.training and kwargs.get("sync_dist"):
            if kwargs.get("on_step"):
                warning_cache.warn(
                    f"self.log({name!r}, on_step=True, sync_dist=True) would make all workers wait for each other at every"
                    " step. The value on a step is this worker's own; the value of the epoch is reduced over all workers. Drop"
                    " sync_dist=True to silence this."
                )
            kwargs["sync_dist"] = False
        super().log(fx, name, value, **kwargs)

    def due(self) -> dict[str, Any]:
        """The epoch's values that are not reduced yet."""
        return {
            key: metric
            for key, metric in self.items()
            if metric.meta.on_epoch
            and not metric.has_reset
            and metric._computed is None
            and not metric.meta.sync.rank_zero_only
        }

    def synchronize(self, workers: Workers) -> None:
        """Reduce the epoch's values over the workers that logged them. Collective: every worker calls it at the same points.

        After it, reading a value communicates no more, so that a progress bar on rank 0 may.
        """
        due = self.due()
        mine = {key: _state_of(metric) for key, metric in due.items() if metric.is_tensor}
        everyones = workers.gather(mine, kind="the logged values")
        for key, metric in sorted(due.items()):
            if metric.is_tensor:
                value = _reduced(metric, [theirs[key] for theirs in everyones if key in theirs])
                metric._computed = torch.as_tensor(value, dtype=metric.value.dtype, device=metric.value.device)
            else:
                metric.compute()  # torchmetrics reduces by itself


def logs_something(trainer: pl.Trainer) -> bool:
    """Whether values of the training epoch wait to be reduced."""
    results = trainer.fit_loop.epoch_loop._results
    return bool(results.due()) if isinstance(results, SynchronizedResults) else bool(results)


def _state_of(metric: _ResultMetric) -> tuple[float, float]:
    """What one worker has accumulated, and its weight."""
    return float(metric.value), float(metric.cumulated_batch_size) if metric.meta.is_mean_reduction else 1.0


def _reduced(metric: _ResultMetric, states: list[tuple[float, float]]) -> float:
    values = [value for value, _ in states]
    if metric.meta.is_mean_reduction:
        weight = sum(weight for _, weight in states)
        return sum(values) / weight if weight else float("nan")
    if metric.meta.is_sum_reduction:
        return sum(values)
    return max(values) if metric.meta.is_max_reduction else min(values)


class LocalMetrics:
    """While a fit lasts torchmetrics do not synchronise in the middle of an epoch, whoever computes them.

    When they synchronise, they do so over all workers, also where the default group is that of an island.

    Nothing is put on a user's metrics, which are copied and pickled inside a fit (``MetricTracker``, ``torch.save(model)``):
    their class synchronises otherwise, so copies and metrics that a hook makes are covered as well. Fits may be nested, and end
    in any order.

    Args:
        workers: of the fit.
        may_synchronize: asked at each computation.
    """

    def __init__(self, workers: Workers, may_synchronize: Callable[[], bool]) -> None:
        self.workers = workers
        self._may_synchronize = may_synchronize

    def install(self) -> None:
        """Begin to keep metrics local; the fit begins."""
        if not _fits:
            _replaced.set(Metric, "sync", _gated(Metric.sync))
            _replaced.set(Metric, "__getstate__", _without_own_values(Metric.__getstate__))
        _fits.append(self)

    def forget(self) -> None:
        """Forget values that were computed alone, since all have met: they are computed again where they are read."""
        for metric in list(_computed_alone.values()):
            metric._computed = None
        _computed_alone.clear()

    def restore(self) -> None:
        """Put torchmetrics' methods back when the fit has ended. May be called twice."""
        if self in _fits:
            self.forget()
            _fits.remove(self)
            if not _fits:
                _replaced.restore()

    @property
    def apart(self) -> bool:
        """Whether the workers are in the middle of an epoch."""
        return not self._may_synchronize()


_fits: list[LocalMetrics] = []  # of this process, as torchmetrics' class is
_replaced = Patches()
# By id, since a metric's hash is that of its state: those that may hold a value of this worker's alone.
_computed_alone: WeakValueDictionary[int, Metric] = WeakValueDictionary()


def _gated(synchronize: Callable[..., None]) -> Callable[..., None]:
    """``Metric.sync`` that stays alone in the middle of an epoch, and tells of a worker that has ended by a PeerError."""

    @wraps(synchronize)
    def sync(
        metric: Metric,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable[[], bool] | None = None,
    ) -> None:
        if should_sync and any(fit.apart for fit in _fits):
            _computed_alone[id(metric)] = metric
            synchronize(metric, dist_sync_fn, process_group, should_sync, _not_available)
            return

        def gathering(gather: Callable[..., Any] | None) -> None:
            synchronize(metric, gather, process_group, should_sync, distributed_available)

        own = dist_sync_fn is not None or process_group is not None or metric.process_group is not None
        workers = _fits[-1].workers
        with workers.answering("synchronizing a metric"):
            if own or not should_sync:
                gathering(dist_sync_fn)
            else:  # a metric sets its states when it has gathered them all, so they may be gathered again
                workers.attempt(lambda: gathering(None if workers.group is None else _gathering_from(workers)))

    return sync


def _gathering_from(workers: Workers) -> Callable[..., list[Tensor]]:
    """torchmetrics' gather, of the workers' own group, which works on host memory: the default group is an island's."""

    def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
        return gathered_list(tensor, workers)

    return gather


def _without_own_values(get_state: Callable[[Metric], dict[str, Any]]) -> Callable[[Metric], dict[str, Any]]:
    """``Metric.__getstate__`` whose copies do not take a value of this worker's alone with them to the epoch's end."""

    @wraps(get_state)
    def state_of(metric: Metric) -> dict[str, Any]:
        state = get_state(metric)
        return {**state, "_computed": None} if _computed_alone.get(id(metric)) is metric else state

    return state_of


def _not_available() -> bool:
    return False
