"""Clock offsets by chains of pairs."""

from __future__ import annotations

import pytest

from lightning_gossip.doctor.clocks import offsets
from lightning_gossip.doctor.report import Link


def seen(i: int, j: int, ahead_s: float, error_s: float = 1e-5) -> Link:
    return Link(i=i, j=j, clock_s=ahead_s, clock_error_s=error_s)


def test_offsets_add_up_along_a_chain_whichever_end_has_measured() -> None:
    found = offsets(4, [seen(0, 2, 1.0), seen(1, 2, 0.25), seen(1, 3, -2.0)])
    assert found[0] == (0.0, 0.0)
    assert found[2] == pytest.approx((1.0, 1e-5))
    assert found[1] == pytest.approx((0.75, 2e-5))
    assert found[3] == pytest.approx((-1.25, 3e-5))


def test_the_surest_chain_is_followed() -> None:
    found = offsets(3, [seen(0, 2, 9.0, error_s=0.5), seen(0, 1, 1.0), seen(1, 2, 1.0)])
    assert found[2] == pytest.approx((2.0, 2e-5))


def test_of_a_worker_that_nobody_has_measured_nothing_is_said() -> None:
    assert offsets(3, [seen(0, 1, 1.0), Link(i=0, j=2, failed="connection refused")])[2] is None
