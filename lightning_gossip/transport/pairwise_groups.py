"""Gloo with a group of two for each edge, so that one bad neighbour costs one edge; messages go by the inbox in the store.

A time-out on any Gloo operation closes every connection of its group, and a closed one is not opened again. With one data
group of all, a single frozen worker would end the exchanges of all its neighbours with everybody. Here each pair has a group
of its own, and there is no connection between workers that never average. An edge that broke is made anew, under the next
number, when one end calls again: the number travels in the request, so the other end makes the same one, and in the answer, so
none is taken for that to another request. An operation belongs to the edge that it began on: if it fails, that one is dropped
and none that has been made since, and the chunks of an exchange go over the edge that it was agreed on.

The listener reads letters and makes no edge: one that a request needs is made by the connector (transport/connector.py), and
the request comes to the listener when it can be answered.

Both ends say in the store that they have come before Gloo connects them; who has waited in vain says so in the other's place,
and the first word counts. Without it one may find the address of another that has just given up, whose process still answers,
and Gloo tries that for five times the deadline.
"""

from __future__ import annotations

import logging
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from typing_extensions import override

from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.transport.base import Pending, Transport
from lightning_gossip.transport.connector import Connector
from lightning_gossip.transport.gloo_group import RUN_BITS, SHORTEST_S, Transfer
from lightning_gossip.transport.mailbox import Inbox
from lightning_gossip.transport.messages import REPLY, WORDS, Kind, Message
from lightning_gossip.transport.peer_errors import peer_errors

log = logging.getLogger(__name__)

Group = Any  # a ProcessGroupGloo, whose methods torch's type stubs lack
_REPLY, _VECTOR, _PROBE = 2, 3, 4  # tags
CONNECT_S = 10.0  # to make a group of two: a few milliseconds, if the peer is there
_COME_S = 2.0  # for a peer to come to the edge that it has just asked for: the next thing it does
_CLOSE_S = 1.0  # for the connector to end: at once, unless Gloo is making an edge
REPLY_S = 5.0  # to send an answer: the peer waits for it already, or has given up
_HERE, _GIVEN_UP = b"here", b"given up"  # written of an end of an edge, once: its worker has made it, or has given it up
_LETTER = struct.Struct(f"<{WORDS + 1}q")  # sender, then the words of the message


class Connections(NamedTuple):
    """Connections with the store of the job, one for each thread that asks it: a connection serves one call at a time.

    Attributes:
        training: the training thread's.
        listener: for nothing but the inbox, on which the listener waits without a deadline.
        connector: on which edges are made that others ask for.
        initiator: on which edges are made, and requests sent, for exchanges that this worker starts.
    """

    training: Store
    listener: Store
    connector: Store
    initiator: Store


