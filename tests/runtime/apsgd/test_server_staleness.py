from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gossip.transport.base import Pending
from tests.runtime.cluster import PATIENCE_S, eventually
from tests.runtime.service import LAWS, N, Progress, Service, law, step, train, up_to
from tests.transport.memory import MemoryNetwork, MemoryTransport
from tests.workers import run_threads

# -- staleness -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("name", LAWS)
def test_the_mean_staleness_is_that_of_the_other_workers_whatever_the_law(name: str, rank: int) -> None:
    """The exact identity: Σ τ of a worker = updates of others between its first pull and its last push."""
    service = Service(rank=rank)
    with service.running():
        model = service.open()
        accounts = train(service, law(name, 0.002), up_to(60 * N))
    for rank, account in enumerate(accounts):
        first, last = account.versions[0], account.versions[-1]  # what is pulled last follows the last push directly
        assert sum(account.staleness) == last - first - len(account.staleness)
        assert account.staleness == [push.staleness for push in model.pushes if push.rank == rank]
    told = [staleness for account in accounts for staleness in account.staleness]
    assert len(told) >= 60 * N
    assert sum(told) / len(told) == pytest.approx(N - 1, rel=0.05)


@pytest.mark.alone
def test_a_slow_workers_updates_are_the_stale_ones_and_the_mean_stays() -> None:
    service = Service()
    with service.running():
        service.open()
        accounts = train(service, law("uniform", 0.001, {2: 20.0}), lambda rank, number, p: p.updates < 600)
    told = [staleness for account in accounts for staleness in account.staleness]
    assert sum(told) / len(told) == pytest.approx(N - 1, rel=0.05)
    means = [sum(account.staleness) / max(1, len(account.staleness)) for account in accounts]
    assert means[2] > 5 * max(means[:2] + means[3:])


@pytest.mark.parametrize("active", [1, 2, 3])
def test_no_more_than_the_active_workers_hold_a_model(active: int) -> None:
    service = Service()
    holding, most = 0, 0
    lock = threading.Lock()

    def script(rank: int) -> int:
        nonlocal holding, most
        generator = torch.Generator().manual_seed(rank)
        draw = law("exponential", 0.0005)(rank)
        update = None
        for _ in range(15):
            service.pull(rank, update)
            with lock:
                holding += 1
                most = max(most, holding)
            assert eventually(lambda: service.model.most_in_flight == active)  # the first ones wait for the others
            time.sleep(draw())
            update = step(service, rank, generator)
            with lock:
                holding -= 1
        service.leave(rank, update)
        return 15

    with service.running():
        model = service.open(active_workers=active)
        service.run(script)
    assert most <= active
    assert model.most_in_flight == active
    assert model.version == 15 * N
    assert sum(push.staleness for push in model.pushes) <= (active - 1) * len(model.pushes)


@pytest.mark.parametrize("slow", [None, 0, 2], ids=["alike", "the server's slow", "another slow"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_staleness": 0, "on_stale": "drop"},
        {"max_staleness": 2, "on_stale": "drop"},
        {"max_staleness": 3, "on_stale": "wait"},
        {"max_staleness": 6, "on_stale": "wait"},
        {"max_staleness": 1, "on_stale": "wait", "active_workers": 2},
        {"max_staleness": 0, "on_stale": "wait", "active_workers": 1},
    ],
    ids=str,
)
def test_no_update_is_applied_that_is_too_stale(options: dict[str, Any], slow: int | None) -> None:
    service = Service()
    with service.running():
        model = service.open(**options)
        slowdown = {} if slow is None else {slow: 5.0}
        accounts = train(service, law("exponential", 0.0005, slowdown), lambda _, number, __: number < 20, together=False)
    limit = options["max_staleness"]
    told = [staleness for account in accounts for staleness in account.staleness]
    assert max(told) <= limit
    assert sorted(told) == sorted(push.staleness for push in model.pushes if push.applied)
    assert all(push.applied == (push.staleness <= limit) for push in model.pushes)
    assert len(model.pushes) == 20 * N
    if options["on_stale"] == "wait":
        assert [account.dropped for account in accounts] == [0] * N


