"""One exchange of half-differences between two workers, cut into chunks with several in flight.

Neither end takes in a chunk whose half-difference is not finite, nor any later chunk of that exchange. One end holds d, the
other −d, from the same two copies, and they look at the chunks in the same order: so both decide the same, without a word, and
the sum of all models stays. (A flag in the request could not do it: the model may become NaN between the request and a chunk.)

What is sent for a chunk is the codec's business (:mod:`lightning_gossip.algorithm.compression.pairwise`). It is written and
read under the turn's lock, for which only :meth:`Exchanger.give_up` ever waits. The model's own lock, for which the training
thread may wait, is held for the copy of a chunk and for its merge, and not while the codec works.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_gossip.algorithm.adpsgd.replica import PublishedModel
from lightning_gossip.algorithm.compression.pairwise import Codec, Plain
from lightning_gossip.algorithm.tensors.finite import all_finite
from lightning_gossip.algorithm.tensors.flat import chunk_slices
from lightning_gossip.transport.base import Pending, Transport


@dataclass
class Outcome:
    """Result of one exchange.

    Args:
        bytes_sent: and as many received; without the headers of messages and packets.
        refused: a half-difference was not finite, so neither end took it in, nor what came after it.
        mine_finite: whether this worker's own copy of that chunk was finite.
    """

    bytes_sent: int = 0
    refused: bool = False
    mine_finite: bool = True


class GivenUpError(Exception):
    """The exchange of this thread was given up, and goes on without it: nobody is told."""


class _Turn:
    """One exchange, as long as it may touch this worker's model; ``lock`` is held wherever it does, and free while it waits."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._is_over = False

    def end(self) -> None:
        """Forbid the exchange to touch the model from now on; the chunks that it waits for are its own."""
        with self.lock:
            self._is_over = True

    def check(self) -> None:
        """Called with the lock held.

        Raises:
            GivenUpError: if this exchange was given up.
        """
        if self._is_over:
            raise GivenUpError


