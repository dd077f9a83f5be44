"""The rounds of one worker, one after the other: say, wait, read, forget."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_gossip.runtime.membership.monitor import Watch
from lightning_gossip.runtime.membership.round_store import FULL, Board, Worker
from lightning_gossip.runtime.store_client import store_lost

log = logging.getLogger(__name__)


class Rounds:
    """Used by the training thread.

    Args:
        store: its connection.
        watch: of this worker; marks the dead absent while a round is waited for.
        prefix: of the keys.
        timeout_s: how long a round waits for a worker that is alive, in seconds.

    Attributes:
        number: of the next round, the same on all members at the same point of their programs.
    """

    def __init__(self, store: Store, watch: Watch, prefix: str, timeout_s: float) -> None:
        self.number = 0
        self._first = 0
        self._left: list[int] = []  # rounds of an earlier use of a Trainer that this worker has spoken in
        self._board = Board(store, f"{prefix}/round")
        self._watch = watch
        self._timeout_s = timeout_s

    def begin_at(self, number: int) -> None:
        """This worker takes part from this round on; in those before it takes part no more."""
        self._left += range(max(self._first, self.number - 2), self.number)  # those before it has deleted itself
        self.number = self._first = number

    @property
    def is_over(self) -> bool:
        """Whether this worker was taken for dead before it has spoken in the next round."""
        return self._board.is_absent(self.number, self._watch.me)

    def hold(self, members: Sequence[Worker], value: bytes, *, tidies: bool) -> list[bytes | None] | None:
        """Say this worker's part, and hear the others'.

        Args:
            members: who takes part.
            value: what this worker says.
            tidies: whether it deletes what belongs to nobody in the round before.

        Returns:
            What each member said, None for one that was absent; None if this worker itself was taken for dead.

        Raises:
            PeerError: if a worker does not come, has failed, or the store is gone.
        """
        number, me = self.number, self._watch.me
        self.number += 1
        self._watch.raise_failure()
        try:
            if not self._board.say(number, me, value):
                return None
            if not self._board.fill(number, members):
                self._watch.look_at(members, number)
                self._watch.raise_failure()  # one that has ended before it knew of this round wakes nobody
                reason = self._board.wait(number, self._timeout_s)
                if not self._board.is_full(number, members):
                    if self._board.is_absent(number + 1, me):  # all have read this round, and deleted it, and gone on
                        return None
                    self._watch.raise_failure()
                    if reason != FULL:
                        raise self._watch.woken(reason)
                    for worker in members:  # to those for whom it is full the others are no members any more
                        self._board.mark_absent(number, worker)
            self._watch.look_at(members)
            said = self._board.read(number, members)
            if said is None:
                return None
        except dist.DistError as error:
            raise store_lost() from error
        self._forget(number - 1, me, tidies)
        return said

    def _forget(self, number: int, me: Worker, tidies: bool) -> None:
        """Everybody has spoken in the round after it, so everybody has read it, and has left those of earlier uses."""
        try:
            for old in self._left:
                self._board.forget(old, me)
                self._board.forget_round(old)  # each may have woken the others in one that was never full
            self._left.clear()
            if number >= self._first:
                self._board.forget(number, me)
            if number >= self._first and tidies:
                self._board.forget_round(number)
        except dist.DistError as error:  # the round is complete; whoever holds the store may have ended after it
            log.debug("%s: the keys of a synchronisation point were left in the store: %s", me.spoken, error)
