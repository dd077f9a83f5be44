"""Whom the gossip averages with: the queue at a busy worker, evidence of deaths, and what is asked of the monitor."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from typing_extensions import override

from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerPicker
from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.failure_detector import Verdict
from lightning_gossip.algorithm.topology.generators import complete, star
from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.adpsgd import initiator, peer_selection
from lightning_gossip.runtime.adpsgd.gossip import Gossip
from lightning_gossip.runtime.adpsgd.initiator import Caller
from lightning_gossip.runtime.adpsgd.peer_selection import ChangingPartners
from lightning_gossip.runtime.adpsgd.request_queue import Requests
from lightning_gossip.runtime.adpsgd.session import Session
from lightning_gossip.runtime.membership.round_store import WorkerId
from lightning_gossip.runtime.store_client import another
from lightning_gossip.transport import Kind, MemoryNetwork, Message
from lightning_gossip.transport.base import Pending
from lightning_gossip.transport.pairwise_groups import REPLY_S, EdgeTransport
from tests.runtime.cluster import PATIENCE_S, eventually
from tests.workers import run_threads


class Everybody:
    """A monitor for which all workers are alive, except those that the test says."""

    def __init__(self, me: WorkerId) -> None:
        self.me = me
        self.version = 0
        self.verdicts: dict[WorkerId, Verdict] = {}
        self.asked = 0
        self.seen_to_close: list[WorkerId] = []

    def verdict(self, worker: WorkerId) -> Verdict:
        self.asked += 1
        return self.verdicts.get(worker, Verdict.ALIVE)

    def connection_lost(self, worker: WorkerId) -> None:
        self.seen_to_close.append(worker)

    def change(self, worker: WorkerId, verdict: Verdict) -> None:
        self.verdicts[worker] = verdict
        self.version += 1


MEMBERS = [WorkerId(rank, 1) for rank in range(4)]


def of_rank_0(**options: Any) -> tuple[ChangingPartners, Everybody]:
    monitor = Everybody(MEMBERS[0])
    picker = PartnerPicker(complete(4), 0, **options)
    made = ChangingPartners(monitor, MEMBERS, complete(4), roles="auto", picker=picker, ceiling_s=PATIENCE_S)  # type: ignore[arg-type]
    return made, monitor


# -- the queue -------------------------------------------------------------------------------------------------------------


def test_a_request_keeps_its_place_and_a_later_one_of_the_same_peer_takes_it() -> None:
    requests = Requests()
    for peer in (3, 1, 2):
        requests.put(peer, Message(Kind.EXCHANGE, session=peer))
    requests.put(1, Message(Kind.EXCHANGE, session=9))
    assert [requests.ahead(peer) for peer in (3, 1, 2, 5)] == [0, 1, 2, 3]
    assert requests.take() == (3, Message(Kind.EXCHANGE, session=3))
    assert [requests.ahead(peer) for peer in (3, 1, 2)] == [3, 1, 2]  # one is being answered
    assert requests.take() == (1, Message(Kind.EXCHANGE, session=9))
    requests.close()
    assert requests.take() == (2, Message(Kind.EXCHANGE, session=2))
    assert requests.take() is None


def test_who_has_to_wait_is_told_at_once_and_how_long() -> None:
    network = MemoryNetwork(4)
    transports = [network.transport(rank) for rank in range(4)]
    gossip = Gossip(transports[0], PartnerPicker(star(4), 0), timeout_s=PATIENCE_S)
    gossip.start()
    try:
        gossip.open(Replica([torch.zeros(4)]), session=1, layout=1)
        ask = Message(Kind.EXCHANGE, session=1, layout=1, value=7)
        assert transports[1].request(0, ask, PATIENCE_S).kind is Kind.ACCEPT  # and sends nothing yet
        for place, rank in enumerate((2, 3), 1):
            answer = transports[rank].request(0, ask, PATIENCE_S)
            assert (answer.kind, answer.value) == (Kind.QUEUED, 7)
            assert answer.wait_us == place * PATIENCE_S * 1e6
        for rank in (1, 2, 3):
            if rank > 1:
                assert transports[rank].await_reply(0, PATIENCE_S).kind is Kind.ACCEPT
            transports[rank].swap(0, torch.ones(4), torch.zeros(4)).wait(PATIENCE_S)
        assert eventually(lambda: gossip.counters.exchanges == 3)
        gossip.drain([torch.zeros(4)])
    finally:
        gossip.close(together=False)
        transports[0].close()
        for thread in gossip._threads:
            thread.join(PATIENCE_S)


@pytest.mark.parametrize(("told_s", "waits_s"), [(3.0, 3.0), (10 * 365 * 86400.0, 4 * (PATIENCE_S + REPLY_S))])
def test_the_deadline_of_who_is_queued_begins_when_it_is_its_turn(
    told_s: float, waits_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = of_rank_0()
    transport, waited, refused = MemoryNetwork(4).transport(0), [], Message(Kind.REFUSE)
    monkeypatch.setattr(transport, "request", lambda *_: Message(Kind.QUEUED, wait_us=int(told_s * 1e6)))
    monkeypatch.setattr(transport, "await_reply", lambda _, timeout_s: waited.append(timeout_s) or refused)
    caller = Caller(transport, made, Session(), None)  # type: ignore[arg-type]
    assert caller._request(1, Message(Kind.EXCHANGE)) is refused
    assert waited == [waits_s + made.answer_s]


def test_who_asks_a_worker_whose_gossip_has_ended_is_refused_at_once() -> None:
    network = MemoryNetwork(2)
    transports = [network.transport(rank) for rank in range(2)]
    gossip = Gossip(transports[0], PartnerPicker(star(2), 0), timeout_s=PATIENCE_S)
    gossip.start()
    gossip.open(Replica([torch.zeros(4)]), session=1, layout=1)
    gossip.close(together=False)  # which leaves the listener alone
    assert [thread.name for thread in gossip._threads if thread.is_alive()] == ["gossip-listener"]
    assert transports[1].request(0, Message(Kind.EXCHANGE, session=1, layout=1), PATIENCE_S).kind is Kind.REFUSE
    transports[0].close()
    gossip._threads[0].join(PATIENCE_S)


class SlowLink(EdgeTransport):
    CHUNK_S = 0.01

    @override
    def swap(self, peer: int, mine: torch.Tensor, theirs: torch.Tensor) -> Pending:
        threading.Event().wait(self.CHUNK_S)
        return super().swap(peer, mine, theirs)


@pytest.mark.alone
def test_nobody_gives_up_or_declares_failed_a_worker_that_is_busy_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight workers call one, at whom each waits for seven exchanges; an exchange takes ten chunks, 0.1 s or more."""
    monkeypatch.setattr(peer_selection, "_FLOOR_S", 0.2)
    chunks, n = 10, 9
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = [WorkerId(rank, 1) for rank in range(n)]
    monitors = [Everybody(member) for member in members]
    drawn, gossips = [], []
    for rank in range(n):
        connections = (another(store), another(store, timeout_s=1e6), another(store), another(store))
        transport = SlowLink(*connections, "queue", rank=rank, world_size=n, timeout_s=PATIENCE_S)
        picker = PartnerPicker(star(n), rank)
        drawn.append(
            ChangingPartners(monitors[rank], members, star(n), roles="auto", picker=picker, ceiling_s=PATIENCE_S)  # type: ignore[arg-type]
        )
        gossips.append(Gossip(transport, drawn[rank], chunk_bytes=40, timeout_s=PATIENCE_S))
    models = [[torch.full((10 * chunks,), float(rank))] for rank in range(n)]
    try:
        for rank, gossip in enumerate(gossips):
            gossip.start()
            gossip.open(Replica(models[rank]), session=1, layout=1)
            gossip.step(models[rank], step_s=0.01)
        assert eventually(lambda: gossips[0].counters.exchanges >= n)
        before, began_s = gossips[0].counters.exchanges, time.monotonic()
        assert eventually(lambda: gossips[0].counters.exchanges >= before + 30)
        per_s = 30 / (time.monotonic() - began_s)
        run_threads([lambda r=r: gossips[r].drain(models[r]) for r in range(n)], PATIENCE_S)  # type: ignore[misc]
        each = [gossip.counters.exchanges for gossip in gossips[1:]]
    finally:
        run_threads([lambda gossip=gossip: gossip.close(together=True) for gossip in gossips], PATIENCE_S)  # type: ignore[misc]
    assert [each.failed_exchanges for each in drawn] == [0] * n
    assert [monitor.seen_to_close for monitor in monitors] == [[]] * n
    assert per_s > 0.5 / (chunks * SlowLink.CHUNK_S)
    assert max(each) - min(each) <= 2  # each in its turn
    assert torch.stack([model[0] for model in models]).mean(0) == pytest.approx(torch.full((100,), (n - 1) / 2).numpy())


