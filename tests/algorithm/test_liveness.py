"""The failure detector and the deadline as state machines: chosen times, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.failure_detector import Liveness, Patience, Verdict

SILENT_S, DEAD_S = 2.0, 30.0


class Watched:
    """An observer that looks every half second, and a worker 1 that beats while it is told to."""

    def __init__(self) -> None:
        self.liveness = Liveness[int](silent_s=SILENT_S, dead_s=DEAD_S)
        self.at_s = 0.0
        self.beat = 0

    def look(self, seconds: float, *, beats: bool) -> Verdict:
        end_s = self.at_s + seconds
        while self.at_s < end_s:
            self.at_s += 0.5
            self.beat += beats
            self.liveness.heard(1, beat=self.beat, at_s=self.at_s)
        return self.liveness.verdict(1)


@pytest.fixture
def watched() -> Watched:
    made = Watched()
    assert made.look(5, beats=True) is Verdict.ALIVE
    return made


def test_a_worker_that_does_not_beat_is_silent_and_then_dead(watched: Watched) -> None:
    assert watched.look(1.5, beats=False) is Verdict.ALIVE
    assert watched.look(1.0, beats=False) is Verdict.SILENT
    assert watched.look(27.0, beats=False) is Verdict.SILENT
    assert watched.look(1.0, beats=False) is Verdict.DEAD


def test_a_worker_that_thaws_in_time_is_alive_again(watched: Watched) -> None:
    assert watched.look(20.0, beats=False) is Verdict.SILENT
    assert watched.look(0.5, beats=True) is Verdict.ALIVE


def test_a_closed_connection_makes_silence_death(watched: Watched) -> None:
    watched.liveness.broke(1)
    assert watched.look(1.5, beats=False) is Verdict.ALIVE
    assert watched.look(1.0, beats=False) is Verdict.DEAD


def test_who_beats_on_after_its_connection_closed_is_not_suspected_any_more(watched: Watched) -> None:
    watched.liveness.broke(1)
    assert watched.look(1.0, beats=True) is Verdict.ALIVE  # the first of the two beats may be from before
    assert not watched.liveness.broken
    assert watched.look(5.0, beats=False) is Verdict.SILENT


def test_one_beat_after_a_connection_closed_may_be_from_before(watched: Watched) -> None:
    watched.liveness.broke(1)
    watched.look(0.5, beats=True)
    assert watched.look(2.5, beats=False) is Verdict.DEAD


def test_the_dead_stay_dead(watched: Watched) -> None:
    watched.liveness.ended(1)
    assert watched.look(5.0, beats=True) is Verdict.DEAD


def test_an_observer_that_was_stopped_itself_takes_nobody_for_dead(watched: Watched) -> None:
    watched.at_s += 1000.0
    assert watched.liveness.verdict(1) is Verdict.ALIVE  # before it has looked again
    assert watched.look(0.5, beats=False) is Verdict.ALIVE
    assert watched.look(29.0, beats=False) is Verdict.SILENT
    assert watched.look(2.0, beats=False) is Verdict.DEAD


def test_who_was_never_heard_is_not_dead() -> None:
    assert Liveness[int](silent_s=SILENT_S, dead_s=DEAD_S).verdict(7) is Verdict.SILENT


def test_who_was_not_listened_to_is_not_dead(watched: Watched) -> None:
    for at_s in range(round(watched.at_s), 1000):
        watched.liveness.heard(2, beat=at_s, at_s=float(at_s))
    assert watched.liveness.verdict(1) is Verdict.ALIVE
    watched.at_s = 1000.0
    assert watched.look(1.0, beats=False) is Verdict.ALIVE
    assert watched.look(29.5, beats=False) is Verdict.DEAD


def test_who_is_no_member_may_be_silent_for_long(watched: Watched) -> None:
    assert watched.look(31.0, beats=False) is Verdict.DEAD
    watched.liveness.heard(1, beat=watched.beat, at_s=watched.at_s, is_member=False)
    assert watched.liveness.verdict(1) is Verdict.DEAD
    watched.liveness.heard(1, beat=watched.beat + 1, at_s=watched.at_s, is_member=False)
    assert watched.liveness.verdict(1) is Verdict.ALIVE
    watched.liveness.ended(1)
    watched.liveness.heard(1, beat=watched.beat + 2, at_s=watched.at_s, is_member=False)
    assert watched.liveness.verdict(1) is Verdict.DEAD


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
