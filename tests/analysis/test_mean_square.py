from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_gossip.algorithm.laws import Constant, Erlang, Exponential, Uniform
from lightning_gossip.analysis.delays.delays import Atoms, constant, histogram
from lightning_gossip.analysis.mean.discrete import constant_staleness_fastest, constant_staleness_limit, spectral_radius
from lightning_gossip.analysis.mean.stability import decay_rate
from lightning_gossip.analysis.planning.arrivals import free_arrivals
from lightning_gossip.analysis.second_moments import second_moments
from lightning_gossip.analysis.second_moments.mean_square import (
    exact_limit,
    mean_square_limit,
    random_staleness_limit,
    rms_decay_rate,
    stationary_variance,
)
from lightning_gossip.errors import ConfigurationError
from tests.analysis.delayed import FloatArray, prony, workers


@pytest.mark.parametrize(
    ("number", "shape", "limit"),
    [(4, 1, 0.843), (16, 1, 0.386), (4, None, 0.445), (16, None, 0.101), (1, 1, 2.0), (1, None, 2.0)],
)
def test_limits_of_memoryless_and_round_robin_workers(number: int, shape: int | None, limit: float) -> None:
    assert mean_square_limit(number, shape=shape) == pytest.approx(limit, abs=5e-4)


def test_the_limit_falls_from_memoryless_to_round_robin_as_the_step_times_get_narrow() -> None:
    limits = [mean_square_limit(3, shape=shape) for shape in (1, 2, 3, 6, 10, None)]
    assert limits == sorted(limits, reverse=True)
    assert limits[-2] < 1.25 * limits[-1]


@pytest.mark.parametrize(("number", "shape"), [(4, 1), (16, 1), (5, 3)])
def test_the_root_mean_square_stands_still_at_the_limit(number: int, shape: int) -> None:
    limit = mean_square_limit(number, shape=shape)
    assert rms_decay_rate(limit, number, shape=shape) == pytest.approx(0.0, abs=1e-6)
    assert rms_decay_rate(1.01 * limit, number, shape=shape) < 0.0 < rms_decay_rate(0.99 * limit, number, shape=shape)


def test_one_worker_is_plain_gradient_descent() -> None:
    for shape in (1, 3):
        assert rms_decay_rate(0.3, 1, shape=shape) == pytest.approx(-math.log(0.7))
    assert stationary_variance(0.1, 1) == pytest.approx(1.0 / (0.1 * 1.9))


def test_a_step_of_a_third_over_the_workers_is_best_for_memoryless_ones() -> None:
    """ηhN ≈ 0.36: for 16 workers within a percent of the best of a grid, which is no sharp one."""
    rates = {product: rms_decay_rate(product / 16, 16) for product in np.arange(0.1, 1.0, 0.02)}
    assert rms_decay_rate(0.36 / 16, 16) == pytest.approx(max(rates.values()), rel=0.01)


@pytest.mark.parametrize(("number", "share"), [(4, 0.54), (8, 0.64), (16, 0.71), (64, 0.78)])
def test_for_round_robin_workers_the_same_step_has_half_to_three_quarters_of_the_best_rate(number: int, share: float) -> None:
    """Their best one is N ≈ 1/(eηh) + ½."""
    best, radius = constant_staleness_fastest(number - 1)
    rate = -math.log(spectral_radius(0.36 / number, number - 1))
    assert rate / -math.log(radius) == pytest.approx(share, abs=0.005)
    assert 1.0 / (math.e * best) + 0.5 == pytest.approx(number, rel=0.005)


@pytest.mark.parametrize("number", [64, 128, 256])
def test_memoryless_workers_diverge_only_from_the_square_of_1_45_over_the_step(number: int) -> None:
    assert (1.45 / mean_square_limit(number)) ** 2 == pytest.approx(number, rel=0.04)


@pytest.mark.parametrize(("product", "ratio"), [(0.36, 1.10), (1.0, 1.21), (2.0, 1.50)])
def test_the_mean_of_16_memoryless_workers_decays_faster_than_the_root_mean_square(product: float, ratio: float) -> None:
    delay = free_arrivals(16, Exponential(1.0), updates=400_000).delay
    assert decay_rate(product / 16, delay) / rms_decay_rate(product / 16, 16) == pytest.approx(ratio, rel=0.03)


