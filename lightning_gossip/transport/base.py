"""How vectors and short messages travel between workers; knows no algorithm.

A transport has three lanes, which never wait for each other:
- the **inbox**: short messages from anybody (requests for an exchange, sync requests, stop). One listener reads it.
- **replies**: the answer of one peer to one request, waited for with a deadline.
- **vectors**: one end sends, the other receives, in the order of the calls; a **swap** is both at the same time.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightning_gossip.transport.messages import INBOX, Kind, Message

log = logging.getLogger(__name__)
_LOGGED = 5  # refusals that are logged one by one


class Pending(Protocol):
    """A vector under way, or a swap."""

    def wait(self, timeout_s: float) -> None:
        """Block until what is sent has been read, and what is received has arrived.

        Raises:
            PeerError: when the peer has ended or the time is over.
        """


class Transport(ABC):
    """Messages and vectors of one worker. Methods may be called from several threads, each lane by one a peer at a time."""

    rank: int
    world_size: int
    run = 0  # what every message of this job carries
    refused = 0  # messages so far

    @abstractmethod
    def post(self, peer: int, message: Message) -> None:
        """Put a message into a peer's inbox; does not wait for it to be read."""

    @abstractmethod
    def next_message(self) -> tuple[int, Message]:
        """Block until somebody's message is in the inbox; the one wait without a deadline. A STOP message ends it.

        Returns:
            The sender and the message.

        Raises:
            PeerError: when a peer asks for an exchange and cannot be connected with. The inbox goes on.
        """

    @abstractmethod
    def reply(self, peer: int, message: Message) -> None:
        """Answer the request of a peer."""

    def tell(self, peer: int, message: Message) -> None:
        """Answer without waiting for the answer to be read; another one follows."""
        self.reply(peer, message)

    @abstractmethod
    def await_reply(self, peer: int, timeout_s: float) -> Message:
        """Block until the peer has answered.

        Raises:
            PeerError: when the peer has ended or the time is over.
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

    def admit(self, sender: int, words: Sequence[int], kinds: frozenset[Kind] = INBOX) -> Message | None:
        """A message from the wire, or None if it is refused, which is logged.

        Args:
            sender: who has sent it, as far as the connection or the envelope tells.
            words: its words.
            kinds: that are accepted.
        """
        if not 0 <= sender < self.world_size:
            self.refuse(sender, f"there are {self.world_size} workers")
            return None
        try:
            message = Message.from_words(words, self.run, kinds)
        except ValueError as reason:
            self.refuse(sender, str(reason))
            return None
        if sender == self.rank and message.kind is not Kind.STOP:
            self.refuse(sender, "that is this worker itself")
            return None
        return message

    def refuse(self, sender: int, reason: str) -> None:
        """Count and log a message that nothing is done for: the first few, and then at each power of two."""
        self.refused += 1
        if self.refused <= _LOGGED or self.refused & (self.refused - 1) == 0:
            log.warning(
                "rank %d: refused a message from rank %d (%d refused so far): %s", self.rank, sender, self.refused, reason
            )

    @abstractmethod
    def close(self) -> None:
        """Free what the transport holds. May be called twice."""

    def request(self, peer: int, message: Message, timeout_s: float) -> Message:
        """Ask a peer and wait for its answer.

        Raises:
            PeerError: when the peer has ended or the time is over.
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