class EdgeTransport(Transport):
    """Transport of one process over a Gloo group of two for each edge.

    Args:
        connections: with the store of the job.
        prefix: of this transport's keys, new for each and the same on all ranks.
        rank, world_size: of this process.
        timeout_s: deadline of a reply that is sent and of making an edge, in seconds.
    """

    def __init__(
        self,
        connections: Connections,
        prefix: str,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._store = PrefixStore(prefix, connections.training)
        self._connecting = PrefixStore(prefix, connections.connector)
        self._initiating = PrefixStore(prefix, connections.initiator)
        self._inbox = Inbox(connections.listener, prefix, rank)
        drawn: Any = str(secrets.randbits(RUN_BITS))
        self.run = int(self._store.compare_set("run", "", drawn))  # the first one's, for all
        self._edges: dict[int, Group] = {}
        self._numbers = [0] * world_size  # by peer, of the edge that is, or of the next one
        self._requested = [0] * world_size  # by peer, the edge of this worker's last request
        self._agreed: dict[int, Group] = {}  # by peer, the edge that the exchange goes over
        self._told: dict[int, tuple[Any, Tensor]] = {}  # by peer: kept until the next one
        self._letters: dict[int, bytes] = {}  # requests that wait for their edge
        self._unmade: dict[int, tuple[int, Exception]] = {}  # by peer: the edge that it asked for in vain
        self._awaited: set[tuple[int, int]] = set()  # peer and number of the edges whose other end is waited for
        self._closed = False
        self._lock = threading.Lock()  # guards all of the above; held for a few instructions
        self._connector = Connector(self._connect)
        # held while an edge is made: the connector and the initiator may need the same one at the same time
        self._making = [threading.Lock() for _ in range(world_size)]

    def make_edges(self, peers: Sequence[int]) -> None:
        """Connect with the neighbours, as far as they answer within :data:`CONNECT_S`; collective among those.

        An edge that is missing then is made when one end calls.

        Args:
            peers: in the order in which their edges are made; of a graph's edge colouring, so that nobody waits for a chain of
                others.
        """
        end_s = time.monotonic() + CONNECT_S
        for peer in peers:
            self._try_edge(peer, max(SHORTEST_S, end_s - time.monotonic()))  # though in vain, both ends know that it was

    def _try_edge(self, peer: int, timeout_s: float) -> None:
        try:
            self._edge(peer, self._store, timeout_s=timeout_s)
        except PeerError as error:
            log.warning(
                "rank %d: has no connection with rank %d yet, and tries again at their first exchange: %s",
                self.rank,
                peer,
                error,
            )

    @override
    def post(self, peer: int, message: Message) -> None:
        # called by the training thread (to end, to request a synchronisation) and by the initiator
        store = self._initiating if message.kind is Kind.EXCHANGE else self._store
        with peer_errors("message", peer):
            self._inbox.push(store, peer, _LETTER.pack(self.rank, *message.words(self.run)))

    @override
    def next_message(self) -> tuple[int, Message]:
        while True:
            peer, message = self._letter()
            if message.kind is not Kind.EXCHANGE or self._can_be_answered(peer, message):
                return peer, message

    def _letter(self) -> tuple[int, Message]:
        """The next one that is not refused."""
        while True:
            letter = self._inbox.pop()
            if len(letter) != _LETTER.size:
                self.refuse(-1, f"{len(letter)} bytes instead of {_LETTER.size}")
                continue
            sender, *words = _LETTER.unpack(letter)
            message = self.admit(sender, words)
            if message is not None:
                return sender, message

    def _can_be_answered(self, peer: int, request: Message) -> bool:
        """Whether the edge of a request stands; otherwise it is being made, or the peer knows by now that it does not."""
        number = request.value
        with self._lock:
            failed_number, error = self._unmade.pop(peer, (-1, None))
            if number > self._numbers[peer]:  # its end of the edge has broken: so has this one
                self._numbers[peer] = number
                self._forget(peer)
            is_late = number < self._numbers[peer]
            stands = peer in self._edges
            if not (is_late or stands):
                self._letters[peer] = _LETTER.pack(peer, *request.words(self.run))
        if error is not None and failed_number == number:
            raise error
        if is_late:
            log.info("rank %d: the request of rank %d is of an edge that has broken", self.rank, peer)
        elif not stands:
            self._connector.ask(peer)
        return stands and not is_late

    def _connect(self, peer: int) -> None:
        """Make the edge that a peer has asked for, and put its request into the inbox again. On the connector's thread."""
        with self._lock:
            number = self._numbers[peer]
        try:
            self._edge(peer, self._connecting, timeout_s=_COME_S)
        except Exception as error:  # noqa: BLE001 - raised where the request is read
            with self._lock:
                if self._closed:
                    return
                self._unmade[peer] = number, error
        with self._lock:
            letter = self._letters.pop(peer, None)
        if letter is not None:
            try:
                self._inbox.push(self._connecting, self.rank, letter)
            except dist.DistError as error:  # the store has ended: the listener has it too
                log.info("rank %d: the store of requests cannot be reached: %s", self.rank, error)

    @override
    def request(self, peer: int, message: Message, timeout_s: float) -> Message:
        with self._lock:
            number = self._requested[peer] = self._numbers[peer]
        self.post(peer, replace(message, value=number))
        return self.await_reply(peer, timeout_s)

    @override
    def reply(self, peer: int, message: Message) -> None:
        edge = self._asked(peer, message)
        words = torch.tensor(message.words(self.run), dtype=torch.int64, device="cpu")
        with self._errors("reply", peer, edge):
            edge.send([words], self._end(peer), _REPLY).wait(timedelta(seconds=min(REPLY_S, self.timeout_s)))
        self._agree(peer, edge, message)

    @override
    def tell(self, peer: int, message: Message) -> None:
        edge = self._asked(peer, message)
        words = torch.tensor(message.words(self.run), dtype=torch.int64, device="cpu")
        with self._errors("reply", peer, edge):
            self._told[peer] = edge.send([words], self._end(peer), _REPLY), words

    def _asked(self, peer: int, answer: Message) -> Group:
        """The edge of the request that is answered."""
        with self._lock:
            edge, number = self._edges.get(peer), self._numbers[peer]
        if edge is None or number != answer.value:  # asked before this worker was frozen, perhaps: the peer has given up since
            raise PeerError(f"The request of rank {peer} is of an edge that has broken.", rank=peer, phase="reply")
        return edge

    @override
    def await_reply(self, peer: int, timeout_s: float) -> Message:
        with self._lock:
            number = self._requested[peer]
        edge = self._edge(peer, self._initiating, number=number)
        end_s = time.monotonic() + timeout_s
        while True:
            words = torch.zeros(WORDS, dtype=torch.int64, device="cpu")
            with self._errors("reply", peer, edge):
                left_s = max(SHORTEST_S, end_s - time.monotonic())
                edge.recv([words], self._end(peer), _REPLY).wait(timedelta(seconds=left_s))
            message = self.admit(peer, words.tolist(), REPLY)
            if message is not None and message.value != number:
                self.refuse(peer, f"it answers a request of edge {message.value}, this is edge {number}")
            elif message is not None:
                self._agree(peer, edge, message)
                return message

    def _agree(self, peer: int, edge: Group, answer: Message) -> None:
        if answer.kind is Kind.ACCEPT:
            with self._lock:
                self._agreed[peer] = edge

    @override
    def send(self, peer: int, vector: Tensor) -> Pending:
        edge = self._of_exchange(peer)
        errors = partial(self._errors, "exchange", peer, edge)
        with errors():
            return Transfer(edge.send([vector], self._end(peer), _VECTOR), errors)

    @override
    def receive(self, peer: int, vector: Tensor) -> Pending:
        edge = self._of_exchange(peer)
        errors = partial(self._errors, "exchange", peer, edge)
        with errors():
            return Transfer(edge.recv([vector], self._end(peer), _VECTOR), errors)

    @override
    def probe(self, peer: int) -> None:
        with self._lock:
            edge = self._edges.get(peer)
        if edge is not None:
            with self._errors("probe", peer, edge):
                # fails at once where the peer's process has ended; nobody receives it, so elsewhere it stays an offer
                edge.send([torch.zeros(1, device="cpu")], self._end(peer), _PROBE)

    @override
    def close(self) -> None:
        with self._lock:
            self._closed = True
            for held in (self._edges, self._agreed, self._told):
                held.clear()
            awaited = list(self._awaited)
        try:
            for peer, number in awaited:
                self._give_up(peer, self._of_edge(peer, number, self._store))
        except dist.DistError as error:  # the store has ended, and so have the waits for it
            log.info("rank %d: the others could not be told of its end: %s", self.rank, error)
        self._connector.close(min(_CLOSE_S, self.timeout_s))

    def drop(self, peer: int, edge: Group) -> bool:
        """An edge with a peer is of no use any more; the next call makes the next one.

        Args:
            peer: the rank.
            edge: which; nothing happens to one that has been made since.

        Returns:
            Whether it stood until now.
        """
        with self._lock:
            stood = self._edges.get(peer) is edge
            if stood:
                self._forget(peer)
                self._numbers[peer] += 1
            return stood

    def _forget(self, peer: int) -> None:
        """Forget an edge; called with the lock held."""
        for held in (self._edges, self._agreed, self._told):
            held.pop(peer, None)

    def _of_exchange(self, peer: int) -> Group:
        """The edge that carried the request and its answer."""
        with self._lock:
            edge = self._agreed.get(peer)
        if edge is None:
            raise PeerError(f"The edge with rank {peer} broke before the exchange had ended.", rank=peer, phase="exchange")
        return edge

    def _edge(self, peer: int, store: Any, *, number: int | None = None, timeout_s: float = CONNECT_S) -> Group:
        """The edge with a peer; made now if there is none.

        Args:
            peer: the rank.
            store: the connection of the calling thread.
            number: of the edge; None for the present one.
            timeout_s: how long to wait for the peer's end.
        """
        with self._making[peer]:
            with self._lock:
                if self._closed:
                    raise ProtocolError("The transport is used after it was closed.")
                edge, present = self._edges.get(peer), self._numbers[peer]
            if number is not None and number != present:
                raise PeerError(f"The edge with rank {peer} broke while it was asked.", rank=peer, phase="reply")
            return edge if edge is not None else self._make(peer, present, store, min(timeout_s, self.timeout_s))

    def _make(self, peer: int, number: int, store: Any, timeout_s: float) -> Group:
        own = self._of_edge(peer, number, store)
        with peer_errors("connection", peer):
            try:
                self._await_end(peer, number, own, timeout_s)
                edge = dist.ProcessGroupGloo(own, int(self.rank > peer), 2, timedelta(seconds=min(CONNECT_S, self.timeout_s)))
            except RuntimeError:
                with self._lock:
                    self._numbers[peer] = max(self._numbers[peer], number + 1)
                raise
        with self._lock:
            if not self._closed and self._numbers[peer] == number:
                self._edges[peer] = edge
        return edge

    def _await_end(self, peer: int, number: int, store: Any, timeout_s: float) -> None:
        """Wait until the peer's end of an edge has come, or one of the two has given the other up."""
        with self._lock:
            closed = self._closed
            self._awaited.add((peer, number))  # before this end is there: who closes then ends the wait
        try:
            if not closed and store.compare_set(f"end/{self.rank}", "", _HERE) == _GIVEN_UP:
                raise PeerError(
                    f"Rank {peer} has waited for this edge in vain before.", rank=peer, phase="connection", timed_out=True
                )
            if not closed:
                store.wait([f"end/{peer}"], timedelta(seconds=timeout_s))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError as error:
            if self._give_up(peer, store):
                raise PeerError(
                    f"Rank {peer} did not come to an edge within {timeout_s:.3g} s. It has ended, is frozen or slow.",
                    rank=peer,
                    phase="connection",
                    seconds=timeout_s,
                    timed_out=True,
                ) from error
        finally:
            with self._lock:
                self._awaited.discard((peer, number))
                closed = self._closed
        if closed:
            raise ProtocolError("The transport was closed while an edge was made.")

    @staticmethod
    def _give_up(peer: int, store: Any) -> bool:
        """Tell a peer that its end of an edge is not waited for any more; False if it has come just now."""
        return bool(store.compare_set(f"end/{peer}", "", _GIVEN_UP) == _GIVEN_UP)

    def _of_edge(self, peer: int, number: int, store: Any) -> Any:
        """The keys of one edge."""
        low, high = sorted((self.rank, peer))
        return PrefixStore(f"{low}-{high}/{number}", store)

    @contextmanager
    def _errors(self, phase: str, peer: int, edge: Group) -> Iterator[None]:
        """Drops the edge after an error. One that this side has dropped before says nothing about the peer."""
        try:
            with peer_errors(phase, peer):
                yield
        except BaseException as error:
            stood = self.drop(peer, edge)
            if isinstance(error, PeerError):
                error.closed &= stood
            raise

    def _end(self, peer: int) -> int:
        """The peer's rank on the edge."""
        return int(peer > self.rank)
