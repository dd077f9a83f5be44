"""Whom a worker exchanges with: evidence of deaths, what is asked of the monitor, and the graph that is left."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerPicker
from lightning_gossip.algorithm.adpsgd.peer_selection import ChangingPeers
from lightning_gossip.algorithm.membership.failure_detector import Verdict
from lightning_gossip.algorithm.topology.generators import complete, ring
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import PeerError
from tests.runtime.peers import Everybody, Member, peers_of


class Clock:
    at_s = 0.0

    def __call__(self) -> float:
        return self.at_s


COMPLETE = complete(4)
MEMBERS = [Member(rank) for rank in range(4)]


def of_rank_0(topology: Topology = COMPLETE, **options: Any) -> tuple[ChangingPeers[Member], Everybody, Clock]:
    monitor, clock = Everybody(), Clock()
    picker = PartnerPicker(topology, 0, **options)
    peers = ChangingPeers(monitor, 0, MEMBERS, topology, roles="auto", picker=picker, ceiling_s=30.0, now_s=clock)
    return peers, monitor, clock


@pytest.mark.parametrize(
    ("error", "is_evidence"),
    [
        (PeerError("slow", rank=1, timed_out=True), False),
        (PeerError("given up here before", rank=1), False),
        (PeerError("closed", rank=1, closed=True), True),
    ],
)
def test_only_a_connection_that_the_peer_has_closed_is_evidence_of_its_death(error: PeerError, is_evidence: bool) -> None:
    peers, monitor, _ = of_rank_0()
    peers.exchange_failed(1, error)
    assert monitor.seen_to_close == ([MEMBERS[1]] if is_evidence else [])
    assert peers.failed_exchanges == 1


def test_a_peer_that_fails_is_not_drawn_for_a_while_that_doubles_and_ends_with_an_exchange() -> None:
    peers, _, clock = of_rank_0()
    for pause_s in (3.0, 6.0, 12.0, 24.0, 30.0, 30.0):
        peers.exchange_failed(1, PeerError("slow", rank=1))
        clock.at_s += pause_s - 0.01
        assert {peers.pick() for _ in range(60)} == {2, 3}
        clock.at_s += 0.02
        assert {peers.pick() for _ in range(60)} == {1, 2, 3}
    peers.took(1, 1.0)
    peers.exchange_failed(1, PeerError("slow", rank=1))
    clock.at_s += 3.01
    assert 1 in {peers.pick() for _ in range(60)}


def test_a_wait_in_vain_doubles_the_deadline_until_an_exchange_succeeds() -> None:
    peers, _, _ = of_rank_0()
    for _ in range(20):
        peers.took(1, 4.0)
    before_s = peers.deadline_s
    peers.exchange_failed(1, PeerError("slow", rank=1, timed_out=True))
    assert peers.deadline_s == 2 * before_s
    assert peers.answer_s == 4 * before_s
    peers.took(2, 4.0)
    assert peers.deadline_s < 1.1 * before_s


def test_a_suspected_peer_is_not_drawn_and_still_in_the_graph() -> None:
    peers, monitor, _ = of_rank_0()
    monitor.verdicts[MEMBERS[2]] = Verdict.SUSPECTED
    assert {peers.pick() for _ in range(50)} == {1, 3}
    assert peers.suspected() == [2]
    assert peers.picker.neighbours == (1, 2, 3)
    for member in MEMBERS[1:]:
        monitor.verdicts[member] = Verdict.SUSPECTED
    assert peers.pick() is None


def test_nobody_is_asked_for_who_is_dead_while_the_monitor_has_nothing_new() -> None:
    peers, monitor, _ = of_rank_0()
    assert peers.start_share == 0.5
    asked = monitor.asked
    for _ in range(100):
        assert peers.start_share == 0.5
    assert monitor.asked == asked
    monitor.change(MEMBERS[3], Verdict.FAILED)
    assert peers.start_share == 0.5
    assert peers.picker.neighbours == (1, 2)
    assert {peers.pick() for _ in range(50)} == {1, 2}


def test_a_slow_link_is_not_drawn_until_there_is_time_for_it_and_an_exchange_over_it_costs_that_time() -> None:
    peers, _, clock = of_rank_0(choice="fast_links")
    for peer, seconds in ((1, 1.0), (2, 1.0), (3, 16.0)):
        peers.took(peer, seconds)
    assert {peers.pick() for _ in range(60)} == {1, 2}
    assert peers.missing_s(1) == 0.0 < peers.missing_s(3)
    for _ in range(200):
        clock.at_s += 1.0
        peers.took(1, 1.0)
    assert {peers.pick() for _ in range(60)} == {1, 2, 3}
    peers.took(3, 16.0)
    assert {peers.pick() for _ in range(60)} == {1, 2}


def test_links_that_were_never_measured_are_drawn_first_and_known_ones_where_they_cannot() -> None:
    peers, monitor, clock = of_rank_0(choice="fast_links")
    peers.took(3, 16.0)
    assert {peers.pick() for _ in range(60)} == {1, 2}
    peers.took(1, 1.0)
    assert [peers.pick() for _ in range(60)].count(2) > 50  # but for one in a hundred, that found no way to it
    monitor.verdicts[MEMBERS[2]] = Verdict.SUSPECTED
    assert {peers.pick() for _ in range(60)} == {1}  # 3 is slow beside it
    monitor.verdicts[MEMBERS[2]] = Verdict.ALIVE
    peers.took(2, 1.0)
    clock.at_s += 3 * 16.0  # earns three seconds, and 16 are owed for what was not known to be slow
    assert {peers.pick() for _ in range(60)} == {1, 2}


def test_an_exchange_that_was_given_up_is_as_slow_as_it_was_long() -> None:
    peers, _, _ = of_rank_0(choice="fast_links")
    for peer in (1, 2, 3):
        peers.took(peer, 1.0)
    peers.gave_up(3, 20.0)
    assert {peers.pick() for _ in range(60)} == {1, 2}


def test_who_was_put_off_does_not_ask_again_before() -> None:
    peers, _, clock = of_rank_0(choice="fast_links")
    peers.put_off(2, 5.0)
    assert {peers.pick() for _ in range(60)} == {1, 3}
    clock.at_s += 5.0
    assert {peers.pick() for _ in range(60)} == {1, 2, 3}


def test_uniform_draws_know_no_slow_links() -> None:
    peers, _, _ = of_rank_0()
    for peer, seconds in ((1, 1.0), (2, 1.0), (3, 1000.0)):
        peers.took(peer, seconds)
    assert {peers.pick() for _ in range(60)} == {1, 2, 3}
    assert peers.missing_s(3) == 0.0


def test_the_times_of_exchanges_outlive_a_repair() -> None:
    peers, monitor, _ = of_rank_0(choice="fast_links")
    for peer, seconds in ((1, 1.0), (2, 1.0), (3, 16.0)):
        peers.took(peer, seconds)
    monitor.change(MEMBERS[1], Verdict.FAILED)
    assert {peers.pick() for _ in range(60)} == {2}
    monitor.change(MEMBERS[2], Verdict.FAILED)
    assert {peers.pick() for _ in range(60)} == {3}  # the only one left is not slower than the median


def test_the_role_of_a_worker_may_change_with_the_graph() -> None:
    peers, monitor, _ = of_rank_0(ring(4))
    assert peers.start_share == 1.0
    monitor.change(MEMBERS[1], Verdict.FAILED)
    monitor.change(MEMBERS[3], Verdict.FAILED)
    assert peers.pick() == 2
    assert peers.picker.neighbours == (1,)


def test_where_none_may_fail_the_first_one_ends_the_gossip() -> None:
    monitor = Everybody()
    peers = peers_of(COMPLETE, 0, monitor=monitor)
    peers.raise_failure()
    monitor.change(MEMBERS[2], Verdict.SUSPECTED)
    peers.raise_failure()
    monitor.change(MEMBERS[2], Verdict.FAILED)
    with pytest.raises(PeerError, match="Rank 2 has failed") as caught:
        peers.raise_failure()
    assert caught.value.rank == 2
    others, monitor, _ = of_rank_0()
    monitor.change(MEMBERS[2], Verdict.FAILED)
    others.raise_failure()


def test_where_none_may_fail_a_broken_exchange_ends_the_gossip_and_a_late_answer_does_not() -> None:
    peers = peers_of(COMPLETE, 0, timeout_s=30.0)
    for _ in range(20):
        peers.took(1, 0.1)
    assert peers.deadline_s == 30.0
    assert peers.answer_s < 30.0 < peers.drain_s
    peers.exchange_failed(1, PeerError("late", rank=1, phase="reply", timed_out=True))
    error = PeerError("closed", rank=1, phase="exchange", closed=True)
    with pytest.raises(PeerError) as caught:
        peers.exchange_failed(1, error)
    assert caught.value is error
