"""Second moments under gradient noise against simulated workers on a quadratic, and what they make of the loss."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from lightning_gossip.algorithm.topology.generators import complete, ring
from lightning_gossip.analysis import Problem, noise_floor, stability_limit
from lightning_gossip.analysis.delays.delays import constant
from lightning_gossip.analysis.planning.dynamics import synchronous
from lightning_gossip.analysis.planning.noisy_loss import Noise, NoisyLoss, shares_of
from lightning_gossip.analysis.second_moments.gradient_noise import (
    Spread,
    gossip_spread,
    neighbours_spread,
    periodic_spread,
    server_spread,
    synchronous_spread,
)
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import (
    ADPSGD,
    DPSGD,
    SGD,
    AllReduce,
    Cluster,
    Epochs,
    Erlang,
    PeriodicAveraging,
    Quadratic,
    Recording,
    Strategy,
    simulate,
)

N, COORDINATES = 8, 200


def simulated(strategy: Strategy, g: float, *, momentum: float, nesterov: bool = False, epoch_steps: int = 400) -> Spread:
    """In units of γ²σ², after the first third; h = 1 and σ = 1, so γ = g."""
    result = simulate(
        strategy,
        Cluster(N, Erlang(1.0, 8)),
        work=Epochs(number=1200 // epoch_steps, batches=epoch_steps * N),
        objective=Quadratic([1.0] * COORDINATES, noise=1.0, start_at=0.0),
        optimizer=SGD(lr=g, momentum=momentum, nesterov=nesterov),
        seed=1,
        recording=Recording(evaluate_every=N),
    )
    late = [point for point in result.points if point.steps > result.steps / 3]
    mean = statistics.fmean(2.0 * point.loss for point in late) / COORDINATES / g**2
    apart = statistics.fmean(point.consensus_distance for point in late) / COORDINATES / g**2
    return Spread(np.array([mean]), np.array([apart]))


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_the_noise_of_one_model_is_the_simulated_one(momentum: float, nesterov: bool) -> None:
    seen = simulated(AllReduce(), 0.1, momentum=momentum, nesterov=nesterov)
    assert synchronous_spread(np.array([0.1]), N, momentum=momentum, nesterov=nesterov).mean == pytest.approx(
        seen.mean, rel=0.08
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("period", [2, 8])
def test_local_models_part_as_simulated(momentum: float, period: int) -> None:
    seen = simulated(PeriodicAveraging(period=period), 0.05, momentum=momentum)
    found = periodic_spread(np.array([0.05]), N, period=period, epoch_steps=400, momentum=momentum)
    assert found.apart == pytest.approx(seen.apart, rel=0.05)
    assert found.mean == pytest.approx(seen.mean, rel=0.15)


def test_averaged_momentum_and_an_epoch_s_end_keep_models_together() -> None:
    g, options = np.array([0.05]), {"epoch_steps": 400, "momentum": 0.9}
    seen = simulated(PeriodicAveraging(period=8, optimizer_state="average"), 0.05, momentum=0.9)
    averaged = periodic_spread(g, N, period=8, keeps_momentum=False, **options)  # type: ignore[arg-type]
    assert averaged.apart == pytest.approx(seen.apart, rel=0.05)
    assert averaged.apart < 0.6 * periodic_spread(g, N, period=8, **options).apart  # type: ignore[arg-type]
    short = periodic_spread(g, N, period=1000, epoch_steps=20, momentum=0.9)
    assert short.apart == pytest.approx(periodic_spread(g, N, period=20, **options).apart)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("momentum", "exchanges", "epoch_steps"),
    [
        (0.0, 1.0, 400),
        pytest.param(0.9, 1.0, 400, marks=pytest.mark.slow),
        pytest.param(0.9, 0.2, 400, marks=pytest.mark.slow),
        (0.9, 0.2, 20),
    ],
)
def test_gossiping_models_part_as_simulated(momentum: float, exchanges: float, epoch_steps: int) -> None:
    strategy = ADPSGD(topology="ring", exchanges_per_step=exchanges)
    seen = simulated(strategy, 0.05, momentum=momentum, epoch_steps=epoch_steps)
    found = gossip_spread(np.array([0.05]), ring(N), exchanges_per_step=exchanges, epoch_steps=epoch_steps, momentum=momentum)
    assert found.apart == pytest.approx(seen.apart, rel=0.2)


def test_neighbours_keep_models_together_as_simulated() -> None:
    seen = simulated(DPSGD(topology="ring"), 0.05, momentum=0.9)
    assert neighbours_spread(np.array([0.05]), ring(N), momentum=0.9).apart == pytest.approx(seen.apart, rel=0.1)


def test_models_that_are_never_averaged_part_as_far_as_each_one_is_noisy() -> None:
    alone = synchronous_spread(np.array([0.3]), 1).mean
    apart = gossip_spread(np.array([0.3]), complete(4), exchanges_per_step=0.0, epoch_steps=10**9).apart
    assert apart == pytest.approx(0.75 * alone, rel=0.02)
    assert gossip_spread(np.array([0.3]), complete(4), exchanges_per_step=1.0, epoch_steps=10**9).apart < 0.5 * apart


def test_a_server_has_the_noise_that_its_delay_leaves() -> None:
    prompt = server_spread(np.array([0.01]), constant(0.5), limit=math.pi, scale=1 / N)
    assert prompt.mean == pytest.approx(synchronous_spread(np.array([0.01]), N).mean, rel=0.01)
    delay = constant(3.5)
    dampings = np.array([0.02, 0.2, 0.4, 1.0])
    found = server_spread(dampings * N, delay, limit=stability_limit(delay), scale=1 / N).mean * N**2
    assert found[:3] == pytest.approx([noise_floor(a, delay) for a in dampings[:3]], rel=0.01)
    assert math.isinf(found[3])


# -- what it makes of the loss -------------------------------------------------------------------------------------------------

ONE = Problem(eigenvalues=[1.0])


def falls(noise: Noise, spread: Spread, *, decay: float = 0.1) -> NoisyLoss:
    return NoisyLoss(np.ones(1), np.array([decay]), 0.5 * spread.mean, 0.5 * float(spread.apart[0]), noise)


def test_noise_that_stays_leaves_a_floor() -> None:
    loss = falls(Noise(0.02, 1.0, (1.0,), with_loss=0.0), Spread(np.array([2.0]), np.array([5.0])))
    assert loss.floor == pytest.approx(0.02)  # ½ · 0.02 · 2
    exactly = math.log(0.98 / 0.01) / 0.2  # F = floor + (1 − floor) e^{−2δt}
    assert loss.hitting_time(0.03) == pytest.approx(exactly, rel=1e-6)
    assert math.isinf(loss.hitting_time(0.02))
    assert loss.share_apart(0.05) == pytest.approx(0.5)  # U = ½ · 0.02 · 5


def test_noise_that_falls_with_the_loss_slows_it_down_or_makes_it_grow() -> None:
    alone = falls(Noise(0.0, 1.0, (1.0,)), Spread(np.array([2.0]), np.array([0.0])))
    assert alone.hitting_time(0.01) == pytest.approx(math.log(100) / 0.2, rel=1e-6)
    noisy = falls(Noise(0.5, 1.0, (1.0,)), Spread(np.array([2.0]), np.array([0.0])))
    assert noisy.hitting_time(0.01) == pytest.approx(2 * math.log(100) / 0.2, rel=1e-6)  # dF/dt = −2δ (1 − ½) F
    assert noisy.floor == 0.0
    assert math.isinf(falls(Noise(1.1, 1.0, (1.0,)), Spread(np.array([2.0]), np.array([0.0]))).hitting_time(0.5))


def test_models_part_for_ever_where_their_distance_makes_the_noise_that_makes_it() -> None:
    together = falls(Noise(0.5, 1.0, (1.0,)), Spread(np.array([0.1]), np.array([3.0])))
    assert together.share_apart(0.3) == pytest.approx(0.75)
    apart = falls(Noise(0.5, 1.0, (1.0,)), Spread(np.array([0.1]), np.array([4.0])))
    assert (apart.holds_together, apart.share_apart(0.3)) == (False, 1.0)
    assert math.isinf(apart.hitting_time(0.9))


def test_dynamics_with_noise_are_slower_and_know_how_far_models_are() -> None:
    quiet = synchronous(ONE, 2.0, momentum=0.9)
    noise = Noise(12.0, 2.0, (1.0,))
    noisy = quiet.with_noise(noise, lambda g: periodic_spread(g, N, period=8, epoch_steps=100, momentum=0.9))
    assert noisy.time_s(0.05, 0.1) > 1.1 * quiet.time_s(0.05, 0.1)
    exact = periodic_spread(np.array([0.1 * 0.05]), N, period=8, epoch_steps=100, momentum=0.9).apart[0]  # at a tenth of h
    s = noisy.noisy(0.05, 0.1).variance_at(0.1)
    assert noisy.consensus_distance(0.05, 0.1) == pytest.approx(0.05**2 * exact * s * 2.0, rel=0.05)
    assert (quiet.consensus_distance(0.05, 0.1), quiet.share_apart(0.05, 0.1), quiet.floor(0.05)) == (None, 0.0, 0.0)


def test_no_learning_rate_is_chosen_with_which_models_train_apart() -> None:
    quiet = synchronous(ONE, 1.0, momentum=0.9)
    noisy = quiet.with_noise(
        Noise(3.0, 1.0, (1.0,)), lambda g: gossip_spread(g, ring(N), exchanges_per_step=0.05, epoch_steps=50, momentum=0.9)
    )
    chosen = noisy.fastest_lr(0.1, highest=0.5, near=0.5, most_apart=0.5)
    assert noisy.share_apart(0.5, 0.1) == 1.0
    assert noisy.share_apart(chosen, 0.1) <= 0.5
    assert chosen < 0.5


def test_shares_are_those_that_see_the_measured_curvature() -> None:
    h = [10.0, 1.0, 0.1, 0.01]
    for seen in (3.0, 0.1, 8.0):
        assert np.asarray(shares_of(h, seen)) @ h == pytest.approx(seen)
    assert sum(shares_of(h, 1e9)) == pytest.approx(1.0)
    assert shares_of(h, -1.0)[0] < 1e-6


@pytest.mark.parametrize(("values", "named"), [((-1.0, 1.0), "variance"), ((1.0, 0.0), "loss")])
def test_noise_that_cannot_be_is_refused(values: tuple[float, float], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Noise(*values, (1.0,))
    with pytest.raises(ConfigurationError, match="with_loss"):
        Noise(1.0, 1.0, (1.0,), with_loss=1.5)
