"""How vectors and short messages travel between workers; knows no algorithm.

A transport has three lanes, which never wait for each other:
- the **inbox**: short messages from anybody (requests for an exchange, calls to a meeting, stop). One listener reads it.
- **replies**: the answer of one peer to one request, waited for with a deadline.
- **vectors**: one end sends, the other receives, in the order of the calls; a **swap** is both at the same time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Protocol

from torch import Tensor

WORDS = 8  # int64 words of a message on the wire: magic, then the fields of Message, then spare zeros
MAGIC = 0x6C676F73_0001  # "lgos", version 1 of the message format


class Kind(IntEnum):
    """What a message is about."""

    EXCHANGE = 1  # "average with me"
    ACCEPT = 2  # answer: start sending
    REFUSE = 3  # answer: not now
    MEET = 4  # everybody comes to a rendezvous after the current step
    STOP = 5  # the listener may end
    PULL = 6  # to a parameter server: "send me the model"; an update comes first if the value, its forward passes, is not 0
    LEAVE = 7  # to a parameter server: "I come to a rendezvous"; the same
    FAILED = 8  # to a parameter server: the sender has failed, and sends nothing more


@dataclass(frozen=True)
class Message:
    """A short message: plain integers, so that nothing on the wire is ever unpickled.

    Args:
        kind: what it is about.
        session: number of the gossip session (the stretch between two rendezvous) that the sender is in.
        layout: fingerprint of the sender's published tensors; exchanges need equal ones.
        step_us: the sender's step time in microseconds, 0 if unknown.
        value: depends on the kind.
        staleness: of the update that the receiver pushed last, from a parameter server; -1 if it was dropped as too stale or
            there is none to report, -2 if it was refused because it was not finite.
        adopts: 1 if the sender's model is not finite and it wants the receiver's in place of it.
    """

    kind: Kind
    session: int = 0
    layout: int = 0
    step_us: int = 0
    value: int = 0
    staleness: int = 0
    adopts: int = 0

    def words(self) -> list[int]:
        """As ``WORDS`` integers for the wire."""
        body = [int(getattr(self, field.name)) for field in fields(self)]
        return [MAGIC, *body] + [0] * (WORDS - 1 - len(body))

    @classmethod
    def from_words(cls, words: list[int]) -> Message:
        """From the wire.

        Raises:
            ValueError: if this is not a message of this version.
        """
        if len(words) != WORDS or words[0] != MAGIC:
            raise ValueError(f"not a message of this version: {words}")
        kind, *rest = words[1 : 1 + len(fields(cls))]
        return cls(Kind(kind), *rest)


class Pending(Protocol):
    """A vector under way, or a swap."""

    def wait(self, timeout_s: float) -> None:
        """Block until what is sent has been read, and what is received has arrived.

        Raises:
            PeerError: when the peer is gone or the time is over.
        """


class Transport(ABC):
    """One worker's end. Methods may be called from several threads, each lane by one thread a peer at a time."""

    rank: int
    world_size: int
    wakes_itself = False  # whether a message from a worker to itself ends its own listener

    @abstractmethod
    def post(self, peer: int, message: Message) -> None:
        """Put a message into a peer's inbox; does not wait for it to be read."""

    @abstractmethod
    def next_message(self) -> tuple[int, Message]:
        """Block until somebody's message is in the inbox; the one wait without a deadline. A STOP message ends it.

        Returns:
            The sender and the message.
        """

    @abstractmethod
    def reply(self, peer: int, message: Message) -> None:
        """Answer the request of a peer."""

    @abstractmethod
    def await_reply(self, peer: int, timeout_s: float) -> Message:
        """Block until the peer has answered.

        Raises:
            PeerError: when the peer is gone or the time is over.
        """

    @abstractmethod
    def send(self, peer: int, vector: Tensor) -> Pending:
        """Start to send a vector; it belongs to the transport until the wait is over."""

    @abstractmethod
    def receive(self, peer: int, vector: Tensor) -> Pending:
        """Start to receive into a vector; it belongs to the transport until the wait is over."""

    def swap(self, peer: int, mine: Tensor, theirs: Tensor) -> Pending:
        """Start to send ``mine`` and to receive into ``theirs``."""
        receiving = self.receive(peer, theirs)
        return _Both(receiving, self.send(peer, mine))

    def probe(self, peer: int) -> None:
        """See whether the connection with a peer still stands, where that can be seen without the peer.

        Raises:
            PeerError: if it has closed.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Free what the transport holds. May be called twice."""

    def request(self, peer: int, message: Message, timeout_s: float) -> Message:
        """Ask a peer and wait for its answer.

        Raises:
            PeerError: when the peer is gone or the time is over.
        """
        self.post(peer, message)
        return self.await_reply(peer, timeout_s)


@dataclass
class _Both:
    receiving: Pending
    sending: Pending

    def wait(self, timeout_s: float) -> None:
        self.receiving.wait(timeout_s)
        self.sending.wait(timeout_s)
