"""Faults put into what follows the loss of a store, as small as a mistake would be; the tester has to find them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from unittest.mock import patch

from typing_extensions import override

from lightning_gossip.algorithm.membership.failover import Failover
from lightning_gossip.algorithm.membership.failure_detector import Verdict
from lightning_gossip.algorithm.membership.meeting import Meeting, Opened
from lightning_gossip.algorithm.membership.monitor import Monitor
from lightning_gossip.algorithm.membership.news import News
from lightning_gossip.algorithm.membership.rounds import Known, Rounds
from lightning_gossip.algorithm.membership.store import AtOwn, Count, Enter, Reached, Steps, Write
from lightning_gossip.algorithm.membership.view_change import ViewChange
from lightning_gossip.algorithm.membership.worker_id import WorkerId


class ActsAtOnce(Rounds):
    """A worker acts by a result that perhaps nobody else has read."""

    @override
    def _settle(self, number: int, members: Sequence[WorkerId]) -> Steps[bool]:
        yield Count(f"{self._key(number)}/known/0")
        return True


class TakesHalfForEnough(Rounds):
    """A worker acts by a result when half of the members know it: then the other half may go on without it."""

    @override
    def _enough(self, present: Sequence[WorkerId], members: Sequence[WorkerId]) -> int:
        return max(1, min(len(members) // 2, len(present)))


class EndsWithoutQuorum(Rounds):
    """Whoever has the store ends rounds, however many are silent."""

    @override
    def _check_quorum(self, present: Collection[WorkerId], members: Sequence[WorkerId]) -> None:
        return


class ExcludesWithoutQuorum(Failover):
    """Whoever has the store tells of silent workers as failed, however many they are."""

    @override
    def _may_go_on(self, present: Collection[WorkerId]) -> bool:
        return True


class TakesTheUnwatchedForAlive(Monitor):
    """Whoever finds some silent asks nobody whether those are there that it does not watch."""

    @override
    def _withdraw_if_too_few_are_heard(self) -> None:
        with patch.object(self._detector, "hears", lambda worker: self.verdict(worker) is Verdict.ALIVE):
            super()._withdraw_if_too_few_are_heard()

    @override
    def _watch_all(self) -> None:
        return


def _changing_views(change: type[ViewChange]) -> type[Failover]:
    return type(change.__name__, (Failover,), {"__doc__": change.__doc__, "view_change": change})


class LooksAheadOnly(ViewChange):
    """A worker does not find out that the others have stayed where it was, and have excluded it."""

    @override
    def _look_back(self, view: int, address: str) -> Steps[bool]:
        return (yield Enter(address, view)) is Reached.OPEN


class LetsThemRest(ViewChange):
    """Nobody registers for workers that rest: those that wait for them are too few."""

    @override
    def _call(self, worker: WorkerId, rest: bytes, view: int, address: str) -> Steps[tuple[bytes, bytes] | None]:
        return None
        yield


class ForgetsTheCall(Failover):
    """A worker that others have registered for goes on in the store that they have left."""

    @override
    def wake(self) -> Steps[None]:
        self._lies_down = False
        yield AtOwn(Write("rests", b"awake"))


class _AnyMayOpen(Meeting):
    @override
    def may_open(self, least: int | None, *, in_vain: bool) -> bool:
        return bool(self.present) and (self.is_complete or in_vain)


class OpensWithoutQuorum(ViewChange):
    """Whoever comes to a store takes it for the job's."""

    meeting = _AnyMayOpen


class _BringsNothing(Meeting):
    @override
    def opened(self, result: bytes) -> Opened:
        return super().opened(result)._replace(known=Known())


class ForgetsTheResult(ViewChange):
    """Nobody brings the last result to the next store."""

    meeting = _BringsNothing


class _ForgetsTheMissing(Meeting):
    @override
    def opened(self, result: bytes) -> Opened:
        opened = super().opened(result)
        news = News.decode(opened.news)
        return opened._replace(news=News(news.number, self._failed, aborted=news.aborted, ended=news.ended).encode())


