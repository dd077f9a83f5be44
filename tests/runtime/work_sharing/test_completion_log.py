"""The log of finished batches, and its second copy."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.runtime.work_sharing.completion_log import CompletionLog


@dataclass(frozen=True)
class Members:
    """A worker as its completion log needs to know it."""

    me: WorkerId
    outside: bool = False
    generation: int = 0


@dataclass
class Ended:
    """A store whose process has ended, and how often somebody tried to write to it."""

    attempts: list[str] = field(default_factory=list)

    def append(self, key: str, value: str) -> None:
        self.attempts.append(value)
        raise dist.DistNetworkError("Broken pipe")

    def delete_key(self, key: str) -> None:
        raise dist.DistNetworkError("Broken pipe")


ME = WorkerId(0, 1)


def begun(reserve: object) -> tuple[CompletionLog, dist.HashStore]:
    store = dist.HashStore()
    log = CompletionLog(store, "fit", Members(ME), reserve=lambda: reserve)
    log.begin("epoch 0")
    return log, store


def test_a_second_store_that_has_ended_is_tried_once_in_an_assignment() -> None:
    """Torch writes a stack of 2 kB to the log for each attempt, which would hide all else that a user should read."""
    second = Ended()
    log, _ = begun(second)
    for position in range(5):
        log.finished(position)
    assert second.attempts == ["0,"]
    assert log.read(str(ME)) == [0, 1, 2, 3, 4]
    log.begin("epoch 1")
    log.finished(7)
    assert second.attempts == ["0,", "7,"]


def test_what_only_the_second_store_has_is_found() -> None:
    second = dist.HashStore()
    log, store = begun(second)
    log.finished(3)
    store.delete_key(f"fit/finished/epoch 0/{ME}")
    assert log.read(str(ME)) == [3]
