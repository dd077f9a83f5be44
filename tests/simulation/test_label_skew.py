"""Workers with samples of their own whose labels are not alike."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import (
    ADPSGD,
    SGD,
    Cluster,
    Constant,
    Epochs,
    Quadratic,
    Steps,
    Uniform,
    digits,
    simulate,
    softmax_regression,
)
from lightning_gossip.simulation.problems.label_skew import label_counts, label_skew
from lightning_gossip.simulation.problems.work import Plan
from lightning_gossip.simulation.run import Strategy


@given(
    labels=st.lists(st.integers(0, 12), min_size=1, max_size=200),
    workers=st.integers(1, 20),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 1e3]),
    seed=st.integers(0, 100),
)
def test_every_sample_is_in_one_share_and_all_are_of_one_size(labels: list[int], workers: int, alpha: float, seed: int) -> None:
    workers = min(workers, len(labels))
    shares = label_skew(labels, workers, alpha=alpha, seed=seed)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(labels)))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    counts = label_counts(labels, shares)
    assert counts.sum(1).tolist() == sizes
    assert counts.sum(0).tolist() == [Counter(labels)[label] for label in range(max(labels) + 1)]


def test_the_same_seed_gives_the_same_shares_and_another_one_others() -> None:
    labels = digits().y.numpy()
    first, second, other = (label_skew(labels, 8, alpha=0.1, seed=seed) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


def test_the_smaller_alpha_the_less_alike_are_the_shares() -> None:
    """The largest label's share of a worker's samples: 1 with one label each, a tenth where all look alike."""
    labels = digits().y.numpy()
    largest = []
    for alpha in (0.001, 0.1, 1.0, 10_000.0):
        counts = label_counts(labels, label_skew(labels, 16, alpha=alpha, seed=1))
        largest.append(float((counts.max(1) / counts.sum(1)).mean()))
    assert largest == sorted(largest, reverse=True)
    assert largest[0] > 0.65
    assert 0.4 < largest[1] < 0.9
    assert largest[-1] < 0.15


@pytest.mark.parametrize(
    ("labels", "workers", "alpha", "message"),
    [
        ([0, 1, 2], 4, 1.0, "3 samples cannot be shared by 4 workers"),
        ([0, 1], 2, 0.0, "skew=0.0 is not a number above 0"),
        ([0, 1], 2, float("inf"), "skew=inf"),
        ([0.5, 1.5], 2, 1.0, "not whole numbers"),
        ([-1, 1], 2, 1.0, "not whole numbers"),
    ],
)
def test_what_cannot_be_shared_is_refused(labels: list[int], workers: int, alpha: float, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        label_skew(labels, workers, alpha=alpha, seed=0)


def plan(work: Epochs | Steps, workers: int = 6) -> Plan:
    problem = softmax_regression(digits())
    generators = [np.random.default_rng(rank) for rank in range(workers)]
    return Plan(
        work, samples=problem.samples, labels=problem.labels, workers=workers, shared=False, seed=1, generators=generators
    )


def test_an_epoch_has_every_sample_and_each_worker_trains_on_its_own() -> None:
    made = plan(Epochs(number=2, batch_size=10, skew=0.1))
    assert made.shares is not None
    orders = []
    for epoch in range(2):
        session = made.open(epoch, range(6))
        seen: list[list[int]] = [[] for _ in range(6)]
        steps = [0] * 6
        for rank in range(6):
            while (task := session.next(rank, None)) is not None:
                assert task.batch is not None
                seen[rank] += task.batch
                steps[rank] += 1
        assert {len(set(own)) for own in seen} == {len(share) for share in made.shares}
        assert all(set(own) == set(share.tolist()) for own, share in zip(seen, made.shares, strict=True))
        assert set(steps) == {22}  # 213 samples each, or 212 and one of them again
        assert made.steps == 2 * 6 * 22
        orders.append(seen)
    assert orders[0] != orders[1]


def test_steps_draw_from_the_worker_s_own_samples() -> None:
    made = plan(Steps(number=50, batch_size=10, skew=0.1))
    assert made.shares is not None
    session = made.open(0, range(6))
    for rank in range(6):
        drawn = [index for _ in range(50) for index in session.next(rank, None).batch]  # type: ignore[union-attr]
        assert set(drawn) <= set(made.shares[rank].tolist())
        assert len(set(drawn)) > 100


@pytest.mark.parametrize("strategy", ["ddp", "dpsgd", "adpsgd", "apsgd", "periodic_averaging"])
def test_every_strategy_trains_on_unlike_data(strategy: str) -> None:
    result = simulate(
        strategy,
        Cluster(4, Uniform(1.0, 0.3)),
        work=Epochs(number=6, batch_size=10, skew=0.1),
        objective=softmax_regression(digits()),
        optimizer=SGD(lr=0.5),
    )
    assert result.ended == "done"
    assert [worker.steps for worker in result.workers] == [6 * 32] * 4  # not shared: each has its own
    assert result.loss is not None
    assert result.loss < 0.6


def test_what_a_failed_worker_has_not_trained_on_is_lost_with_it() -> None:
    result = simulate(
        "adpsgd",
        Cluster(4, Constant(1.0), failures={2: 10.5}),
        work=Epochs(number=2, batch_size=10, skew=0.1),
        objective=softmax_regression(digits()),
    )
    assert result.ended == "done"
    assert [worker.steps for worker in result.workers] == [64, 64, 10, 64]


@pytest.mark.parametrize(
    ("strategy", "objective", "message"),
    [
        (ADPSGD(work_sharing=True), True, "work_sharing=True hands each batch to whoever is free"),
        (ADPSGD(), False, "skew=0.1: the objective has no samples with labels"),
    ],
)
def test_what_does_not_go_with_skew_is_refused(strategy: Strategy, objective: bool, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        simulate(
            strategy,
            Cluster(4, Constant(1.0)),
            work=Epochs(batches=40, batch_size=10, skew=0.1),
            objective=softmax_regression(digits()) if objective else Quadratic([1.0]),
        )
