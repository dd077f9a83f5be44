"""The rounds of one worker, one after the other: write, wait, read, forget."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_gossip.runtime.membership.monitor import HeartbeatMonitor
from lightning_gossip.runtime.membership.round_store import FULL, RoundStore, WorkerId
from lightning_gossip.runtime.store_client import store_lost

log = logging.getLogger(__name__)


class Rounds:
    """The rounds that the training thread of one worker takes part in.

    Args:
        store: the training thread's connection.
        monitor: of this worker; marks failed workers absent while a round is waited for.
        prefix: of the keys.
        timeout_s: how long a round waits for a worker that is alive, in seconds.

    Attributes:
        number: of the next round, the same on all members at the same point of their programs.
    """

    def __init__(self, store: Store, monitor: HeartbeatMonitor, prefix: str, timeout_s: float) -> None:
        self.number = 0
        self._first = 0
        self._left: list[int] = []  # rounds of an earlier use of a Trainer that this worker has written to
        self._round_store = RoundStore(store, f"{prefix}/round")
        self._monitor = monitor
        self._timeout_s = timeout_s

    def begin_at(self, number: int) -> None:
        """Take part from this round on, and no more in those before it."""
        self._left += range(max(self._first, self.number - 2), self.number)  # those before it has deleted itself
        self.number = self._first = number

    @property
    def is_excluded(self) -> bool:
        """Whether this worker was marked absent before it has written its value of the next round."""
        return self._round_store.is_absent(self.number, self._monitor.me)

    def hold(self, members: Sequence[WorkerId], value: bytes, *, tidies: bool) -> list[bytes | None] | None:
        """Exchange one value a member.

        Args:
            members: who takes part.
            value: of this worker.
            tidies: whether this worker deletes what belongs to nobody in the round before.

        Returns:
            Each member's value, None for one that was absent; no list if this worker itself was marked absent.

        Raises:
            PeerError: if a worker does not come, has aborted, or the store does not answer.
        """
        number, me = self.number, self._monitor.me
        self.number += 1
        self._monitor.raise_failure()
        try:
            if not self._round_store.write(number, me, value):
                return None
            if not self._round_store.wake_if_full(number, members):
                self._monitor.observe(members, number)
                self._monitor.raise_failure()  # a worker that has aborted before it knew of this round wakes nobody
                reason = self._round_store.wait(number, self._timeout_s)
                if not self._round_store.is_full(number, members):
                    if self._round_store.is_absent(number + 1, me):  # all have read this round, and deleted it, and gone on
                        return None
                    self._monitor.raise_failure()
                    if reason != FULL:
                        raise self._monitor.woken(reason)
                    for worker in members:  # to those for whom it is full the others are no members any more
                        self._round_store.mark_absent(number, worker)
            self._monitor.observe(members)
            values = self._round_store.read(number, members)
            if values is None:
                return None
        except dist.DistError as error:
            raise store_lost() from error
        self._forget(number - 1, me, tidies)
        return values

    def _forget(self, number: int, me: WorkerId, tidies: bool) -> None:
        """Delete a round, since everybody has written to the one after it, and has left those of earlier uses."""
        try:
            for old in self._left:
                self._round_store.forget(old, me)
                self._round_store.forget_round(old)  # each may have woken the others in one that was never full
            self._left.clear()
            if number >= self._first:
                self._round_store.forget(number, me)
            if number >= self._first and tidies:
                self._round_store.forget_round(number)
        except dist.DistError as error:  # the round is complete; whoever holds the store may have ended after it
            log.debug("%s: the keys of a synchronisation point were left in the store: %s", me.spoken, error)
