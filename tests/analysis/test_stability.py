"""Every number of the theory: roots and decays, limits and optima of constant and Erlang delays."""

from __future__ import annotations

import math

import pytest

from lightning_gossip.algorithm.laws import Constant, Uniform
from lightning_gossip.analysis.delays.combined import Repeated, Sum
from lightning_gossip.analysis.delays.delays import Atoms, Delay, Gamma, constant
from lightning_gossip.analysis.mean.discrete import constant_staleness_fastest, constant_staleness_limit, spectral_radius
from lightning_gossip.analysis.mean.stability import (
    convergence_speed,
    damping,
    decay_rate,
    dominant_root,
    fastest,
    of_staleness,
    stability_limit,
)
from lightning_gossip.errors import ConfigurationError
from tests.analysis.delayed import constant_staleness, prony, random_staleness
from tests.analysis.laws import DELAYS


@pytest.mark.parametrize(("product", "relative"), [(0.05, 1.054), (0.2, 1.296), (1.0, 0.318), (math.pi / 2.0, 0.0)])
def test_decay_of_a_constant_delay_relative_to_none(product: float, relative: float) -> None:
    assert decay_rate(product / 3.0, constant(3.0)) * 3.0 / product == pytest.approx(relative, abs=5e-4)


def test_at_the_branch_point_the_decay_is_e_times_that_without_delay() -> None:
    root = dominant_root(math.exp(-1.0) / 2.0, constant(2.0))
    assert root == pytest.approx(-0.5)
    assert -root.real / (math.exp(-1.0) / 2.0) == pytest.approx(math.e)
    for relative in (1.0 - 1e-15, 1.0 + 1e-15):
        assert dominant_root(relative * math.exp(-1.0), constant(1.0)).real == pytest.approx(-1.0, abs=1e-6)


def test_a_constant_delay_oscillates_beyond_one_e_th_and_diverges_beyond_half_pi() -> None:
    assert dominant_root(0.36, constant(1.0)).imag == 0.0
    assert dominant_root(0.37, constant(1.0)).imag > 0.0
    assert stability_limit(constant(2.0)) == pytest.approx(math.pi / 4.0)
    assert decay_rate(1.5707, constant(1.0)) > 0.0 > decay_rate(1.5709, constant(1.0))


@pytest.mark.parametrize(("shape", "limit"), [(1, math.inf), (2, 4.0), (3, 2.667), (4, 2.274), (2000, math.pi / 2.0)])
def test_limits_of_erlang_delays(shape: int, limit: float) -> None:
    assert stability_limit(Gamma(2.0, shape)) * 2.0 == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize("shape", [2, 3, 4])
def test_the_search_over_crossings_finds_the_closed_limits(shape: int) -> None:
    """A sum with no delay at all is searched, not looked up."""
    closed = stability_limit(Gamma(2.0, shape))
    assert stability_limit(Sum(Gamma(2.0, shape), constant(0.0))) == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize("shape", [1, 2, 3, 4])
def test_optima_of_erlang_delays(shape: int) -> None:
    best = fastest(Gamma(2.0, shape))
    assert best.damping * 2.0 == pytest.approx((shape / (shape + 1)) ** (shape + 1), rel=1e-9)
    assert decay_rate(best.damping * (1.0 - 1e-9), Gamma(2.0, shape)) == pytest.approx(best.decay, rel=1e-3)


@pytest.mark.parametrize("product", [0.25 + 1e-9, 0.5, 1.0, 7.0])
def test_exponential_delays_have_a_plateau(product: float) -> None:
    assert decay_rate(product / 3.0, Gamma(3.0)) == pytest.approx(1.0 / 6.0, rel=1e-4)
    assert fastest(Gamma(3.0)).decay == pytest.approx(1.0 / 6.0)


@pytest.mark.parametrize("name", DELAYS)
def test_nothing_is_faster_than_the_fastest(name: str) -> None:
    delay = DELAYS[name]
    best = fastest(delay)
    for factor in (0.3, 0.8, 0.99, 1.01, 1.3, 2.0, 5.0):
        assert decay_rate(best.damping * factor, delay) <= best.decay * (1.0 + 1e-6)


@pytest.mark.parametrize("name", DELAYS)
def test_decay_changes_sign_at_the_limit(name: str) -> None:
    delay = DELAYS[name]
    limit = stability_limit(delay)
    if math.isinf(limit):
        assert decay_rate(50.0 / delay.mean, delay) > 0.0
    else:
        assert decay_rate(0.999 * limit, delay) > 0.0 > decay_rate(1.001 * limit, delay)


@pytest.mark.parametrize(("staleness", "limit"), [(1, 1.0), (2, 0.6180), (8, 0.18454)])
def test_limits_of_a_constant_staleness(staleness: int, limit: float) -> None:
    assert constant_staleness_limit(staleness) == pytest.approx(limit, abs=5e-5)


@pytest.mark.parametrize("staleness", [0, 1, 2, 5, 8, 31])
def test_at_the_limit_of_a_constant_staleness_the_spectral_radius_is_one(staleness: int) -> None:
    assert spectral_radius(constant_staleness_limit(staleness), staleness) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("staleness", [1, 2, 8])
