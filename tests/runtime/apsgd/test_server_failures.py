from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.transport import Kind, Message
from lightning_gossip.transport.base import Pending
from tests.runtime.cluster import PATIENCE_S, eventually
from tests.runtime.service import EXTRA, LAYOUT, SHORT_S, N, Service
from tests.transport.memory import MemoryNetwork, MemoryTransport
from tests.workers import run_threads

# -- failures --------------------------------------------------------------------------------------------------------------


class Breaking(MemoryTransport):
    """The server's end; one of its methods fails."""

    def __init__(self, network: MemoryNetwork, rank: int, where: str) -> None:
        super().__init__(network, rank)
        self.where = where

    def strike(self, where: str, peer: int | None = None) -> None:
        if where == self.where:
            raise PeerError(f"injected at {where}", rank=peer, phase=where, seconds=0.0)

    def next_message(self) -> tuple[int, Message]:
        message = super().next_message()
        self.strike("next_message")
        return message

    def reply(self, peer: int, message: Message) -> None:
        self.strike("reply", peer)
        super().reply(peer, message)

    def send(self, peer: int, vector: Tensor) -> Pending:
        self.strike("send", peer)
        return super().send(peer, vector)

    def receive(self, peer: int, vector: Tensor) -> Pending:
        self.strike("receive", peer)
        return super().receive(peer, vector)


NEXT_CALLS: dict[str, Callable[[Service], Any]] = {
    "pull": lambda service: service.pull(0),
    "push": lambda service: service.pull(0, torch.ones(N + EXTRA, dtype=torch.float64)),
    "leave": lambda service: service.leave(0),
    "step": lambda service: service.server.raise_failure(),
}


@pytest.mark.parametrize("where", ["next_message", "reply", "send", "receive"])
def test_a_failure_on_a_servers_thread_is_raised_at_every_next_call_of_the_training_thread(where: str) -> None:
    service = Service(transports={0: partial(Breaking, where=where)})
    with service.running(together=False):
        model = service.open()
        service.pull(0)

        def remote() -> None:
            update = None
            if where == "receive":  # with the first pull there is nothing to
                service.pull(1)
                update = torch.ones(N + EXTRA, dtype=torch.float64)
            service.hurry(1)
            service.pull(1, update)

        with pytest.raises(PeerError):
            run_threads([remote], PATIENCE_S)
        assert eventually(lambda: service.server._failure is not None)
        for call in NEXT_CALLS.values():
            with pytest.raises(PeerError, match=f"injected at {where}") as caught:
                call(service)
            frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
            assert "strike" in frames
            assert "guarded" in frames
        assert model.version == 0


def test_a_failure_wakes_the_training_thread_that_waits_for_its_turn() -> None:
    service = Service(transports={0: partial(Breaking, where="receive")})

    def local() -> None:
        with pytest.raises(PeerError, match="injected at receive"):
            service.pull(0)

    def remote() -> None:
        assert eventually(lambda: service.model._queue == [0])
        with pytest.raises(PeerError):
            service.pull(1, torch.ones(N + EXTRA, dtype=torch.float64))

    with service.running(together=False):
        service.open(active_workers=1)
        service.pull(1)
        service.hurry(1)
        began_s = time.monotonic()
        run_threads([local, remote], PATIENCE_S)
        assert time.monotonic() - began_s < PATIENCE_S / 2
        assert eventually(lambda: "gossip-server-1" not in service.alive)


def test_a_worker_that_dies_before_its_update_is_sent_is_a_peer_error_at_the_server() -> None:
    service = Service()
    with service.running(together=False):
        service.open()
        service.pull(0)
        service.pull(1)
        service.hurry(0)
        service.transports[1].post(0, Message(Kind.PULL, service.session, LAYOUT, value=1))
        assert eventually(lambda: service.server._failure is not None)
        with pytest.raises(PeerError) as caught:
            service.pull(0, torch.ones(N + EXTRA, dtype=torch.float64))
        assert (caught.value.rank, caught.value.phase) == (1, "exchange")


def test_a_worker_that_says_that_it_has_failed_wakes_the_training_thread_that_waits_for_its_update() -> None:
    service = Service()

    def local() -> PeerError:
        with pytest.raises(PeerError, match="Rank 1 has failed") as caught:
            service.pull(0)
        return caught.value

    def remote() -> None:
        assert eventually(lambda: service.model._queue == [0])
        service.transports[1].post(0, Message(Kind.FAILED))

    with service.running(together=False):
        service.open(active_workers=1)
        service.pull(1)
        began_s = time.monotonic()
        error, _ = run_threads([local, remote], PATIENCE_S)
        assert time.monotonic() - began_s < PATIENCE_S / 2
        assert error.rank == 1
        for call in NEXT_CALLS.values():
            with pytest.raises(PeerError, match="Rank 1 has failed"):
                call(service)


