from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_gossip.algorithm import complete, exponential, ring
from lightning_gossip.analysis import gradient_bound, least_updates, rho_bar, step_size
from lightning_gossip.errors import ConfigurationError


def rho_bar_of(n: int, rho: float) -> float:
    return (n - 1) / n * (1 / (1 - rho) + 2 * math.sqrt(rho) / (1 - math.sqrt(rho)) ** 2)


def test_rho_bar_has_rho_in_closed_form() -> None:
    for n in (4, 8, 16):
        assert rho_bar(ring(n)) == pytest.approx(rho_bar_of(n, 1 - (1 - math.cos(2 * math.pi / n)) / n), rel=1e-9)
        assert rho_bar(complete(n)) == pytest.approx(rho_bar_of(n, 1 - 1 / (n - 1)), rel=1e-9)
    assert rho_bar(exponential(16)) == pytest.approx(rho_bar_of(16, 1 - 1 / 16), rel=1e-9)
    assert rho_bar(ring(2)) == pytest.approx(0.5)  # one exchange makes both equal


def test_rho_bar_grows_with_the_square_of_the_inverse_gap() -> None:
    gaps = [(1 - math.cos(2 * math.pi / n)) / n for n in (64, 128)]
    assert rho_bar(ring(128)) / rho_bar(ring(64)) == pytest.approx((gaps[0] / gaps[1]) ** 2, rel=0.02)


def test_the_step_size_is_n_times_one_over_the_root_of_k() -> None:
    assert step_size(16, 400, 0.1, 4.0) == pytest.approx(16 / (1 + 40))
    assert step_size(16, 400, 0.1, 1.0, heterogeneity=0.5) == pytest.approx(16 / (1 + 40))
    assert step_size(8, 10**8, 1.0, 1.0) / step_size(8, 10**6, 1.0, 1.0) == pytest.approx(0.1, rel=0.02)
    assert step_size(8, 1000, 1.0, 1.0) == 8 * step_size(1, 1000, 1.0, 1.0)
    assert step_size(4, 10, 2.0, 0.0) == 4 / 20  # without noise a constant


def test_the_bound_falls_like_one_over_the_root_of_k() -> None:
    updates = np.array([10**6, 10**8])
    slope = np.diff(np.log([gradient_bound(int(k), 1.0, 1.0, 1.0) for k in updates])) / np.diff(np.log(updates))
    assert slope[0] == pytest.approx(-0.5, abs=0.005)


@pytest.mark.parametrize("make", [ring, exponential])
def test_the_least_k_is_that_of_the_mixing(make: Callable[[int], Any]) -> None:
    """1024 n⁴ρ̄² L²/σ², for graphs that mix slowly; staleness plays a part where they do not."""
    for n in (8, 32):
        assert least_updates(make(n), 3.0, 4.0) == pytest.approx(1024 * n**4 * rho_bar(make(n)) ** 2 * 9 / 4)
    n, t = 4, 10_000
    stale = least_updates(complete(n), 1.0, 1.0, staleness=t) / least_updates(complete(n), 1.0, 1.0, staleness=t // 10)
    assert stale == pytest.approx(100, rel=0.2)  # T² in the end
    assert least_updates(ring(8), 1.0, 0.0) == math.inf


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: step_size(0, 10, 1.0, 1.0), "workers=0"),
        (lambda: step_size(4, 0, 1.0, 1.0), "updates=0"),
        (lambda: step_size(4, 10, 0.0, 1.0), "lipschitz=0.0"),
        (lambda: step_size(4, 10, 1.0, -1.0), "variance=-1.0"),
        (lambda: gradient_bound(10, -1.0, 1.0, 1.0), "gap=-1.0"),
        (lambda: least_updates(ring(4), 1.0, 1.0, staleness=-1), "staleness=-1"),
        (lambda: least_updates(ring(4), 1.0, 1.0, heterogeneity=-1.0), "heterogeneity=-1.0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Callable[[], float], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make()
