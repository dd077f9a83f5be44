from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_gossip.algorithm.laws import Constant, Erlang, Law, LogNormal
from lightning_gossip.analysis.delays.delays import Atoms, Delay, Flat, Gamma, constant, histogram
from lightning_gossip.analysis.mean.hitting import hitting_time, loss_curve, noise_floor
from lightning_gossip.analysis.mean.stability import decay_rate, of_staleness
from lightning_gossip.analysis.planning.arrivals import free_arrivals
from lightning_gossip.analysis.problem import Problem
from lightning_gossip.errors import ConfigurationError
from tests.analysis.delayed import FloatArray, random_staleness


def delayed_flow(a: float, length: float, *, steps: int = 400) -> tuple[FloatArray, FloatArray]:
    """x' = −a x(t − 1) from x = 1 for t ≤ 0, by the trapezoidal rule: times and values."""
    dt, count = 1.0 / steps, int(length * steps)
    x = np.ones(count + steps + 1)
    for k in range(steps, steps + count):
        x[k + 1] = x[k] - 0.5 * a * dt * (x[k - steps] + x[k - steps + 1])
    return np.arange(count + 1) * dt, x[steps:]


@pytest.mark.parametrize("a", [0.1, 0.3, 0.3678, 0.368, 0.38, 0.45, 0.8, 1.2])
@pytest.mark.parametrize("reduction", [0.1, 1e-3])
def test_hitting_times_of_a_delayed_flow(a: float, reduction: float) -> None:
    times, x = delayed_flow(a, 75.0)
    last = times[np.flatnonzero(np.abs(x) > reduction)[-1]]
    assert hitting_time(a, constant(1.0), reduction) == pytest.approx(last, rel=1e-3, abs=5e-3)


def test_the_decay_alone_is_off_by_a_third_where_it_is_fastest() -> None:
    for a in (0.3678, 0.3679):
        naive = math.log(10.0) / decay_rate(a, constant(1.0))
        assert naive / hitting_time(a, constant(1.0), 0.1) == pytest.approx(0.65, abs=0.02)


@pytest.mark.parametrize("law", [LogNormal(1.0, 0.7), LogNormal(1.0, 1.5), Erlang(1.0, 4), {2: 95, 30: 5}], ids=str)
@pytest.mark.parametrize("product", [0.1, 0.6])
def test_hitting_times_of_a_staleness_with_a_long_tail(law: Law | dict[int, int], product: float) -> None:
    """In its own recursion; the rightmost modes have as little as a hundredth of the error."""
    staleness = histogram(law) if isinstance(law, dict) else free_arrivals(16, law, updates=20_000).law
    weights = np.zeros(int(staleness.times[-1]) + 1)
    weights[staleness.times.astype(int)] = staleness.weights
    step = product / staleness.mean
    x = np.abs(random_staleness(step, weights, 4_000))
    for reduction in (0.5, 0.1, 1e-2):
        last = int(np.flatnonzero(x > reduction)[-1])
        assert hitting_time(step, of_staleness(staleness), reduction) == pytest.approx(last, rel=0.08, abs=1.5)


def test_at_the_double_root_the_decay_alone_is_off_by_36_percent() -> None:
    naive = math.log(10.0) / decay_rate(math.exp(-1.0), constant(1.0))
    assert naive / hitting_time(math.exp(-1.0), constant(1.0), 0.1) == pytest.approx(1.0 - 0.359, abs=0.002)


def test_a_diverging_error_is_never_small() -> None:
    assert hitting_time(1.6, constant(1.0), 0.1) == math.inf


def test_the_noise_floor_of_a_constant_delay_in_closed_form_and_by_integration() -> None:
    for a in (0.05, 0.5, 1.2):
        closed = (1.0 + math.sin(a)) / (2.0 * a * math.cos(a))
        assert noise_floor(a, constant(1.0)) == pytest.approx(closed)
        assert noise_floor(a, Gamma(1.0, 2000.0)) == pytest.approx(closed, rel=0.02)
    assert noise_floor(0.5, constant(0.0)) == pytest.approx(1.0)


def test_the_noise_floor_of_exponential_delays() -> None:
    """∫ dω/|iω + a/(1 + iωm)|² / 2π = (1 + am)/(2a), by residues."""
    for a in (0.1, 1.0, 6.0):
        assert noise_floor(a, Gamma(2.0)) == pytest.approx((1.0 + 2.0 * a) / (2.0 * a), rel=1e-4)


