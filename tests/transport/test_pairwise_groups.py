"""A group for each edge: one bad neighbour costs one edge, and an edge that broke is made anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, Store, TCPStore
from typing_extensions import override

from lightning_gossip.algorithm.topology.edge_order import edge_order
from lightning_gossip.algorithm.topology.generators import ring
from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.runtime.store_client import another
from lightning_gossip.transport import pairwise_groups
from lightning_gossip.transport.base import Kind, Message
from lightning_gossip.transport.pairwise_groups import Connections, EdgeTransport
from tests.workers import run_threads

PATIENCE_S = 10.0


def connections(store: Store) -> Connections:
    return Connections(another(store), another(store, timeout_s=1e6), another(store), another(store))


@pytest.fixture
def transports() -> Iterator[list[EdgeTransport]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = [EdgeTransport(connections(store), "test", rank=rank, world_size=3, timeout_s=PATIENCE_S) for rank in range(3)]
    yield made
    for transport in made:
        transport.close()


def ask(caller: EdgeTransport, peer: EdgeTransport, timeout_s: float = PATIENCE_S) -> Message:
    """A request and its answer."""

    def answer() -> None:
        rank, message = peer.next_message()
        peer.reply(rank, Message(Kind.ACCEPT, session=message.session, value=message.value))

    def request() -> Message:
        return caller.request(peer.rank, Message(Kind.EXCHANGE, session=7), timeout_s)

    answered: Message = run_threads([request, answer], 2 * PATIENCE_S)[0]
    return answered


def drop(one: EdgeTransport, other: EdgeTransport) -> None:
    """One end of the edge that stands breaks."""
    assert one.drop(other.rank, one._edges[other.rank])


def swap(one: EdgeTransport, other: EdgeTransport) -> None:
    """Each gets the other's vector."""

    def end(mine: EdgeTransport, peer: EdgeTransport) -> torch.Tensor:
        theirs = torch.zeros(5)
        mine.swap(peer.rank, torch.full((5,), float(mine.rank)), theirs).wait(PATIENCE_S)
        return theirs

    got = run_threads([lambda: end(one, other), lambda: end(other, one)], 2 * PATIENCE_S)
    assert [float(vector[0]) for vector in got] == [other.rank, one.rank]


def test_an_edge_is_made_with_the_first_request(transports: list[EdgeTransport]) -> None:
    a, b, _ = transports
    assert ask(a, b) == Message(Kind.ACCEPT, session=7)
    swap(a, b)
    assert ask(b, a).kind is Kind.ACCEPT
    swap(a, b)


def test_a_peer_that_does_not_answer_costs_its_own_edge_only(transports: list[EdgeTransport]) -> None:
    a, b, c = transports
    ask(a, b)
    ask(a, c)
    with pytest.raises(PeerError) as caught:
        a.request(c.rank, Message(Kind.EXCHANGE), 0.2)  # nobody listens
    assert caught.value.timed_out
    assert caught.value.rank == c.rank
    swap(a, b)


@pytest.mark.parametrize("who_notices", [0, 1])
def test_an_edge_that_broke_is_made_anew_by_the_next_request(who_notices: int, transports: list[EdgeTransport]) -> None:
    a, b, _ = transports
    ask(a, b)
    drop((a, b)[who_notices], (b, a)[who_notices])
    if who_notices == 1:  # the caller learns of it by its first try
        with pytest.raises(PeerError):
            a.request(b.rank, Message(Kind.EXCHANGE), 1.0)
    ask(a, b)
    swap(a, b)


def test_a_request_of_an_edge_that_has_broken_since_is_refused_at_once(transports: list[EdgeTransport]) -> None:
    a, b, _ = transports
    ask(a, b)
    a.post(b.rank, Message(Kind.EXCHANGE))  # and then b was frozen, and its own try failed
    peer, _ = b.next_message()
    drop(b, a)
    with pytest.raises(PeerError, match="of an edge that has broken") as caught:
        b.reply(peer, Message(Kind.ACCEPT))
    assert not caught.value.closed


