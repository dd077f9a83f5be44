from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gossip.algorithm.apsgd.server import ParameterServer
from lightning_gossip.algorithm.apsgd.worker import Served
from lightning_gossip.algorithm.tensors.flat import Fading
from lightning_gossip.errors import ConfigurationError, PeerError, ProtocolError
from lightning_gossip.runtime.apsgd.client import RemoteServer, Update
from lightning_gossip.transport import Kind, Message
from lightning_gossip.transport.base import Pending
from tests.runtime.cluster import PATIENCE_S, eventually
from tests.runtime.service import EXTRA, LAYOUT, SHORT_S, N, Service, Watched, law, step, train
from tests.transport.memory import MemoryNetwork, MemoryTransport
from tests.workers import run_threads

# -- chosen interleavings --------------------------------------------------------------------------------------------------


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.5},
    {"active_workers": 2},
    {"max_staleness": 1},
    {"max_staleness": 3, "on_stale": "wait"},
    {"max_staleness": 1, "on_stale": "wait", "active_workers": 2},
]


@settings(max_examples=40)
@given(
    options=st.sampled_from(OPTIONS),
    actions=st.lists(st.tuples(st.integers(0, N - 1), st.sampled_from(["step"] * 5 + ["leave", "last step"])), max_size=40),
    rank=st.integers(0, N - 1),
)
def test_whatever_the_order_the_server_does_what_its_rules_do_alone(
    options: dict[str, Any], actions: list[tuple[int, str]], rank: int
) -> None:
    """One call after the other, and the same ones on a ParameterServer in this thread."""
    service = Service(rank=rank)
    generator = torch.Generator().manual_seed(1)
    with service.running():
        service.open(**options)
        reference = ParameterServer(service.start(), workers=N, **options)
        last: dict[int, int | None] = {}
        for worker, action in actions:
            holds = worker in reference.in_flight
            if holds and action != "leave" and not reference.may_push(worker):
                continue  # would wait for somebody, and here everybody comes in turn
            if not holds and len(reference.in_flight) >= options.get("active_workers", N):
                continue
            update = step(service, worker, generator) if holds and action != "leave" else None
            if update is not None:
                last[worker] = reference.push(worker, update)
            if action == "step":
                served = service.pull(worker, update)
                reference.queue(worker)
                assert served == Served(reference.pull(worker), last.get(worker), False)
                assert torch.equal(service.out[worker], reference.model)
            else:
                reference.leave(worker)
                assert service.leave(worker, update) == Served(reference.version, last.get(worker), False)
            assert torch.equal(service.server.model, reference.model)
            assert dict(service.model.in_flight) == dict(reference.in_flight)


def test_in_turn_every_update_is_as_stale_as_there_are_others() -> None:
    service = Service()
    generator = torch.Generator().manual_seed(2)
    with service.running():
        service.open()
        for rank in range(N):
            assert service.pull(rank) == Served(0, None, False)
        for _ in range(10):
            seen = [service.pull(rank, step(service, rank, generator)).staleness for rank in range(N)]
        assert seen == [N - 1] * N
        for rank in range(N):
            service.leave(rank)


