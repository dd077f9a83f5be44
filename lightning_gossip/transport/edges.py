"""Gloo with a group of two for each edge, so that one bad neighbour costs one edge; messages go by the inbox in the store.

A time-out on any Gloo operation closes every connection of its group, and a closed one is not opened again. With one data
group of all, a single frozen worker would end the exchanges of all its neighbours with everybody. Here each pair has a group
of its own, and there is no connection between workers that never average. An edge that broke is made anew, under the next
number, when one end calls again: the number travels in the request, so the listener makes the same one.

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
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from typing_extensions import override

from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.transport.base import Pending, Transport
from lightning_gossip.transport.gloo import RUN_BITS, SHORTEST_S, PeerTrouble, Transfer
from lightning_gossip.transport.inbox import Inbox
from lightning_gossip.transport.wire import REPLY, WORDS, Kind, Message

log = logging.getLogger(__name__)

Group = Any  # a ProcessGroupGloo, whose methods torch's type stubs lack
_REPLY, _VECTOR, _PROBE = 2, 3, 4  # tags
CONNECT_S = 10.0  # to make a group of two: a few milliseconds, if the peer is there
REPLY_S = 5.0  # to send an answer: the peer waits for it already, or has given up
_HERE, _GONE = b"here", b"gone"  # what is said of an end of an edge, once
_LETTER = struct.Struct(f"<{WORDS + 1}q")  # sender, then the words of the message


class EdgeTransport(Transport):
    """One process's end.

    Args:
        store: the training thread's connection to the store of the job.
        listening: one for nothing but the inbox; the listener waits there without a deadline.
        answering: one on which the listener makes edges.
        calling: one that the caller has for itself.
        prefix: of this transport's keys, new for each and the same on all ranks.
        rank, world_size: of this process.
        timeout_s: deadline of a reply that is sent and of making an edge, in seconds.
    """

    wakes_itself = True

    def __init__(
        self,
        store: Store,
        listening: Store,
        answering: Store,
        calling: Store,
        prefix: str,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._store, self._answering, self._calling = (PrefixStore(prefix, each) for each in (store, answering, calling))
        self._inbox = Inbox(listening, prefix, rank)
        drawn: Any = str(secrets.randbits(RUN_BITS))
        self.run = int(self._store.compare_set("run", "", drawn))  # the first one's, for all
        self._edges: dict[int, Group] = {}
        self._numbers = [0] * world_size  # by peer, of the edge that is, or of the next one
        self._asked = [0] * world_size  # by peer, the edge of its last request
        self._closed = False
        self._lock = threading.Lock()  # guards the three above; held for a few instructions
        # held while an edge is made: the listener and the caller may need the same one at the same time
        self._making = [threading.Lock() for _ in range(world_size)]

    def make_edges(self, peers: tuple[int, ...]) -> None:
        """Connect with the neighbours, as far as they answer within :data:`CONNECT_S`; collective among those.

        An edge that is missing then is made when one end calls.
        """
        end_s = time.monotonic() + CONNECT_S
        for peer in sorted(peers, key=lambda peer: (min(peer, self.rank), max(peer, self.rank))):  # one order for all
            self._try_edge(peer, max(SHORTEST_S, end_s - time.monotonic()))  # though in vain, both ends know that it was

    def _try_edge(self, peer: int, timeout_s: float) -> None:
        try:
            self._edge(peer, self._store, timeout_s)
        except PeerError as error:
            log.warning(
                "rank %d: has no connection with rank %d yet, and tries again at their first exchange: %s",
                self.rank,
                peer,
                error,
            )

    @override
    def post(self, peer: int, message: Message) -> None:
        # called by the training thread (to end, to call a meeting) and by the caller
        store = self._calling if message.kind is Kind.EXCHANGE else self._store
        with PeerTrouble(peer, "message"):
            self._inbox.push(store, peer, _LETTER.pack(self.rank, *message.words(self.run)))

    @override
    def next_message(self) -> tuple[int, Message]:
        peer, message = self._letter()
        if message.kind is Kind.EXCHANGE:
            with self._lock:
                self._asked[peer] = message.value
                if message.value > self._numbers[peer]:  # its end of the edge has broken: so has this one
                    self._numbers[peer] = message.value
                    self._edges.pop(peer, None)
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

    @override
    def request(self, peer: int, message: Message, timeout_s: float) -> Message:
        with self._lock:
            number = self._numbers[peer]
        self.post(peer, replace(message, value=number))
        return self.await_reply(peer, timeout_s)

    @override
    def reply(self, peer: int, message: Message) -> None:
        words = torch.tensor(message.words(self.run), dtype=torch.int64)
        with self._trouble(peer, "reply"):
            with self._lock:
                stale = self._numbers[peer] != self._asked[peer]
            if stale:  # asked before this worker was frozen, perhaps: the peer has given up meanwhile
                raise PeerError(f"The request of rank {peer} is of an edge that has broken.", rank=peer, phase="reply")
            edge = self._edge(peer, self._answering)
            edge.send([words], self._end(peer), _REPLY).wait(timedelta(seconds=min(REPLY_S, self.timeout_s)))

    @override
    def await_reply(self, peer: int, timeout_s: float) -> Message:
        message, end_s = None, time.monotonic() + timeout_s
        while message is None:
            words = torch.zeros(WORDS, dtype=torch.int64)
            with self._trouble(peer, "reply"):
                edge = self._edge(peer, self._calling)
                left_s = max(SHORTEST_S, end_s - time.monotonic())
                edge.recv([words], self._end(peer), _REPLY).wait(timedelta(seconds=left_s))
            message = self.admit(peer, words.tolist(), REPLY)
        return message

    @override
    def send(self, peer: int, vector: Tensor) -> Pending:
        with self._trouble(peer, "exchange"):
            return _EdgeTransfer(peer, self._made(peer).send([vector], self._end(peer), _VECTOR), self)

    @override
    def receive(self, peer: int, vector: Tensor) -> Pending:
        with self._trouble(peer, "exchange"):
            return _EdgeTransfer(peer, self._made(peer).recv([vector], self._end(peer), _VECTOR), self)

    @override
    def probe(self, peer: int) -> None:
        with self._lock:
            edge = self._edges.get(peer)
        if edge is not None:
            with self._trouble(peer, "probe"):
                # fails at once where the peer's process is gone; nobody receives it, so elsewhere it stays an offer
                edge.send([torch.zeros(1)], self._end(peer), _PROBE)

    @override
    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._edges.clear()

    def drop(self, peer: int) -> None:
        """The edge with a peer is of no use any more; the next call makes the next one."""
        with self._lock:
            if self._edges.pop(peer, None) is not None:
                self._numbers[peer] += 1

    def _made(self, peer: int) -> Group:
        """The edge that carried the request and its answer."""
        with self._lock:
            edge = self._edges.get(peer)
        if edge is None:
            raise PeerError(f"The edge with rank {peer} broke before the exchange began.", rank=peer, phase="exchange")
        return edge

    def _edge(self, peer: int, store: Any, timeout_s: float = CONNECT_S) -> Group:
        """The edge with a peer; made now if there is none.

        Args:
            store: the connection of the calling thread.
            timeout_s: how long to wait for the peer's end.
        """
        with self._making[peer]:
            with self._lock:
                if self._closed:
                    raise ProtocolError("The transport is used after it was closed.")
                edge, number = self._edges.get(peer), self._numbers[peer]
            return edge if edge is not None else self._make(peer, number, store, min(timeout_s, self.timeout_s))

    def _make(self, peer: int, number: int, store: Any, timeout_s: float) -> Group:
        low, high = sorted((self.rank, peer))
        own = PrefixStore(f"{low}-{high}/{number}", store)
        with PeerTrouble(peer, "connection"):
            try:
                self._await_end(peer, own, timeout_s)
                edge = dist.ProcessGroupGloo(own, int(self.rank > peer), 2, timedelta(seconds=min(CONNECT_S, self.timeout_s)))
            except RuntimeError:
                with self._lock:
                    self._numbers[peer] += 1
                raise
        with self._lock:
            if not self._closed and self._numbers[peer] == number:
                self._edges[peer] = edge
        return edge

    def _await_end(self, peer: int, store: Any, timeout_s: float) -> None:
        """Until the peer's end of an edge has come, or this one has given it up, or the peer had given this one up before."""
        if store.compare_set(f"end/{self.rank}", "", _HERE) == _GONE:
            raise PeerError(
                f"Rank {peer} has waited for this edge in vain before.", rank=peer, phase="connection", timed_out=True
            )
        try:
            store.wait([f"end/{peer}"], timedelta(seconds=timeout_s))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError as error:
            if store.compare_set(f"end/{peer}", "", _GONE) == _GONE:  # else it has come just now
                raise PeerError(
                    f"Rank {peer} did not come to an edge within {timeout_s:.3g} s. It is gone, frozen or slow.",
                    rank=peer,
                    phase="connection",
                    seconds=timeout_s,
                    timed_out=True,
                ) from error

    def _trouble(self, peer: int, phase: str) -> _EdgeTrouble:
        return _EdgeTrouble(peer, phase, self)

    def _end(self, peer: int) -> int:
        """The peer's rank on the edge."""
        return int(peer > self.rank)


class _EdgeTrouble(PeerTrouble):
    """Also drops the edge."""

    def __init__(self, peer: int, phase: str, transport: EdgeTransport) -> None:
        super().__init__(peer, phase)
        self._transport = transport

    @override
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._transport.drop(self._peer)
        super().__exit__(kind, error, traceback)


class _EdgeTransfer(Transfer):
    def __init__(self, peer: int, work: dist.Work, transport: EdgeTransport) -> None:
        super().__init__(peer, work)
        self._transport = transport

    @override
    def wait(self, timeout_s: float) -> None:
        try:
            super().wait(timeout_s)
        except PeerError:
            self._transport.drop(self.peer)
            raise
