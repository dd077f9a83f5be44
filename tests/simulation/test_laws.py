from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import (
    LAWS,
    Cluster,
    Constant,
    Erlang,
    Exponential,
    Law,
    LogNormal,
    Samples,
    Uniform,
    make_law,
)

MEAN_S = 0.2
# law, standard deviation over the mean
CASES = [
    pytest.param(Constant(MEAN_S), 0.0, id="constant"),
    pytest.param(Exponential(MEAN_S), 1.0, id="exponential"),
    pytest.param(Exponential(MEAN_S, spread=0.3), 0.3, id="exponential, shifted"),
    pytest.param(Erlang(MEAN_S, 4), 0.5, id="erlang"),
    pytest.param(LogNormal(MEAN_S, 0.5), math.sqrt(math.exp(0.25) - 1.0), id="lognormal"),
    pytest.param(Uniform(MEAN_S, 0.1), 0.1 / math.sqrt(3.0), id="uniform"),
    pytest.param(Samples([0.1, 0.2, 0.3]), math.sqrt(2.0 / 3.0) / 2.0, id="samples"),
]


@pytest.mark.parametrize(("law", "deviation"), CASES)
def test_a_law_has_its_mean_and_its_spread(law: Law, deviation: float) -> None:
    times_s = law.draw(np.random.default_rng(1), 100_000, 0)
    assert times_s.min() > 0.0
    assert times_s.mean() == pytest.approx(MEAN_S, rel=0.01)
    assert times_s.std() == pytest.approx(deviation * MEAN_S, rel=0.02, abs=1e-12)


def test_every_law_has_a_name() -> None:
    assert {type(case.values[0]) for case in CASES} == set(LAWS.values())


@pytest.mark.parametrize(("law", "deviation"), CASES)
def test_the_times_of_a_worker_depend_on_the_seed_and_its_rank_alone(law: Law, deviation: float) -> None:
    def times_s(workers: int, seed: int, rank: int) -> list[float]:
        streams = Cluster(workers, law).compute_times(seed)
        for other in (0, workers - 1):
            streams[other].next_s()  # must not matter to the one that is looked at
        return [streams[rank].next_s() for _ in range(300)]

    assert times_s(4, 1, 2) == times_s(8, 1, 2)
    if deviation > 0.0:
        assert times_s(4, 1, 2) != times_s(4, 2, 2)
        assert times_s(4, 1, 2) != times_s(4, 1, 1)


def test_samples_in_order_come_in_order_again_and_again() -> None:
    stream = Cluster(1, Samples([1.0, 2.0, 3.0], order="given")).compute_times(0)[0]
    assert [stream.next_s() for _ in range(500)] == [1.0 + step % 3 for step in range(500)]


def test_a_slow_worker_s_times_are_multiplied() -> None:
    plain, slow = Cluster(2, Exponential(1.0)), Cluster.one_slow(2, Exponential(1.0), rank=1, factor=7.0)
    assert slow.compute_times(3)[1].next_s() == 7.0 * plain.compute_times(3)[1].next_s()
    assert slow.compute_times(3)[0].next_s() == plain.compute_times(3)[0].next_s()


def test_a_record_gives_each_worker_its_measured_times() -> None:
    spans = [["compute", 0.0, 0.5, None], ["wait", 0.5, 9.0, 1], ["compute", 9.0, 9.25, None]]
    record = {"workers": [{"rank": 1, "spans": [["compute", 0.0, 2.0, None]]}, {"rank": 0, "spans": spans}]}
    cluster = Cluster.measured(record)
    assert cluster.workers == 2
    assert cluster.compute == (Samples([0.5, 0.25]), Samples([2.0]))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Constant(0.0), "mean_s"),
        (lambda: Exponential(-1.0), "mean_s"),
        (lambda: Exponential(1.0, spread=1.5), "spread"),
        (lambda: Erlang(1.0, 0), "shape"),
        (lambda: LogNormal(1.0, -0.1), "sigma"),
        (lambda: LogNormal(1.0, float("nan")), "sigma"),
        (lambda: Uniform(1.0, 2.0), "spread"),
        (lambda: Samples([]), "times_s"),
        (lambda: Samples([0.1, -0.1]), "times_s"),
        (lambda: Samples([0.1], order="sorted"), "order"),  # type: ignore[arg-type]
        (lambda: make_law("exponental", mean_s=1.0), "exponential"),
        (lambda: make_law("constant", means=1.0), "means"),
        (lambda: Cluster(0, Constant(1.0)), "workers"),
        (lambda: Cluster(2, [Constant(1.0)]), "compute"),
        (lambda: Cluster(2, 0.1), "compute"),  # type: ignore[arg-type]
        (lambda: Cluster(2, Constant(1.0), slowdown={2: 3.0}), "slowdown"),
        (lambda: Cluster(2, Constant(1.0), slowdown={1: 0.5}), "slowdown"),
        (lambda: Cluster(2, Constant(1.0), failures={0: -1.0}), "failures"),
        (lambda: Cluster(2, Constant(1.0), failures={5: 1.0}), "failures"),
        (lambda: Cluster(2, Constant(1.0), backward_share=1.1), "backward_share"),
        (lambda: Cluster.measured({"strategy": "ddp"}), "record"),
        (lambda: Cluster.measured({"workers": [{"rank": 0, "spans": []}]}), "record"),
        (lambda: Cluster.measured({"workers": [{"rank": 0, "spans": 3}]}), "record"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, key: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=key):
        make()
