from __future__ import annotations

import math

from lightning_gossip.algorithm.adpsgd.pace import Pace, backoff_s


def test_the_wait_after_refusals_doubles_up_to_50_ms_however_many_there_are() -> None:
    waits = [backoff_s(refusals) for refusals in range(1200)]  # 2.0**1024 does not fit a float
    assert waits[:3] == [0.0005, 0.001, 0.002]
    assert waits == sorted(waits)
    assert set(waits[7:]) == {0.05}


def test_while_no_step_time_is_known_there_is_one_exchange_a_session() -> None:
    pace = Pace()
    pace.begin_session()
    assert pace.next_start_s(1.0) == 0.0
    pace.start(5.0)
    assert pace.next_start_s(1.0) == math.inf


def test_the_pace_is_the_mean_step_and_in_a_pair_the_faster_ones() -> None:
    pace = Pace()
    for seconds in (1.0, 1.0, 1.0, 1.0, 6.0):
        pace.step(seconds)
    pace.start(10.0)
    assert pace.next_start_s(1.0) == 12.0
    assert pace.next_start_s(4.0) == 10.5
    pace.peer_step(1, 0.5)
    assert pace.next_start_s(1.0) == 10.5
    pace.peer_step(1, 3.0)
    assert pace.next_start_s(1.0) == 12.0


def test_a_worker_that_becomes_slower_is_known_to_be_after_some_steps() -> None:
    pace = Pace()
    for seconds in (0.1,) * 100 + (1.0,) * 100:
        pace.step(seconds)
    assert pace.own_step_s == 1.0
