"""The schedule of the chaos script."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.schedule import KINDS, schedule


@given(seed=st.integers(0, 10**6), workers=st.integers(2, 8), length_s=st.floats(0, 300))
def test_more_than_half_are_well_at_any_time_and_all_at_the_end(seed: int, workers: int, length_s: float) -> None:
    troubles = schedule(seed, workers=workers, length_s=length_s)
    for trouble in troubles:
        now = [other for other in troubles if other.at_s <= trouble.at_s < other.over_s]
        assert len(now) <= max(1, (workers - 1) // 2)
        assert len({other.worker for other in now}) == len(now)
        assert trouble.until_s <= length_s + 0.01
    assert len({trouble.worker for trouble in troubles if trouble.kind != "slow"}) < workers


def test_a_seed_is_a_schedule_and_another_one_is_another() -> None:
    assert schedule(1, workers=4, length_s=60) == schedule(1, workers=4, length_s=60)
    assert schedule(1, workers=4, length_s=60) != schedule(2, workers=4, length_s=60)
    assert {trouble.kind for trouble in schedule(1, workers=4, length_s=1000)} == set(KINDS)


def test_a_trouble_says_what_it_is() -> None:
    trouble = schedule(1, workers=4, length_s=60)[0]
    assert str(trouble) == f"{trouble.kind} worker {trouble.worker} for {trouble.seconds:.1f} s"
    assert trouble.until_s == pytest.approx(trouble.at_s + trouble.seconds)
