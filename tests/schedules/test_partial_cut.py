"""A cut that is not in two: one side has lost the store, and both still reach a worker that ends just then.

Of four workers the third and fourth lose the host of the store, rank 0, at once; rank 1 ends half a second later. The two find
that in time: they are half, one of the others has ended, and they go on at the next store. Rank 0 has heard rank 1 a moment ago
when it tells that the two are silent: with it, and the store, it is half as well. That rank 0 alone is not enough then only the
rounds find out.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

from typing_extensions import override

from tests.schedules import failover, failover_faults
from tests.schedules.choices import Choices
from tests.schedules.violation import Violation, judge

CUT_S, ENDS_S = 4.1, 4.6


class CutInThree(failover.Hosted):
    """Rank 0 with the store, rank 1 in the middle, and the other two."""

    @override
    def _drawn_size(self) -> int:
        return 4

    @override
    def _drawn_program(self) -> list[list[str]]:
        return [["gather", *["epoch", "gather"] * 3]]

    @override
    def _drawn_faults(self) -> list[tuple[float, str, int, Any]]:
        self.one_host = False
        return [(CUT_S, "part", 0, (200.0, frozenset({2, 3}))), (ENDS_S, "kill", 1, 0.3)]

    @override
    def _carried(self, one: int, other: int) -> float:
        return super()._carried(one, other) if 1 not in (one, other) else -math.inf

    @override
    def _strike(self) -> None:
        super()._strike()
        for rank in (2, 3):  # they exchange with rank 0, whose host refuses what they send
            self.workers[0].monitor.connection_lost(self.workers[rank].began_as)


def _violations(**replacements: Any) -> list[str]:
    broken = []
    with patch.object(failover, "LOST_S", 0.3):
        for seed in range(20):
            world = CutInThree(Choices(seed), **replacements)
            try:
                judge(world.run)
            except Violation as violation:
                broken.append(str(violation))
    return broken


def test_who_is_left_of_those_that_excluded_others_does_not_go_on_alone() -> None:
    assert not _violations()


def test_without_the_check_in_rounds_both_sides_would_go_on() -> None:
    broken = _violations(**failover_faults.FAULTS["ends rounds without a quorum"])
    assert any("another has" in violation for violation in broken)
