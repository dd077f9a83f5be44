"""What a round asks of the store, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gossip.algorithm.membership.rounds import Rounds
from lightning_gossip.algorithm.membership.store import Await, Count, Decide, ReadAll, Steps
from lightning_gossip.algorithm.membership.worker_id import WorkerId

MEMBERS = [WorkerId(rank, 1) for rank in range(4)]


class _OneHasFailed:
    """The last member's failure is news."""

    def has_failed(self, worker: WorkerId) -> bool:
        return worker == MEMBERS[-1]

    def raise_failure(self) -> None:
        pass

    def waits_for(self, key: str | None) -> None:
        pass

    def read_news(self) -> Steps[None]:
        yield from ()


@pytest.mark.parametrize(("arrived", "reads"), [(1, False), (2, False), (3, True)])
def test_only_who_may_be_the_last_of_those_left_reads_all_values(arrived: int, reads: bool) -> None:
    steps = Rounds("p", MEMBERS[1], _OneHasFailed(), lambda: 0.0, 10.0).hold(MEMBERS, b"value")
    asked: list[Any] = [next(steps)]
    while not isinstance(asked[-1], Await):
        answer = {Count: arrived, Decide: getattr(asked[-1], "value", None)}.get(type(asked[-1]))
        asked.append(steps.send(answer))
    assert any(isinstance(effect, ReadAll) for effect in asked) == reads
