import functools
import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_gossip.algorithm.membership.store import StoreLostError
from lightning_gossip.algorithm.work_sharing import Leave
from lightning_gossip.runtime.work_sharing.claim_counter import EpochQueue, Speeds, Store
from tests.runtime.epochs import BATCHES_EACH, FIRST_EPOCHS, EagerQueue, Epoch, Worker, first_epoch_bound_s, run_epochs

MEDIANS = 1.5  # a worker that took batches until none were left waits no longer than this many median steps


@dataclass(frozen=True)
class Case:
    step_times: tuple[float, ...]
    batches: int
    lookahead: int
    noise: float
    skew_s: float
    seed: int

    @functools.cache  # noqa: B019 - the cases are few; two tests look at each
    def run(self, queue: type[EpochQueue] = EpochQueue, epochs: int = 3) -> list[Epoch]:
        return run_epochs(
            self.step_times,
            batches=self.batches,
            lookahead=self.lookahead,
            noise=self.noise,
            skew_s=self.skew_s,
            seed=self.seed,
            queue=queue,
            epochs=epochs,
        )


def random_case(seed: int, noise: float, *, short: bool = False) -> Case:
    """With ``short`` also epochs that are over before the loaders have prefetched; the bounds on waits need longer ones."""
    generator = np.random.default_rng(seed)
    n = int(generator.integers(2, 13))
    spread = float(generator.choice([1.0, 1.1, 3.0, 10.0, 100.0]))
    lookahead = int(generator.choice([1, 1, 2, 3, 5, 9]))
    return Case(
        step_times=tuple(float(p) for p in np.exp(generator.uniform(0.0, np.log(spread), n))),
        batches=int(generator.integers(n if short else n * (lookahead + 3), 40 * n)),
        lookahead=lookahead,
        noise=noise,
        skew_s=float(generator.choice([0.0, 1.0, 3.0])),
        seed=seed,
    )


