"""The claims of an island: its first rank makes them, and its mates follow the list that it writes.

Position by position under ``key``/0, ``key``/1 …, and an end. So all ranks of an island make the same steps by construction,
the last one of an epoch included. The list is written when a claim is made, and read one ahead on a thread: nobody waits for
it on the way to a step.

The list is in the island's own store, which the first rank serves: it lives as long as that rank, and so as the island, and no
mate asks the job's store for it. If the job's is lost the first rank can claim no more, and ends its list as at an epoch's end.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch.distributed as dist

from lightning_gossip.algorithm.work_sharing import Ledger
from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.work_sharing.claim_counter import Store
from lightning_gossip.transport.threads import in_background

_END = "end"
_READ_BY_ALL = 2  # steps after which each mate has read a position: it is in the same step as the first rank, or the one before


class ClaimList:
    """The list as the first rank writes it. The positions are told in the order of the claims, by one thread at a time.

    Args:
        store: the island's, a connection for this alone.
        key: prefix of the list's keys.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._written = 0
        self._deleted = 0
        self._ended = False

    def tell(self, position: int | None) -> None:
        """Write the next position, or the end; nothing after it."""
        if not self._ended:
            self._store.set(f"{self._key}/{self._written}", _END if position is None else str(position))
            self._written += 1
            self._ended = position is None

    def stepped(self, steps: int) -> None:
        """So many batches have been trained on: delete what all mates have read."""
        while self._deleted < steps - _READ_BY_ALL:
            self._store.delete_key(f"{self._key}/{self._deleted}")
            self._deleted += 1


class FollowedQueue:
    """What a mate knows of the claims of its island; stands in for the queue of the first rank.

    Args:
        batches: of the epoch, of all.
    """

    left_early = False  # the first rank tells
    is_lost = False

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.ledger = Ledger()
        self.taken = 0

    def first_unclaimed(self) -> int | None:
        """Unknown to a mate."""
        return None


class FollowedClaims:
    """The positions that the first rank of the island has claimed, one after the other, as a mate reads them.

    Args:
        store: the island's, a connection for this alone.
        key: prefix of the list's keys.
        batches: of the epoch, of all.
    """

    def __init__(self, store: Store, key: str, batches: int) -> None:
        self.queue = FollowedQueue(batches)
        self._store = store
        self._key = key
        self._number = 0
        self._closed = False
        self._ahead: Future[str | None] | None = None

    def __iter__(self) -> FollowedClaims:
        return self

    def __next__(self) -> int:
        """The next position.

        Raises:
            StopIteration: when the first rank is done with claiming.
        """
        if self._closed:
            raise StopIteration
        told = (self._ahead or self._read_ahead()).result()
        if told is None or told == _END:
            self._closed = True
            raise StopIteration
        self._number += 1
        self._ahead = self._read_ahead()
        position = int(told)
        self.queue.ledger.claim(position)
        self.queue.taken = max(self.queue.taken, position + 1)
        return position

    def settle(self) -> None:
        """Nothing is under way that others would have to know of: the first rank tells of its claims."""

    def close(self) -> None:
        """Follow no more. May be called twice."""
        self._closed = True

    def _read_ahead(self) -> Future[str | None]:
        return in_background("gossip-claim", self._read)

    def _read(self) -> str | None:
        """Wait for the next position; None if it is not wanted any more. On a thread of its own.

        The first rank ends its list when it leaves it, so that nobody waits for what does not come.
        """
        told = None
        while told is None and not self._closed:
            told = self._told()
        return told

    def _told(self) -> str | None:
        try:
            return self._store.get(f"{self._key}/{self._number}").decode()
        except dist.DistStoreError:
            return None  # the first rank has not claimed for very long; if it has died, so will this process
        except dist.DistError as error:
            raise PeerError(
                "The first rank of this island, which tells its mates what to train on, does not answer: it has ended, or"
                " cannot be reached. Its own log says why.",
                phase="island",
            ) from error
