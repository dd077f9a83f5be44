"""Tests that use the fixture ``hosts`` are skipped where the machine cannot have any, and say why."""

from __future__ import annotations

import pytest

from benchmarks.cluster import unavailable


@pytest.fixture(scope="session")
def hosts() -> None:
    if reason := unavailable():
        pytest.skip(reason)
