"""A worker that stops for good: asynchronous algorithms go on without it, synchronous ones stall."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("topology", ["ring", "exponential", "complete"])
@pytest.mark.parametrize("strategy", ["adpsgd", "apsgd"])
def test_the_others_end_the_epochs_without_it(strategy: str, topology: str) -> None:
    result = simulate(
        ADPSGD(topology=topology) if strategy == "adpsgd" else strategy,
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
    assert 798 <= result.steps <= 800  # what it held is lost: one batch in training, one claimed ahead
    assert result.time_s < 1.1 * (20.5 + (800 - 8 * 20.5) / 7)
    assert result.loss is not None
    assert result.loss < 1e-3


@pytest.mark.parametrize("strategy", ["ddp", "dpsgd", "qsgd", "periodic_averaging"])
def test_synchronous_ones_stall(strategy: str) -> None:
    result = simulate(strategy, Cluster(4, Constant(1.0), failures={2: 10.5}), work=Epochs(batches=400))
    assert result.ended == "stalled"
    assert result.workers[2].failed_s == 10.5
    assert [worker.steps for worker in result.workers] == [10] * 4


def test_without_the_server_nobody_goes_on() -> None:
    cluster = Cluster(4, Constant(1.0), failures={1: 7.5})
    assert simulate(APSGD(server_rank=1), cluster, work=Steps(number=50)).ended == "stalled"
    assert simulate(APSGD(server_rank=0), cluster, work=Steps(number=50)).ended == "done"


def test_the_oldest_update_of_a_failed_worker_holds_nobody_up() -> None:
    """Under on_stale='wait' the others wait for the slow worker; when it has failed they do not."""
    cluster = Cluster.one_slow(4, Constant(1.0), factor=1000.0, failures={0: 50.0})
    result = simulate(APSGD(server_rank=1, max_staleness=3, on_stale="wait"), cluster, work=Steps(number=30))
    assert result.ended == "done"
    assert result.time_s == pytest.approx(50.0, abs=32.0)


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
    assert result.steps <= 60
    assert failures or result.steps == 60


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
