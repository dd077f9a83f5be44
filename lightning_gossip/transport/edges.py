"""Gloo with a group of two for each edge, so that one bad neighbour costs one edge.

A time-out on any Gloo operation closes every connection of its group, and a closed one is not opened again. With one data
group of all, a single frozen worker would end the exchanges of all its neighbours with everybody. Here each pair has a group
of its own. An edge that broke is made anew, under the next number, when one end calls again: the number travels in the
request, so the listener makes the same one.

*Control*, the inbox, is one group of all. Nothing on it has a time-out, so nothing closes it but the death of a process, and
then only the connection with that one.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from typing_extensions import override

from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.transport.base import WORDS, Kind, Message, Pending, Transport
from lightning_gossip.transport.gloo import FOREVER, PeerTrouble, Transfer, flush, parse

log = logging.getLogger(__name__)

Group = Any  # a ProcessGroupGloo, whose methods torch's type stubs lack
_REQUEST, _REPLY, _VECTOR = 1, 2, 3  # tags
_CONNECT_S = 10.0  # to make a group of two: a few milliseconds, if the peer is there


class EdgeTransport(Transport):
    """One process's end. Creating it is collective.

    Args:
        store: a connection to the store of the job.
        prefix: of this transport's keys, new for each and the same on all ranks.
        rank, world_size: of this process.
        timeout_s: deadline of a reply that is sent and of making the groups, in seconds.
    """

    def __init__(self, store: Store, prefix: str, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._store = PrefixStore(prefix, store)
        self._control: Group | None = self._group("control", rank, world_size, timeout_s)
        self._edges: dict[int, Group] = {}
        self._numbers = [0] * world_size  # by peer, of the edge that is, or of the next one
        self._lock = threading.Lock()  # guards the two above; held for a few instructions
        # held while an edge is made: the listener and the caller may need the same one at the same time
        self._making = [threading.Lock() for _ in range(world_size)]
        self._requests: dict[int, list[tuple[dist.Work, Tensor]]] = {}
        self._others: list[tuple[Kind, dist.Work, Tensor]] = []

    def make_edges(self, peers: tuple[int, ...]) -> None:
        """Connect with the neighbours, as far as they answer; collective among those."""
        for peer in sorted(peers, key=lambda peer: (min(peer, self.rank), max(peer, self.rank))):  # one order for all
            self._try_edge(peer)

    def _try_edge(self, peer: int) -> None:
        try:
            self._edge(peer)
        except PeerError as error:
            log.warning("rank %d: %s", self.rank, error)

    @override
    def post(self, peer: int, message: Message) -> None:
        words = torch.tensor(message.words(), dtype=torch.int64)
        with PeerTrouble(peer, "message"):
            work = self._open().send([words], peer, _REQUEST)
        if message.kind in (Kind.MEET, Kind.STOP, Kind.FAILED):
            self._others.append((message.kind, work, words))
        else:
            self._requests.setdefault(peer, []).append((work, words))

    @override
    def next_message(self) -> tuple[int, Message]:
        words = torch.zeros(WORDS, dtype=torch.int64)
        work = self._open().recv_anysource([words], _REQUEST)
        work.wait(FOREVER)
        peer, message = int(work._source_rank()), parse(words)
        if message.kind is Kind.EXCHANGE:
            with self._lock:
                if message.value > self._numbers[peer]:  # its end of the edge has broken: so has this one
                    self._numbers[peer] = message.value
                    self._edges.pop(peer, None)
        return peer, message

    @override
    def request(self, peer: int, message: Message, timeout_s: float) -> Message:
        with self._lock:
            number = self._numbers[peer]
        self.post(peer, replace(message, value=number))
        return self.await_reply(peer, timeout_s)

    @override
    def reply(self, peer: int, message: Message) -> None:
        words = torch.tensor(message.words(), dtype=torch.int64)
        with self._trouble(peer, "reply"):
            self._edge(peer).send([words], self._end(peer), _REPLY).wait(timedelta(seconds=self.timeout_s))

    @override
    def await_reply(self, peer: int, timeout_s: float) -> Message:
        words = torch.zeros(WORDS, dtype=torch.int64)
        with self._trouble(peer, "reply"):
            self._edge(peer).recv([words], self._end(peer), _REPLY).wait(timedelta(seconds=timeout_s))
        self._requests.pop(peer, None)
        return parse(words)

    @override
    def send(self, peer: int, vector: Tensor) -> Pending:
        with self._trouble(peer, "exchange"):
            return _EdgeTransfer(peer, self._edge(peer).send([vector], self._end(peer), _VECTOR), self)

    @override
    def receive(self, peer: int, vector: Tensor) -> Pending:
        with self._trouble(peer, "exchange"):
            return _EdgeTransfer(peer, self._edge(peer).recv([vector], self._end(peer), _VECTOR), self)

    @override
    def close(self) -> None:
        flush(self._others, self.rank)
        self._requests.clear()
        self._others.clear()
        with self._lock:
            self._edges.clear()
        self._control = None

    def drop(self, peer: int) -> None:
        """The edge with a peer is of no use any more; the next call makes the next one."""
        with self._lock:
            if self._edges.pop(peer, None) is not None:
                self._numbers[peer] += 1

    def _edge(self, peer: int) -> Group:
        with self._making[peer]:
            with self._lock:
                edge, number = self._edges.get(peer), self._numbers[peer]
            return edge if edge is not None else self._make(peer, number)

    def _make(self, peer: int, number: int) -> Group:
        low, high = sorted((self.rank, peer))
        with PeerTrouble(peer, "connection"):
            try:
                edge = self._group(f"{low}-{high}/{number}", int(self.rank > peer), 2, min(_CONNECT_S, self.timeout_s))
            except RuntimeError:
                with self._lock:
                    self._numbers[peer] += 1
                raise
        with self._lock:
            if self._control is not None and self._numbers[peer] == number:
                self._edges[peer] = edge
        return edge

    def _group(self, name: str, rank: int, size: int, timeout_s: float) -> Group:
        return dist.ProcessGroupGloo(PrefixStore(name, self._store), rank, size, timedelta(seconds=timeout_s))

    def _trouble(self, peer: int, phase: str) -> _EdgeTrouble:
        return _EdgeTrouble(peer, phase, self)

    def _end(self, peer: int) -> int:
        """The peer's rank on the edge."""
        return int(peer > self.rank)

    def _open(self) -> Group:
        if self._control is None:
            raise ProtocolError("The transport is used after it was closed.")
        return self._control


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