@pytest.mark.parametrize(("number", "shape", "product"), [(6, 1, 0.5), (6, 1, 1.5), (5, 3, 0.36), (8, 2, 1.2), (4, 4, 1.5)])
def test_simulated_workers_have_exactly_these_second_moments(number: int, shape: int, product: float) -> None:
    """Update by update, beyond doubt only up to the error of so many runs."""
    step, updates, runs = product / number, 4 * number, 60_000
    exact = expected_squares(step, number, shape, updates)
    halves = [workers(step, number, shape, updates, runs=runs, seed=seed)[1] for seed in (1, 2)]
    seen = 0.5 * (halves[0] + halves[1])
    spread = np.maximum(np.abs(halves[0] - halves[1]), 0.004 * seen)
    assert (np.abs(seen - exact) < 6.0 * spread).mean() > 0.97
    assert seen == pytest.approx(exact, rel=0.1)


QUICK = [(0.2, 1), (1.0, 4)]


@pytest.mark.parametrize(
    ("product", "shape"),
    [
        pytest.param(product, shape, marks=[] if (product, shape) in QUICK else pytest.mark.slow)
        for product in (0.1, 0.2, 1.0, 1.5)
        for shape in (1, 4)
    ],
)
def test_simulated_workers_decay_as_predicted(product: float, shape: int) -> None:
    """The mean within 5 % of the roots, the root mean square within 10 % of the second moments; not beside the double root."""
    number = 16
    law = Exponential(1.0) if shape == 1 else Erlang(1.0, shape)
    delay = free_arrivals(number, law, updates=200_000).delay
    mean, square = workers(product / number, number, shape, 16 * number, runs=30_000, seed=3)
    fitted = prony(mean[: 8 * number], lag=number // 2, burn=2 * number)
    assert -fitted.real == pytest.approx(decay_rate(product / number, delay), rel=0.05)
    window = np.arange(4 * number, 16 * number)
    slope = -np.polyfit(window, 0.5 * np.log(square[window]), 1)[0]
    assert slope == pytest.approx(rms_decay_rate(product / number, number, shape=shape), rel=0.10)


def test_noise_leaves_the_variance_that_is_predicted() -> None:
    rng, number, step, runs = np.random.default_rng(5), 4, 0.2, 40_000
    rows, z, v = np.arange(runs), np.zeros(runs), np.zeros((runs, number))
    for _ in range(150):
        i = rng.integers(number, size=runs)
        z = z - step * v[rows, i] - rng.standard_normal(runs)
        v[rows, i] = z
    assert z.var() == pytest.approx(stationary_variance(step, number), rel=0.03)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rms_decay_rate(0.1, 64, shape=9), "second moments"),
        (lambda: rms_decay_rate(0.0, 4), "step=0.0"),
        (lambda: rms_decay_rate(0.1, 0), "workers=0"),
        (lambda: stationary_variance(0.9, 4), "must be below 0.843"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=words):
        make()


def expected_squares(step: float, number: int, shape: int, updates: int) -> FloatArray:
    """E[z²] after every k-th event, from all models 1 and phases drawn uniformly."""
    states = np.array(second_moments._states(number, shape))
    chances = np.array([math.factorial(number) / math.prod(map(math.factorial, c)) for c in states.tolist()])
    chances /= shape**number
    pairs = states[:, :, None] * states[:, None, :]
    pairs[:, range(shape), range(shape)] -= states
    parts = [np.ones((len(states), 1)), states, states, pairs.reshape(len(states), -1)]
    moments = (np.concatenate(parts, axis=1) * chances[:, None]).ravel()
    exists = second_moments._exists([tuple(c) for c in states.tolist()])
    first = np.concatenate([np.ones((len(states), 1)), np.zeros((len(states), 2 * shape + shape**2))], axis=1).ravel()[exists]
    event, moments = second_moments.event(number, shape).at(step), moments[exists]
    squares = [float(first @ moments)]
    for _ in range(updates):
        for _ in range(shape):
            moments = event @ moments
        squares.append(float(first @ moments))
    return np.array(squares)


@pytest.mark.parametrize(("number", "shape"), [(4, 1), (16, 1), (8, 4)])
def test_the_limit_of_independent_staleness_is_a_little_below_that_of_workers(number: int, shape: int) -> None:
    law = Exponential(1.0) if shape == 1 else Erlang(1.0, shape)
    independent = random_staleness_limit(free_arrivals(number, law, updates=200_000).law)
    assert 0.86 < independent / mean_square_limit(number, shape=shape) < 1.0


def test_the_limit_of_a_constant_staleness_needs_no_integral() -> None:
    assert random_staleness_limit(constant(3.0)) == constant_staleness_limit(3)
    assert random_staleness_limit(constant(0.0), momentum=0.9) == pytest.approx(2.0 * 1.9, rel=0.25), "heavy ball"


