"""The loss of the job's store where workers are so many that each watches a few of the others only.

The world is that of :mod:`tests.schedules.failover`, with more workers than one watches: three in place of eight, and so seven
to nine workers in place of ten and more. Those that find out at once who is silent find out about different ones, and know
nothing of the rest. Troubles are mostly cuts with fewer than half at the store.

| invariant beside those of failover | checked |
|---|---|
| if cuts are all that happens, shorter than a side that is too small looks for the other one, nobody ends | when one does |
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from typing_extensions import override

from lightning_gossip.algorithm.membership import monitor
from lightning_gossip.errors import PeerError
from tests.schedules.choices import Choices
from tests.schedules.failover import Hosted
from tests.schedules.membership import FAIL_AFTER_S, Worker
from tests.schedules.violation import judge

_WATCHED = 3
_SHORT_S = 2 * FAIL_AFTER_S  # a cut that ends nobody


class OfMany(Hosted):
    """A job of more workers than one watches."""

    @override
    def _drawn_size(self) -> int:
        return 7 + self.choices.below(3)

    @override
    def _drawn_faults(self) -> list[tuple[float, str, int, Any]]:
        self.one_host = False
        faults = super()._drawn_faults() if self.choices.below(2) else []
        others = [rank for rank in range(1, self.n) if self.choices.below(2)]
        side = frozenset({0, *others[: self.n // 2 - 1]})
        how = (self.choices.of((30.0, 5.0, 6.5, 7.0, 8.0, 12.0, 200.0)), side)
        faults.append((self.choices.of((1.0, 0.0, 0.3, 2.0, 4.0, 9.0, 15.0)), "part", 0, how))
        return sorted(faults, key=lambda fault: fault[0])

    @override
    def _rest_s(self, worker: Worker, use: int) -> float:
        return 0.0  # while those rest that watch a worker nobody notices its silence

    @override
    def _may_end_by(self, error: Exception) -> bool:
        is_short = all(kind == "part" and how[0] <= _SHORT_S for _, kind, _, how in self._all_faults)
        if isinstance(error, PeerError) and error.phase == "quorum" and is_short and not self.primary_lost:
            return False
        return super()._may_end_by(error)

    @override
    def run(self) -> None:
        with patch.object(monitor, "WATCHED", _WATCHED):
            super().run()


def run(choices: Choices, **replacements: Any) -> OfMany:
    """Run one schedule; an exception of the product is a violation too."""
    with patch.object(monitor, "WATCHED", _WATCHED):
        world = OfMany(choices, **replacements)
    judge(world.run)
    return world