def test_the_best_step_of_a_constant_staleness(staleness: int) -> None:
    step, radius = constant_staleness_fastest(staleness)
    assert radius == staleness / (staleness + 1)
    assert spectral_radius(step, staleness) == pytest.approx(radius, abs=1e-6)
    assert spectral_radius(0.99 * step, staleness) > radius < spectral_radius(1.01 * step, staleness)


@pytest.mark.parametrize("staleness", [8, 15, 40])
@pytest.mark.parametrize("product", [0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.2])
def test_a_run_with_constant_staleness_decays_as_predicted(staleness: int, product: float) -> None:
    """Within 2 %; delay in steps: the staleness and a half."""
    delay = of_staleness(constant(float(staleness)))
    step = product / delay.mean
    x = constant_staleness(step, staleness, int(12 * delay.mean))
    fitted = prony(x, lag=round(delay.mean / 2), burn=round(2 * delay.mean))
    assert -fitted.real == pytest.approx(decay_rate(step, delay), rel=0.02)


@pytest.mark.parametrize("staleness", [4, 8, 20])
@pytest.mark.parametrize("product", [0.1, 0.3, 0.6, 1.0])
def test_the_continuous_root_is_the_discrete_one_to_half_a_percent(staleness: int, product: float) -> None:
    delay = of_staleness(constant(float(staleness)))
    step = product / delay.mean
    exact = -math.log(spectral_radius(step, staleness))
    assert decay_rate(step, delay) == pytest.approx(exact, rel=0.005)
    without = abs(decay_rate(step, constant(float(staleness))) / exact - 1.0)
    assert without > 4.0 * abs(decay_rate(step, delay) / exact - 1.0), "without the half step it is far less exact"


def test_random_staleness_decays_as_its_polynomial_says() -> None:
    law = Atoms([0.0, 3.0, 9.0], [0.2, 0.5, 0.3])
    weights = [0.2, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3]
    x = random_staleness(0.06, weights, 400)  # type: ignore[arg-type]
    exact = -math.log(spectral_radius(0.06, law))
    assert -prony(x, lag=3, burn=60).real == pytest.approx(exact, rel=1e-3)
    assert decay_rate(0.06, of_staleness(law)) == pytest.approx(exact, rel=0.01)


def test_momentum_is_a_geometric_delay_and_a_larger_step() -> None:
    """x_{k+1} = x_k + u_k, u_k = β u_{k−1} − g x_{k−τ}."""
    step, share, staleness = 0.004, 0.6, 6
    x, u = [1.0] * (staleness + 1), 0.0
    for _ in range(1500):
        u = share * u - step * x[-1 - staleness]
        x.append(x[-1] + u)
    import numpy as np

    fitted = prony(np.array(x), lag=10, burn=300)
    delay = Sum(of_staleness(constant(float(staleness))), Repeated(constant(1.0), share))
    assert -fitted.real == pytest.approx(decay_rate(step / (1.0 - share), delay), rel=0.01)


def test_the_speed_over_a_spectrum_is_its_slowest_direction_s() -> None:
    delay = Gamma(1.0, 4)
    speeds = [decay_rate(0.1 * 2.0 * h, delay) for h in (0.1, 1.0, 9.0)]
    assert convergence_speed([9.0, 0.1, 1.0, 0.0], 0.1, 2.0, delay) == min(speeds)
    assert damping(0.1, 2.0, 9.0) == pytest.approx(1.8)


def test_laws_of_step_times_are_taken_as_they_are() -> None:
    assert decay_rate(0.3, Constant(1.0)) == decay_rate(0.3, constant(1.0))
    assert stability_limit(Uniform(1.0, 0.1)) == pytest.approx(math.pi / 2.0, rel=0.01)


def test_without_delay_it_is_gradient_flow() -> None:
    nothing: Delay = constant(0.0)
    assert dominant_root(0.7, nothing) == -0.7
    assert stability_limit(nothing) == math.inf
    with pytest.raises(ConfigurationError, match="without any delay"):
        fastest(nothing)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: damping(0.1, 0.0, 1.0), "rate=0.0"),
        (lambda: damping(-0.1, 1.0, 1.0), "step_size=-0.1"),
        (lambda: damping(0.1, 1.0, 0.0), "eigenvalue=0.0"),
        (lambda: decay_rate(math.nan, constant(1.0)), "damping=nan"),
        (lambda: convergence_speed([], 0.1, 1.0, constant(1.0)), "no positive eigenvalue"),
        (lambda: convergence_speed([-1.0, 0.0], 0.1, 1.0, constant(1.0)), "no positive eigenvalue"),
        (lambda: convergence_speed([-1.0, 2.0], 0.1, 1.0, constant(1.0)), "saddle"),
        (lambda: convergence_speed([math.inf], 0.1, 1.0, constant(1.0)), "finite"),
        (lambda: constant_staleness_limit(-1), "staleness=-1"),
        (lambda: spectral_radius(0.1, Atoms([0.5])), "whole number"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=words):
        make()
