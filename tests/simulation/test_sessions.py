from __future__ import annotations

import heapq
import statistics
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gossip.algorithm.work_sharing import OwnRate
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import (
    Cluster,
    Constant,
    Epochs,
    Quadratic,
    Recording,
    Samples,
    Steps,
    Uniform,
    digits,
    simulate,
)
from lightning_gossip.simulation.problems.batch_assignment import EqualShares, SharedEpoch, Task
from lightning_gossip.simulation.problems.work import Plan
from tests.runtime.epochs import BATCHES_EACH, FIRST_EPOCHS, first_epoch_bound_s, run_epochs


def rates_of(step_times: list[float | None]) -> list[OwnRate]:
    """What the others know of each worker when the epoch begins."""
    rates = [OwnRate(len(step_times)) for _ in step_times]
    for rate, step_s in zip(rates, step_times, strict=True):
        if step_s is not None:
            rate.tell(step_s)
    return rates


def play(epoch: SharedEpoch, step_times: list[float], *, known: bool) -> tuple[list[int], float]:
    """An epoch under virtual time: which worker takes each batch, and when the last one ends."""
    recent = [deque([step_s] if known else [], maxlen=9) for step_s in step_times]
    events = [(0.0, rank) for rank in range(len(step_times))]
    running: set[int] = set()
    taken, now_s = [], 0.0
    while events:
        now_s, rank = heapq.heappop(events)
        if rank in running:
            epoch.stepped(rank)
            recent[rank].append(step_times[rank])
        if epoch.next(rank, statistics.median(recent[rank]) if recent[rank] else None) is not None:
            taken.append(rank)
            running.add(rank)
            heapq.heappush(events, (now_s + step_times[rank], rank))
    return taken, now_s


@settings(max_examples=60)
@given(
    step_times=st.lists(st.sampled_from([1.0, 1.1, 3.0, 10.0, 100.0]), min_size=1, max_size=9),
    spare=st.integers(0, 200),
    lookahead=st.sampled_from([1, 2, 5]),
    known=st.booleans(),
)
def test_every_batch_is_trained_on_once_by_the_claim_rule(
    step_times: list[float], spare: int, lookahead: int, known: bool
) -> None:
    n = len(step_times)
    rates = rates_of([step_s if known else None for step_s in step_times])
    epoch = SharedEpoch([Task(None, 1)] * (n + spare), members=range(n), own_rates=rates, lookahead=lookahead)
    taken, _ = play(epoch, step_times, known=known)
    assert len(taken) == n + spare
    assert epoch.remaining == 0
    assert set(taken) == set(range(n))


@pytest.mark.parametrize(("n", "lookahead"), FIRST_EPOCHS)
@pytest.mark.parametrize("each", BATCHES_EACH)
def test_the_first_epoch_of_equal_workers_is_as_short_as_can_be(n: int, lookahead: int, each: int) -> None:
    """Nothing is known, and loaders prefetch up to the whole of it before the first step."""
    epoch = SharedEpoch([Task(None, 1)] * (each * n), members=range(n), own_rates=rates_of([None] * n), lookahead=lookahead)
    _, length = play(epoch, [1.0] * n, known=False)
    assert length <= 1.05 * each


@pytest.mark.parametrize(("n", "lookahead"), [case for case in FIRST_EPOCHS if case[0] < 100])
@pytest.mark.parametrize("slowdown", [4.0, 10.0])
@pytest.mark.parametrize("each", BATCHES_EACH)
def test_a_slow_worker_holds_up_the_first_epoch_by_its_prefetch(n: int, lookahead: int, slowdown: float, each: int) -> None:
    for slow in (0, n - 1):
        step_times = [1.0] * n
        step_times[slow] = slowdown
        tasks = [Task(None, 1)] * (each * n)
        epoch = SharedEpoch(tasks, members=range(n), own_rates=rates_of([None] * n), lookahead=lookahead)
        _, length = play(epoch, step_times, known=False)
        assert length <= first_epoch_bound_s(step_times, batches=len(tasks), lookahead=lookahead)


def test_no_worker_trains_most_of_a_first_epoch_alone() -> None:
    result = simulate(
        "adpsgd", Cluster(16, Uniform(0.1, 0.02)), work=Epochs(batches=160, lookahead=9), recording=Recording(spans=False)
    )
    assert result.epoch_times_s[0] <= 1.1
    assert max(worker.steps for worker in result.workers) <= 11


