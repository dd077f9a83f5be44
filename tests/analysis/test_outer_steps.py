"""Rounds of local steps with outer steps on a quadratic: the rules beside simulated workers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.algorithm.topology.generators import make_topology
from lightning_gossip.analysis import Problem
from lightning_gossip.analysis.planning.dynamics import synchronous, with_outer_steps
from lightning_gossip.analysis.second_moments.gradient_noise import gossip_spread, periodic_spread, synchronous_spread
from lightning_gossip.analysis.second_moments.outer_steps import Rounds
from lightning_gossip.simulation import (
    ADPSGD,
    SGD,
    Cluster,
    Constant,
    Links,
    PeriodicAveraging,
    Quadratic,
    Recording,
    Steps,
    simulate,
)

N = 8
NONE = Outer(lr=1.0, momentum=0.0)


def simulated_decay(outer: Outer, local_steps: int, g: float, momentum: float) -> float:
    result = simulate(
        ADPSGD(topology="complete", local_steps=local_steps, outer=outer, exchanges_per_step=0.5, dense_share=0.0),
        Cluster(N, Constant(1.0)),
        work=Steps(number=300),
        objective=Quadratic([1.0], start_at=1.0),
        optimizer=SGD(lr=g, momentum=momentum),
        links=Links(latency_s=0.01),
        recording=Recording(evaluate_every=N),
        seed=1,
    )
    seconds, losses = np.array([(point.time_s, point.loss) for point in result.points if 1e-25 < point.loss < 1e-2]).T
    return -0.5 * float(np.polyfit(seconds, np.log(losses), 1)[0])


@pytest.mark.parametrize(
    ("outer", "local_steps", "g", "momentum"),
    [
        (Outer(), 4, 0.02, 0.0),
        (Outer(), 10, 0.1, 0.0),
        (Outer(lr=0.7, momentum=0.9), 4, 0.1, 0.0),
        (Outer(nesterov=False), 4, 0.02, 0.0),
        (Outer(), 10, 0.02, 0.9),
    ],
)
def test_the_mean_of_gossiping_workers_falls_by_the_round_map(
    outer: Outer, local_steps: int, g: float, momentum: float
) -> None:
    rule = Rounds(outer, local_steps).decay(g, momentum=momentum)
    assert simulated_decay(outer, local_steps, g, momentum) == pytest.approx(rule, rel=0.15)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_an_outer_step_that_changes_nothing_changes_no_rule(momentum: float, nesterov: bool) -> None:
    rounds, g = Rounds(NONE, 5), np.array([0.01, 0.1, 0.4])
    alone = synchronous_spread(g, 1, momentum=momentum, nesterov=nesterov)
    assert rounds.variance(g, momentum=momentum, nesterov=nesterov) == pytest.approx(alone.mean)
    options = {"momentum": momentum, "nesterov": nesterov}
    graph = make_topology("ring", 4)
    plain = gossip_spread(g, graph, exchanges_per_step=0.5, epoch_steps=40, **options)  # type: ignore[arg-type]
    with_rounds = gossip_spread(g, graph, exchanges_per_step=0.5, epoch_steps=40, rounds=rounds, **options)  # type: ignore[arg-type]
    assert with_rounds.apart == pytest.approx(plain.apart, rel=1e-3)
    problem = Problem(eigenvalues=[1.0, 0.1], start=[1.0, 1.0])
    one, other = synchronous(problem, 1.0, **options), with_outer_steps(problem, 1.0, rounds, **options)  # type: ignore[arg-type]
    assert other.limit == pytest.approx(one.limit, rel=0.02)
    assert other.decay(0.05) == pytest.approx(one.decay(0.05), rel=1e-6)


@pytest.mark.parametrize(
    ("local_steps", "g", "grows"),
    [(10, 0.06, False), (10, 0.095, True), (10, 0.14, False), (8, 0.14, True), (50, 0.095, False)],
)
def test_outer_steps_push_on_a_swing_of_the_inner_momentum(local_steps: int, g: float, grows: bool) -> None:
    """In a band of curvatures, whose lower end is the limit; simulated with an exact mean."""
    rounds = Rounds(Outer(), local_steps)
    result = simulate(
        PeriodicAveraging(period=local_steps, outer=Outer(), at_rendezvous="evaluate"),
        Cluster(2, Constant(1.0)),
        work=Steps(number=30 * local_steps),
        objective=Quadratic([1.0], start_at=1.0),
        optimizer=SGD(lr=g, momentum=0.9),
    )
    assert result.loss is not None
    assert (result.loss > 0.5) == grows
    assert (rounds.decay(g, momentum=0.9) < 0.0) == grows
    limits = {8: 0.1183, 10: 0.0802, 50: 3.8}
    assert rounds.limit(3.8, momentum=0.9) == pytest.approx(limits[local_steps], rel=0.03)


def test_noise_keeps_up_what_simulated_workers_have() -> None:
    g, rounds = 0.02, Rounds(Outer(), 10)
    rule = gossip_spread(
        np.array([g]), make_topology("complete", N), exchanges_per_step=0.5, epoch_steps=10**9, momentum=0.9, rounds=rounds
    )
    result = simulate(
        ADPSGD(topology="complete", local_steps=10, outer=Outer(), exchanges_per_step=0.5, dense_share=0.0),
        Cluster(N, Constant(1.0)),
        work=Steps(number=1_500),
        objective=Quadratic([1.0] * 40, noise=1.0, start_at=0.0),
        optimizer=SGD(lr=g, momentum=0.9),
        links=Links(latency_s=0.01),
        recording=Recording(evaluate_every=3 * N),
        seed=1,
    )
    points = result.points[len(result.points) // 4 : -1]
    mean = np.mean([2.0 * point.loss for point in points]) / 40 / g**2
    apart = np.mean([point.consensus_distance for point in points]) / 40 / g**2
    assert mean == pytest.approx(float(rule.mean[0]), rel=0.1)
    assert apart == pytest.approx(float(rule.apart[0]), rel=0.15)


def test_rarer_pushes_and_longer_rounds() -> None:
    g, graph = np.array([0.1]), make_topology("ring", 8)
    every = [
        float(gossip_spread(g, graph, exchanges_per_step=0.25, epoch_steps=10**9, push_every=p).apart[0]) for p in (1, 4, 16)
    ]
    assert every[0] == pytest.approx(every[1], rel=0.1)
    assert every[2] > every[1]
    averaged = periodic_spread(g, 8, period=8, epoch_steps=10**9, rounds=Rounds(Outer(), 8))
    plain = periodic_spread(g, 8, period=8, epoch_steps=10**9)
    assert averaged.apart == pytest.approx(plain.apart)
    assert averaged.mean[0] > plain.mean[0]
    assert math.isinf(Rounds(Outer(lr=1.4, momentum=0.9), 1).variance(np.array([1.9]))[0])
