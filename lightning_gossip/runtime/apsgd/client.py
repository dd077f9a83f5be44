"""What a worker says to the parameter server, and how from another rank.

A request is a message, PULL or LEAVE, and after it the update, if there is one; the answer is a message, and after that of a
PULL the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.apsgd.worker import Served
from lightning_gossip.errors import ConfigurationError, PeerError, ProtocolError
from lightning_gossip.transport.base import Transport
from lightning_gossip.transport.messages import Kind, Message

_DROPPED, _REFUSED = -1, -2  # in place of a staleness


@dataclass(frozen=True)
class Update:
    """An update that a worker pushes to the server.

    Args:
        vector: shape (d,).
        forward_passes: in training mode that led to it, at least 1.
    """

    vector: Tensor
    forward_passes: int = 1

    def __post_init__(self) -> None:
        if self.forward_passes < 1:  # on the wire 0 says that there is no update
            raise ProtocolError(f"An update of {self.forward_passes} forward passes.")


class ServerLink(ABC):
    """One worker's way to the server.

    Attributes:
        bytes_sent: through it; by the server's own rank, models sent to the other workers.
    """

    bytes_sent: int

    @abstractmethod
    def pull(self, session: int, layout: int, out: Tensor, update: Update | None = None) -> Served:
        """Push an update, if there is one, wait for this worker's turn, and copy the model.

        Push and pull are one: where it is this worker's turn at once, no update of another comes between.

        Args:
            session: that this worker is in; the server may still be in the one before.
            layout: fingerprint of this worker's tensors.
            out: shape (d,), the model.
            update: to the model that was pulled last.

        Raises:
            PeerError: if the server has ended, or the turn does not come in time.
            ConfigurationError: if the server has other tensors.
        """

    @abstractmethod
    def leave(self, session: int, update: Update | None = None) -> Served:
        """Come to a synchronisation, with an update to the model that was pulled last, if there is one; it is applied then."""

    @abstractmethod
    def request_sync(self, session: int) -> None:
        """Ask all workers to synchronise; they hear of it when they pull."""


class RemoteServer(ServerLink):
    """The server as seen from another rank.

    Args:
        transport: to the server.
        rank: the server's.
        timeout_s: deadline of a vector.
        turn_timeout_s: deadline of this worker's turn.

    Attributes:
        bytes_sent: updates sent to the server.
    """

    def __init__(self, transport: Transport, rank: int, *, timeout_s: float, turn_timeout_s: float) -> None:
        self.bytes_sent = 0
        self._transport = transport
        self._rank = rank
        self._timeout_s = timeout_s
        self._turn_timeout_s = turn_timeout_s

    @override
    def pull(self, session: int, layout: int, out: Tensor, update: Update | None = None) -> Served:
        with self._saying_that_it_has_ended():
            answer = self._request(Kind.PULL, session, layout, update)
            if answer.kind is Kind.REFUSE:
                raise layout_error(self._transport.rank, self._rank)
            self._transport.receive(self._rank, out).wait(self._timeout_s)
        return _served(answer)

    @override
    def leave(self, session: int, update: Update | None = None) -> Served:
        with self._saying_that_it_has_ended():
            return _served(self._request(Kind.LEAVE, session, 0, update))

    @override
    def request_sync(self, session: int) -> None:
        self._transport.post(self._rank, Message(Kind.SYNC, session))

    def _request(self, kind: Kind, session: int, layout: int, update: Update | None) -> Message:
        forward_passes = 0 if update is None else update.forward_passes
        self._transport.post(self._rank, Message(kind, session, layout, value=forward_passes))
        sending = None if update is None else self._transport.send(self._rank, update.vector)
        answer = self._transport.await_reply(self._rank, self._turn_timeout_s)
        if answer.kind is Kind.FAILED:
            raise self._ended()
        if update is not None and sending is not None and answer.kind is not Kind.REFUSE:  # then it is unread
            sending.wait(self._timeout_s)  # it was read before the answer was written
            self.bytes_sent += update.vector.numel() * update.vector.element_size()
        return answer

    @contextmanager
    def _saying_that_it_has_ended(self) -> Iterator[None]:
        """In place of that the connection is closed."""
        try:
            yield
        except PeerError as error:
            if not error.closed:
                raise
            raise self._ended(closed=True) from error

    def _ended(self, *, closed: bool = False) -> PeerError:
        return PeerError(
            f"Rank {self._rank}, where the server is, has ended this training; its own log says why. A script that goes on"
            " after an exception of its own raises it on every rank at the end of an epoch, where all have met.",
            rank=self._rank,
            phase="reply",
            closed=closed,
        )


def to_message(session: int, served: Served) -> Message:
    """The answer to a worker, without the model."""
    kind = Kind.SYNC if served.sync_requested else Kind.ACCEPT
    staleness = _REFUSED if served.refused else _DROPPED if served.staleness is None else served.staleness
    return Message(kind, session, value=served.version, staleness=staleness)


def _served(answer: Message) -> Served:
    staleness = None if answer.staleness in (_DROPPED, _REFUSED) else answer.staleness
    return Served(answer.value, staleness, answer.kind is Kind.SYNC, answer.staleness == _REFUSED)


def layout_error(rank: int, server: int) -> ConfigurationError:
    """The refusal of a worker whose tensors are not the server's."""
    return ConfigurationError(
        f"Rank {rank} trains other tensors than rank {server}, where the parameter server is. The parameters with"
        " requires_grad, their shapes, types and memory formats must be the same on all ranks when an epoch begins."
    )