@pytest.mark.parametrize("slow", [0, 2], ids=["the server's", "another"])
@pytest.mark.parametrize(("limit", "active"), [(3, None), (5, None), (1, 2), (0, 1)])
def test_waiting_for_one_worker_20_times_slower_never_ends_in_a_deadlock(limit: int, active: int | None, slow: int) -> None:
    """The others make as many steps as it lets them, and some more when it has left."""
    service = Service()
    left = threading.Event()

    def goes_on(rank: int, number: int, _: Progress) -> bool:
        if rank == slow and number == 5:
            left.set()
        return number < 5 if rank == slow else number < 5 or not left.is_set()

    with service.running():
        model = service.open(max_staleness=limit, on_stale="wait", active_workers=active)
        accounts = train(service, law("uniform", 0.0005, {slow: 20.0}), goes_on, together=False)
    assert len(accounts[slow].staleness) == 5
    assert all(len(account.staleness) >= 5 for account in accounts)
    assert max(staleness for account in accounts for staleness in account.staleness) <= limit
    assert all(push.applied for push in model.pushes)


# -- slow workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize("slow", [0, 2], ids=["the server's", "another"])
def test_a_worker_10_times_slower_does_not_slow_the_others(slow: int) -> None:
    """Stretches without it and with it in turn; the best of each, since another job can only hold them up."""
    service = Service()

    def updates_of_the_others(factor: float) -> int:
        service.open()
        accounts = train(
            service,
            law("uniform", 0.004, {slow: factor}),
            lambda _, number, progress: number == 0 or time.monotonic() < progress.began_s + 0.1,
        )
        return sum(len(account.staleness) for rank, account in enumerate(accounts) if rank != slow)

    with service.running():
        pairs = [(updates_of_the_others(1.0), updates_of_the_others(10.0)) for _ in range(4)]
    without, with_it = (max(counts) for counts in zip(*pairs, strict=True))
    assert with_it >= 0.7 * without, pairs


class Held(MemoryTransport):
    """The server's end; what goes to rank 3, or comes from it, is under way until it is released."""

    def __init__(self, network: MemoryNetwork, rank: int, way: str) -> None:
        super().__init__(network, rank)
        self.way = way
        self.reached, self.released = threading.Event(), threading.Event()

    def send(self, peer: int, vector: Tensor) -> Pending:
        return self.held("send", peer, super().send(peer, vector))

    def receive(self, peer: int, vector: Tensor) -> Pending:
        return self.held("receive", peer, super().receive(peer, vector))

    def held(self, way: str, peer: int, pending: Pending) -> Pending:
        return Holding(self, pending) if (way, peer) == (self.way, 3) else pending


@dataclass
class Holding:
    transport: Held
    pending: Pending

    def wait(self, timeout_s: float) -> None:
        self.transport.reached.set()
        assert self.transport.released.wait(PATIENCE_S)
        self.pending.wait(timeout_s)


@pytest.mark.parametrize("way", ["send", "receive"])
def test_a_vector_on_its_way_holds_nobody_up(way: str) -> None:
    service = Service(transports={0: partial(Held, way=way)})
    held = service.transports[0]
    assert isinstance(held, Held)
    generator = torch.Generator().manual_seed(3)

    def slow() -> None:
        service.pull(3)
        service.pull(3, step(service, 3, torch.Generator().manual_seed(4)))
        service.leave(3)

    def others() -> None:
        assert held.reached.wait(PATIENCE_S)
        for rank in (0, 1, 2):
            service.pull(rank)
        for _ in range(20):
            for rank in (0, 1, 2):
                service.pull(rank, step(service, rank, generator))
        assert not held.released.is_set()
        held.released.set()
        for rank in (0, 1, 2):
            service.leave(rank)

    with service.running():
        model = service.open()
        run_threads([slow, others], PATIENCE_S)
    assert model.version == 61