def test_an_answer_waits_for_nobody_who_has_given_up(transports: list[EdgeTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = transports
    ask(a, b)
    a.post(b.rank, Message(Kind.EXCHANGE))  # and then it is frozen: nothing closes the edge
    peer, _ = b.next_message()
    monkeypatch.setattr(pairwise_groups, "REPLY_S", 0.2)
    began_s = time.monotonic()
    with pytest.raises(PeerError):
        b.reply(peer, Message(Kind.ACCEPT))
    assert time.monotonic() - began_s < PATIENCE_S / 2


@pytest.mark.parametrize("stands", [True, False], ids=["its edge stands", "its edge is missing"])
def test_a_caller_that_died_after_its_request_does_not_hold_up_the_next_one(
    stands: bool, transports: list[EdgeTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, caller, gone = transports
    monkeypatch.setattr(pairwise_groups, "_COME_S", PATIENCE_S / 4 if stands else 0.2)
    if stands:
        ask(caller, listener)
    gone.post(listener.rank, Message(Kind.EXCHANGE))  # and then it is gone: its end of the edge does not come

    def listen() -> None:
        if not stands:  # the one that is gone comes first, and the edge of the other is made behind it
            with pytest.raises(PeerError, match=f"Rank {gone.rank} did not come"):
                listener.next_message()
        rank, request = listener.next_message()
        listener.reply(rank, Message(Kind.ACCEPT, value=request.value))

    began_s = time.monotonic()
    run_threads([listen, lambda: caller.request(listener.rank, Message(Kind.EXCHANGE), PATIENCE_S)], 2 * PATIENCE_S)
    swap(caller, listener)
    assert time.monotonic() - began_s < PATIENCE_S / 5


def test_an_edge_that_a_peer_asks_for_and_does_not_come_to_is_a_failure_of_that_peer(
    transports: list[EdgeTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, _, gone = transports
    monkeypatch.setattr(pairwise_groups, "_COME_S", 0.1)
    gone.post(listener.rank, Message(Kind.EXCHANGE))
    with pytest.raises(PeerError, match="did not come") as caught:
        listener.next_message()
    assert (caught.value.rank, caught.value.closed) == (gone.rank, False)
    listener.post(listener.rank, Message(Kind.STOP))
    assert listener.next_message() == (listener.rank, Message(Kind.STOP))


def test_an_old_edges_failure_leaves_the_new_edge_alone(transports: list[EdgeTransport]) -> None:
    a, b, _ = transports
    both = [lambda: a._edge(1, a._store), lambda: b._edge(0, b._store)]
    run_threads(both, PATIENCE_S)
    old, held = a._edges[1], b._edges[0]
    waits = threading.Event()

    def caller() -> PeerError:
        waits.set()
        with pytest.raises(PeerError) as caught:
            a.await_reply(1, 1.0)
        return caught.value

    def peer() -> None:  # has lost patience meanwhile, and calls under the next number; nothing tells a that the old one closed
        assert waits.wait(PATIENCE_S)
        drop(b, a)
        assert b.request(a.rank, Message(Kind.EXCHANGE), PATIENCE_S).kind is Kind.ACCEPT

    def listener() -> None:
        rank, request = a.next_message()
        a.reply(rank, Message(Kind.ACCEPT, value=request.value))

    error = run_threads([caller, peer, listener], 2 * PATIENCE_S)[0]
    assert error.timed_out
    assert not error.closed
    assert a._edges[1] is not old
    assert b._edges[0] is not held
    assert a._numbers[1] == b._numbers[0] == 1
    swap(a, b)


def test_the_chunks_of_an_exchange_go_over_the_edge_that_it_was_agreed_on(transports: list[EdgeTransport]) -> None:
    a, b, _ = transports
    ask(a, b)
    drop(b, a)  # b has lost patience after the first chunks, and asks again

    def refuses() -> None:
        rank, request = a.next_message()
        a.reply(rank, Message(Kind.REFUSE, value=request.value))

    run_threads([refuses, lambda: b.request(a.rank, Message(Kind.EXCHANGE), PATIENCE_S)], 2 * PATIENCE_S)
    with pytest.raises(PeerError, match="broke before the exchange had ended") as caught:
        a.swap(b.rank, torch.zeros(5), torch.zeros(5))
    assert not caught.value.closed


def test_an_answer_to_an_earlier_request_is_none_to_this_one(transports: list[EdgeTransport]) -> None:
    a, b, _ = transports
    ask(a, b)
    drop(a, b)

    def answer() -> None:
        rank, request = b.next_message()
        assert request.value == 1
        edge = b._edges[a.rank]
        stale = torch.tensor(Message(Kind.ACCEPT, value=0).words(b.run))
        edge.send([stale], 0, 2).wait()
        b.reply(rank, Message(Kind.REFUSE, value=request.value))

    answers = run_threads([lambda: a.request(b.rank, Message(Kind.EXCHANGE), PATIENCE_S), answer], 2 * PATIENCE_S)
    assert answers[0].kind is Kind.REFUSE
    assert a.refused == 1


def test_only_a_connection_that_the_peer_has_closed_speaks_for_its_death(transports: list[EdgeTransport]) -> None:
    a, b, c = transports
    ask(a, b)
    ask(a, c)
    waits = [a.receive(b.rank, torch.zeros(5)), a.receive(b.rank, torch.zeros(5)), a.receive(c.rank, torch.zeros(5))]
    errors = []
    for wait in waits[:2]:
        with pytest.raises(PeerError) as caught:
            wait.wait(0.1)
        errors.append(caught.value)
    c.close()
    with pytest.raises(PeerError) as caught:
        waits[2].wait(PATIENCE_S)
    errors.append(caught.value)
    assert [(error.timed_out, error.closed) for error in errors] == [(True, False), (False, False), (False, True)]


def test_closing_ends_the_wait_for_a_peer_that_has_asked(transports: list[EdgeTransport]) -> None:
    listener, _, gone = transports
    gone.post(listener.rank, Message(Kind.EXCHANGE))
    reads = threading.Thread(target=listener.next_message, daemon=True)
    reads.start()
    key = f"test/0-{gone.rank}/0/end/0"
    end_s = time.monotonic() + PATIENCE_S
    while not listener._store.check([key.removeprefix("test/")]) and time.monotonic() < end_s:
        reads.join(0.01)
    began_s = time.monotonic()
    listener.close()
    assert time.monotonic() - began_s < pairwise_groups._COME_S / 2
    assert not any(thread.name == "gossip-connector" for thread in threading.enumerate())
    gone.post(listener.rank, Message(Kind.STOP))
    reads.join(PATIENCE_S)
    assert not reads.is_alive()


class Closes(PrefixStore):
    """The keys of an edge, whose transport is closed when its end has just come."""

    def __init__(self, transport: EdgeTransport, peer: int) -> None:
        super().__init__(f"{transport.rank}-{peer}/0", transport._store)
        self._transport = transport

    @override
    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        stands = super().compare_set(key, expected, wanted)
        self._transport.close()
        return stands


def test_closing_ends_a_wait_that_is_about_to_begin(transports: list[EdgeTransport]) -> None:
    listener, _, gone = transports
    began_s = time.monotonic()
    with pytest.raises(ProtocolError, match="closed"):
        listener._await_end(gone.rank, 0, Closes(listener, gone.rank), PATIENCE_S)
    with pytest.raises(ProtocolError, match="closed"):
        listener._await_end(gone.rank, 0, listener._of_edge(gone.rank, 0, listener._store), PATIENCE_S)
    assert time.monotonic() - began_s < PATIENCE_S / 2


def test_a_worker_ends_its_own_listener(transports: list[EdgeTransport]) -> None:
    got: list[tuple[int, Message]] = []
    listener = threading.Thread(target=lambda: got.append(transports[0].next_message()))
    listener.start()
    transports[0].post(0, Message(Kind.STOP))
    listener.join(PATIENCE_S)
    assert got == [(0, Message(Kind.STOP))]


def test_an_edge_that_one_end_has_given_up_fails_at_once_at_the_other(transports: list[EdgeTransport]) -> None:
    a, b, _ = transports
    with pytest.raises(PeerError, match="did not come"):
        a._edge(1, a._store, timeout_s=0.05)
    began_s = time.monotonic()
    with pytest.raises(PeerError, match="in vain before"):
        b._edge(0, b._store)
    assert time.monotonic() - began_s < 1.0
    assert ask(a, b).kind is Kind.ACCEPT
    swap(a, b)


def test_both_ends_agree_on_whether_an_edge_is_made_when_one_comes_at_the_others_deadline(
    transports: list[EdgeTransport],
) -> None:
    a, b, _ = transports

    def makes(transport: EdgeTransport, peer: int, late_s: float, timeout_s: float) -> bool:
        threading.Event().wait(late_s)
        try:
            transport._edge(peer, transport._store, timeout_s=timeout_s)
        except PeerError:
            return False
        return True

    for turn in range(20):
        late_s = 0.09 + 0.001 * turn
        ends = run_threads([partial(makes, a, 1, 0.0, 0.1), partial(makes, b, 0, late_s, PATIENCE_S)], 2.0)
        assert ends[0] == ends[1], turn
        if ends[0]:
            drop(a, b)
            drop(b, a)


def test_a_neighbour_that_does_not_come_does_not_delay_the_edges_after_it(
    transports: list[EdgeTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairwise_groups, "CONNECT_S", 0.5)
    a, _, c = transports
    began_s = time.monotonic()
    run_threads([lambda: a.make_edges((1, 2)), lambda: c.make_edges((0, 1))], 10.0)
    assert time.monotonic() - began_s < 1.0
    assert ask(a, c).kind is Kind.ACCEPT


class SlowToMake(EdgeTransport):
    """As between hosts: an edge takes its two ends a while."""

    MAKING_S = 0.05

    def _make(self, *args: Any) -> Any:
        threading.Event().wait(self.MAKING_S)
        return super()._make(*args)


@pytest.mark.alone
def test_the_edges_of_a_long_ring_are_made_side_by_side() -> None:
    """One after the other they would take n steps: 1.6 s."""
    n = 32
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = [SlowToMake(connections(store), "ring", rank=rank, world_size=n, timeout_s=PATIENCE_S) for rank in range(n)]
    began_s = time.monotonic()
    run_threads([partial(made[rank].make_edges, edge_order(ring(n), rank)) for rank in range(n)], 2 * PATIENCE_S)
    took_s = time.monotonic() - began_s
    assert [len(transport._edges) for transport in made] == [2] * n
    for transport in made:
        transport.close()
    assert took_s < n * SlowToMake.MAKING_S / 2
