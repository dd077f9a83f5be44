"""How long a store that may only be slow is waited for."""

from __future__ import annotations

from lightning_gossip.algorithm.membership.patience import Patience

LEAST_S, MOST_S = 3.0, 30.0


def test_where_stores_answer_at_once_none_is_waited_for_longer() -> None:
    patience = Patience(least_s=LEAST_S, most_s=MOST_S)
    assert patience.answer_s == LEAST_S
    for _ in range(50):
        patience.answered(0.01)
        assert patience.answer_s == LEAST_S


def test_the_deadline_follows_the_slowest_answer_of_late_up_to_the_time_after_which_a_worker_has_failed() -> None:
    patience = Patience(least_s=LEAST_S, most_s=MOST_S)
    patience.answered(5.0)  # one that the name server did not hear
    assert patience.answer_s == 20.0
    patience.answered(12.0)
    assert patience.answer_s == MOST_S
    for _ in range(8):
        patience.answered(0.01)
    assert patience.answer_s == LEAST_S


def test_who_gives_up_a_worker_sooner_than_that_waits_no_less_than_the_least() -> None:
    assert Patience(least_s=LEAST_S, most_s=1.0).answer_s == LEAST_S
