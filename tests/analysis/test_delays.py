from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from scipy import integrate, stats

from lightning_gossip.algorithm.laws import LogNormal
from lightning_gossip.analysis.delays.combined import Repeated, Sum
from lightning_gossip.analysis.delays.conversion import delay_of
from lightning_gossip.analysis.delays.delays import Atoms, Delay, Flat, Gamma, constant, histogram
from lightning_gossip.errors import ConfigurationError
from tests.analysis.laws import DELAYS, LAWS

POINTS = np.array([0.0, -1.0, 2.0, 3j, -0.5 + 8j, 1.0 - 4j])


@pytest.mark.parametrize("name", LAWS)
def test_a_transform_is_the_mean_of_e_to_the_minus_s_tau_over_the_law_s_own_draws(name: str) -> None:
    law, delay = LAWS[name], DELAYS[name]
    times = law.draw(np.random.default_rng(1), 200_000, 0)
    # left of the axis a wide law's transform depends on delays that no run sees
    for s in POINTS[POINTS.real >= 0.0] if name == "wide lognormal" else POINTS:
        terms = np.exp(-s * times)
        error = 5.0 * np.abs(terms - terms.mean()).std() / math.sqrt(len(times)) + 1e-4  # of the cut law's tail
        assert abs(delay.transform(s) - terms.mean()) < error
    assert delay.mean == pytest.approx(times.mean(), rel=0.01)
    assert math.sqrt(delay.variance) == pytest.approx(times.std(), rel=0.05, abs=1e-9)


@pytest.mark.parametrize("name", DELAYS)
def test_a_transform_begins_at_one_and_falls_by_the_mean(name: str) -> None:
    delay = DELAYS[name]
    assert delay.transform(0.0) == pytest.approx(1.0, abs=1e-12)
    assert delay.slope(0.0) == pytest.approx(-delay.mean, rel=1e-9)
    second = (delay.slope(1e-5) - delay.slope(-1e-5)) / 2e-5
    assert second.real == pytest.approx(delay.variance + delay.mean**2, rel=1e-6)


@pytest.mark.parametrize("name", DELAYS)
def test_the_slope_is_the_transform_s_derivative(name: str) -> None:
    delay, step = DELAYS[name], 1e-5
    for s in POINTS:
        numerical = (delay.transform(s + step) - delay.transform(s - step)) / (2 * step)
        assert abs(delay.slope(s) - numerical) < 1e-7 * max(1.0, abs(numerical))


@pytest.mark.parametrize("name", DELAYS)
def test_a_transform_takes_and_gives_arrays_of_any_shape(name: str) -> None:
    s = POINTS.reshape(2, 3)
    assert DELAYS[name].transform(s).shape == (2, 3)
    assert DELAYS[name].slope(s).shape == (2, 3)
    assert DELAYS[name].transform(s)[1, 2] == pytest.approx(DELAYS[name].transform(s[1, 2]), rel=1e-12)


@pytest.mark.parametrize("sigma", [0.2, 0.5, 1.0])
def test_the_log_normal_quadrature_is_exact_to_nine_digits(sigma: float) -> None:
    delay, cut = delay_of(LogNormal(1.0, sigma)), float(stats.norm.isf(1e-4))

    def time(z: float) -> float:
        return math.exp(sigma * min(z, cut) - 0.5 * sigma**2)

    def real_part(z: float, w: float) -> float:
        return math.cos(w * time(z)) * stats.norm.pdf(z)

    for w in (0.5, 5.0, 12.0):
        inner = integrate.quad(real_part, -9.0, cut, args=(w,), limit=2000, epsabs=1e-12)[0]
        assert delay.transform(1j * w).real == pytest.approx(inner + 1e-4 * math.cos(w * time(cut)), abs=1e-9)


