"""What a round asks of the store, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gossip.algorithm.membership.monitor import Monitor
from lightning_gossip.algorithm.membership.rounds import Rounds, Survivable
from lightning_gossip.algorithm.membership.store import Await, Count, Decide, Read, ReadAll, Steps, Swap
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
        answer = {Count: arrived, Decide: getattr(asked[-1], "value", None)}.get(type(asked[-1]))
        asked.append(steps.send(answer))
    assert any(isinstance(effect, ReadAll) for effect in asked) == reads


def _run(steps: Steps[Any], store: dict[str, bytes]) -> Any:
    """A protocol to its end, or to where it waits, on a store."""
    answer: Any = None
    try:
        while True:
            match steps.send(answer):
                case Decide(key, value):
                    answer = store.setdefault(key, value)
                case Swap(key, expected, value):
                    if store.get(key) == expected:
                        store[key] = value
                    answer = store[key]
                case Count(key):
                    store[key] = answer = str(int(store.get(key, b"0")) + 1).encode()
                    answer = int(answer)
                case Read(key) | Await(key):
                    answer = store.get(key)
                case effect:
                    store[effect.key] = effect.value
                    answer = None
    except StopIteration as ended:
        return ended.value


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
