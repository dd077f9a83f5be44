from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_gossip.algorithm.laws import Constant, Erlang, Exponential, Law, LogNormal, Uniform
from lightning_gossip.analysis.mean.stability import of_staleness
from lightning_gossip.analysis.planning.arrivals import arrival_rate, arrivals, free_arrivals, run_time
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import Links


@pytest.mark.parametrize(
    ("law", "spread"),
    [(Exponential(0.1), 15.5), (Erlang(0.1, 4), 7.9), (Uniform(0.1, 0.1), 1.3), (Constant(0.1), 0.0)],
)
def test_the_staleness_of_16_workers_has_the_mean_15_and_the_law_s_spread(law: Law, spread: float) -> None:
    seen = free_arrivals(16, law, updates=100_000)
    assert seen.law.mean == pytest.approx(15.0, abs=0.01)
    assert math.sqrt(seen.law.variance) == pytest.approx(spread, rel=0.02, abs=0.02)
    assert seen.rate == pytest.approx(160.0)
    assert seen.delay.mean == pytest.approx(of_staleness(seen.law).mean)


@pytest.mark.parametrize("law", [Exponential(0.1), pytest.param(Erlang(0.1, 4), marks=pytest.mark.slow), LogNormal(0.1, 0.7)])
def test_simulating_a_server_gives_what_the_renewals_give(law: Law) -> None:
    simulated = arrivals(6, law, active_workers=6, updates=30_000)
    drawn = free_arrivals(6, law, updates=30_000)
    assert simulated.rate == pytest.approx(drawn.rate, rel=0.03)
    assert simulated.law.mean == pytest.approx(5.0, abs=0.02)
    assert simulated.law.variance == pytest.approx(drawn.law.variance, rel=0.06)


@pytest.mark.parametrize("law", [Exponential(1.0), Erlang(1.0, 4), Uniform(1.0, 0.5)])
def test_the_time_to_many_updates(law: Law) -> None:
    """Drawn: the K-th of the renewals of N workers that begin together."""
    workers, updates, runs = 8, 400, 600
    rng = np.random.default_rng(2)
    times = np.cumsum(law.draw(rng, runs * workers * 200, 0).reshape(runs, workers, 200), axis=2)
    ends = np.sort(times.reshape(runs, -1), axis=1)[:, updates - 1]
    predicted = run_time(updates, workers, law)
    assert ends.mean() == pytest.approx(predicted.mean_s, rel=0.01)
    assert ends.std() == pytest.approx(predicted.deviation_s, rel=0.15)


SLOW_AND_FAST = [Constant(5.0), Erlang(1.0, 4), Erlang(1.0, 4), Exponential(0.5), Uniform(2.0, 0.3), Exponential(1.0)]


def test_workers_that_differ_have_the_same_mean_staleness_and_their_own_one_each() -> None:
    seen = free_arrivals(6, SLOW_AND_FAST, updates=60_000)
    assert seen.rate == pytest.approx(0.2 + 1 + 1 + 2 + 0.5 + 1)
    assert seen.law.mean == pytest.approx(5.0, abs=0.05)
    # of the slowest, whose steps are of constant length: the others' rate times its step
    of_slowest = [count for staleness, count in seen.staleness.items() if 20 <= staleness <= 35]
    assert sum(of_slowest) == pytest.approx(60_000 * 0.2 / 5.7, rel=0.1)


def test_simulating_a_server_of_workers_that_differ_gives_what_the_renewals_give() -> None:
    simulated = arrivals(6, SLOW_AND_FAST, active_workers=6, updates=20_000)
    drawn = free_arrivals(6, SLOW_AND_FAST, updates=20_000)
    assert simulated.rate == pytest.approx(drawn.rate, rel=0.03)
    assert simulated.law.mean == pytest.approx(5.0, abs=0.1)
    assert simulated.law.variance == pytest.approx(drawn.law.variance, rel=0.1)


def test_one_law_for_each_of_equal_workers_is_one_law_for_all() -> None:
    laws = [Erlang(0.1, 4)] * 8
    assert free_arrivals(8, laws, updates=2_000) == free_arrivals(8, laws[0], updates=2_000)
    assert run_time(500, 8, laws).mean_s == pytest.approx(run_time(500, 8, laws[0]).mean_s, rel=1e-12)
    assert run_time(500, 8, laws).deviation_s == pytest.approx(run_time(500, 8, laws[0]).deviation_s, rel=1e-12)