# -- evidence --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_evidence"),
    [
        (PeerError("slow", rank=1, timed_out=True), False),
        (PeerError("given up here before", rank=1), False),
        (PeerError("closed", rank=1, closed=True), True),
    ],
)
def test_only_a_connection_that_the_peer_has_closed_is_evidence_of_its_failure(error: PeerError, is_evidence: bool) -> None:
    made, monitor = of_rank_0()
    made.exchange_failed(1, error)
    assert monitor.seen_to_close == ([MEMBERS[1]] if is_evidence else [])
    assert made.failed_exchanges == 1


# -- what is asked of the monitor --------------------------------------------------------------------------------------------


def test_nobody_is_asked_for_who_has_failed_while_the_monitor_has_nothing_new() -> None:
    made, monitor = of_rank_0()
    assert made.initiates
    asked = monitor.asked
    for _ in range(100):
        assert made.start_share == 0.5
        assert made.initiates
    assert monitor.asked == asked
    monitor.change(MEMBERS[3], Verdict.FAILED)
    assert made.initiates
    assert made.picker.neighbours == (1, 2)
    assert {made.pick() for _ in range(50)} == {1, 2}


def test_the_time_of_an_exchange_counts_for_its_peer_while_the_graph_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    made, monitor = of_rank_0(choice="fast_links")
    repaired = peer_selection.repaired

    def interrupted(*args: Any) -> Any:
        made.took(3, 1.0)  # the responder's exchange ends just now
        return repaired(*args)

    monkeypatch.setattr(peer_selection, "repaired", interrupted)
    before = made.picker
    monitor.change(MEMBERS[1], Verdict.FAILED)
    assert made.initiates
    assert made.picker is not before
    assert before._times_s == {3: 1.0}


class OneSuspected:
    """Partners of whom one is suspected and none is to be asked."""

    initiates, start_share, looks_again_s = True, 0.5, 0.01

    @staticmethod
    def suspected() -> list[int]:
        return [1]


def test_a_suspected_peer_is_probed_now_and_then_however_often_this_worker_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, session = MemoryNetwork(2).transport(0), Session()
    probes: list[int] = []
    monkeypatch.setattr(transport, "probe", probes.append)
    worker: Any = type("WorkerId", (), {"exchanges_per_step": 1.0})()
    calling: Any = OneSuspected()
    caller = Caller(transport, calling, session, worker)
    thread = threading.Thread(target=caller.call, daemon=True)
    began_s = time.monotonic()
    thread.start()
    for number in range(500):  # each step wakes the caller; the session is not open, so no exchange is due
        session.note_own_step(1.0 + number)
        threading.Event().wait(0.002)
    session.stop()
    thread.join(PATIENCE_S)
    took_s = time.monotonic() - began_s
    assert 1 <= len(probes) <= 1 + took_s / initiator._PROBE_S
