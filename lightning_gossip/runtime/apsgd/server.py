"""A parameter server inside the job: threads on one rank.

| thread, on the server's rank | does | waits for |
|---|---|---|
| ``gossip-listener`` | sorts messages by sender | a message, without a deadline; STOP ends it |
| ``gossip-server-<rank>``, one a peer | receives its updates, sends it the model | a message, its turn; a vector: deadline |

The training thread of the server's rank is a worker like the others, and calls the server directly.

One condition guards the :class:`~lightning_gossip.algorithm.apsgd.server.ParameterServer` and the session. It is held to take
in what a worker has sent, or to copy what it is sent, never across the network. A thread that serves a slow worker waits for
that one alone.

A failure on a thread ends it, is kept, and is raised on the training thread at its next step. Who asks then, or waits for its
turn, is told that the server has failed: the process may go on with another use, and its connections stay.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.apsgd.server import ServerRule
from lightning_gossip.algorithm.apsgd.worker import Served
from lightning_gossip.algorithm.tensors.finite import all_finite
from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.runtime.apsgd.client import ServerLink, Update, layout_error, to_message
from lightning_gossip.runtime.clock import Deadline
from lightning_gossip.runtime.store_client import store_errors
from lightning_gossip.transport.base import Transport
from lightning_gossip.transport.messages import Kind, Message
from lightning_gossip.transport.threads import new_thread

log = logging.getLogger(__name__)

_MOST_PASSES = 1_000_000  # forward passes of one update
_MOST_REQUESTS = 2  # of one peer that wait: it has one at a time


class Server(ServerLink):
    """The server, and its own rank's link to it.

    Args:
        transport: to the other workers.
        timeout_s: deadline of a vector.
        turn_timeout_s: deadline of the local worker's turn.
        refuse_nonfinite: refuse updates that hold NaN or infinities.

    Attributes:
        bytes_sent: models sent to other workers.
    """

    def __init__(self, transport: Transport, *, timeout_s: float, turn_timeout_s: float, refuse_nonfinite: bool = True) -> None:
        self.bytes_sent = 0
        self._refuses = refuse_nonfinite
        self._transport = transport
        self._timeout_s = timeout_s
        self._turn_timeout_s = turn_timeout_s
        self._condition = threading.Condition()
        self._server: ServerRule | None = None
        self._session = -1
        self._layout = 0
        self._sync_requested_in = -1  # the last session in which a synchronisation was asked for
        self._staleness: dict[int, int | None] = {}  # by rank, of its last update
        self._refused: set[int] = set()  # ranks whose last update was not finite
        self._stopped = False
        self._failure: BaseException | None = None
        peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
        self._inboxes: dict[int, queue.SimpleQueue[Message]] = {peer: queue.SimpleQueue() for peer in peers}
        self._threads = [self._thread("gossip-listener", self._listen)]
        self._threads += [self._thread(f"gossip-server-{peer}", partial(self._serve, peer)) for peer in peers]

    def start(self) -> None:
        """Start the threads that serve the workers."""
        for thread in self._threads:
            thread.start()

    def open(self, session: int, layout: int, server: ServerRule) -> None:
        """Begin a session with the model that the server holds."""
        with self._condition:
            self._session, self._layout, self._server = session, layout, server
            self._staleness.clear()
            self._refused.clear()
            self._condition.notify_all()

    def raise_failure(self) -> None:
        """Raise what ended a thread, if anything did."""
        if self._failure is not None:
            with store_errors():
                raise self._failure

    def close(self, *, together: bool, timeout_s: float = 10.0) -> None:
        """End the threads. May be called twice.

        Args:
            together: another worker's STOP message ends the listener; otherwise it is left to the end of the process.
            timeout_s: deadline for the threads.
        """
        with self._condition:
            if self._stopped:
                return
            self._stopped = True
            self._condition.notify_all()
        for inbox in self._inboxes.values():
            inbox.put(Message(Kind.STOP))
        deadline = Deadline.after(timeout_s)
        for thread in self._threads:
            if thread.is_alive() and (together or thread.name != "gossip-listener"):
                thread.join(deadline.left_s)
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if together and alive:
            log.warning(
                "rank %d: its threads %s did not end within %.3g s; they end with this process",
                self._transport.rank,
                ", ".join(alive),
                timeout_s,
            )

    # -- the training thread of this rank ------------------------------------------------------------------------------

    @override
    def pull(self, session: int, layout: int, out: Tensor, update: Update | None = None) -> Served:
        self.raise_failure()
        return self._pull(self._transport.rank, session, out, update, self._turn_timeout_s)

    @override
    def leave(self, session: int, update: Update | None = None) -> Served:
        self.raise_failure()
        return self._leave(self._transport.rank, update, self._turn_timeout_s)

    @override
    def request_sync(self, session: int) -> None:
        with self._condition:
            self._sync_requested_in = max(self._sync_requested_in, session)

    @property
    def model(self) -> Tensor:
        """z; for a caller that knows that nobody pushes."""
        return self._open.model

    @property
    def sync_requested(self) -> bool:
        """Whether somebody asks for a synchronisation in this session."""
        return self._sync_requested_in == self._session

    # -- all threads ---------------------------------------------------------------------------------------------------

    def _pull(self, rank: int, session: int, out: Tensor, update: Update | None, timeout_s: float | None) -> Served:
        acceptable = self._acceptable(update)
        with self._condition:
            self._await(lambda: self._session == session, timeout_s)
            self._push(rank, update, timeout_s, acceptable=acceptable)
            self._open.queue(rank)
            self._await(lambda: self._open.may_pull(rank), timeout_s)
            version = self._open.pull(rank)
            out.copy_(self._open.answer(rank))
            self._condition.notify_all()
            return Served(version, self._staleness.get(rank), self.sync_requested, rank in self._refused)

    def _leave(self, rank: int, update: Update | None, timeout_s: float | None) -> Served:
        acceptable = self._acceptable(update)
        with self._condition:
            self._push(rank, update, timeout_s, acceptable=acceptable)
            self._open.leave(rank)
            self._condition.notify_all()
            return Served(self._open.version, self._staleness.get(rank), self.sync_requested, rank in self._refused)

    def _acceptable(self, update: Update | None) -> bool:
        """Read the update, with no lock held."""
        return update is None or not self._refuses or all_finite(update.vector)

    def _push(self, rank: int, update: Update | None, timeout_s: float | None, *, acceptable: bool) -> None:
        """With the condition held."""
        self._refused.discard(rank)
        if update is None:
            return
        if not acceptable:
            log.warning(
                "rank %d: refused an update of rank %d, which is not finite (NaN or infinity)", self._transport.rank, rank
            )
            self._open.refuse(rank)
            self._staleness[rank] = None
            self._refused.add(rank)
            self._condition.notify_all()
        else:
            self._await(lambda: self._open.may_push(rank), timeout_s)
            self._staleness[rank] = self._open.push(rank, update.vector, forward_passes=update.forward_passes)
            self._condition.notify_all()

    def _await(self, due: Callable[[], bool], timeout_s: float | None) -> None:
        if not self._condition.wait_for(lambda: self._stopped or self._failure is not None or due(), timeout_s):
            raise PeerError(
                f"This worker's turn at the parameter server did not come within {timeout_s:.3g} s. A worker that holds the"
                " others up is slow or has ended; look at the logs of the other ranks.",
                phase="turn",
                seconds=timeout_s,
            )
        if timeout_s is not None:  # the training thread
            self.raise_failure()
        if self._stopped or self._failure is not None:
            raise _StoppedError

    @property
    def _open(self) -> ServerRule:
        if self._server is None:
            raise ProtocolError("No session has been opened yet.")
        return self._server

    # -- the threads that serve ----------------------------------------------------------------------------------------

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except _StoppedError:
                return
            except BaseException as error:  # noqa: BLE001 - kept, and raised on the training thread
                self._fail(error)

        return new_thread(name, guarded)

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            if not self._stopped:
                self._failure = self._failure or error
            self._condition.notify_all()

    def _listen(self) -> None:
        while True:
            peer, message = self._transport.next_message()
            if message.kind is Kind.STOP:
                return
            if message.kind is Kind.FAILED:
                self._fail(PeerError(f"Rank {peer} has failed; its own log says why.", rank=peer, phase="update"))
                continue
            reason = self._reason_to_refuse(peer, message)
            if reason is not None:
                self._transport.refuse(peer, f"{message.kind.name}: {reason}")
            elif message.kind is Kind.SYNC:
                self.request_sync(message.session)
            elif not self._put(peer, message):
                self._transport.reply(peer, Message(Kind.FAILED))

    def _put(self, peer: int, message: Message) -> bool:
        """Hand a request to the thread that answers it; False if there is none any more."""
        with self._condition:
            if not self._stopped:
                self._inboxes[peer].put(message)
            return not self._stopped

    def _reason_to_refuse(self, peer: int, message: Message) -> str | None:
        """What is wrong with a message of whose words each may be right."""
        with self._condition:
            current = self._session
        if message.kind is Kind.EXCHANGE:
            return "it is not for a parameter server"
        if current >= 0 and not current <= message.session <= current + 1:  # nobody is further ahead
            return f"session {message.session} while this one is {current}"
        if message.value > _MOST_PASSES:
            return f"an update of {message.value} forward passes"
        if message.kind is not Kind.SYNC and self._inboxes[peer].qsize() >= _MOST_REQUESTS:
            return "its last requests have not been answered yet"
        return None

    def _serve(self, peer: int) -> None:
        received, model = torch.empty(0, device="cpu"), torch.empty(0, device="cpu")
        while (message := self._inboxes[peer].get()).kind is not Kind.STOP:
            if message.kind not in (Kind.PULL, Kind.LEAVE):
                raise ProtocolError(f"Rank {peer} sent {message.kind.name} to the parameter server.")
            try:
                layout, like = self._opened(message.session)
                if message.kind is Kind.PULL and message.layout != layout:
                    self._transport.reply(peer, Message(Kind.REFUSE, message.session, layout))
                    raise layout_error(peer, self._transport.rank)
                if received.shape != like.shape or received.dtype != like.dtype:
                    received, model = torch.empty_like(like), torch.empty_like(like)
                served = self._served(peer, message, received, model)
            except _StoppedError:
                self._transport.reply(peer, Message(Kind.FAILED))
                raise
            self._transport.reply(peer, to_message(message.session, served))
            if message.kind is Kind.PULL:
                self._transport.send(peer, model).wait(self._timeout_s)
                with self._condition:
                    self.bytes_sent += model.numel() * model.element_size()

    def _served(self, peer: int, message: Message, received: Tensor, model: Tensor) -> Served:
        """Read what a peer sends with its request, and take it in when it is its turn."""
        update = None
        if message.value:
            self._transport.receive(peer, received).wait(self._timeout_s)
            update = Update(received, message.value)
        if message.kind is Kind.LEAVE:
            return self._leave(peer, update, None)
        return self._pull(peer, message.session, model, update, None)

    def _opened(self, session: int) -> tuple[int, Tensor]:
        """Layout and model of a session, when it has begun here too."""
        with self._condition:
            self._await(lambda: self._session == session, None)
            return self._layout, self._open.model


class _StoppedError(Exception):
    """The server was closed while a thread waited for a turn."""
