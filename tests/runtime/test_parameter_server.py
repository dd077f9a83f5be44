from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gossip.algorithm.flat import Fading
from lightning_gossip.algorithm.server import ParameterServer
from lightning_gossip.errors import ConfigurationError, PeerError, ProtocolError
from lightning_gossip.runtime.parameter_server import Server
from lightning_gossip.runtime.server_link import RemoteServer, Served, ServerLink, Update
from lightning_gossip.transport import Kind, MemoryNetwork, Message
from lightning_gossip.transport.base import Pending
from lightning_gossip.transport.memory import MemoryTransport
from tests.runtime.cluster import PATIENCE_S, eventually
from tests.workers import run_threads

N = 4
LAYOUT = 17
EXTRA = 5  # elements after one a rank, in which its updates are counted
SHORT_S = 0.2  # a deadline that is meant to be missed


@dataclass(frozen=True)
class Pulled:
    rank: int
    version: int
    in_flight: int  # with this one


@dataclass(frozen=True)
class Pushed:
    rank: int
    staleness: int
    applied: bool


class Watched(ParameterServer):
    """Writes down what happens to it; the server's condition is held meanwhile."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.events: list[Pulled | Pushed] = []

    def pull(self, rank: int) -> int:
        version = super().pull(rank)
        self.events.append(Pulled(rank, version, len(self.in_flight)))
        return version

    def push(self, rank: int, update: Tensor, *, forward_passes: int = 1) -> int | None:
        staleness = self.version - self.in_flight.get(rank, 0)
        reported = super().push(rank, update, forward_passes=forward_passes)
        self.events.append(Pushed(rank, staleness, reported is not None))
        return reported

    @property
    def pushes(self) -> list[Pushed]:
        return [event for event in self.events if isinstance(event, Pushed)]

    @property
    def most_in_flight(self) -> int:
        return max(event.in_flight for event in self.events if isinstance(event, Pulled))


class Service:
    """A server on one rank, and a link to it on every rank.

    Args:
        n: workers.
        rank: the server's.
        transports: by rank, in place of the ones that work.
    """

    def __init__(
        self,
        *,
        n: int = N,
        rank: int = 0,
        transports: Mapping[int, Callable[[MemoryNetwork, int], MemoryTransport]] | None = None,
    ) -> None:
        self.n, self.rank, self.session = n, rank, 0
        network = MemoryNetwork(n)
        self.transports = [(transports or {}).get(r, MemoryTransport)(network, r) for r in range(n)]
        deadlines = {"timeout_s": PATIENCE_S, "turn_timeout_s": PATIENCE_S}
        self.server = Server(self.transports[rank], **deadlines)
        self.links: list[ServerLink] = [
            self.server if r == rank else RemoteServer(self.transports[r], rank, **deadlines) for r in range(n)
        ]
        self.remote = [r for r in range(n) if r != rank]
        self.out = [torch.zeros(n + EXTRA, dtype=torch.float64) for _ in range(n)]
        self.model = Watched(self.start(), workers=n)

    def start(self) -> Tensor:
        return torch.cat([torch.zeros(self.n), torch.arange(float(EXTRA))]).double()

    def hurry(self, rank: int) -> None:
        """From now on its deadlines are short; what came before was to succeed on a busy machine too."""
        link: Any = self.links[rank]
        link._timeout_s = link._turn_timeout_s = SHORT_S

    def open(self, **options: Any) -> Watched:
        """The next session, with a new model."""
        self.session += 1
        self.model = Watched(self.start(), workers=self.n, **options)
        self.server.open(self.session, LAYOUT, self.model)
        return self.model

    def pull(self, rank: int, update: Tensor | None = None, *, session: int | None = None, layout: int = LAYOUT) -> Served:
        wrapped = None if update is None else Update(update)
        return self.links[rank].pull(self.session if session is None else session, layout, self.out[rank], wrapped)

    def leave(self, rank: int, update: Tensor | None = None) -> Served:
        return self.links[rank].leave(self.session, None if update is None else Update(update))

    def run(self, script: Callable[[int], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """On these ranks at once, default all."""
        return run_threads([partial(script, rank) for rank in (range(self.n) if ranks is None else ranks)], PATIENCE_S)

    def close_together(self) -> None:
        """As the strategies do."""
        self.transports[(self.rank + 1) % self.n].post(self.rank, Message(Kind.STOP))
        began_s = time.monotonic()
        self.server.close(together=True)
        assert time.monotonic() - began_s < 8
        assert not self.alive

    def abandon(self) -> None:
        """The end after a failure; closing the transport ends the listener as the end of the process would."""
        self.server.close(together=False)
        for transport in self.transports:
            transport.close()
        for thread in self.server._threads:
            if thread.is_alive():
                thread.join(PATIENCE_S)

    @property
    def alive(self) -> list[str]:
        return [thread.name for thread in self.server._threads if thread.is_alive()]

    @contextlib.contextmanager
    def running(self, *, together: bool = True) -> Iterator[Service]:
        """Started; closed together at the end, or abandoned if that is meant, or something went wrong."""
        self.server.start()
        try:
            yield self
            if together:
                self.close_together()
        finally:
            self.abandon()


@dataclass
class Account:
    """What one worker has seen in a session."""

    applied: Tensor  # the sum of its updates that were
    versions: list[int] = field(default_factory=list)  # that it pulled
    staleness: list[int] = field(default_factory=list)  # that it was told
    dropped: int = 0


class Progress:
    """Updates that all workers have made, and a point at which all begin."""

    def __init__(self, workers: int) -> None:
        self.updates = 0
        self._lock = threading.Lock()
        self.began_s = time.monotonic()
        self._begin = threading.Barrier(workers, action=self._note_start)

    def begin(self) -> None:
        self._begin.wait(PATIENCE_S)

    def count(self) -> None:
        with self._lock:
            self.updates += 1

    def _note_start(self) -> None:
        self.began_s = time.monotonic()


def train(
    service: Service,
    compute_s: Callable[[int], Callable[[], float]],
    goes_on: Callable[[int, int, Progress], bool],
    *,
    together: bool = True,
) -> list[Account]:
    """All workers pull, compute, push and pull …, and leave, as the strategy does.

    Args:
        service: with an open session.
        compute_s: by rank, what draws the seconds of a step.
        goes_on: whether a rank makes another step after so many.
        together: all pull before the first one computes; not possible if only some may hold a model.
    """
    progress = Progress(service.n)

    def script(rank: int) -> Account:
        generator = torch.Generator().manual_seed(rank)
        draw, account = compute_s(rank), Account(torch.zeros(service.n + EXTRA, dtype=torch.float64))
        account.versions.append(service.pull(rank).version)
        if together:
            progress.begin()
        number = 0
        while goes_on(rank, number, progress):
            time.sleep(draw())
            update = step(service, rank, generator)
            served = service.pull(rank, update.clone())
            progress.count()
            number += 1
            account.versions.append(served.version)
            if served.staleness is None:
                account.dropped += 1
            else:
                account.staleness.append(served.staleness)
                account.applied += update
        service.leave(rank)
        return account

    return service.run(script)


def step(service: Service, rank: int, generator: torch.Generator) -> Tensor:
    """Whole numbers, whose sums have no rounding: one for the count of this rank's updates, and others."""
    update = torch.zeros(service.n + EXTRA, dtype=torch.float64)
    update[rank] = 1.0
    update[service.n :] = torch.randint(-50, 50, (EXTRA,), generator=generator)
    return update