@pytest.mark.parametrize(("slowdown", "lookahead"), [(1.0, 1), (10.0, 1), (10.0, 9), (100.0, 1)])
def test_an_epoch_is_as_long_as_with_the_runtime_s_queue(slowdown: float, lookahead: int) -> None:
    step_times = [1.0] * 7 + [slowdown]
    real = run_epochs(step_times, batches=1000, epochs=2, lookahead=lookahead)[-1].length_s
    epoch = SharedEpoch([Task(None, 1)] * 1000, members=range(8), own_rates=rates_of([*step_times]), lookahead=lookahead)
    _, ours = play(epoch, step_times, known=True)
    assert ours == pytest.approx(real, rel=0.02)


def test_who_has_failed_is_counted_on_by_nobody() -> None:
    for failed in (False, True):
        epoch = SharedEpoch([Task(None, 1)] * 8, members=range(3), own_rates=rates_of([10.0, 1.0, 10.0]), lookahead=1)
        epoch.next(1, 1.0)
        if failed:
            epoch.lost(1)
        epoch.next(0, 10.0)
        assert (epoch.remaining < 4) == failed  # the slow one has taken one beyond its own


def test_equal_shares_begin_again_where_they_do_not_come_out_even() -> None:
    tasks = [Task([k], 1) for k in range(5)]
    shares, taken = EqualShares(tasks, members=[0, 1]), []
    for rank in (0, 1):
        while (task := shares.next(rank, None)) is not None:
            taken.append((rank, tasks.index(task)))
    assert taken == [(0, 0), (0, 2), (0, 4), (1, 1), (1, 3), (1, 0)]


def test_an_epoch_of_a_data_set_holds_every_sample_once() -> None:
    plan = Plan(Epochs(batch_size=16), samples=100, workers=3, shared=True, seed=1, generators=[])
    epoch = plan.open(0, range(3))
    taken = []
    while (task := epoch.next(1, 1.0)) is not None:  # the others never claim, so two batches stay theirs
        taken.append(task)
        epoch.stepped(1)
    samples = [sample for task in taken for sample in task.batch or ()]
    assert len(samples) == len(set(samples))
    assert plan.batches == 7
    assert len(taken) == plan.batches - 2
    assert {task.size for task in taken} <= {16, 4}


def test_samples_are_counted_where_the_last_batch_is_smaller() -> None:
    from lightning_gossip.simulation import softmax_regression

    result = simulate("adpsgd", Cluster(4, Constant(1.0)), work=Epochs(batch_size=8), objective=softmax_regression(digits()))
    assert sum(worker.samples for worker in result.workers) == 1277
    assert result.steps == 160


def test_steps_are_made_by_all_alike() -> None:
    result = simulate("adpsgd", Cluster.one_slow(4, Constant(1.0), factor=3.0), work=Steps(number=10))
    assert [worker.steps for worker in result.workers] == [10] * 4
    assert result.time_s == 30.0


def test_every_worker_reports_what_it_did_and_when() -> None:
    result = simulate(
        "adpsgd",
        Cluster(2, [Samples([1.0, 2.0], order="given"), Constant(4.0)]),
        work=Epochs(batches=8),
        objective=Quadratic([1.0]),
        recording=Recording(spans=True),
    )
    assert result.spans is not None
    for worker, spans in zip(result.workers, result.spans, strict=True):
        assert worker.busy_s == pytest.approx(sum(s.end_s - s.start_s for s in spans if s.activity == "compute"))
        assert worker.wait_s == pytest.approx(sum(s.end_s - s.start_s for s in spans if s.activity == "wait"))
        assert worker.busy_s + worker.wait_s == pytest.approx(result.time_s)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Epochs(number=0), "number"),
        (lambda: Epochs(batches=0), "batches"),
        (lambda: Epochs(batch_size=0), "batch_size"),
        (lambda: Epochs(lookahead=0), "lookahead"),
        (lambda: Steps(number=1.5), "number"),  # type: ignore[arg-type]
        (lambda: simulate("ddp", Cluster(2, Constant(1.0)), work=Epochs()), "batches"),
        (lambda: simulate("ddp", Cluster(2, Constant(1.0)), work=Epochs(batches=1)), "batches"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, key: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=key):
        make()
