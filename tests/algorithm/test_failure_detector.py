"""The failure detector and the deadline as state machines: chosen times, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.failure_detector import FailureDetector, Patience, Verdict

SUSPECT_AFTER_S, FAIL_AFTER_S = 2.0, 30.0


class Observed:
    """An observer that looks every half second, and a worker 1 that sends heartbeats while it is told to."""

    def __init__(self) -> None:
        self.detector = FailureDetector[int](suspect_after_s=SUSPECT_AFTER_S, fail_after_s=FAIL_AFTER_S)
        self.at_s = 0.0
        self.count = 0

    def look(self, seconds: float, *, heartbeats: bool) -> Verdict:
        end_s = self.at_s + seconds
        while self.at_s < end_s:
            self.at_s += 0.5
            self.count += heartbeats
            self.detector.heard(1, count=self.count, at_s=self.at_s)
        return self.detector.verdict(1)


@pytest.fixture
def observed() -> Observed:
    made = Observed()
    assert made.look(5, heartbeats=True) is Verdict.ALIVE
    return made


def test_a_worker_without_heartbeats_is_suspected_and_then_failed(observed: Observed) -> None:
    assert observed.look(1.5, heartbeats=False) is Verdict.ALIVE
    assert observed.look(1.0, heartbeats=False) is Verdict.SUSPECTED
    assert observed.look(27.0, heartbeats=False) is Verdict.SUSPECTED
    assert observed.look(1.0, heartbeats=False) is Verdict.FAILED


def test_a_worker_that_thaws_in_time_is_alive_again(observed: Observed) -> None:
    assert observed.look(20.0, heartbeats=False) is Verdict.SUSPECTED
    assert observed.look(0.5, heartbeats=True) is Verdict.ALIVE


def test_a_suspected_worker_with_a_lost_connection_has_failed(observed: Observed) -> None:
    observed.detector.connection_lost(1)
    assert observed.look(1.5, heartbeats=False) is Verdict.ALIVE
    assert observed.look(1.0, heartbeats=False) is Verdict.FAILED


def test_heartbeats_after_a_lost_connection_clear_it(observed: Observed) -> None:
    observed.detector.connection_lost(1)
    assert observed.look(1.0, heartbeats=True) is Verdict.ALIVE  # the first of the two heartbeats may be from before
    assert not observed.detector.connections_lost
    assert observed.look(5.0, heartbeats=False) is Verdict.SUSPECTED


def test_one_heartbeat_after_a_lost_connection_may_be_from_before(observed: Observed) -> None:
    observed.detector.connection_lost(1)
    observed.look(0.5, heartbeats=True)
    assert observed.look(2.5, heartbeats=False) is Verdict.FAILED


def test_a_worker_whose_process_has_ended_stays_failed(observed: Observed) -> None:
    observed.detector.process_ended(1)
    assert observed.look(5.0, heartbeats=True) is Verdict.FAILED


def test_an_observer_that_was_stopped_itself_declares_nobody_failed(observed: Observed) -> None:
    observed.at_s += 1000.0
    assert observed.detector.verdict(1) is Verdict.ALIVE  # before it has looked again
    assert observed.look(0.5, heartbeats=False) is Verdict.ALIVE
    assert observed.look(29.0, heartbeats=False) is Verdict.SUSPECTED
    assert observed.look(2.0, heartbeats=False) is Verdict.FAILED


def test_a_worker_that_was_never_heard_has_not_failed() -> None:
    assert FailureDetector[int](suspect_after_s=SUSPECT_AFTER_S, fail_after_s=FAIL_AFTER_S).verdict(7) is Verdict.SUSPECTED


def test_a_worker_that_was_not_listened_to_has_not_failed(observed: Observed) -> None:
    for at_s in range(round(observed.at_s), 1000):
        observed.detector.heard(2, count=at_s, at_s=float(at_s))
    assert observed.detector.verdict(1) is Verdict.ALIVE
    observed.at_s = 1000.0
    assert observed.look(1.0, heartbeats=False) is Verdict.ALIVE
    assert observed.look(29.5, heartbeats=False) is Verdict.FAILED


def test_heartbeats_of_a_worker_that_is_no_member_may_be_late_for_long(observed: Observed) -> None:
    assert observed.look(31.0, heartbeats=False) is Verdict.FAILED
    observed.detector.heard(1, count=observed.count, at_s=observed.at_s, is_member=False)
    assert observed.detector.verdict(1) is Verdict.FAILED
    observed.detector.heard(1, count=observed.count + 1, at_s=observed.at_s, is_member=False)
    assert observed.detector.verdict(1) is Verdict.ALIVE
    observed.detector.process_ended(1)
    observed.detector.heard(1, count=observed.count + 2, at_s=observed.at_s, is_member=False)
    assert observed.detector.verdict(1) is Verdict.FAILED


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=50), st.integers(0, 20))
def test_a_deadline_stays_between_its_bounds_and_grows_with_each_wait_in_vain(times: list[float], vain: int) -> None:
    patience = Patience(floor_s=2.0, ceiling_s=120.0)
    for seconds in times:
        patience.took(seconds)
    before = patience.deadline_s
    for _ in range(vain):
        patience.in_vain()
    assert 2.0 <= before <= patience.deadline_s <= 120.0
    assert patience.deadline_s >= min(120.0, before * 2**vain)


def test_a_peer_that_has_become_slow_gets_the_time_that_it_needs() -> None:
    patience = Patience(floor_s=1.0, ceiling_s=1000.0)
    for _ in range(50):
        patience.took(1.0)
    waits = 0
    while patience.deadline_s < 100.0:  # it takes 100 s now
        patience.in_vain()
        waits += 1
    assert waits <= 7
    for _ in range(50):
        patience.took(100.0)
    assert patience.deadline_s >= 100.0