def test_thousands_of_measured_delays_need_little_memory() -> None:
    times, places = np.linspace(0.5, 1.5, 5_000), 1j * np.linspace(0.0, 40.0, 2_000)
    tracemalloc.start()
    values = Atoms(times).transform(places)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6, "all at once would be 160 MB"
    assert values[:50] == pytest.approx(Flat(1.0, 0.5).transform(places[:50]), abs=1e-3)


def test_nearly_no_spread_of_a_uniform_law_is_a_constant_delay() -> None:
    for s in (0.3 + 1j, -2.0, 1e-3j):
        assert Flat(1.0, 1e-6).transform(s) == pytest.approx(constant(1.0).transform(s), rel=1e-9)


def test_geometric_delays_are_the_sum_of_their_atoms() -> None:
    share, step = 0.6, 0.3
    atoms = Atoms(step * np.arange(200), (1 - share) * share ** np.arange(200))
    delay = Repeated(constant(step), share)
    assert delay.mean == pytest.approx(atoms.mean)
    assert delay.variance == pytest.approx(atoms.variance)
    for s in (0.5, -0.4 + 1j, 2j):
        assert delay.transform(s) == pytest.approx(atoms.transform(s), rel=1e-9)


def test_nesterov_s_momentum_applies_more_of_a_gradient_at_once() -> None:
    share, step = 0.6, 0.3
    shares = np.append((1 - share) * (1 + share), (1 - share) * share ** np.arange(2.0, 200.0))
    atoms = Atoms(step * np.arange(len(shares)), shares)
    delay = Repeated(constant(step), share, nesterov=True)
    assert (delay.mean, delay.variance) == pytest.approx((atoms.mean, atoms.variance))
    for s in (0.5, -0.4 + 1j, 2j):
        assert delay.transform(s) == pytest.approx(atoms.transform(s), rel=1e-9)
        assert delay.slope(s) == pytest.approx(atoms.slope(s), rel=1e-9)


def test_a_histogram_of_staleness_is_a_law() -> None:
    law = histogram({0: 2, 3: 6})
    assert law.mean == pytest.approx(2.25)
    assert law.weights.tolist() == [0.25, 0.75]


def test_equal_samples_become_one_atom() -> None:
    assert Atoms([0.2, 0.2, 0.2]).constant == 0.2
    assert Atoms([0.2, 0.3]).constant is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Atoms([]), "the sample is empty"),
        (lambda: Atoms([0.1, -0.1]), "at least 0"),
        (lambda: Atoms([math.nan]), "finite"),
        (lambda: Atoms([1.0, 2.0], [1.0]), "as many weights"),
        (lambda: Atoms([1.0], [0.0]), "empty"),
        (lambda: histogram({}), "no update was counted"),
        (lambda: Gamma(0.0), "mean_time=0.0"),
        (lambda: Gamma(1.0, -1.0), "shape=-1.0"),
        (lambda: Flat(1.0, 2.0), "negative delays"),
        (lambda: Repeated(constant(1.0), 1.0), "share=1.0"),
        (lambda: delay_of("constant"), "no law of times"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_law_is_refused_by_name(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_delay_is_a_delay_of_itself() -> None:
    delay: Delay = Sum(constant(1.0), Gamma(1.0))
    assert delay_of(delay) is delay


@pytest.mark.parametrize("step", [constant(2.0), Sum(constant(0.5), constant(0.7)), Atoms([1, 2, 5], [0.5, 0.3, 0.2])])
def test_repeated_steps_have_their_transform_and_its_slope(step: Delay) -> None:
    delay = Repeated(step, 0.6)
    assert delay.transform(0.0) == pytest.approx(1.0)
    assert float(delay.slope(0.0).real) == pytest.approx(-delay.mean)
    assert 0.6 * float(step.transform(delay.left).real) == pytest.approx(1.0)
    s, h = -0.1 + 0.3j, 1e-6
    assert delay.slope(s) == pytest.approx((delay.transform(s + h) - delay.transform(s - h)) / (2 * h), rel=1e-6)
