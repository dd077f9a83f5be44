"""One value of every logged metric on all ranks, without a collective inside an epoch.

Lightning reduces a metric over ranks only where the user passed ``sync_dist=True``, and then also in the middle of an epoch
if the metric is logged on every step. Both are wrong here: workers in the middle of an epoch are at different steps, and at
its end a value that differs over ranks splits ReduceLROnPlateau, EarlyStopping and the best checkpoint's path. So inside the
epoch every value is the worker's own, and at its end all values are reduced at once, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torchmetrics import Metric
from typing_extensions import override

from lightning_gossip.runtime.peers import answering
from lightning_gossip.runtime.rendezvous import gather
from lightning_gossip.strategies.survival import survive_in

_warned: set[str] = set()


class SynchronizedResults(_ResultCollection):
    """Lightning's collection of logged values; epoch values are always reduced, training step values never."""

    @override
    def log(self, fx: str, name: str, value: Any, **kwargs: Any) -> None:
        if self.training and kwargs.get("sync_dist"):
            if kwargs.get("on_step") and name not in _warned:
                _warned.add(name)
                rank_zero_warn(
                    f"self.log({name!r}, on_step=True, sync_dist=True) would make all workers wait for each other at every"
                    " step. The value on a step is this worker's own; the value of the epoch is reduced over all workers. Drop"
                    " sync_dist=True to silence this."
                )
            kwargs["sync_dist"] = False
        super().log(fx, name, value, **kwargs)

    def synchronize(self) -> None:
        """Reduce the epoch's values over the workers that logged them. Collective: every worker calls it at the same points.

        After it, reading a value communicates no more, so that a progress bar on rank 0 may.
        """
        due = {
            key: metric
            for key, metric in self.items()
            if metric.meta.on_epoch
            and not metric.has_reset
            and metric._computed is None
            and not metric.meta.sync.rank_zero_only
        }
        mine = {key: _state_of(metric) for key, metric in due.items() if metric.is_tensor}
        everyones = gather(mine, kind="the logged values")
        for key, metric in sorted(due.items()):
            if metric.is_tensor:
                value = _reduced(metric, [theirs[key] for theirs in everyones if key in theirs])
                metric._computed = torch.as_tensor(value, dtype=metric.value.dtype, device=metric.value.device)
            else:
                metric.compute()  # torchmetrics reduces by itself


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


def _reporting(synchronize: Callable[..., None]) -> Callable[..., None]:
    """The same; a worker that is gone is a PeerError."""

    def sync(*args: Any, **kwargs: Any) -> None:
        with answering("synchronizing a metric"):
            synchronize(*args, **kwargs)

    return sync


class LocalMetrics:
    """Keeps torchmetrics that are computed in the middle of an epoch from synchronising.

    Args:
        model: whose metrics.
        may_synchronize: asked at each computation.
        survives: whether a worker may die meanwhile.
    """

    def __init__(self, model: torch.nn.Module, may_synchronize: Callable[[], bool], *, survives: bool = False) -> None:
        self._changed: list[tuple[Metric, str, Any]] = []
        for module in model.modules():
            if isinstance(module, Metric):
                available = module.distributed_available_fn

                def gated(available: Callable[[], bool] = available) -> bool:
                    return available() and may_synchronize()

                self._set(module, "distributed_available_fn", gated)
                # a value computed in the middle of the epoch must not be returned at its end
                self._set(module, "compute_with_cache", False)
                if survives:
                    survive_in(module, self._set)
                else:
                    self._set(module, "sync", _reporting(module.sync))

    def _set(self, metric: Metric, name: str, value: Any) -> None:
        self._changed.append((metric, name, getattr(metric, name)))
        object.__setattr__(metric, name, value)

    def restore(self) -> None:
        """Give the metrics their own behaviour back."""
        for metric, name, value in reversed(self._changed):
            object.__setattr__(metric, name, value)
        self._changed.clear()
