"""A job of threads for each test that asks for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.runtime.party import Party


@pytest.fixture
def party() -> Iterator[Callable[..., Party]]:
    made: list[Party] = []

    def make(workers: int, **options: Any) -> Party:
        made.append(Party(workers, **options))
        return made[-1]

    yield make
    for each in made:
        for member in each.all:
            member.monitor.rest()