LAWS: dict[str, Callable[[random.Random, float], float]] = {
    "constant": lambda _, mean_s: mean_s,
    "uniform": lambda draw, mean_s: draw.uniform(0.5, 1.5) * mean_s,
    "exponential": lambda draw, mean_s: draw.expovariate(1.0 / mean_s),
}


def law(name: str, mean_s: float, slow: Mapping[int, float] | None = None) -> Callable[[int], Callable[[], float]]:
    """By rank, what draws the seconds of a step; some ranks so many times slower."""

    def of(rank: int) -> Callable[[], float]:
        draw, factor = random.Random(rank), (slow or {}).get(rank, 1.0)
        return lambda: LAWS[name](draw, mean_s * factor)

    return of


def up_to(updates: int) -> Callable[[int, int, Progress], bool]:
    """Until all workers together have made so many updates."""
    return lambda _, __, progress: progress.updates < updates


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
        pairs = [(updates_of_the_others(1.0), updates_of_the_others(10.0)) for _ in range(7)]
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


# -- the meeting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caller", [0, 2], ids=["the server's", "another"])
def test_a_call_to_a_meeting_reaches_everybody_who_pulls(caller: int) -> None:
    service = Service()
    update = torch.ones(N + EXTRA, dtype=torch.float64)
    with service.running():
        for _ in range(2):
            service.open()
            assert not service.server.meeting_called
            assert not any(service.pull(rank).meeting_called for rank in range(N))
            service.links[caller].call_meeting(service.session)
            assert eventually(lambda: service.server.meeting_called)
            assert [service.pull(rank, update).meeting_called for rank in range(N)] == [True] * N
            assert [service.leave(rank).meeting_called for rank in range(N)] == [True] * N
            assert service.server.meeting_called


def test_a_worker_that_called_hears_of_it_with_its_next_answer() -> None:
    """Its messages are read in the order in which it sent them."""
    service = Service()
    with service.running():
        for _ in range(50):
            service.open()
            service.pull(1)
            service.links[1].call_meeting(service.session)
            assert service.leave(1).meeting_called


def test_workers_that_wait_for_a_turn_hear_of_the_meeting_with_it() -> None:
    service = Service()
    update = torch.ones(N + EXTRA, dtype=torch.float64)

    def wait(rank: int) -> bool:
        served = service.pull(rank)
        service.leave(rank, update)
        return served.meeting_called

    def call() -> bool:
        assert eventually(lambda: len(service.model._queue) == 2)
        service.links[3].call_meeting(service.session)
        assert eventually(lambda: service.server.meeting_called)
        return service.leave(0, update).meeting_called

    with service.running():
        model = service.open(active_workers=1)
        service.pull(0)
        assert run_threads([call, partial(wait, 1), partial(wait, 2)], PATIENCE_S) == [True] * 3
    assert model.version == 3


def test_a_meeting_is_of_its_session_only() -> None:
    """Whether the call comes too late, or before the server has opened the session."""
    service = Service()
    with service.running():
        service.open()
        service.open()
        service.links[1].call_meeting(service.session - 1)
        service.pull(1)  # the call has been read before this
        assert not service.leave(1).meeting_called
        service.links[1].call_meeting(service.session)
        service.links[1].call_meeting(service.session - 1)
        service.pull(1)
        assert service.leave(1).meeting_called
        service.open()
        service.links[1].call_meeting(service.session + 1)
        thread = threading.Thread(target=lambda: service.links[1].pull(service.session, LAYOUT, service.out[1]), daemon=True)
        assert not service.pull(2).meeting_called
        assert eventually(lambda: service.server._meeting == service.session + 1)
        assert not service.leave(2).meeting_called
        service.open()
        thread.start()
        thread.join(PATIENCE_S)
        assert service.leave(1).meeting_called


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
