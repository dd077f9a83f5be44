import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from lightning_gossip.runtime.work_sharing.claim_counter import EpochQueue
from lightning_gossip.runtime.work_sharing.claim_prefetch import Claims

STEP_S = 0.1


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowStore:
    """Counts take a while, on the clock alone; and before each count something may happen."""

    def __init__(
        self, store: dist.Store, clock: Clock, takes_s: float, before: Callable[[str], None] = lambda key: None
    ) -> None:
        self._store, self._clock, self._takes_s, self._before = store, clock, takes_s, before

    def add(self, key: str, amount: int) -> int:
        self._before(key)
        self._clock.now_s += self._takes_s
        return self._store.add(key, amount)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def claims_of(store: Any, clock: Clock, *, rank: int = 0, workers: int = 1, batches: int = 12) -> Claims:
    queue = EpochQueue(store, "e", rank=rank, workers=workers, batches=batches, lookahead=1)
    return Claims(queue, lambda: STEP_S, clock=clock)


def taken(store: dist.Store) -> int:
    """How far the shared counter is."""
    return store.add("e/next", 0)


def test_while_the_store_answers_at_once_nothing_is_claimed_ahead() -> None:
    store, clock = dist.HashStore(), Clock()
    claims = claims_of(SlowStore(store, clock, STEP_S / 200), clock)
    for number in range(8):
        assert next(claims) == number
        claims.settle()
        assert taken(store) == number


def test_where_a_claim_takes_long_the_next_one_is_made_ahead() -> None:
    store, clock = dist.HashStore(), Clock()
    claims = claims_of(SlowStore(store, clock, STEP_S / 2), clock)
    handed = [next(claims) for _ in range(5)]
    claims.settle()
    assert handed == [0, 1, 2, 3, 4]
    assert taken(store) == 5
    assert claims.queue.ledger.unstepped() == [0, 1, 2, 3, 4, 5]  # a checkpoint hands the one ahead out again
    assert [next(claims) for _ in range(2)] == [5, 6]


def test_the_loader_has_its_batch_while_the_next_claim_is_not_answered() -> None:
    store, clock = dist.HashStore(), Clock()
    answers, asked = threading.Event(), threading.Event()
    answers.set()

    def before(_: str) -> None:
        asked.set()
        assert answers.wait(10.0)

    claims = claims_of(SlowStore(store, clock, STEP_S, before), clock)
    assert [next(claims) for _ in range(4)] == [0, 1, 2, 3]
    claims.settle()
    answers.clear()
    asked.clear()
    assert next(claims) == 4  # claimed before the store fell silent
    assert asked.wait(10.0)  # and the next claim waits in its own thread
    assert taken(store) == 4
    answers.set()
    assert next(claims) == 5


def test_the_thread_that_asks_gets_what_a_claim_has_ended_with() -> None:
    store, clock = dist.HashStore(), Clock()
    fails = threading.Event()

    def before(_: str) -> None:
        if fails.is_set():
            raise ConnectionError("gone")

    claims = claims_of(SlowStore(store, clock, STEP_S, before), clock)
    for _ in range(4):
        next(claims)
    claims.settle()
    fails.set()
    next(claims)
    with pytest.raises(ConnectionError, match="gone"):
        next(claims)


@pytest.mark.parametrize("takes_s", [0.0, STEP_S / 2])
@pytest.mark.parametrize("seed", range(4))
def test_each_batch_is_taken_once_whoever_is_asked_when(takes_s: float, seed: int) -> None:
    store, clock, draw = dist.HashStore(), Clock(), random.Random(seed)
    workers = [claims_of(SlowStore(store, clock, takes_s), clock, rank=rank, workers=3, batches=40) for rank in range(3)]
    handed: list[int] = []
    while workers:
        worker = draw.choice(workers)
        position = next(worker, None)
        if position is None:
            worker.settle()
            workers.remove(worker)
        else:
            handed.append(position)
            worker.queue.ledger.step()
    assert sorted(handed) == list(range(40))


def test_closing_waits_for_the_claim_under_way_but_not_for_ever() -> None:
    store, clock = dist.HashStore(), Clock()
    answers, asked = threading.Event(), threading.Event()
    answers.set()

    def before(_: str) -> None:
        asked.set()
        assert answers.wait(10.0)

    claims = claims_of(SlowStore(store, clock, STEP_S, before), clock)
    for _ in range(4):
        next(claims)
    claims.settle()
    answers.clear()
    asked.clear()
    next(claims)
    assert asked.wait(10.0)
    *_, thread = [thread for thread in threading.enumerate() if thread.name == "gossip-claim"]  # that before may just be ending
    claims.close(timeout_s=0.01)
    assert thread.is_alive()  # the store has not answered
    answers.set()
    thread.join(10.0)
    claims.close()
    assert taken(store) == 5  # the batch is handed out again with what else this worker has not trained on