@pytest.mark.parametrize("staleness", [{0: 1, 4: 1}, {1: 3, 2: 1, 9: 2}])
def test_independent_staleness_is_stable_below_its_limit_and_not_above(staleness: dict[int, int]) -> None:
    """Its own recursion, in the mean square: the covariances of the last models, one step at a time."""
    law = histogram(staleness)
    limit = random_staleness_limit(law)
    assert mean_square_growth(0.97 * limit, law) < 1.0 < mean_square_growth(1.03 * limit, law)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_momentum_lowers_the_limit_and_workers_are_stable_below_it(momentum: float) -> None:
    number, runs, rng = 6, 2_000, np.random.default_rng(4)
    law = free_arrivals(number, Exponential(1.0), updates=100_000).law
    limit = random_staleness_limit(law, momentum=momentum)
    assert limit < random_staleness_limit(law) * (1.0 - momentum) * 1.5
    rows, z, v, u = np.arange(runs), np.ones(runs), np.ones((runs, number)), np.zeros((runs, number))
    for _ in range(150 * number):
        i = rng.integers(number, size=runs)
        u[rows, i] = momentum * u[rows, i] + v[rows, i]
        z = z - 0.95 * limit * u[rows, i]
        v[rows, i] = z
    assert (z * z).mean() < 0.1


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.5, 0.9])
@pytest.mark.parametrize("number", [2, 8])
def test_the_limit_of_round_robin_workers_with_momentum(number: int, momentum: float, nesterov: bool) -> None:
    """Exactly, by one round of their steps; the theory takes an own step to last as long as all of them."""
    limit = random_staleness_limit(constant(number - 1.0), momentum=momentum, nesterov=nesterov)
    assert round_robin(0.93 * limit, number, momentum, nesterov) < 1.0 < round_robin(1.05 * limit, number, momentum, nesterov)


def round_robin(step: float, number: int, momentum: float, nesterov: bool) -> float:
    """The factor of a round."""
    size = 1 + 2 * number
    unit, after = np.eye(size), np.eye(size)
    for worker in range(number):
        update, model, velocity = unit.copy(), 1 + worker, 1 + number + worker
        update[velocity] += unit[model] - (1.0 - momentum) * unit[velocity]
        update[0] -= step * (unit[model] + momentum * update[velocity] if nesterov else update[velocity])
        update[model] = update[0]
        after = update @ after
    return float(np.abs(np.linalg.eigvals(after)).max())


def test_the_exact_limit_is_known_for_some_laws() -> None:
    assert exact_limit(4, Exponential(1.0)) == mean_square_limit(4)
    assert exact_limit(4, Constant(1.0)) == mean_square_limit(4, shape=None)
    assert exact_limit(4, Erlang(1.0, 2)) == mean_square_limit(4, shape=2)
    assert exact_limit(64, Erlang(1.0, 9)) is None
    assert exact_limit(4, Uniform(1.0, 0.5)) is None
    assert exact_limit(4, Exponential(1.0, spread=0.5)) is None


def mean_square_growth(step: float, law: Atoms) -> float:
    """The factor of E[x²] in a step, after many, of x_{k+1} = x_k − g x_{k−τ_k} with independent τ_k."""
    p = np.zeros(int(law.times[-1]) + 2)
    p[law.times.astype(int)] = law.weights
    c, factor = np.ones((len(p), len(p))), 1.0
    for _ in range(4_000):
        square = c[0, 0] - 2.0 * step * p @ c[0] + step**2 * p @ np.diag(c)
        across = c[0, :-1] - step * p @ c[:, :-1]
        c = np.block([[np.array([[square]]), across[None]], [across[:, None], c[:-1, :-1]]])
        factor = float(np.abs(c).max())
        c /= factor
    return factor


@pytest.mark.parametrize(
    ("number", "momentum", "nesterov", "limit"),
    [
        (4, 0.9, False, 0.0647874),
        (8, 0.9, False, 0.0279479),
        (8, 0.5, False, 0.1259615),
        (4, 0.9, True, 0.2202947),
    ],
)
def test_the_limit_of_round_robin_workers_with_momentum_is_exact(
    number: int, momentum: float, nesterov: bool, limit: float
) -> None:
    """Of the eigenvalues of all workers' steps in one round, computed apart from this package."""
    found = random_staleness_limit(histogram({number - 1: 1}), momentum=momentum, nesterov=nesterov)
    assert found == pytest.approx(limit, abs=1e-7)
