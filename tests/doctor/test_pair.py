"""Two workers of one process, over the loopback: what they measure, and what they say when they cannot."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_gossip.doctor.measure import host, pair
from lightning_gossip.doctor.report import Link, Listening, Worker
from lightning_gossip.runtime.clock import now_s
from tests.doctor.reports import worker

TOKEN, OTHERS = b"t" * 32, b"o" * 32
LINK = Link(i=0, j=1)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with host.listen("127.0.0.1") as made:
        yield made


def at(listener: socket.socket) -> Worker:
    address, port = listener.getsockname()
    where = Listening(address=address, interface="lo", because="", towards_store=None)
    return worker(1, 0, listening=where, port=port)


@contextmanager
def answering(listener: socket.socket, expected: bytes, *, connect_s: float = 5.0, pair_s: float = 2.0) -> Iterator[None]:
    thread = threading.Thread(
        target=pair.answer, args=(listener, expected), kwargs={"connect_s": connect_s, "pair_s": pair_s}, daemon=True
    )
    thread.start()
    yield
    thread.join(connect_s + pair_s)
    assert not thread.is_alive()


def test_a_pair_measures_latency_rates_clocks_and_packets(listener: socket.socket) -> None:
    said = pair.hello(TOKEN, 3, 0)
    with answering(listener, said):
        found = pair.measure(at(listener), LINK, said, connect_s=2.0, pair_s=2.0)
    assert found.failed is None
    assert found.latency_s is not None
    assert found.worst_s is not None
    assert 0.0 < found.latency_s <= found.worst_s < 1.0
    assert found.there is not None
    assert found.back is not None
    assert min(found.there, found.back) > 1e6
    assert found.clock_s == pytest.approx(0.0, abs=0.05)  # one clock
    assert found.resent == pytest.approx(0.0, abs=0.05)
    assert found.path_mtu is not None
    assert found.path_mtu >= 1280


def test_a_closed_port_is_refused_at_once(listener: socket.socket) -> None:
    peer = at(listener)
    listener.close()
    began_s = now_s()
    found = pair.measure(peer, LINK, pair.hello(TOKEN, 0, 0), connect_s=5.0, pair_s=5.0)
    assert (found.phase, found.failed) == ("connect", "connection refused")
    assert now_s() - began_s < 4.0


def test_a_stranger_is_hung_up_on_and_the_right_one_still_served(listener: socket.socket) -> None:
    said = pair.hello(TOKEN, 3, 0)
    with answering(listener, said):
        for wrong in (pair.hello(OTHERS, 3, 0), pair.hello(TOKEN, 2, 0)):
            found = pair.measure(at(listener), LINK, wrong, connect_s=2.0, pair_s=2.0)
            assert (found.phase, found.failed) == ("connect", "something else answers at its address and port")
        assert pair.measure(at(listener), LINK, said, connect_s=2.0, pair_s=2.0).failed is None


def test_who_answers_nothing_is_given_up_in_time(listener: socket.socket) -> None:
    found = pair.measure(at(listener), LINK, pair.hello(TOKEN, 0, 0), connect_s=2.0, pair_s=0.2)
    assert (found.phase, found.failed) == ("connect", "nothing came back within 0.2 s")


def test_what_was_measured_before_the_peer_ended_is_kept(listener: socket.socket) -> None:
    def answer_pings() -> None:
        connection, _ = listener.accept()
        with connection:
            stream = connection.makefile("rwb")
            stream.read(len(pair.hello(TOKEN, 0, 0)))
            stream.write(struct.pack("<d", 0.0))
            stream.flush()
            while struct.unpack("<qq", stream.read(16))[0] == 0:
                stream.write(struct.pack("<d", 0.0))
                stream.flush()

    thread = threading.Thread(target=answer_pings, daemon=True)
    thread.start()
    found = pair.measure(at(listener), LINK, pair.hello(TOKEN, 0, 0), connect_s=2.0, pair_s=2.0)
    thread.join(5)
    assert found.phase == "bandwidth"
    assert found.latency_s is not None
    assert found.there is None


def test_nobody_calls_and_the_listener_goes_on_in_time(listener: socket.socket) -> None:
    began_s = now_s()
    pair.answer(listener, pair.hello(TOKEN, 0, 0), connect_s=0.1, pair_s=1.0)
    assert now_s() - began_s < 1.0
