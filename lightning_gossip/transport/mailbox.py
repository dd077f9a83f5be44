"""A queue of short letters for each worker, in the job's store.

A Gloo group of all cannot serve: a receive from any source is ended by the end of one sender (seen: "Connection reset by
peer"), or is not, and only a message wakes it. A queue has neither trouble: the end of a sender does not touch it, and a
worker ends its own listener by a letter to itself. Its price is a push (2 µs for the caller) and a pop (50 µs) at the store.

Whoever waits for a letter needs a connection for that alone. Torch's store (2.14) never forgets a connection that has waited
for a queue, and a later push ends whatever else it waits for then: a listener that made an edge there thought that its peer
had come, and then waited for it for ever. (40,000 letters, each waited for, did not slow the queue: 0.12 ms a letter.)
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

log = logging.getLogger(__name__)

_EMPTY_S = 0.01


class Inbox:
    """Inbox of one worker. :meth:`push` may be called from any thread, :meth:`pop` from one.

    Args:
        store: a connection for nothing else, whose calls may wait without a deadline.
        prefix: of the queues' keys.
        rank: whose letters are popped.
    """

    def __init__(self, store: Store, prefix: str, rank: int) -> None:
        self._store: Any = PrefixStore(prefix, store)
        self._rank = rank
        self._pause = threading.Event()  # never set

    @staticmethod
    def push(store: Any, peer: int, letter: bytes) -> None:
        """Put a letter into a peer's inbox.

        Args:
            store: the calling thread's connection, with the prefix.
            peer: the rank.
            letter: any bytes.
        """
        store.queue_push(f"inbox/{peer}", letter)

    def pop(self) -> bytes:
        """The next letter; waits for it, without a deadline."""
        letter = None
        while letter is None:
            letter = self._letter()
        return letter

    def _letter(self) -> bytes | None:
        try:
            letter: bytes = self._store.queue_pop(f"inbox/{self._rank}")
        except dist.QueueEmptyError:
            # torch 2.14's store sometimes wakes a connection for a key that it has waited for earlier
            log.debug("rank %d: the store woke a listener for which it had no message", self._rank)
            self._pause.wait(_EMPTY_S)
            return None
        return letter
