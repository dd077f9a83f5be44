"""A group for each edge: one bad neighbour costs one edge, and an edge that broke is made anew."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch.distributed import Store, TCPStore

from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.connection import another
from lightning_gossip.transport import edges
from lightning_gossip.transport.base import Kind, Message
from lightning_gossip.transport.edges import EdgeTransport
from tests.workers import run_threads

PATIENCE_S = 10.0


def connections(store: Store) -> tuple[Store, Store, Store, Store]:
    """What a transport wants."""
    return another(store), another(store, timeout_s=1e6), another(store), another(store)


@pytest.fixture
def transports() -> Iterator[list[EdgeTransport]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = [EdgeTransport(*connections(store), "test", rank=rank, world_size=3, timeout_s=PATIENCE_S) for rank in range(3)]
    yield made
    for transport in made:
        transport.close()


def ask(caller: EdgeTransport, peer: EdgeTransport, timeout_s: float = PATIENCE_S) -> Message:
    """A request and its answer."""

    def answer() -> None:
        rank, message = peer.next_message()
        peer.reply(rank, Message(Kind.ACCEPT, session=message.session))

    def request() -> Message:
        return caller.request(peer.rank, Message(Kind.EXCHANGE, session=7), timeout_s)

    answered: Message = run_threads([request, answer], 2 * PATIENCE_S)[0]
    return answered


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
    (a, b)[who_notices].drop((b, a)[who_notices].rank)
    if who_notices == 1:  # the caller learns of it by its first try
        with pytest.raises(PeerError):
            ask(a, b, 1.0)
    ask(a, b)
    swap(a, b)


def test_a_request_of_an_edge_that_has_broken_since_is_refused_at_once(transports: list[EdgeTransport]) -> None:
    a, b, _ = transports
    ask(a, b)
    a.post(b.rank, Message(Kind.EXCHANGE))  # and then b was frozen, and its own try failed
    peer, _ = b.next_message()
    b.drop(a.rank)
    with pytest.raises(PeerError, match="of an edge that has broken"):
        b.reply(peer, Message(Kind.ACCEPT))


def test_an_answer_waits_for_nobody_who_has_given_up(transports: list[EdgeTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = transports
    ask(a, b)
    a.post(b.rank, Message(Kind.EXCHANGE))  # and then it is frozen: nothing closes the edge
    peer, _ = b.next_message()
    monkeypatch.setattr(edges, "REPLY_S", 0.2)
    began_s = time.monotonic()
    with pytest.raises(PeerError):
        b.reply(peer, Message(Kind.ACCEPT))
    assert time.monotonic() - began_s < PATIENCE_S / 2


def test_a_listener_that_waits_for_a_peer_that_does_not_come_reads_its_next_message_in_time() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listener, caller = (EdgeTransport(*connections(store), "test", rank=rank, world_size=2, timeout_s=1.0) for rank in (1, 0))
    answering = threading.Event()

    def listen() -> None:
        peer, _ = listener.next_message()
        answering.set()
        with contextlib.suppress(PeerError):
            listener.reply(peer, Message(Kind.ACCEPT))
        assert listener.next_message() == (1, Message(Kind.STOP))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    threading.Event().wait(0.1)  # it waits for its inbox by now, most likely; who waits, the store does not tell
    keys = store.num_keys()
    caller.post(1, Message(Kind.EXCHANGE))  # and then it is gone
    assert answering.wait(PATIENCE_S)
    while store.num_keys() == keys and thread.is_alive():  # until it offers its end of the edge
        threading.Event().wait(0.01)
    listener.post(1, Message(Kind.STOP))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


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
        a._edge(1, a._store, 0.05)
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
            transport._edge(peer, transport._store, timeout_s)
        except PeerError:
            return False
        return True

    for turn in range(20):
        late_s = 0.09 + 0.001 * turn
        ends = run_threads([partial(makes, a, 1, 0.0, 0.1), partial(makes, b, 0, late_s, PATIENCE_S)], 2.0)
        assert ends[0] == ends[1], turn
        a.drop(1)
        b.drop(0)


def test_a_neighbour_that_does_not_come_does_not_delay_the_edges_after_it(
    transports: list[EdgeTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges, "CONNECT_S", 0.5)
    a, _, c = transports
    began_s = time.monotonic()
    run_threads([lambda: a.make_edges((1, 2)), lambda: c.make_edges((0, 1))], 10.0)
    assert time.monotonic() - began_s < 1.0
    assert ask(a, c).kind is Kind.ACCEPT