@pytest.mark.parametrize(
    "delay",
    [Gamma(1.0), Gamma(1.0, 4.0), Flat(1.0, 1.0), Atoms([0.01, 2.0])],
    ids=["exponential", "Erlang", "uniform", "two kinds"],
)
@pytest.mark.parametrize("a", [1e-9, 1e-6, 1e-4])
def test_a_damping_that_hardly_notices_the_delay_has_the_noise_floor_without_one(a: float, delay: Delay) -> None:
    assert noise_floor(a, delay) * 2.0 * a == pytest.approx(1.0, rel=1e-3)


def test_the_loss_of_a_noisy_quadratic_with_constant_staleness() -> None:
    """The expected loss, step by step, of the delayed recursion in two directions."""
    h, noise, step_size, staleness, runs = np.array([1.0, 0.2]), 0.4, 0.05, 7, 20_000
    rng = np.random.default_rng(0)
    x = [np.ones((runs, 2))] * (staleness + 1)
    losses = [0.5 * float((h * x[-1] ** 2).mean(0).sum())]
    for _ in range(400):
        x.append(x[-1] - step_size * (h * x[-1 - staleness] + noise * rng.standard_normal((runs, 2))))
        x.pop(0)
        losses.append(0.5 * float((h * x[-1] ** 2).mean(0).sum()))
    delay = of_staleness(constant(float(staleness)))
    curve = loss_curve(Problem(eigenvalues=h.tolist(), noise=noise), step_size=step_size, rate=1.0, delay=delay)
    assert curve.floor == pytest.approx(np.mean(losses[-50:]), rel=0.02)
    predicted = curve.at(np.arange(401.0))
    assert predicted[20:] == pytest.approx(np.array(losses[20:]), rel=0.08)
    target = 2.0 * curve.floor
    last = int(np.flatnonzero(np.array(losses) > target)[-1])
    assert curve.hitting_time(target) == pytest.approx(last, rel=0.05)
    assert (curve.envelope(np.arange(401.0)) >= predicted - 1e-12).all()


def test_a_loss_that_is_low_enough_already_takes_no_time() -> None:
    curve = loss_curve(Problem(eigenvalues=[1.0], start=[0.1]), step_size=0.1, rate=1.0, delay=Constant(1.0))
    assert curve.hitting_time(1.0) == 0.0


def test_a_target_below_what_the_noise_leaves_is_refused_with_the_floor() -> None:
    curve = loss_curve(Problem(eigenvalues=[1.0], noise=1.0), step_size=0.1, rate=1.0, delay=Constant(1.0))
    with pytest.raises(ConfigurationError, match=f"not above {curve.floor:g}"):
        curve.hitting_time(0.9 * curve.floor)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Problem(eigenvalues=[]), "eigenvalues is empty"),
        (lambda: Problem(eigenvalues=[0.0]), "an eigenvalue=0.0"),
        (lambda: Problem(eigenvalues=[1.0], start=[1.0, 2.0]), "2 coordinates"),
        (lambda: Problem(eigenvalues=[1.0], noise=-1.0), "noise=-1.0"),
        (lambda: Problem(eigenvalues=[1.0], start=[math.nan]), "no finite number"),
        (lambda: hitting_time(0.1, constant(1.0), 1.5), "reduction=1.5"),
        (lambda: hitting_time(0.1, constant(1.0), 1e-200), "reduction=1e-200"),
        (lambda: noise_floor(1.6, constant(1.0)), "diverges"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.parametrize("off", [0.0, 1e-12, 1e-10, 1e-9, 1e-8])
def test_near_the_double_root_the_time_is_that_of_the_double_root(off: float) -> None:
    """There x is 2a(t + 4/3)e^{-t}, but for faster modes."""
    for sign in (-1.0, 1.0):
        assert hitting_time(math.exp(-1.0) * (1.0 + sign * off), constant(1.0), 1e-3) == pytest.approx(8.9294, abs=2e-3)


def test_gradient_flow_takes_as_long_as_its_integral() -> None:
    problem, step = Problem(eigenvalues=[2.0, 0.1], start=[1.0, 2.0]), 1e-3
    x, time_s = problem.distances.copy(), 0.0
    while 0.5 * float(np.asarray(problem.eigenvalues) @ x**2) > 0.05:
        x -= step * np.asarray(problem.eigenvalues) * x
        time_s += step
    assert problem.flow_time(0.05) == pytest.approx(time_s, rel=1e-3)
    assert problem.flow_time(10.0) == 0.0
