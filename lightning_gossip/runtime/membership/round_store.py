"""Rounds in a store: each member writes one value, or is marked absent, and everybody reads the same (decisions/005).

A round has a number and one key a member. A key is written once, by ``compare_set``: by its owner, or as ABSENT by anybody
for whom the owner has failed. Whoever comes first has decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.store_client import look_up

_PART_BYTES = 4 << 20  # a TCPStore drops a client that sends more than 8 MB in one value
_ABSENT = b"-"
FULL = "full"  # why those who wait for a round are woken, if all is well


class WorkerId(NamedTuple):
    """Identity of one process of the job.

    Args:
        initial_rank: the rank that it was started with; stays when ranks change.
        incarnation: 1 for the first process with this rank, one more for each that came back.
    """

    initial_rank: int
    incarnation: int

    def __str__(self) -> str:
        """The name in the store's keys."""
        return f"{self.initial_rank}.{self.incarnation}"

    @property
    def spoken(self) -> str:
        """The name for people.

        >>> WorkerId(0, 1).spoken, WorkerId(0, 2).spoken
        ('rank 0', 'rank 0 (second start)')
        """
        ordinals = {2: "second", 3: "third", 4: "fourth"}
        again = "" if self.incarnation == 1 else f" ({ordinals.get(self.incarnation, f'{self.incarnation}th')} start)"
        return f"rank {self.initial_rank}{again}"


class RoundStore:
    """The values of all rounds, through one connection; used by one thread.

    Args:
        store: the connection, used by nobody else.
        prefix: of all keys.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def write(self, number: int, worker: WorkerId, value: bytes) -> bool:
        """Write this worker's value of a round.

        Returns:
            False if this worker has been marked absent before.
        """
        parts = [value[i : i + _PART_BYTES] for i in range(0, len(value), _PART_BYTES)][1:]
        for index, part in enumerate(parts):
            self._store.set(f"{self._key(number, worker)}/{index}", part)  # type: ignore[arg-type]  # bytes are fine
        head = b"%d+" % len(parts) + value[:_PART_BYTES]
        return self._decide(number, worker, head) != _ABSENT

    def mark_absent(self, number: int, worker: WorkerId) -> None:
        """Decide that a worker takes no part in a round, unless it has written its value already."""
        self._decide(number, worker, _ABSENT)

    def is_absent(self, number: int, worker: WorkerId) -> bool:
        """Whether a worker was marked absent in a round; such a mark is never deleted."""
        return look_up(self._store, self._key(number, worker)) == _ABSENT

    def wake_if_full(self, number: int, members: Sequence[WorkerId]) -> bool:
        """Wake those who wait for the round if every member has written its value or is absent; returns whether so."""
        full = self._store.check([self._key(number, worker) for worker in members])
        if full:
            self.wake(number, FULL)
        return full

    def wake(self, number: int, reason: str) -> None:
        """Wake those who wait for the round, whether it is full or not."""
        self._store.set(f"{self._prefix}/{number}/full", reason)

    def wait(self, number: int, timeout_s: float) -> str:
        """Wait until somebody wakes those who wait for the round; returns the reason, as far as the store still has it.

        Raises:
            PeerError: if nobody does so in time.
        """
        try:
            self._store.wait([f"{self._prefix}/{number}/full"], timedelta(seconds=timeout_s))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError as error:
            raise PeerError(
                f"Some worker did not come within {timeout_s:.3g} s, and is alive. Look at the logs of the other ranks, or"
                " pass a longer timeout=timedelta(...).",
                phase="rendezvous",
                seconds=timeout_s,
            ) from error
        reason = look_up(self._store, f"{self._prefix}/{number}/full")
        return "the round is over" if reason is None else reason.decode()

    def is_full(self, number: int, members: Sequence[WorkerId]) -> bool:
        """Whether every member has written its value or is absent."""
        return self._store.check([self._key(number, worker) for worker in members])

    def read(self, number: int, members: Sequence[WorkerId]) -> list[bytes | None] | None:
        """The members' values of a full round, None for an absent one; no list if the round has been deleted meanwhile."""
        values: list[bytes | None] = []
        for worker in members:  # not all at once: that waits for a key that is not there, and somebody may be deleting it
            head = look_up(self._store, self._key(number, worker))
            value = None if head is None or head == _ABSENT else self._whole(number, worker, head)
            if head is None or (value is None and head != _ABSENT):
                return None
            values.append(value)
        return values

    def forget(self, number: int, worker: WorkerId) -> None:
        """Delete a worker's value of a round that everybody has read or left; a mark of absence stays."""
        key = self._key(number, worker)
        head = look_up(self._store, key)
        if head is None or head == _ABSENT:
            return
        parts = int(head.split(b"+", 1)[0])
        for name in (key, *(f"{key}/{index}" for index in range(parts))):
            self._store.delete_key(name)

    def forget_round(self, number: int) -> None:
        """Delete the wake-up of a round that everybody has read."""
        self._store.delete_key(f"{self._prefix}/{number}/full")

    def _whole(self, number: int, worker: WorkerId, head: bytes) -> bytes | None:
        count, value = head.split(b"+", 1)
        parts = [look_up(self._store, f"{self._key(number, worker)}/{index}") for index in range(int(count))]
        return value + b"".join(part for part in parts if part is not None) if None not in parts else None

    def _decide(self, number: int, worker: WorkerId, value: bytes) -> bytes:
        written: bytes = self._store.compare_set(self._key(number, worker), "", value)  # type: ignore[arg-type]
        return written

    def _key(self, number: int, worker: WorkerId) -> str:
        return f"{self._prefix}/{number}/{worker}"
