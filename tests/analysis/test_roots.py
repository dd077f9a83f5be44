"""The rightmost root, over laws and dampings that hypothesis draws: it is a root, and nothing lies right of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import lambertw

from lightning_gossip.analysis.delays.delays import Atoms, Delay, Gamma, constant
from lightning_gossip.analysis.mean.roots import count_right_of, real_roots, rightmost_root
from lightning_gossip.analysis.mean.stability import dominant_root
from tests.analysis.delayed import prony, random_staleness
from tests.analysis.laws import delays

dampings = st.floats(0.02, 3.0)


def error(s: complex, a: float, delay: Delay) -> float:
    return abs(s + a * complex(delay.transform(s)))


@given(a=dampings, delay=delays)
@settings(max_examples=150, deadline=None)
def test_the_root_satisfies_the_characteristic_equation(a: float, delay: Delay) -> None:
    root = rightmost_root(a, delay)
    if root is not None:
        assert error(root, a, delay) <= 1e-9 * max(1.0, a)
        assert root.imag >= 0.0


@given(a=dampings, delay=delays)
@settings(max_examples=12, deadline=None)
def test_no_root_of_a_dense_search_lies_further_right(a: float, delay: Delay) -> None:
    """Newton's method from a grid over the bounded part of the plane in which roots right of it could be."""
    root = rightmost_root(a, delay)
    if root is None:
        return
    radius = a * float(delay.transform(root.real).real)
    count = int(min(1500, 40 + 8 * radius * delay.reach))
    real, imaginary = np.meshgrid(np.linspace(root.real, max(a, root.real + 1e-3), 12), np.linspace(0.0, 1.05 * radius, count))
    s = (real + 1j * imaginary).ravel()
    with np.errstate(all="ignore"):
        for _ in range(40):
            s = s - (s + a * delay.transform(s)) / (1.0 + a * delay.slope(s))
            s = s[np.isfinite(s) & (s.real > max(delay.left, root.real - 50.0 / delay.mean))]
        found = s[np.abs(s + a * delay.transform(s)) < 1e-9 * (1.0 + np.abs(s))]
    tolerance = 1e-6 * (a + abs(root))  # double roots are found to half the digits
    assert not (found.real > root.real + tolerance).any()


@given(a=dampings, delay=delays)
@settings(max_examples=60, deadline=None)
def test_the_count_of_roots_changes_by_the_pair_at_the_root(a: float, delay: Delay) -> None:
    root = rightmost_root(a, delay)
    if root is None or root.imag == 0.0:
        return
    gap = 1e-6 * (a + abs(root))
    assert count_right_of(root.real + gap, a, delay) == 0
    assert count_right_of(root.real - gap, a, delay) >= 2


@pytest.mark.parametrize("product", [0.01, 0.2, 0.36, 0.3679, 0.37, 1.0, 1.6, 5.0, 40.0])
def test_a_constant_delay_has_lambert_s_root(product: float) -> None:
    """The general search, which the public function does not use for constant delays."""
    expected = complex(lambertw(-product)) / 2.5
    found = rightmost_root(product / 2.5, constant(2.5))
    assert found is not None
    assert abs(found - complex(expected.real, abs(expected.imag))) < 1e-7


@pytest.mark.parametrize("shape", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("product", [0.05, 0.2, 0.3, 1.0, 2.5, 8.0])
def test_erlang_delays_have_a_polynomial_s_root(shape: int, product: float) -> None:
    polynomial = np.poly1d([1.0 / shape, 1.0]) ** shape * np.poly1d([1.0, 0.0]) + product
    expected = max(polynomial.r, key=lambda root: root.real)
    assert dominant_root(product, Gamma(1.0, shape)) == pytest.approx(complex(expected.real, abs(expected.imag)), abs=1e-6)


def test_two_real_roots_are_both_found() -> None:
    right, left = real_roots(0.2, Gamma(1.0, 1.0))  # s² + s + 0.2 = 0
    assert right == pytest.approx((-1.0 + np.sqrt(0.2)) / 2.0)
    assert left == pytest.approx((-1.0 - np.sqrt(0.2)) / 2.0)


@given(
    weights=st.lists(st.floats(0.0, 1.0), min_size=9, max_size=40).filter(lambda w: sum(w[8:]) > 0.1),
    product=st.sampled_from([0.1, 0.2, 0.6, 0.8, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_a_long_run_of_the_delayed_recursion_decays_as_the_root_says(weights: list[float], product: float) -> None:
    shares = np.array(weights) / sum(weights)
    delay = Atoms(np.arange(len(shares)) + 0.5, shares)
    step = product / delay.mean
    x = random_staleness(step, shares, int(60 * delay.mean))
    root = dominant_root(step, delay)
    fitted = prony(x, lag=max(1, round(delay.mean / 2)), burn=int(30 * delay.mean))
    if np.abs(x).min() > 1e-250:  # and did not reach the smallest numbers
        assert fitted.real == pytest.approx(root.real, rel=0.04, abs=0.01 / delay.mean)
