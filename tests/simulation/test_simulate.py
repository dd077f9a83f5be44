"""The one call: its arguments, its endings, what it returns."""

from __future__ import annotations

import json

import pytest
import torch

from lightning_gossip.algorithm.topology.generators import ring
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import (
    SGD,
    STRATEGIES,
    Cluster,
    Constant,
    Epochs,
    Exponential,
    Links,
    Quadratic,
    RandomSlowdowns,
    Recording,
    Steps,
    make_strategy,
    simulate,
)

CLUSTER = Cluster(4, Exponential(1.0))


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_an_objective_there_are_times_only(name: str) -> None:
    result = simulate(name, CLUSTER, work=Epochs(number=2, batches=40))
    assert result.ended == "done"
    assert len(result.epoch_times_s) == 2
    assert sum(result.epoch_times_s) == pytest.approx(result.time_s)
    assert result.steps == 80
    assert result.points == []
    assert result.models is None
    assert json.loads(json.dumps(result.summary()))["train_loss"] is None


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_arguments_give_the_same_result_to_the_bit(name: str) -> None:
    def run(seed: int):  # type: ignore[no-untyped-def]
        return simulate(
            name,
            CLUSTER,
            work=Epochs(number=2, batches=40),
            objective=Quadratic([0.5, 1.0], noise=0.1),
            links=Links(latency_s=0.01, bandwidth=50.0, slowdowns=RandomSlowdowns(probability=0.2, factor=5.0, period_s=3.0)),
            seed=seed,
            recording=Recording(trace=True),
        )

    first, second, other = run(1), run(1), run(2)
    assert first.trace == second.trace
    assert first.points == second.points
    assert torch.equal(first.models, second.models)
    assert first.points != other.points


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_ends_at_a_loss_at_a_time_or_when_it_diverges(name: str) -> None:
    problem, work = Quadratic([1.0]), Steps(number=400)
    every = Recording(evaluate_every=4)
    target = simulate(name, CLUSTER, work=work, objective=problem, target_loss=0.05, recording=every)
    assert target.ended == "target"
    assert target.loss is not None
    assert target.loss <= 0.05 < target.points[-2].loss
    assert target.time_to(0.05) == target.points[-1].time_s
    assert target.time_to(0.0) is None
    over = simulate(name, CLUSTER, work=work, objective=problem, until_s=20.0)
    assert over.ended == "until"
    assert 0.0 < over.time_s <= 20.0
    diverged = simulate(name, CLUSTER, work=Steps(number=3000), objective=problem, optimizer=SGD(lr=20.0), recording=every)
    assert diverged.ended == "diverged"


def test_names_and_options_are_those_of_the_lightning_strategies() -> None:
    strategy = make_strategy("adpsgd", topology=ring(4), checkpoint="mean", start_method="popen", exchange_timeout_s=9.0)
    assert strategy.graph_name(4) == "ring"
    assert [make_strategy("adpsgd").graph_name(n) for n in (7, 8)] == ["ring", "exponential"]
    assert simulate(strategy, CLUSTER, work=Steps(number=2)).summary()["topology"] == "ring"
    assert make_strategy("allreduce") == make_strategy("ddp")
    assert make_strategy("adaptive_averaging").name == "adaptive_averaging"


def test_a_small_objective_may_stand_for_a_large_model() -> None:
    links = Links(bandwidth=100.0)
    small = simulate("ddp", CLUSTER, work=Steps(number=5), objective=Quadratic([1.0]), links=links)
    large = simulate("ddp", CLUSTER, work=Steps(number=5), objective=Quadratic([1.0]), links=links, model_bytes=10_000)
    assert small.model_bytes == 8
    assert large.time_s > small.time_s + 5 * 100.0
    assert large.loss == small.loss


def test_a_cluster_in_which_all_links_are_slow_at_random_slows_all_reduce_more_than_gossip() -> None:
    slow = Links(bandwidth=1e3, slowdowns=RandomSlowdowns(probability=0.02, factor=10.0, period_s=1.0))
    work, nbytes = Steps(number=50), 400
    cluster = Cluster(32, Constant(1.0))
    ratios = [
        simulate(name, cluster, work=work, links=slow, model_bytes=nbytes).time_s
        / simulate(name, cluster, work=work, links=Links(bandwidth=1e3), model_bytes=nbytes).time_s
        for name in ("adpsgd", "ddp")
    ]
    assert ratios[0] < 1.1
    assert ratios[1] > 2.0


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"strategy": "adpsdg"}, "adpsgd"),
        ({"strategy": 3}, "strategy"),
        ({"cluster": 4}, "cluster"),
        ({"work": 10}, "work"),
        ({"links": 1.0}, "links"),
        ({"links": Links.one_slow(0, 7, 2.0)}, "slow"),
        ({"objective": "digits"}, "objective"),
        ({"optimizer": 0.1}, "optimizer"),
        ({"model_bytes": -1}, "model_bytes"),
        ({"seed": -1}, "seed"),
        ({"recording": True}, "recording"),
        ({"target_loss": 0.1}, "target_loss"),
        ({"until_s": float("nan")}, "until_s"),
        ({"strategy": make_strategy("adpsgd", topology=ring(6))}, "topology"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, object], key: str) -> None:
    arguments = {"strategy": "adpsgd", "cluster": CLUSTER, "work": Steps(number=1), **options}
    with pytest.raises(ConfigurationError, match=key):
        simulate(arguments.pop("strategy"), arguments.pop("cluster"), **arguments)  # type: ignore[arg-type]


def test_points_of_the_loss_come_at_a_whole_number_of_steps() -> None:
    with pytest.raises(ConfigurationError, match="evaluate_every"):
        Recording(evaluate_every=0)


@pytest.mark.parametrize("options", [{"topologie": "ring"}, {"roles": "both"}, {"exchanges_per_step": -1.0}])
def test_an_unknown_option_of_a_strategy_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        make_strategy("adpsgd", **options)
