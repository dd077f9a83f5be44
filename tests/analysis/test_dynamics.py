"""The planner's dynamics against closed forms and the simulator."""

from __future__ import annotations

import math

import pytest

from lightning_gossip.algorithm.laws import Erlang, Exponential, Law, LogNormal
from lightning_gossip.analysis import Atoms, Problem, constant_staleness_limit, free_arrivals, mean_square_limit
from lightning_gossip.analysis.planning.dynamics import server, synchronous
from lightning_gossip.simulation import APSGD
from tests.analysis.simulated import rms_rate

ONE = Problem(eigenvalues=[1.0])


@pytest.mark.parametrize(("law", "g", "within"), [(Erlang(1.0, 4), 0.1, 0.08), (Exponential(1.0), 0.1, 0.08)])
def test_momentum_on_a_server_is_a_delay_of_own_steps(law: Law, g: float, within: float) -> None:
    seen = free_arrivals(4, law)
    variation = math.sqrt(seen.law.variance) / seen.law.mean
    dynamics = server(ONE, 4.0, seen.law, workers=4, scale=0.25, momentum=0.9, variation=1.0 if variation > 0.8 else 0.5)
    assert dynamics.decay(g) == pytest.approx(rms_rate(APSGD(), law, g, momentum=0.9), rel=within)


def test_without_momentum_the_servers_limits_are_those_of_the_analysis() -> None:
    assert server(ONE, 1.0, Atoms([3]), workers=4, scale=0.25).limit == pytest.approx(4 * constant_staleness_limit(3), rel=0.01)
    limit = server(ONE, 1.0, free_arrivals(4, Exponential(1.0)).law, workers=4, scale=0.25, variation=1.0).limit
    assert limit == pytest.approx(4 * mean_square_limit(4), rel=0.01)


def test_synchronous_strategies_converge_below_their_limit() -> None:
    assert synchronous(ONE, 1.0).limit == 2.0
    assert synchronous(ONE, 1.0, momentum=0.9).limit == pytest.approx(3.8)
    assert synchronous(ONE, 10.0).decay(0.3) == pytest.approx(-10 * math.log(0.7))
    ring_of_four = synchronous(ONE, 1.0, smallest_weight=-1 / 3)  # metropolis weights
    assert ring_of_four.limit == pytest.approx(2 / 3)
    assert ring_of_four.decay(0.66) > 0.0 > ring_of_four.decay(0.68)


@pytest.mark.parametrize("weight", [1.0, -1 / 3])
def test_nesterov_s_momentum_has_a_lower_limit(weight: float) -> None:
    dynamics = synchronous(ONE, 1.0, momentum=0.9, nesterov=True, smallest_weight=weight)
    assert dynamics.limit == pytest.approx((1 + weight) * 1.9 / 2.8)
    assert dynamics.decay(0.99 * dynamics.limit) > 0.0 > dynamics.decay(1.01 * dynamics.limit)


def limit_of_server(law: Law, variation: float) -> float:
    seen = free_arrivals(8, law)
    return server(ONE, 1.0, seen.law, workers=8, scale=1 / 8, momentum=0.9, variation=variation).limit


@pytest.mark.parametrize(("sigma", "grows_from", "at_least"), [(0.6, 0.37, 0.25), (0.75, 0.58, 0.4)])
def test_the_limit_with_momentum_is_on_the_safe_side_of_where_log_normal_times_grow(
    sigma: float, grows_from: float, at_least: float
) -> None:
    """Where they grow was found by products of random matrices, almost surely; in the mean square it is sooner."""
    limit = limit_of_server(LogNormal(1.0, sigma), math.sqrt(math.expm1(sigma**2)))
    assert at_least < limit < grows_from


def test_the_limit_has_no_jump_between_narrow_and_memoryless_step_times() -> None:
    law = LogNormal(1.0, 0.7)
    limits = [limit_of_server(law, variation) for variation in (0.0, 0.3, 0.6, 0.79, 0.81, 0.9, 1.0, 1.5)]
    assert limits == sorted(limits)
    assert limits[4] < 1.1 * limits[3]
    assert limits[-1] == limits[-2]
