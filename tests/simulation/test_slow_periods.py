"""Workers that are slow for a while."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import (
    DPSGD,
    AllReduce,
    Cluster,
    Constant,
    PeriodicAveraging,
    SlowPeriod,
    Steps,
    Strategy,
    simulate,
)

LATE = SlowPeriod(rank=1, from_s=2.5, until_s=6.5, factor=4.0)


def test_work_is_slowed_from_the_beginning_of_a_period_to_its_end() -> None:
    (times,) = Cluster(1, Constant(1.0), slow_periods=[SlowPeriod(rank=0, from_s=2.5, until_s=6.5, factor=4.0)]).compute_times(
        0
    )
    assert [times.next_s(at_s) for at_s in (0.0, 1.5, 2.0, 2.5, 6.25, 6.5, 9.0)] == [1.0, 1.0, 2.5, 4.0, 1.1875, 1.0, 1.0]
    two = [SlowPeriod(rank=0, from_s=4.0, until_s=6.0, factor=2.0), SlowPeriod(rank=0, from_s=1.0, until_s=2.0, factor=4.0)]
    (times,) = Cluster(1, Constant(4.0), slow_periods=two).compute_times(0)
    assert times.next_s(0.0) == pytest.approx(1.0 + 1.0 + 2.0 + 1.5)  # 1 + 0.25 + 2 + 0.75 of work


@pytest.mark.parametrize(
    ("strategy", "seconds"), [(AllReduce(), 13.0), (DPSGD(), 13.0), (PeriodicAveraging(period=10), 13.0), ("adpsgd", 13.0)]
)
def test_a_period_takes_three_quarters_of_itself_from_whoever_waits(strategy: Strategy | str, seconds: float) -> None:
    """Ten steps of 1 s; in 4 s the slow worker does the work of 1."""
    result = simulate(strategy, Cluster(3, Constant(1.0), slow_periods=[LATE]), work=Steps(number=10))
    assert result.time_s == pytest.approx(seconds)


def test_gossip_lets_the_others_go_on() -> None:
    result = simulate("adpsgd", Cluster(3, Constant(1.0), slow_periods=[LATE]), work=Steps(number=10))
    assert [worker.wait_s for worker in result.workers] == pytest.approx([3.0, 0.0, 3.0])  # at the end


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SlowPeriod(rank=-1, from_s=0.0, until_s=1.0, factor=2.0), "rank"),
        (lambda: SlowPeriod(rank=0, from_s=-1.0, until_s=1.0, factor=2.0), "from_s"),
        (lambda: SlowPeriod(rank=0, from_s=1.0, until_s=1.0, factor=2.0), "until_s"),
        (lambda: SlowPeriod(rank=0, from_s=0.0, until_s=1.0, factor=0.5), "factor"),
        (lambda: Cluster(1, Constant(1.0), slow_periods=[LATE]), "slow_periods"),
        (lambda: Cluster(2, Constant(1.0), slow_periods=[LATE, LATE]), "overlap"),
        (lambda: Cluster(2, Constant(1.0), slow_periods=[(1, 2.0, 3.0, 4.0)]), "slow_periods"),  # type: ignore[list-item]
    ],
)
def test_bad_periods_are_refused_by_name(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make()
