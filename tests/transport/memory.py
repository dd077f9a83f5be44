"""Workers as threads of one process. For tests, and for anything that must choose its interleavings."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from lightning_gossip.errors import PeerError
from lightning_gossip.transport.base import Pending, Transport
from lightning_gossip.transport.messages import REPLY, Kind, Message

T = TypeVar("T")


class MemoryNetwork:
    """The queues that connect ``world_size`` workers of one process."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.inbox: list[queue.Queue[tuple[int, list[int]]]] = [queue.Queue() for _ in range(world_size)]
        # all at once and not on first use: two threads that create the same queue would each keep their own
        pairs = [(sender, receiver) for sender in range(world_size) for receiver in range(world_size)]
        self.replies: dict[tuple[int, int], queue.Queue[list[int]]] = {pair: queue.Queue() for pair in pairs}
        self.vectors: dict[tuple[int, int], queue.Queue[Tensor]] = {pair: queue.Queue() for pair in pairs}

    def transport(self, rank: int) -> MemoryTransport:
        """The end of one worker."""
        return MemoryTransport(self, rank)


class MemoryTransport(Transport):
    """Transport of one worker of a :class:`MemoryNetwork`. Sending copies the vector once, as a socket would."""

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self.rank = rank
        self.world_size = network.world_size
        self._network = network
        self._closed = False

    def post(self, peer: int, message: Message) -> None:
        self._network.inbox[peer].put((self.rank, message.words()))

    def next_message(self) -> tuple[int, Message]:
        while True:
            sender, words = self._network.inbox[self.rank].get()
            message = self.admit(sender, words)
            if message is not None:
                return sender, message

    def reply(self, peer: int, message: Message) -> None:
        self._network.replies[self.rank, peer].put(message.words())

    def await_reply(self, peer: int, timeout_s: float) -> Message:
        end_s = time.monotonic() + timeout_s
        while True:
            words = _get(self._network.replies[peer, self.rank], max(0.0, end_s - time.monotonic()), peer, "reply")
            message = self.admit(peer, words, REPLY)
            if message is not None:
                return message

    def send(self, peer: int, vector: Tensor) -> Pending:
        self._network.vectors[self.rank, peer].put(vector.clone())
        return _Sent()

    def receive(self, peer: int, vector: Tensor) -> Pending:
        return _Receiving(self._network.vectors[peer, self.rank], peer, vector)

    def close(self) -> None:
        """Nothing is held; wakes this worker's own listener, once."""
        if self._closed:
            return
        self._closed = True
        self._network.inbox[self.rank].put((self.rank, Message(Kind.STOP).words()))


class _Sent:
    def wait(self, timeout_s: float) -> None:
        """Return at once, since the vector was copied."""


@dataclass
class _Receiving:
    incoming: queue.Queue[Tensor]
    peer: int
    vector: Tensor

    def wait(self, timeout_s: float) -> None:
        self.vector.copy_(_get(self.incoming, timeout_s, self.peer, "exchange"))


def _get(source: queue.Queue[T], timeout_s: float, peer: int, phase: str) -> T:
    try:
        return source.get(timeout=timeout_s)
    except queue.Empty:
        raise PeerError(
            f"Rank {peer} did not answer within {timeout_s:.3g} s ({phase}). Look at its log.",
            rank=peer,
            phase=phase,
            seconds=timeout_s,
            timed_out=True,
        ) from None