def test_a_pull_comes_directly_after_its_push() -> None:
    """Another worker may push at any moment; if one of its updates came between, the version would tell."""
    service = Service()
    seen: list[tuple[int, int]] = []

    def script(rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        pulled = service.pull(rank).version
        for _ in range(50):
            served = service.pull(rank, step(service, rank, generator))
            assert served.staleness is not None
            seen.append((served.version, pulled + served.staleness + 1))
            pulled = served.version
        service.leave(rank)

    with service.running():
        service.open()
        service.run(script)
    assert len(seen) == 50 * N
    assert all(version == applied for version, applied in seen)


# -- no update is lost -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_model_ends_as_the_start_and_the_scaled_sum_of_all_updates(options: dict[str, Any], rank: int) -> None:
    service = Service(rank=rank)
    with service.running():
        model = service.open(**options)
        accounts = train(service, law("exponential", 0.0005), lambda _, number, __: number < 25, together=False)
    applied = torch.stack([account.applied for account in accounts]).sum(0)
    assert torch.equal(model.model, service.start() + options.get("scale", 1 / N) * applied)  # bit by bit
    assert model.version == sum(len(account.staleness) for account in accounts)
    assert len(model.pushes) == 25 * N
    if options.get("on_stale") == "wait" or "max_staleness" not in options:
        assert model.version == 25 * N
    assert not model.in_flight


def test_a_model_is_that_of_its_version() -> None:
    """No pull copies half of an update: the counts in the model add up to the version."""
    service = Service()
    torn: list[tuple[float, int]] = []

    def script(rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        update = None
        for _ in range(100):
            served = service.pull(rank, update)
            count = float(service.out[rank][:N].sum()) * N
            if count != served.version:
                torn.append((count, served.version))
            update = step(service, rank, generator)
        service.leave(rank, update)

    with service.running():
        model = service.open()
        service.run(script)
    assert torn == []
    assert model.version == 100 * N


# -- sessions --------------------------------------------------------------------------------------------------------------


def test_sessions_follow_each_other_with_models_of_other_sizes() -> None:
    service = Service()
    with service.running():
        for size in (9, 3, 30):
            service.session += 1
            model = Watched(torch.full((size,), float(size)), workers=N)
            service.server.open(service.session, size, model)
            service.out = [torch.zeros(size) for _ in range(N)]
            for rank in range(N):  # nothing is told of the session before
                assert service.pull(rank, layout=size) == Served(0, None, False)
                assert torch.equal(service.out[rank], torch.full((size,), float(size)))
            for rank in range(N):
                assert service.leave(rank, torch.ones(size)).staleness == rank
            assert torch.equal(service.server.model, torch.full((size,), size + 1.0))


@pytest.mark.parametrize("first", [True, False], ids=["the first session", "a later one"])
@pytest.mark.parametrize("call", ["pull", "leave"])
def test_a_worker_ahead_of_the_server_waits_until_the_session_is_opened(call: str, first: bool) -> None:
    service = Service()
    returned: list[Served] = []

    def early() -> None:
        link = service.links[1]
        out = service.out[1]
        returned.append(link.pull(service.session + 1, LAYOUT, out) if call == "pull" else link.leave(service.session + 1))

    with service.running():
        if not first:
            service.open()
            service.pull(1)
            service.leave(1)
        thread = threading.Thread(target=early, daemon=True)
        thread.start()
        try:
            if not first:  # the others go on
                for rank in (0, 2, 3):
                    service.pull(rank)
                    service.pull(rank, torch.ones(N + EXTRA, dtype=torch.float64))
                    service.leave(rank)
            thread.join(0.1)
            service.server.raise_failure()
            assert returned == []
        finally:
            if thread.is_alive():
                service.open()
            thread.join(PATIENCE_S)
        assert returned == [Served(0, None, False)]
        if call == "pull":
            assert torch.equal(service.out[1], service.start())
            service.leave(1)


@pytest.mark.parametrize("updates", [0, 1], ids=["with the first pull", "later"])
def test_other_tensors_are_refused_at_both_ends(updates: int) -> None:
    service = Service()
    with service.running(together=False):
        service.open()
        service.pull(0)
        update = None
        for _ in range(updates):
            service.pull(2)
            update = torch.ones(N + EXTRA, dtype=torch.float64)
        with pytest.raises(ConfigurationError, match="Rank 2 trains other tensors than rank 0"):
            service.pull(2, update, layout=LAYOUT + 1)
        assert eventually(lambda: service.server._failure is not None)
        with pytest.raises(ConfigurationError, match="Rank 2 trains other tensors than rank 0"):
            service.pull(0, torch.ones(N + EXTRA, dtype=torch.float64))
        assert service.model.version == 0


class Unread(MemoryTransport):
    """Where sending ends when it is read, as over sockets, and a refused update never is."""

    def send(self, peer: int, vector: torch.Tensor) -> Pending:
        class Never:
            def wait(self, timeout_s: float) -> None:
                raise PeerError("nobody read this")

        return Never()


def test_a_refused_update_is_not_waited_for() -> None:
    network = MemoryNetwork(2)
    link = RemoteServer(Unread(network, 1), 0, timeout_s=PATIENCE_S, turn_timeout_s=PATIENCE_S)
    network.transport(0).reply(1, Message(Kind.REFUSE))
    with pytest.raises(ConfigurationError, match="Rank 1 trains other tensors than rank 0"):
        link.pull(1, LAYOUT, torch.zeros(3), Update(torch.ones(3)))
    assert link.bytes_sent == 0


def test_an_update_without_a_forward_pass_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="0 forward passes"):
        Update(torch.zeros(1), 0)


# -- sync requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caller", [0, 2], ids=["the server's", "another"])
def test_a_sync_request_reaches_everybody_who_pulls(caller: int) -> None:
    service = Service()
    update = torch.ones(N + EXTRA, dtype=torch.float64)
    with service.running():
        for _ in range(2):
            service.open()
            assert not service.server.sync_requested
            assert not any(service.pull(rank).sync_requested for rank in range(N))
            service.links[caller].request_sync(service.session)
            assert eventually(lambda: service.server.sync_requested)
            assert [service.pull(rank, update).sync_requested for rank in range(N)] == [True] * N
            assert [service.leave(rank).sync_requested for rank in range(N)] == [True] * N
            assert service.server.sync_requested


def test_a_worker_that_called_hears_of_it_with_its_next_answer() -> None:
    """Its messages are read in the order in which it sent them."""
    service = Service()
    with service.running():
        for _ in range(50):
            service.open()
            service.pull(1)
            service.links[1].request_sync(service.session)
            assert service.leave(1).sync_requested


def test_workers_that_wait_for_a_turn_hear_of_a_sync_request_with_it() -> None:
    service = Service()
    update = torch.ones(N + EXTRA, dtype=torch.float64)

    def wait(rank: int) -> bool:
        served = service.pull(rank)
        service.leave(rank, update)
        return served.sync_requested

    def call() -> bool:
        assert eventually(lambda: len(service.model._queue) == 2)
        service.links[3].request_sync(service.session)
        assert eventually(lambda: service.server.sync_requested)
        return service.leave(0, update).sync_requested

    with service.running():
        model = service.open(active_workers=1)
        service.pull(0)
        assert run_threads([call, partial(wait, 1), partial(wait, 2)], PATIENCE_S) == [True] * 3
    assert model.version == 3


def test_a_sync_request_is_of_its_session_only() -> None:
    """Whether the call comes too late, or before the server has opened the session."""
    service = Service()
    with service.running():
        service.open()
        service.open()
        service.links[1].request_sync(service.session - 1)
        service.pull(1)  # the call has been read before this
        assert not service.leave(1).sync_requested
        service.links[1].request_sync(service.session)
        service.links[1].request_sync(service.session - 1)
        service.pull(1)
        assert service.leave(1).sync_requested
        service.open()
        service.links[1].request_sync(service.session + 1)
        thread = threading.Thread(target=lambda: service.links[1].pull(service.session, LAYOUT, service.out[1]), daemon=True)
        assert not service.pull(2).sync_requested
        assert eventually(lambda: service.server._sync_requested_in == service.session + 1)
        assert not service.leave(2).sync_requested
        service.open()
        thread.start()
        thread.join(PATIENCE_S)
        assert service.leave(1).sync_requested


# -- what is sent -------------------------------------------------------------------------------------------------------


def test_models_and_updates_sent_to_other_ranks_are_counted() -> None:
    service = Service()
    update = torch.ones(N + EXTRA, dtype=torch.float64)
    with service.running():
        service.open()
        for rank in range(N):
            service.pull(rank)
            service.pull(rank, update)
            service.leave(rank, update)
    vector = (N + EXTRA) * 8
    assert service.server.bytes_sent == (N - 1) * 2 * vector
    assert [service.links[rank].bytes_sent for rank in service.remote] == [2 * vector] * (N - 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("rank", [0, 1], ids=["the server's", "another"])
@pytest.mark.parametrize("last", [False, True], ids=["with a pull", "with the last word"])
def test_the_forward_passes_go_with_the_update(rank: int, last: bool) -> None:
    service = Service(n=2)
    statistics = [Fading(slice(2, 4), 0.9)]
    start, update = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, -0.5, 0.25, 0.0])
    service.out = [torch.zeros(4), torch.zeros(4)]
    expected = ParameterServer(start.clone(), workers=2, fading=statistics)
    expected.queue(rank)
    expected.pull(rank)
    expected.push(rank, update, forward_passes=3)
    with service.running():
        service.session = 1
        service.server.open(1, LAYOUT, ParameterServer(start.clone(), workers=2, fading=statistics))
        service.pull(rank)
        if last:
            service.links[rank].leave(1, Update(update, 3))
        else:
            service.links[rank].pull(1, LAYOUT, service.out[rank], Update(update, 3))
            assert torch.equal(service.out[rank], expected.model)
        assert torch.equal(service.server.model, expected.model)


class Slow(Tensor):
    """Takes its time to tell its size on a server's thread, until a second thread asks too, if one can."""

    meet = threading.Barrier(2)

    def numel(self) -> int:
        if threading.current_thread().name.startswith("gossip-server"):
            with contextlib.suppress(threading.BrokenBarrierError):
                Slow.meet.wait(SHORT_S)
        return super().numel()


def test_models_sent_at_the_same_time_are_both_counted() -> None:
    service = Service(n=3)
    Slow.meet.reset()
    with service.running():
        service.session = 1
        service.server.open(1, LAYOUT, ParameterServer(torch.zeros(8).as_subclass(Slow), workers=3))
        service.out = [torch.zeros(8) for _ in range(3)]
        service.run(service.pull, [1, 2])
    assert service.server.bytes_sent == 2 * 8 * 4
