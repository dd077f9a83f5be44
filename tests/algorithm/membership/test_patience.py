"""How long a store that may only be slow is waited for, on a clock that the test moves."""

from __future__ import annotations

import pytest

from lightning_gossip.algorithm.membership.patience import Patience

LEAST_S, MOST_S = 3.0, 30.0


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def now_s(self) -> float:
        return self.s


def _answer(clock: Clock, patience: Patience, seconds: float) -> None:
    with patience.measured():
        clock.s += seconds


def test_where_stores_answer_at_once_none_is_waited_for_longer() -> None:
    clock = Clock()
    patience = Patience(clock.now_s, least_s=LEAST_S, most_s=MOST_S)
    assert patience.answer_s == LEAST_S
    for _ in range(50):
        _answer(clock, patience, 0.01)
        assert patience.answer_s == LEAST_S


def test_the_deadline_follows_the_slowest_answer_of_late_up_to_the_time_after_which_a_worker_has_failed() -> None:
    clock = Clock()
    patience = Patience(clock.now_s, least_s=LEAST_S, most_s=MOST_S)
    _answer(clock, patience, 5.0)  # one that the name server did not hear
    assert patience.answer_s == 20.0
    _answer(clock, patience, 12.0)
    assert patience.answer_s == MOST_S
    for _ in range(8):
        _answer(clock, patience, 0.01)
    assert patience.answer_s == LEAST_S


def test_what_never_answers_makes_nobody_wait_longer() -> None:
    clock = Clock()
    patience = Patience(clock.now_s, least_s=LEAST_S, most_s=MOST_S)
    with pytest.raises(ConnectionError), patience.measured():
        clock.s += 60.0
        raise ConnectionError
    assert patience.answer_s == LEAST_S


def test_who_gives_up_a_worker_sooner_than_that_waits_no_less_than_the_least() -> None:
    assert Patience(Clock().now_s, least_s=LEAST_S, most_s=1.0).answer_s == LEAST_S
