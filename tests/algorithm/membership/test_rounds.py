"""What a round asks of the store, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gossip.algorithm.membership.monitor import Monitor
from lightning_gossip.algorithm.membership.rounds import Rounds, Survivable
from lightning_gossip.algorithm.membership.store import Append, Await, Count, Decide, Delete, Read, Steps, Swap, Write
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import PeerError

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
        asked.append(steps.send({Count: arrived}.get(type(asked[-1]))))
    assert any(isinstance(effect, Read) and effect.key.endswith("/said") for effect in asked) == reads


class _AllAreWell(_OneHasFailed):
    def has_failed(self, worker: WorkerId) -> bool:
        return False

    def ended(self) -> list[WorkerId]:
        return []


def _take_turns(threads: list[Steps[Any]], store: dict[str, bytes]) -> tuple[list[Any], list[int]]:
    """What each protocol returns, and how often it has asked the store: twice where it waits, and then reads."""
    results: list[Any] = [None] * len(threads)
    asked, answers = [0] * len(threads), [None] * len(threads)
    waits: dict[int, Any] = dict.fromkeys(range(len(threads)))
    while waits:
        for place, effect in list(waits.items()):
            if isinstance(effect, Await) and effect.key not in store:
                continue
            try:
                effect = threads[place].send(answers[place] if effect is None else _do(effect, store))
            except StopIteration as end:
                results[place] = end.value
                del waits[place]
            else:
                asked[place] += 2 if isinstance(effect, Await) else 1
                waits[place] = effect
    return results, asked


@pytest.mark.parametrize(("workers", "most"), [(2, 10), (3, 9), (5, 8), (8, 8), (64, 8)])
def test_a_round_asks_the_store_at_most_eight_times_a_worker(workers: int, most: int) -> None:
    members = [WorkerId(rank, 1) for rank in range(workers)]
    everyones = [Rounds("p", me, _AllAreWell(), lambda: 0.0, 10.0, Survivable()) for me in members]
    store: dict[str, bytes] = {}
    for number in range(4):
        results, asked = _take_turns([rounds.hold(members, b"%d" % place) for place, rounds in enumerate(everyones)], store)
        assert results == [{worker: b"%d" % place for place, worker in enumerate(members)}] * workers
        assert max(asked) <= most
        assert {key.split("/")[2] for key in store} <= {str(number)}, "the keys of the round before are gone"


def _run(steps: Steps[Any], store: dict[str, bytes]) -> Any:
    """A protocol to its end, or to where it waits, on a store."""
    answer: Any = None
    try:
        while True:
            answer = _do(steps.send(answer), store)
    except StopIteration as ended:
        return ended.value


def _do(effect: Any, store: dict[str, bytes]) -> Any:
    match effect:
        case Append(key, value):
            store[key] = store.get(key, b"") + value
        case Decide(key, value):
            return store.setdefault(key, value)
        case Swap(key, expected, value):
            if store.get(key) == expected:
                store[key] = value
            return store[key]
        case Count(key):
            store[key] = str(int(store.get(key, b"0")) + 1).encode()
            return int(store[key])
        case Read(key) | Await(key):
            return store.get(key)
        case Delete(key):
            store.pop(key, None)
        case Write(key, value):
            store[key] = value
        case _:
            raise AssertionError(effect)
    return None


def test_a_round_does_not_end_without_those_that_several_have_excluded_at_once() -> None:
    """Each of them knew that the others were enough without the one that it had not heard, and none of the others' words."""
    members = [WorkerId(rank, 1) for rank in range(5)]
    store: dict[str, bytes] = {}
    monitors = [Monitor("p", me, None, lambda: 0.0, fail_after_s=6.0, heartbeat_s=0.5) for me in members[:2]]
    for monitor in monitors:
        monitor.observe(members)
        _run(monitor.send(), store)
    monitors[0]._found |= {members[2], members[3]}  # three of five are enough without these
    monitors[1]._found |= {members[4]}
    for monitor in monitors:
        _run(monitor.publish(), store)
    rounds = Rounds("p", members[1], monitors[1], lambda: 0.0, 10.0, Survivable())
    with pytest.raises(PeerError, match="reaches 2 of 5 workers"):
        _run(rounds.hold(members, b"value"), store)
