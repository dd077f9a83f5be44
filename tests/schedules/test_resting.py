"""Workers that rest between two uses of a Trainer when the host of the job's store is lost, in the smallest schedules of it."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from tests.schedules import failover_faults
from tests.schedules.choices import Choices
from tests.schedules.failover import InRounds
from tests.schedules.violation import Violation, judge


class OneHostIsLost(InRounds):
    """Three workers on hosts of their own; that of the store is lost when so many have read a result, or rest for long."""

    at = 0

    @override
    def _drawn_size(self) -> int:
        return 3

    @override
    def _drawn_program(self) -> list[list[str]]:
        return [["gather"], ["gather"]]

    @override
    def _drawn_faults(self) -> list[tuple[float, str, int, Any]]:
        self.one_host = False
        self.due = [self.at]
        return [(float("inf"), "power", 0, 0.3)]

    @override
    def _rest_s(self, worker: Any, use: int) -> float:
        return 40.0


def _violations(kind: type[OneHostIsLost], at: range, **replacements: Any) -> list[str]:
    broken = []
    for seed in range(60):
        world = type("World", (kind,), {"at": at[seed % len(at)]})(Choices(seed), **replacements)
        try:
            judge(world.run)
        except Violation as violation:
            broken.append(str(violation))
    return broken


def test_two_of_three_go_on_though_one_of_them_rests() -> None:
    assert not _violations(OneHostIsLost, range(8, 13))


def test_if_nobody_registered_for_one_that_rests_the_other_would_be_too_few() -> None:
    broken = _violations(OneHostIsLost, range(8, 13), **failover_faults.FAULTS["registers for nobody that rests"])
    assert any("is one of 2 of 3" in violation for violation in broken)