def test_an_update_to_a_model_that_was_not_pulled_is_a_protocol_error() -> None:
    service = Service()
    with service.running():
        service.open()
        with pytest.raises(ProtocolError, match="not pulled"):
            service.pull(0, torch.ones(N + EXTRA, dtype=torch.float64))


def test_a_turn_that_does_not_come_is_a_peer_error_on_the_servers_rank() -> None:
    service = Service()
    with service.running():
        service.open(active_workers=1)
        service.pull(1)
        service.hurry(0)
        began_s = time.monotonic()
        with pytest.raises(PeerError, match="turn") as caught:
            service.pull(0)
        assert 0.8 * SHORT_S <= time.monotonic() - began_s < 5
        assert (caught.value.phase, caught.value.seconds) == ("turn", SHORT_S)


def test_a_turn_to_push_that_does_not_come_is_a_peer_error_on_the_servers_rank() -> None:
    """Rank 1 holds the oldest model: two updates of rank 0 to newer ones, then it must wait for that."""
    service = Service(n=2)
    update = torch.ones(2 + EXTRA, dtype=torch.float64)
    with service.running():
        service.open(max_staleness=2, on_stale="wait")
        service.pull(1)
        service.pull(0)
        service.pull(0, update)
        service.pull(0, update)
        service.hurry(0)
        for call in (service.pull, service.leave):
            with pytest.raises(PeerError) as caught:
                call(0, update)
            assert caught.value.phase == "turn"


def test_a_turn_that_does_not_come_is_a_peer_error_on_another_rank() -> None:
    service = Service()
    with service.running():
        service.open(active_workers=1)
        service.pull(0)
        service.hurry(1)
        began_s = time.monotonic()
        with pytest.raises(PeerError) as caught:
            service.pull(1)
        assert 0.8 * SHORT_S <= time.monotonic() - began_s < 5
        assert caught.value.rank == 0


# -- the end ---------------------------------------------------------------------------------------------------------------


def test_a_server_that_never_started_or_was_closed_closes() -> None:
    service = Service()
    service.server.close(together=True)
    service.server.close(together=False)
    service = Service()
    with service.running():
        service.open()
        assert sorted(service.alive) == ["gossip-listener", *(f"gossip-server-{rank}" for rank in (1, 2, 3))]
    service.server.close(together=True)
    service.server.close(together=False)
    assert service.alive == []


@pytest.mark.parametrize("waits", ["for a turn", "for a session"])
def test_closing_ends_a_thread_that_waits(waits: str) -> None:
    service = Service()
    with service.running():
        service.open(active_workers=1)
        service.pull(0)
        session = service.session if waits == "for a turn" else service.session + 1
        service.transports[1].post(0, Message(Kind.PULL, session, LAYOUT))
        if waits == "for a turn":
            assert eventually(lambda: service.model._queue == [1])


def test_a_listener_that_nobody_stops_is_named_and_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    service = Service()
    with service.running(together=False):
        service.open()
        began_s = time.monotonic()
        with caplog.at_level(logging.WARNING):
            service.server.close(together=True, timeout_s=SHORT_S)
        assert time.monotonic() - began_s < 5
        assert "gossip-listener did not end" in caplog.text
        assert service.alive == ["gossip-listener"]
    assert service.alive == []


def test_closing_alone_does_not_wait_for_the_listener() -> None:
    service = Service()
    with service.running(together=False):
        service.open()
        began_s = time.monotonic()
        service.server.close(together=False)
        assert time.monotonic() - began_s < 5
        assert service.alive == ["gossip-listener"]


# -- a server that ends by an exception, while its process goes on ---------------------------------------------------------


@pytest.mark.parametrize("ends", ["by an exception of its own rank", "since another worker has failed"])
def test_who_waits_for_a_server_that_has_ended_is_told_so_and_so_is_who_asks_later(ends: str) -> None:
    service = Service()

    def told(rank: int) -> None:
        with pytest.raises(PeerError, match="Rank 0, where the server is, has ended this training") as caught:
            service.pull(rank)
        assert (caught.value.rank, caught.value.phase) == (0, "reply")

    def end(_: int) -> None:
        assert eventually(lambda: service.model._queue == [3])
        if ends == "by an exception of its own rank":
            service.server.close(together=False)
        else:
            service.transports[1].post(0, Message(Kind.FAILED))

    with service.running(together=False):
        service.open(active_workers=1)
        service.pull(1)  # and keeps the others waiting
        began_s = time.monotonic()
        service.run(lambda rank: end(rank) if rank == 1 else told(rank), [1, 3])
        told(2)  # after that
        assert time.monotonic() - began_s < PATIENCE_S / 2
