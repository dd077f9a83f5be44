"""A transport with chosen faults, by rank and by the number of the exchange: the tests' way to bad networks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_gossip.errors import ConfigurationError, PeerError
from lightning_gossip.transport.base import Pending, Transport
from lightning_gossip.transport.messages import Kind, Message

Where = Literal["request", "swap"]


@dataclass(frozen=True)
class Fault:
    """One kind of trouble.

    Args:
        kind: ``"delay"`` waits ``seconds`` before the operation; ``"drop"`` loses the request, so that nothing moves (the
            initiator sees a refusal); ``"fail"`` raises :class:`~lightning_gossip.errors.PeerError`.
        where: at the request of an exchange, or at one of its swaps.
        at: numbers of the exchanges, or of the swaps, that are hit, counted by each worker from 0: a collection, a function
            of the number, or None for every one.
        peer: only with this peer.
        seconds: length of a delay: a number, or a function of the number of the operation.
    """

    kind: Literal["delay", "drop", "fail"]
    where: Where = "request"
    at: Sequence[int] | Callable[[int], bool] | None = None
    peer: int | None = None
    seconds: float | Callable[[int], float] = 0.0

    def __post_init__(self) -> None:
        if self.kind == "drop" and self.where == "swap":
            raise ConfigurationError("A swap cannot be dropped (the other end would wait for it); use kind='fail'.")

    def hits(self, where: Where, number: int, peer: int) -> bool:
        """Whether this operation is hit."""
        if where != self.where or self.peer not in (None, peer):
            return False
        if self.at is None:
            return True
        return self.at(number) if callable(self.at) else number in self.at


class FaultyTransport(Transport):
    """Passes everything on to another transport, except where a fault hits.

    Args:
        inner: the transport that works.
        faults: what goes wrong at this worker.
    """

    def __init__(self, inner: Transport, faults: Sequence[Fault]) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.dropped = 0
        self._inner = inner
        self._faults = tuple(faults)
        self._numbers: dict[Where, int] = {"request": 0, "swap": 0}
        self._closed = threading.Event()

    def post(self, peer: int, message: Message) -> None:
        self._inner.post(peer, message)

    def next_message(self) -> tuple[int, Message]:
        return self._inner.next_message()

    def reply(self, peer: int, message: Message) -> None:
        self._inner.reply(peer, message)

    def tell(self, peer: int, message: Message) -> None:
        self._inner.tell(peer, message)

    def await_reply(self, peer: int, timeout_s: float) -> Message:
        return self._inner.await_reply(peer, timeout_s)

    def request(self, peer: int, message: Message, timeout_s: float) -> Message:
        if self._strike("request", peer):
            self.dropped += 1
            return Message(Kind.REFUSE, message.session, message.layout)
        return self._inner.request(peer, message, timeout_s)

    def send(self, peer: int, vector: Tensor) -> Pending:
        return self._inner.send(peer, vector)

    def receive(self, peer: int, vector: Tensor) -> Pending:
        return self._inner.receive(peer, vector)

    def swap(self, peer: int, mine: Tensor, theirs: Tensor) -> Pending:
        self._strike("swap", peer)
        return self._inner.swap(peer, mine, theirs)

    def close(self) -> None:
        self._closed.set()
        self._inner.close()

    def _strike(self, where: Where, peer: int) -> bool:
        """Apply the faults that hit; True if the operation is dropped."""
        number = self._numbers[where]
        self._numbers[where] += 1
        dropped = False
        for fault in self._faults:
            if not fault.hits(where, number, peer):
                continue
            if fault.kind == "delay":
                self._closed.wait(fault.seconds(number) if callable(fault.seconds) else fault.seconds)
            elif fault.kind == "fail":
                phase = "exchange" if where == "swap" else "reply"
                raise PeerError(f"injected at {where} {number} with rank {peer}", rank=peer, phase=phase, seconds=0.0)
            else:
                dropped = True
        return dropped
