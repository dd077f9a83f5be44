"""What those know together that meet at the next store: whether the ones that have ended may have gone on without them."""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any

import pytest

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.meeting import Meeting, Registration
from lightning_gossip.algorithm.membership.monitor import Monitor
from lightning_gossip.algorithm.membership.news import News
from lightning_gossip.algorithm.membership.store import StoreLostError, Write
from lightning_gossip.algorithm.membership.worker_id import WorkerId, spans_of

HEARTBEAT_S = 0.5
SUSPECT_S = 4 * HEARTBEAT_S


def _workers(n: int) -> list[WorkerId]:
    return [WorkerId(rank, 1) for rank in range(n)]


def _registration(worker: WorkerId, n: int, *, view: int = 0, ended_here: Collection[WorkerId] = ()) -> Registration:
    all_ = spans_of(_workers(n))
    return Registration(worker, view, 3, True, all_, all_, all_, News().encode(), frozenset(), frozenset(ended_here))


def _may_open(said: list[Registration], ended: Collection[WorkerId]) -> bool:
    return Meeting(said, frozenset(ended), frozenset()).may_open(None, in_vain=True)


def test_of_two_the_one_that_rested_goes_on_when_the_other_has_ended_meanwhile() -> None:
    me, other = _workers(2)
    assert _may_open([_registration(me, 2, ended_here=[other])], [other])
    assert not _may_open([_registration(me, 2)], [other])  # it was silent, and may have been excluded


@pytest.mark.parametrize("n", [3, 4, 5])
def test_one_that_rested_does_not_go_on_after_others_that_were_enough_for_a_store_of_their_own(n: int) -> None:
    me, *others = _workers(n)
    assert not _may_open([_registration(me, n, ended_here=others)], others)


def test_two_of_four_that_rested_go_on_since_the_other_two_were_too_few_for_a_store_of_their_own() -> None:
    one, two, *others = _workers(4)
    assert _may_open([_registration(one, 4, ended_here=others), _registration(two, 4)], others)
    assert not _may_open([_registration(one, 4), _registration(two, 4)], others)


def test_that_one_rested_in_a_store_which_others_have_left_since_does_not_count() -> None:
    one, two, *others = _workers(4)
    assert not _may_open([_registration(one, 4, ended_here=others), _registration(two, 4, view=3)], others)


def test_members_that_were_admitted_by_a_result_which_is_not_settled_may_have_gone_on_by_it() -> None:
    one, two = _workers(2)
    said = _registration(one, 1)._replace(settled=False, proposed=spans_of([one, two]))
    assert not _may_open([said], [])  # the other one has the store, and is half of the two
    assert _may_open([said, _registration(two, 1)._replace(number=2)], [])


def test_who_was_admitted_by_a_result_that_is_not_settled_goes_on_with_those_that_settle_it() -> None:
    first, one, joiner = _workers(3)
    said = [
        _registration(one, 2)._replace(settled=False, proposed=spans_of([first, one, joiner])),
        _registration(joiner, 2)._replace(settled=False, number=-1),
    ]
    meeting = Meeting(said, frozenset([first]), frozenset([first]))
    assert meeting.may_open(None, in_vain=False)
    assert meeting.present == (one, joiner)
    assert News.decode(meeting.opened(b"").news).failed == {first}
    alone = Meeting(said[:1], frozenset([first]), frozenset([first]))
    assert alone.missing == [joiner]  # it is waited for, since it may have acted by that result


def _of_islands(said: list[Registration], ended: Collection[WorkerId], *, in_vain: bool = True) -> Meeting | None:
    meeting = Meeting(said, frozenset(ended), frozenset(ended), Islands(2))
    return meeting if meeting.may_open(None, in_vain=in_vain) else None


def test_what_is_left_of_an_island_is_neither_waited_for_nor_goes_on() -> None:
    first, mate, *others = _workers(6)
    said = [_registration(worker, 6) for worker in (mate, *others)]
    meeting = _of_islands(said, [first], in_vain=False)
    assert meeting is not None
    assert meeting.present == tuple(others)
    opened = meeting.opened(b"")
    assert News.decode(opened.news).failed == {first, mate}
    assert _of_islands(said[:3], [first]) is None  # the third island is silent, or half of it


class Store:
    """One that says yes to everything, at a time."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.monitor = Monitor("p", WorkerId(0, 1), None, lambda: self.at_s, fail_after_s=6.0, heartbeat_s=HEARTBEAT_S)

    def send(self, *, lost: bool = False) -> None:
        steps: Generator[Any, Any, None] = self.monitor.send()
        effect = next(steps)
        try:
            while True:
                if lost:
                    steps.throw(StoreLostError())
                effect = steps.send(None if isinstance(effect, Write) else effect.value)
        except (StopIteration, StoreLostError):
            pass

    def rests(self, from_s: float, until_s: float, *, lost: bool = False) -> None:
        self.at_s = from_s
        self.monitor.rest(resting=True)
        self.send(lost=lost)
        self.at_s = until_s
        self.monitor.rest(resting=False)


@pytest.mark.parametrize(
    ("from_s", "lost", "kept_until_s"),
    [
        (1.0, False, 60.0 + SUSPECT_S),
        (SUSPECT_S, False, SUSPECT_S),  # others may have excluded it before it said so
        (1.0, True, SUSPECT_S),  # it could not say so
    ],
)
def test_nobody_excludes_a_worker_that_rests_if_it_has_said_so_in_time(from_s: float, lost: bool, kept_until_s: float) -> None:
    store = Store()
    store.rests(from_s, 60.0, lost=lost)
    store.at_s = 100.0
    assert store.monitor.kept_until_s(contact_s=0.0) == kept_until_s


def test_what_another_store_was_told_keeps_nobody_in_this_one() -> None:
    store = Store()
    store.rests(1.0, 60.0)
    store.monitor.move(News().encode())
    assert store.monitor.kept_until_s(contact_s=0.0) == SUSPECT_S