class WaitsForTheMissing(ViewChange):
    """Members that did not come to the next store are not told of as failed."""

    meeting = _ForgetsTheMissing


class LeavesTheNextStore(Failover):
    """A thread that notices the loss of a store late makes its worker leave the next one."""

    @override
    def lose(self, moves: int) -> None:
        self._lost = True


class ReturnsToAnOlderStore(Failover):
    """A worker that has registered for a view goes back to an earlier one."""

    @override
    def _may_adopt(self, view: int) -> bool:
        return view >= self.view


class _CountsRanks(Meeting):
    @override
    def __init__(self, said: Any, ended: Any, in_time: Any, islands: Any = None) -> None:
        super().__init__(said, ended, in_time)


class CountsRanks(ViewChange):
    """What is left of an island is counted at the next store, and waited for, as if ranks were single workers."""

    meeting = _CountsRanks


class ForgetsAdmitted(ViewChange):
    """Members that were admitted by a result which is not settled do not count: perhaps they have gone on by it."""

    meeting = type("_ForgetsAdmitted", (Meeting,), {"_grown": []})


FAULTS: dict[str, dict[str, Any]] = {
    "acts by a result that others may not know": {"rounds": ActsAtOnce},
    "acts by a result that half of the members know": {"rounds": TakesHalfForEnough},
    "ends rounds without a quorum": {"rounds": EndsWithoutQuorum},
    "excludes silent workers without a quorum": {"rounds": EndsWithoutQuorum, "failover": ExcludesWithoutQuorum},
    "takes those for alive that it does not watch": {"monitor": TakesTheUnwatchedForAlive},
    "looks ahead only": {"failover": _changing_views(LooksAheadOnly)},
    "opens a store without a quorum": {"failover": _changing_views(OpensWithoutQuorum)},
    "brings no result to the next store": {"failover": _changing_views(ForgetsTheResult)},
    "waits for members that did not come": {"failover": _changing_views(WaitsForTheMissing)},
    "leaves the next store for the last one's loss": {"failover": LeavesTheNextStore},
    "returns to an older store": {"failover": ReturnsToAnOlderStore},
    "registers for nobody that rests": {"failover": _changing_views(LetsThemRest)},
    "forgets that it was called while it rested": {"failover": ForgetsTheCall},
}


def _some(*faults: str) -> dict[str, dict[str, Any]]:
    return {fault: FAULTS[fault] for fault in faults}


GUARDED = {
    "ends rounds without a quorum": "needs a cut that is not in two (test_partial_cut.py)",
    "forgets that it was called while it rested": "needs a cut whose two sides both count it, and that ends while it rests",
    "counts ranks and not islands": "by ranks no two sides are enough either, and each round counts islands (decisions/038)",
}
"""Faults that no schedule has found: why, as far as it is known."""

OF_ISLANDS: dict[str, dict[str, Any]] = {
    "counts ranks and not islands": {"failover": _changing_views(CountsRanks)},
    **_some("opens a store without a quorum", "waits for members that did not come", "returns to an older store"),
}
OF_ISLANDS_IN_ROUNDS = {
    **OF_ISLANDS,
    "forgets members that were just admitted": {"failover": _changing_views(ForgetsAdmitted)},
    **_some("brings no result to the next store", "registers for nobody that rests"),
}
AS_ONE_ACTS = _some(
    "acts by a result that others may not know",
    "acts by a result that half of the members know",
    "opens a store without a quorum",
    "brings no result to the next store",
)
OF_MANY = _some("takes those for alive that it does not watch", "excludes silent workers without a quorum")
BY_THE_CLOCK = _some(
    "looks ahead only",
    "opens a store without a quorum",
    "waits for members that did not come",
    "returns to an older store",
    "registers for nobody that rests",
    "forgets that it was called while it rested",
)
IN_ROUNDS = _some(
    "ends rounds without a quorum",
    "excludes silent workers without a quorum",
    "opens a store without a quorum",
    "brings no result to the next store",
    "waits for members that did not come",
    "leaves the next store for the last one's loss",
    "returns to an older store",
    "registers for nobody that rests",
    "forgets that it was called while it rested",
)
