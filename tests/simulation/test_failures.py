"""A worker that stops for good: AD-PSGD goes on without it and makes up for it, the others end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gossip.algorithm.work_sharing import OwnRate
from lightning_gossip.simulation import (
    ADPSGD,
    APSGD,
    SGD,
    Cluster,
    Constant,
    Epochs,
    Exponential,
    Links,
    Quadratic,
    Recording,
    Steps,
    Uniform,
    simulate,
)
from lightning_gossip.simulation.problems.batch_assignment import EqualShares, SharedEpoch, Task


@pytest.mark.parametrize("work_sharing", [True, False])
@pytest.mark.parametrize("topology", ["ring", "auto", "complete"])
def test_the_others_end_the_epochs_without_it(topology: str, work_sharing: bool) -> None:
    result = simulate(
        ADPSGD(topology=topology, work_sharing=work_sharing),
        Cluster(8, Uniform(1.0, 0.3), failures={3: 20.5}),
        work=Epochs(number=2, batches=400),
        links=Links(latency_s=0.01, bandwidth=1e5),
        model_bytes=100,
        objective=Quadratic([0.5, 1.0]),
        optimizer=SGD(lr=0.1),
    )
    assert result.ended == "done"
    assert [worker.rank for worker in result.workers if worker.failed_s is not None] == [3]
    assert result.workers[3].failed_s == 20.5
    assert result.workers[3].steps < min(worker.steps for worker in result.workers if worker.rank != 3)
    # what it held is handed out again, in finer pieces if they are fewer than workers; equal shares are filled up
    assert 800 <= result.steps <= (807 if work_sharing else 814)
    assert len(result.epochs) == 3
    assert result.time_s < 1.1 * (20.5 + (800 - 8 * 20.5) / 7)
    assert result.loss is not None
    assert result.loss < 1e-3


def test_what_a_failed_worker_has_left_is_handed_out_once() -> None:
    tasks = [Task([k], 1) for k in range(20)]
    epoch = SharedEpoch(tasks, members=[0, 1, 2], own_rates=[OwnRate(3) for _ in range(3)], lookahead=2)
    trained = []
    for rank, steps in ((0, 2), (1, 1), (0, 1)):
        for _ in range(steps):
            task = epoch.next(rank, 1.0)
            assert task is not None
            assert task.batch is not None
            trained += task.batch
            epoch.stepped(rank)
    assert epoch.unfinished == []
    epoch.next(1, 1.0)  # begun and not ended
    epoch.lost(1)
    epoch.lost(2)  # before its first batch
    while (task := epoch.next(0, 1.0)) is not None:
        trained += task.batch or []
        epoch.stepped(0)
    left = [position for task in epoch.unfinished for position in task.batch or []]
    assert sorted(trained + left) == list(range(20))
    assert 2 in left


def test_equal_shares_of_a_failed_worker_are_handed_out_once() -> None:
    shares = EqualShares([Task([k], 1) for k in range(8)], members=[0, 4, 6])
    for rank, steps in ((0, 3), (4, 1), (6, 3)):
        for _ in range(steps):
            shares.next(rank, None)
            shares.stepped(rank)
    shares.next(4, None)
    shares.lost(4)
    assert [task.batch for task in shares.unfinished] == [[4], [7]]


@pytest.mark.parametrize("strategy", ["ddp", "dpsgd", "qsgd", "periodic_averaging"])
def test_synchronous_ones_stall(strategy: str) -> None:
    result = simulate(strategy, Cluster(4, Constant(1.0), failures={2: 10.5}), work=Epochs(batches=400))
    assert result.ended == "stalled"
    assert result.workers[2].failed_s == 10.5
    assert [worker.steps for worker in result.workers] == [10] * 4


@pytest.mark.parametrize("failing", [0, 1])
def test_a_server_s_workers_end_with_the_first_that_fails(failing: int) -> None:
    result = simulate(APSGD(server_rank=1), Cluster(4, Constant(1.0), failures={failing: 7.5}), work=Steps(number=50))
    assert (result.ended, result.time_s, result.workers[failing].failed_s) == ("stalled", 7.5, 7.5)


def test_when_all_have_failed_the_run_has_stalled() -> None:
    cluster = Cluster(4, Constant(1.0), failures={rank: 5.0 + rank for rank in range(4)})
    assert simulate("adpsgd", cluster, work=Steps(number=50)).ended == "stalled"


def test_a_failure_from_the_beginning_is_one_too() -> None:
    result = simulate("adpsgd", Cluster(4, Constant(1.0), failures={0: 0.0}), work=Epochs(batches=40))
    assert result.ended == "done"
    assert result.workers[0].steps == 0


@settings(max_examples=25)
@given(
    topology=st.sampled_from(["ring", "exponential", "complete", "star"]),
    failures=st.dictionaries(st.integers(0, 5), st.floats(0.0, 12.0), max_size=5),
    latency_s=st.sampled_from([0.0, 0.02, 0.7]),
    seed=st.integers(0, 99),
)
def test_no_moment_of_failing_hangs_the_others(topology: str, failures: dict[int, float], latency_s: float, seed: int) -> None:
    result = simulate(
        ADPSGD(topology=topology),
        Cluster(6, Exponential(1.0), failures=failures),
        work=Epochs(number=2, batches=30),
        links=Links(latency_s=latency_s, bandwidth=10.0),
        model_bytes=5,
        objective=Quadratic([1.0]),
        seed=seed,
    )
    assert result.ended == "done"
    struck = sum(worker.failed_s is not None for worker in result.workers)
    assert 60 <= result.steps <= 60 + 6 * struck


def test_an_exchange_with_a_failed_partner_merges_no_more() -> None:
    """Rank 1 fails while both copies are on their way: neither end has merged."""
    result = simulate(
        ADPSGD(at_rendezvous="evaluate"),
        Cluster(2, Constant(100.0), failures={1: 4.0}),
        work=Steps(number=1),
        links=Links(latency_s=1.0, bandwidth=1.0),
        model_bytes=3,
        objective=Quadratic([1.0], heterogeneity=1.0, workers=2),
        recording=Recording(trace=True),
    )
    assert result.trace is not None
    kinds = [(event.time_s, event.kind, event.rank) for event in result.trace]
    assert (4.0, "lost", 0) in kinds
    assert not any(kind == "merge" for _, kind, _ in kinds)
    assert torch.isfinite(result.models).all()  # type: ignore[arg-type]


def test_who_has_failed_is_found_out_as_in_the_runtime() -> None:
    """Suspected after four heartbeats, which with a closed connection is enough; its neighbours then have other partners."""
    result = simulate(
        ADPSGD(topology="ring"),
        Cluster(6, Constant(0.1), failures={1: 1.0, 3: 1.0}),
        work=Epochs(batches=600),
        recording=Recording(trace=True),
    )
    assert result.trace is not None
    between = [event.time_s for event in result.trace if event.kind == "merge" and event.rank == 2 and event.time_s > 1.0]
    assert 2.9 < between[0] < 4.5
