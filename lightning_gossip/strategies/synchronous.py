"""What the synchronous algorithms have in common: collectives of their own, and workers that arrive early.

All workers make their collectives in the same order, each as often as the others. Where one has fewer batches (uneven streams)
or is told to stop, it arrives at the synchronisation point early and goes on taking part, so that nobody waits for it in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.collectives import Collectives
from lightning_gossip.runtime.sync_point import SyncPoint
from lightning_gossip.strategies.report import WorkerReport
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from lightning_gossip.strategies.worker_algorithm import Algorithm


class SynchronousAlgorithm(Algorithm):
    """Base of the algorithms whose workers make the same collectives.

    Args:
        device: of the models.
        timeout_s: deadline of each collective: how long a worker waits for another one that computes.
        timeline: where waits are recorded.
        groups: tells, with islands, two groups of this fit's own: of the ranks with the same part of a model, and of all.
    """

    is_lockstep: ClassVar[bool] = True

    def __init__(
        self,
        device: torch.device,
        timeout_s: float,
        timeline: Timeline,
        groups: Callable[[float], tuple[dist.ProcessGroup, dist.ProcessGroup]] | None = None,
    ) -> None:
        self._own_groups = groups
        self._of_all: Collectives | None = None
        self._device = device
        self._timeout_s = timeout_s
        self._timeline = timeline
        self._group: Collectives | None = None
        self._model = SharedModel(nn.Module())
        self._asks_for_sync = False
        self._sync_requested = False

    @property
    def collectives(self) -> Collectives:
        """Collectives of this fit."""
        assert self._group is not None, "start() comes first"
        return self._group

    @property
    def of_all(self) -> Collectives:
        """Collectives of all ranks, also where workers are islands of them: for what all have to decide alike."""
        return self.collectives if self._of_all is None else self._of_all

    @property
    @override
    def waited_s(self) -> float:
        return self.collectives.waited_s

    @property
    @override
    def collectives_made(self) -> int:
        return self.collectives.made

    @override
    def start(self) -> None:
        if self._own_groups is None:
            self._group = Collectives(self._device, self._timeout_s, self._timeline)
            return
        self._group, self._of_all = (
            Collectives(self._device, self._timeout_s, self._timeline, group, staged=self._device.type != "cpu")
            for group in self._own_groups(self._timeout_s)
        )

    @override
    def open(self, model: SharedModel) -> None:
        self._model = model
        self._model.check_equal(self.collectives.gather(self._model.layout))
        self._asks_for_sync = self._sync_requested = False

    @override
    def settle(self) -> None:
        """Nothing changes a model but its own worker."""

    @override
    def average(self, sync_point: SyncPoint) -> float:
        return self._model.average(sync_point)

    @override
    def close(self, *, together: bool) -> None:
        for group in (self._group, self._of_all):
            if group is not None:
                group.close()

    @override
    def request_sync(self) -> None:
        self._asks_for_sync = True  # said when this worker arrives

    @override
    def sync_requested(self) -> bool:
        return self._sync_requested

    @override
    def complete(self, report: WorkerReport) -> None:
        report.bytes_sent = self.collectives.bytes_sent

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore: the algorithm has no state."""