def one_slow(n: int, slowness: float, lookahead: int, noise: float = 0.05) -> Case:
    return Case((1.0,) * (n // 2) + (slowness,) + (1.0,) * (n - n // 2 - 1), 437, lookahead, noise, 0.5, n)


def wait_by_the_rule(epoch: Epoch, worker: Worker) -> float:
    """Without what no rule can know: by how much the steps after the last claim differed from what had been reckoned."""
    return epoch.wait_s(worker) - max(w.surprise_s for w in epoch.workers) + min(0.0, worker.surprise_s)


RANDOM = [*(pytest.param(seed, 0.0, id=f"{seed}-exact") for seed in range(24))]
RANDOM += [pytest.param(seed, 0.3, id=f"{seed}-noisy") for seed in range(100, 112)]


@pytest.mark.parametrize(("seed", "noise"), RANDOM)
def test_every_batch_is_taken_once_and_every_worker_takes_one(seed: int, noise: float) -> None:
    for epoch in random_case(seed, noise, short=True).run():
        assert sorted(p for worker in epoch.workers for p in worker.positions) == list(range(epoch.batches))
        assert all(worker.positions for worker in epoch.workers)


@pytest.mark.parametrize("seed", range(40))
def test_who_stays_to_the_end_waits_at_most_a_step_and_a_half(seed: int) -> None:
    case = random_case(seed, noise=0.1 if seed % 3 == 0 else 0.0)
    epoch = case.run()[-1]
    median = statistics.median(case.step_times)
    waits = [wait_by_the_rule(epoch, worker) / median for worker in epoch.workers if worker.held_at_leaving is None]
    assert max(waits, default=0.0) <= MEDIANS, case


@pytest.mark.parametrize("seed", range(40))
def test_who_leaves_early_waits_at_most_its_own_steps_for_what_it_holds_and_one_more(seed: int) -> None:
    case = random_case(seed, noise=0.1 if seed % 3 == 0 else 0.0)
    epoch = case.run()[-1]
    for worker in epoch.workers:
        if worker.held_at_leaving is not None:
            assert wait_by_the_rule(epoch, worker) <= (1 + worker.held_at_leaving) * worker.step_s, case


@pytest.mark.parametrize("lookahead", [1, 9])
@pytest.mark.parametrize("slowness", [10.0, 100.0])
@pytest.mark.parametrize("n", [4, 16])
def test_an_epoch_with_one_slow_worker_takes_little_longer_than_the_ideal(n: int, slowness: float, lookahead: int) -> None:
    case = one_slow(n, slowness, lookahead)
    epoch = case.run()[-1]
    assert epoch.length_s <= 1.12 * epoch.ideal_s + 0.5


@pytest.mark.parametrize("lookahead", [1, 9])
@pytest.mark.parametrize("slowness", [10.0, 100.0])
@pytest.mark.parametrize("n", [4, 16])
def test_without_the_rule_it_takes_much_longer(n: int, slowness: float, lookahead: int) -> None:
    """Of several epochs, since one late claim more or less is chance."""
    case = one_slow(n, slowness, lookahead)
    ruled = [epoch.length_s for epoch in case.run(epochs=4)[1:]]
    eager = [epoch.length_s for epoch in case.run(EagerQueue, epochs=4)[1:]]
    if n == 4 and slowness == 10.0 and lookahead == 1:
        assert statistics.mean(eager) > 1.02 * statistics.mean(ruled)
    else:
        assert statistics.mean(eager) > 1.15 * statistics.mean(ruled)


def test_without_the_rule_the_fast_workers_wait_for_many_steps() -> None:
    """Shows that the bound on waits can fail."""
    epoch = one_slow(4, 10.0, 1).run(EagerQueue)[-1]
    assert max(wait_by_the_rule(epoch, worker) for worker in epoch.workers) > 3 * MEDIANS


@pytest.mark.parametrize(("n", "lookahead"), FIRST_EPOCHS)
@pytest.mark.parametrize("each", BATCHES_EACH)
def test_the_first_epoch_of_equal_workers_is_as_short_as_can_be(n: int, lookahead: int, each: int) -> None:
    """Nothing is known, and loaders prefetch up to the whole of it before the first step."""
    [epoch] = run_epochs([1.0] * n, batches=each * n, lookahead=lookahead, epochs=1)
    assert epoch.length_s <= 1.05 * epoch.ideal_s


@pytest.mark.parametrize("lookahead", [1, 3, 9])
@pytest.mark.parametrize("batches", [65, 79, 160, 173])
def test_nobody_does_what_is_left_over_where_shares_do_not_come_out_even(batches: int, lookahead: int) -> None:
    [epoch] = run_epochs([1.0] * 16, batches=batches, lookahead=lookahead, epochs=1)
    assert epoch.length_s <= math.ceil(batches / 16)


@pytest.mark.parametrize("seed", range(6))
def test_the_first_epoch_is_short_too_if_workers_begin_at_different_times(seed: int) -> None:
    case = Case((1.0,) * 16, 16 * 12, lookahead=9, noise=0.1, skew_s=4.0, seed=seed)
    epoch = case.run(epochs=1)[0]
    assert epoch.length_s <= 1.2 * epoch.ideal_s + 4.0


@pytest.mark.parametrize(("n", "lookahead"), [case for case in FIRST_EPOCHS if case[0] < 100])
@pytest.mark.parametrize("slowdown", [4.0, 10.0])
@pytest.mark.parametrize("each", BATCHES_EACH)
def test_a_slow_worker_holds_up_the_first_epoch_by_its_prefetch(n: int, lookahead: int, slowdown: float, each: int) -> None:
    for slow in (0, n - 1):
        step_times = [1.0] * n
        step_times[slow] = slowdown
        [epoch] = run_epochs(step_times, batches=each * n, lookahead=lookahead, epochs=1)
        assert epoch.length_s <= first_epoch_bound_s(step_times, batches=each * n, lookahead=lookahead)


def test_a_worker_that_knows_nothing_yet_takes_its_fair_share_at_most() -> None:
    store = dist.HashStore()
    queues = [EpochQueue(store, "e", rank=rank, workers=4, batches=22, lookahead=9) for rank in range(4)]
    taken = []
    for queue in queues:  # one after the other, as if each loader were the fastest to prefetch
        taken.append(0)
        while queue.claim(None) is not None:
            taken[-1] += 1
    assert taken == [6, 6, 6, 4]


def test_the_last_worker_never_leaves() -> None:
    store = dist.HashStore()
    queues = [EpochQueue(store, "e", rank=rank, workers=3, batches=30, lookahead=1) for rank in range(3)]
    slow, *others = queues
    for queue in others:
        queue.claim(1.0)
        queue._do(Leave(queue.protocol._own.term))
    taken = 0
    while slow.claim(1000.0) is not None:
        slow.ledger.step()
        taken += 1
    assert taken == 28
    assert not slow.left_early


def epoch(
    store: Store, name: str, speeds: list[Speeds], rank: int, batches: int, gone: frozenset[int] = frozenset()
) -> EpochQueue:
    return EpochQueue(
        store,
        name,
        rank=rank,
        workers=len(speeds),
        batches=batches,
        lookahead=1,
        speeds=speeds[rank],
        gone=lambda: gone,
    )


def test_step_times_outlive_the_epoch_and_leaving_does_not() -> None:
    store = dist.HashStore()
    speeds = [Speeds(store, "fit", rank=rank, workers=2) for rank in range(2)]
    for rank, step_s in ((0, 1.0), (1, 100.0)):
        queue = epoch(store, "e0", speeds, rank, 8)
        while queue.claim(step_s) is not None:
            queue.ledger.step()
    slow = epoch(store, "e1", speeds, 1, 8)
    assert slow.claim(100.0) == 1
    assert slow.claim(100.0) is None  # it knows of rank 0, which has not begun this epoch
    assert slow.left_early
    fast = epoch(store, "e1", speeds, 0, 8)
    taken = []
    while (position := fast.claim(1.0)) is not None:
        taken.append(position)
        fast.ledger.step()
    assert taken == [0, 2, 3, 4, 5, 6, 7]


class Counting:
    """Notes what each call reads and writes."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def call(key: str | list[str], *args: Any) -> Any:
            self.calls.append((name, len(key) if isinstance(key, list) else 1))
            return method(key, *args)

        return call


@pytest.mark.parametrize("n", [2, 16, 128])
def test_a_claim_reads_as_much_however_many_the_workers(n: int) -> None:
    store = Counting(dist.HashStore())
    queues = [EpochQueue(store, "e", rank=rank, workers=n, batches=100 * n, lookahead=1) for rank in range(n)]
    for queue in queues:
        queue.claim(1.0)  # tells its step time, and has the batch that it is sure of
    first, *others = queues
    kinds = []
    for _ in range(99):
        store.calls.clear()
        first.claim(1.0)
        first.ledger.step()
        kinds.append(tuple(store.calls))
        for queue in others:
            queue.claim(1.0)
            queue.ledger.step()
    assert kinds[0] == (("add", 1),) * 4  # three are there from now on
    assert set(kinds[1:]) == {(("add", 1),), (("multi_get", 3), ("add", 1))}
    assert sum(len(kind) > 1 for kind in kinds) <= 99 // 16 + 5  # now and then, and in the last few steps


def slow_claims(gone: frozenset[int], *, left: bool = False, known: bool = True) -> bool:
    """Whether a slow worker takes one of the last batches, when another one has died, or has not."""
    store = dist.HashStore()
    speeds = [Speeds(store, "fit", rank=rank, workers=3) for rank in range(3)]
    slow, fast, other = (epoch(store, "e", speeds, rank, 8, gone) for rank in range(3))
    fast.claim(1.0 if known else None)
    if left:
        fast._do(Leave(speeds[1].own.term or 1))
    other.claim(10.0)
    slow.claim(10.0)
    return slow.claim(10.0) is not None


def test_what_a_dead_worker_has_told_does_not_count() -> None:
    assert not slow_claims(frozenset())
    assert slow_claims(frozenset({1}))
    assert slow_claims(frozenset({1}), known=False)


def test_a_dead_worker_that_had_left_is_not_taken_for_two() -> None:
    assert slow_claims(frozenset(), left=True)
    assert slow_claims(frozenset({1}), left=True)
    store = dist.HashStore()
    speeds = [Speeds(store, "fit", rank=rank, workers=3) for rank in range(3)]
    slow, fast, left = (epoch(store, "e", speeds, rank, 8, frozenset({2})) for rank in range(3))
    for queue, step_s in ((left, 1.0), (fast, 1.0), (slow, 100.0)):
        queue.claim(step_s)
    left._do(Leave(speeds[2].own.term))
    assert slow.claim(100.0) is None  # the fast one still claims
    assert slow.left_early


def test_a_worker_that_never_began_and_died_holds_nobody_up() -> None:
    store = dist.HashStore()
    speeds = [Speeds(store, "fit", rank=rank, workers=2) for rank in range(2)]
    queue = epoch(store, "e", speeds, 0, 40, frozenset({1}))
    taken = 0
    while queue.claim(1.0) is not None:
        taken += 1  # it holds them all
    assert taken == 39
    assert not queue.left_early


@pytest.mark.parametrize("tcp", [False, True], ids=["HashStore", "TCPStore"])
def test_a_sum_of_large_rates_is_read_as_it_was_written(tcp: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if tcp else dist.HashStore()
    queues = [EpochQueue(store, "e", rank=rank, workers=2, batches=400, lookahead=1) for rank in range(2)]
    for queue in queues:
        assert queue.claim(1e-300) is not None
        assert queue.claim(1e-300) is not None
        assert queue.claim(1e-300) is not None
    assert queues[0]._look().rates == sum(queue.protocol._own.term for queue in queues) > 2**61


def test_members_that_have_changed_leave_no_step_times_behind() -> None:
    store = dist.HashStore()
    speeds = Speeds(store, "fit", rank=0, workers=2)
    epoch(store, "e", [speeds, speeds], 0, 8).claim(1.0)
    assert store.check(["fit/rate/0"])
    speeds.forget()
    speeds.forget()
    assert not store.check(["fit/rate/0"])


def test_what_nobody_claimed_can_be_told_when_the_epoch_is_interrupted() -> None:
    store = dist.HashStore()
    queues = [EpochQueue(store, "e", rank=rank, workers=2, batches=10, lookahead=1) for rank in range(2)]
    taken = [queue.claim(1.0) for queue in queues] + [queues[0].claim(1.0), queues[1].claim(1.0)]
    first = queues[0].first_unclaimed()
    assert first is not None
    assert sorted([*taken, *range(first, 10)]) == list(range(10))
    queues[0].ledger.step()
    assert queues[0].ledger.unstepped() == [2]


class _Lost:
    """A store whose host has ended."""

    def __getattr__(self, name: str) -> Any:
        raise StoreLostError


def test_a_worker_whose_counters_are_lost_claims_no_more_and_says_so() -> None:
    store = dist.HashStore()
    queue = EpochQueue(store, "e", rank=0, workers=2, batches=10, lookahead=1)
    assert queue.claim(1.0) == 0
    queue._store = queue._speeds._store = _Lost()
    assert queue.claim(1.0) is None
    assert queue.is_lost
    assert queue.first_unclaimed() is None
    assert queue.ledger.unstepped() == [0]


def test_a_worker_whose_counters_are_lost_before_its_first_claim_has_the_batch_that_it_is_sure_of() -> None:
    queue = EpochQueue(_Lost(), "e", rank=1, workers=2, batches=10, lookahead=1)
    assert [queue.claim(1.0), queue.claim(1.0)] == [1, None]
