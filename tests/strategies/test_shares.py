"""Whose batches are whose, when workers are excluded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.algorithm.work_sharing import EpochPlan
from lightning_gossip.runtime.work_sharing.completion_log import CompletionLog
from lightning_gossip.strategies.data.batch_samplers import SharedBatches


@dataclass
class Members:
    """A worker as its completion log needs to know it."""

    me: WorkerId
    outside: bool = False
    generation: int = 3


def shared(store: Any, members: Members, *, rank: int, workers: int) -> SharedBatches:
    """One worker's end of an epoch of 12 batches."""
    return SharedBatches(
        EpochPlan(24, 2, shuffle=False, drop_last=False, seed=0),
        rank=rank,
        workers=workers,
        epoch=lambda: 0,
        training=lambda: True,
        store=store,
        key="fit",
        lookahead=1,
        batch_s=lambda: None,
        completion_log=CompletionLog(store, "fit", members),
    )


def test_an_excluded_worker_takes_no_batch_of_the_others() -> None:
    store = dist.HashStore()
    lonely = iter(shared(store, Members(WorkerId(1, 2), outside=True), rank=1, workers=2))
    together = iter(shared(store, Members(WorkerId(0, 1)), rank=0, workers=1))
    taken = []
    for batch in together:
        taken.append(batch)
        next(lonely, None)
    assert len(taken) == 12