class Exchanger:
    """Streams a model through a transport: snapshot a chunk, send it while receiving the peer's, merge; several at once.

    The buffers are allocated once: 2 · ``depth`` chunks as they are sent. Used by one thread at a time; :meth:`give_up` by any.

    Args:
        transport: where to.
        chunk_bytes: size of a chunk. Long enough that a chunk's latency does not matter, short enough that the lock is
            held for a millisecond at most.
        depth: chunks in flight. With two, one is on the wire while the other is copied and merged.
        timeout_s: deadline of each chunk; may be changed between two runs.
        refuse_nonfinite: whether half-differences are looked at; the same on all workers.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        chunk_bytes: int = 4 << 20,
        depth: int = 2,
        timeout_s: float,
        refuse_nonfinite: bool = True,
    ) -> None:
        self._transport = transport
        self._chunk_bytes = chunk_bytes
        self._depth = depth
        self.timeout_s = timeout_s
        self._refuses = refuse_nonfinite
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._turn = _Turn()  # of the exchange under way, or of the last one

    def run(self, peer: int, model: PublishedModel, codec: Codec | None = None) -> Outcome:
        """Average with a peer that runs the same at the same time.

        Args:
            peer: the rank.
            model: of this worker.
            codec: for this model, of the same kind as the peer's; elements as they are if None.

        Raises:
            PeerError: when the peer is gone or a chunk's deadline is over. The chunks merged so far stay merged.
        """

        code = Plain(model.dtype) if codec is None else codec

        def merge(chunk: slice, mine: Tensor, theirs: Tensor) -> None:
            difference = code.half_difference(chunk, mine, theirs)
            if self._refuses and not outcome.refused and not all_finite(difference):
                outcome.refused, outcome.mine_finite = True, code.is_finite(mine)
            if not outcome.refused:
                model.merge(chunk, difference)

        outcome = Outcome()
        turn = self._turn = _Turn()
        outcome.bytes_sent = self._greet(peer, code, turn) + self._stream(peer, model, code, merge, turn)
        return outcome

    def give(self, peer: int, model: PublishedModel) -> Outcome:
        """Give the model to a peer that takes it, and ignore what it sends.

        Raises:
            PeerError: as :meth:`run`.
        """
        turn = self._turn = _Turn()
        return Outcome(self._stream(peer, model, Plain(model.dtype), lambda chunk, mine, theirs: None, turn))

    def take(self, peer: int, model: PublishedModel, into: Tensor) -> Outcome:
        """Take the model of a peer that gives it.

        Args:
            peer: the rank.
            model: of this worker, which stays as it is.
            into: shape (d,).

        Returns:
            ``refused`` if the peer's is not finite either.

        Raises:
            PeerError: as :meth:`run`.
        """
        outcome = Outcome(mine_finite=False)
        plain = Plain(model.dtype)
        turn = self._turn = _Turn()
        outcome.bytes_sent = self._stream(peer, model, plain, lambda chunk, mine, theirs: _put(into, chunk, theirs), turn)
        outcome.refused = not all_finite(into)
        return outcome

    def give_up(self) -> None:
        """Leave the exchange under way to its thread, and its buffers with it: it takes in nothing any more. From any thread.

        Waits at most as long as a chunk takes to be merged. Afterwards another exchange may begin.
        """
        self._turn.end()
        self._buffers = []

    def release(self) -> None:
        """Give the buffers back; the next run allocates them again."""
        self._buffers = []

    def _greet(self, peer: int, codec: Codec, turn: _Turn) -> int:
        """Swap the codec's greeting, if it has one; returns the bytes sent."""
        mine = codec.greeting()
        if mine is None:
            return 0
        theirs = torch.empty_like(mine)
        self._transport.swap(peer, mine, theirs).wait(self.timeout_s)
        with turn.lock:
            turn.check()
            codec.agree(theirs)
        return mine.nbytes

    def _stream(self, peer: int, model: PublishedModel, codec: Codec, arrived: _Arrived, turn: _Turn) -> int:
        """Swap all chunks; returns the bytes sent."""
        granules = max(1, self._chunk_bytes // (model.dtype.itemsize * codec.granule))
        chunks = chunk_slices(model.numel, granules * codec.granule)
        if not chunks:
            return 0
        buffers = self._allocate(codec, chunks[0].stop)
        bytes_sent = 0
        in_flight: deque[tuple[slice, Tensor, Tensor, Pending]] = deque()

        def finish() -> None:
            chunk, mine, theirs, pending = in_flight.popleft()
            pending.wait(self.timeout_s)
            with turn.lock:
                turn.check()
                arrived(chunk, mine, theirs)

        for number, chunk in enumerate(chunks):
            if len(in_flight) == self._depth:
                finish()
            length = chunk.stop - chunk.start
            size = codec.payload_numel(length)
            mine, theirs = (buffer[:size] for buffer in buffers[number % self._depth])
            with turn.lock:
                turn.check()
                model.snapshot(chunk, codec.room(mine, length))
                codec.encode(chunk, mine)
            in_flight.append((chunk, mine, theirs, self._transport.swap(peer, mine, theirs)))
            bytes_sent += mine.nbytes
        while in_flight:
            finish()
        return bytes_sent

    def _allocate(self, codec: Codec, length: int) -> list[tuple[Tensor, Tensor]]:
        size, dtype = codec.payload_numel(length), codec.payload_dtype
        buffers = self._buffers
        if not (buffers and buffers[0][0].numel() >= size and buffers[0][0].dtype == dtype):
            buffers = self._buffers = [
                (torch.empty(size, dtype=dtype, device="cpu"), torch.empty(size, dtype=dtype, device="cpu"))
                for _ in range(self._depth)
            ]
        return buffers


class _Arrived(Protocol):
    def __call__(self, chunk: slice, mine: Tensor, theirs: Tensor) -> None: ...


def _put(vector: Tensor, chunk: slice, piece: Tensor) -> None:
    vector[chunk] = piece
