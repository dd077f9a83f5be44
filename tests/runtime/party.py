"""A job whose workers are threads on one store in memory: who dies when is chosen, and groups are not made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import GossipError
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.membership.monitor import HeartbeatMonitor
from tests.workers import run_threads

HEARTBEAT_S, PATIENCE_S = 0.02, 20.0
FAIL_AFTER_S = (
    60.0  # a busy host stops a thread for a while: here the end of a worker is told, and late heartbeats mean nothing
)


class Died(BaseException):
    """What ends a worker's script as SIGKILL would."""


class Party:
    """The members of one job, each to be driven by a thread of its own."""

    def __init__(self, workers: int, *, min_workers: int = 1, fail_after_s: float = FAIL_AFTER_S) -> None:
        self.store = dist.HashStore()
        self.min_workers = min_workers
        self.fail_after_s = fail_after_s
        self.members = [WorkerId(number, 1) for number in range(workers)]
        self.all: list[Membership] = []
        self.made: list[tuple[int, int]] = []  # (rank, size) of each group
        self.fail_groups: Callable[[WorkerId, int], bool] = lambda me, generation: False
        for worker in self.members:
            self.add(worker)

    def add(self, worker: WorkerId) -> Membership:
        self.store.set(f"p/incarnation/{worker.initial_rank}", str(worker.incarnation))
        monitor = HeartbeatMonitor(self.store, "p", worker, fail_after_s=self.fail_after_s, heartbeat_s=HEARTBEAT_S)
        made: list[Membership] = []

        def make(_: Any, rank: int, size: int) -> None:
            self.made.append((rank, size))
            if self.fail_groups(worker, made[0].generation):
                raise RuntimeError("no group")

        made.append(
            Membership(
                self.store,
                monitor,
                "p",
                self.members if worker in self.members else [worker],
                make_group=make,
                min_workers=self.min_workers,
                timeout_s=PATIENCE_S,
            )
        )
        self.all.append(made[0])
        return made[0]

    def bury(self, worker: WorkerId) -> None:
        """Tell the others that a worker's process has ended, as the kernel would."""
        for member in self.all:
            if member.me != worker:
                member.monitor.process_ended(worker)

    def die(self, member: Membership) -> None:
        """Stop the heartbeats without a word, and end the script."""
        self.bury(member.me)
        monitor = member.monitor
        with monitor.lock:
            monitor._stopped = True
            monitor._drive = lambda steps: None  # type: ignore[method-assign]  # a killed process writes nothing more
            monitor.lock.notify_all()
        raise Died

    def run(self, script: Callable[[Membership], Any]) -> list[Any]:
        """What each member's script returned, or the exception that ended it."""

        def guarded(member: Membership) -> Any:
            member.monitor.observe(member.members, outside=member.outside)
            member.monitor.start()
            try:
                return script(member)
            except (Died, GossipError) as error:
                return error

        return run_threads([lambda member=member: guarded(member) for member in self.all], 2 * PATIENCE_S)  # type: ignore[misc]
