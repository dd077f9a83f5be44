"""One exchange of half-differences between two workers, cut into chunks with several in flight."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from lightning_gossip.algorithm.flat import chunk_slices
from lightning_gossip.algorithm.replica import Replica, half_difference
from lightning_gossip.transport.base import Pending, Transport


class PublishedModel(Protocol):
    """What an exchange needs of a replica; the implementation takes the lock."""

    numel: int
    dtype: torch.dtype

    def snapshot(self, chunk: slice, out: Tensor) -> None:
        """See :meth:`lightning_gossip.algorithm.replica.Replica.snapshot`."""

    def merge(self, chunk: slice, half_difference: Tensor) -> None:
        """See :meth:`lightning_gossip.algorithm.replica.Replica.merge`."""


class Exchanger:
    """Streams a model through a transport: snapshot a chunk, send it while receiving the peer's, merge; several at once.

    The buffers are allocated once: 2 · ``depth`` chunks. Used by one thread at a time.

    Args:
        transport: where to.
        chunk_bytes: size of a chunk. Long enough that a chunk's latency does not matter, short enough that the lock is
            held for a millisecond at most.
        depth: chunks in flight. With two, one is on the wire while the other is copied and merged.
        timeout_s: deadline of each chunk; may be changed between two runs.
    """

    def __init__(self, transport: Transport, *, chunk_bytes: int = 4 << 20, depth: int = 2, timeout_s: float) -> None:
        self._transport = transport
        self._chunk_bytes = chunk_bytes
        self._depth = depth
        self.timeout_s = timeout_s
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def run(self, peer: int, model: PublishedModel) -> int:
        """Average with a peer that runs the same at the same time.

        Returns:
            Bytes sent (and as many received).

        Raises:
            PeerError: when the peer is gone or a chunk's deadline is over. The chunks merged so far stay merged.
        """
        itemsize = torch.empty((), dtype=model.dtype).element_size()
        chunks = chunk_slices(model.numel, max(1, self._chunk_bytes // itemsize))
        if not chunks:
            return 0
        self._allocate(chunks[0].stop, model.dtype)
        in_flight: deque[tuple[slice, Tensor, Tensor, Pending]] = deque()
        for number, chunk in enumerate(chunks):
            if len(in_flight) == self._depth:
                self._finish(model, *in_flight.popleft())
            length = chunk.stop - chunk.start
            mine, theirs = (buffer[:length] for buffer in self._buffers[number % self._depth])
            model.snapshot(chunk, mine)
            in_flight.append((chunk, mine, theirs, self._transport.swap(peer, mine, theirs)))
        while in_flight:
            self._finish(model, *in_flight.popleft())
        return model.numel * itemsize

    def release(self) -> None:
        """Give the buffers back; the next run allocates them again."""
        self._buffers = []

    def _finish(self, model: PublishedModel, chunk: slice, mine: Tensor, theirs: Tensor, pending: Pending) -> None:
        pending.wait(self.timeout_s)
        model.merge(chunk, half_difference(mine, theirs))

    def _allocate(self, length: int, dtype: torch.dtype) -> None:
        if self._buffers and self._buffers[0][0].numel() >= length and self._buffers[0][0].dtype == dtype:
            return
        self._buffers = [(torch.empty(length, dtype=dtype), torch.empty(length, dtype=dtype)) for _ in range(self._depth)]


class LockedReplica:
    """A replica as an exchange sees it: each copy under the model lock."""

    def __init__(self, replica: Replica, lock: threading.Lock) -> None:
        self._replica = replica
        self._lock = lock
        self.numel = replica.numel
        self.dtype: torch.dtype = replica.dtype

    def snapshot(self, chunk: slice, out: Tensor) -> None:
        """See :class:`PublishedModel`."""
        with self._lock:
            self._replica.snapshot(chunk, out)

    def merge(self, chunk: slice, half_difference: Tensor) -> None:
        """See :class:`PublishedModel`."""
        with self._lock:
            self._replica.merge(chunk, half_difference)