def test_the_time_to_many_updates_of_workers_that_differ() -> None:
    updates, runs = 400, 400
    rng = np.random.default_rng(2)
    times = [np.cumsum(law.draw(rng, runs * 250, 0).reshape(runs, 250), axis=1) for law in SLOW_AND_FAST]
    ends = np.sort(np.concatenate(times, axis=1), axis=1)[:, updates - 1]
    predicted = run_time(updates, 6, SLOW_AND_FAST)
    assert ends.mean() == pytest.approx(predicted.mean_s, rel=0.01)
    assert ends.std() == pytest.approx(predicted.deviation_s, rel=0.15)


def test_a_bound_drops_what_is_staler_and_slows_no_worker() -> None:
    seen = arrivals(8, Erlang(1.0, 2), max_staleness=6, updates=20_000)
    assert max(seen.staleness) == 6
    assert seen.computing == pytest.approx(1.0, abs=0.01)
    assert seen.rate == pytest.approx(8.0 * (1.0 - seen.dropped), rel=0.02)
    assert 0.1 < seen.dropped < 0.9


def test_waiting_drops_nothing_and_leaves_the_mean_staleness() -> None:
    seen = arrivals(8, Erlang(1.0, 2), max_staleness=7, on_stale="wait", updates=20_000)
    assert seen.staleness.keys() == {7}, "with a bound of N − 1 the workers take turns"
    assert seen.dropped == 0.0
    assert seen.computing < 0.9


def test_a_cap_leaves_as_many_workers_as_it_says() -> None:
    seen = arrivals(8, Erlang(1.0, 2), active_workers=3, updates=20_000)
    assert seen.rate == pytest.approx(3.0, rel=0.02)
    assert seen.law.mean == pytest.approx(2.0, abs=0.02)


def test_steps_between_two_pushes_thin_the_updates() -> None:
    seen = arrivals(6, Erlang(1.0, 4), steps_per_update=2.5, updates=20_000)
    assert seen.rate == pytest.approx(6.0 / 2.5, rel=0.02)
    assert seen.law.mean == pytest.approx(5.0, abs=0.02)


def test_a_link_can_carry_no_more_than_its_bandwidth() -> None:
    own = 1.0 / 0.1  # the server's own worker uses no link
    free = arrivals(16, Exponential(0.1), links=Links(bandwidth=1_000.0 / 0.1), model_bytes=1_000, updates=20_000)
    assert free.rate <= 1.02 * (own + 10.0)
    in_step = arrivals(16, Constant(0.1), links=Links(bandwidth=1_000.0 / 0.1), model_bytes=1_000, updates=2_000)
    # the others share each direction fairly, so all 15 are down together, compute, and go up together
    assert in_step.rate == pytest.approx(own + 15.0 / (1.5 + 0.1 + 1.5), rel=0.01)


def test_the_same_seed_gives_the_same_arrivals() -> None:
    once, again, other = (arrivals(5, Exponential(1.0), max_staleness=6, seed=seed, updates=500) for seed in (1, 1, 2))
    assert once == again != other


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: arrival_rate(0, Constant(1.0)), "workers=0"),
        (lambda: free_arrivals(4, Constant(1.0), updates=0), "updates=0"),
        (lambda: arrivals(4, Constant(1.0), steps_per_update=0.5), "steps_per_update=0.5"),
        (lambda: arrivals(4, Constant(1.0), max_staleness=2, on_stale="wait"), "max_staleness=3"),
        (lambda: arrivals(4, Constant(1.0), active_workers=5), "active_workers=5 of 4"),
        (lambda: run_time(0, 4, Constant(1.0)), "updates=0"),
        (lambda: arrivals(4, [Constant(1.0)] * 3), "nor one for each of 4 workers"),
        (lambda: arrival_rate(2, [Constant(1.0), 1.0]), "nor one for each of 2 workers"),  # type: ignore[list-item]
    ],
)
def test_what_cannot_be_is_refused_by_name(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=words):
        make()
