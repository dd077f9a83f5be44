"""Nodes, cluster files, traces and slow periods in a configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_gossip import ConfigurationError
from lightning_gossip.simulation import ADPSGD, ClusterFile, Nodes, Samples, SlowPeriod
from recipes.job import make_trainer, plain_errors
from recipes.simulate import compose_strategies
from recipes.simulated.clusters import take_over_file
from recipes.simulated.scenario import Scenario, scenario_of
from recipes.train import CONF

TIMES = ["objective=none", "recipe=digits_mlp", "compute.mean_s=0.1", "run_dir=unused"]


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def composed(*overrides: str) -> DictConfig:
    return compose("simulate", [*TIMES, *overrides])


def scenario(*overrides: str) -> Scenario:
    with plain_errors():
        made = scenario_of(composed(*overrides))
        made.links.check(made.cluster.workers)
        return made


@pytest.mark.parametrize("cluster", sorted(path.stem for path in (CONF / "cluster").glob("*.yaml")))
def test_every_described_cluster_is_nodes_and_is_not_trained_on(cluster: str) -> None:
    made = scenario(f"cluster={cluster}")
    nodes = made.links.nodes
    assert nodes is not None
    numbers = cluster.split("_")[1].split("x")
    assert (nodes.number, nodes.sizes[0]) == (int(numbers[0]), int(numbers[1]))
    assert made.links.bandwidth == int(cluster.split("_")[2].removesuffix("g")) * 1e9 / 8
    assert (nodes.racks is not None) == cluster.startswith("racks")
    with pytest.raises(ConfigurationError, match=r"cluster describes .*nodes.*Write trainer\.devices and trainer\.num_nodes"):
        make_trainer(compose("config", [f"cluster={cluster}", "run_dir=unused"]))


def test_a_described_cluster_takes_further_overrides() -> None:
    made = scenario("cluster=nodes_16x8_10g", "trainer.num_nodes=4", "links.nodes.racks=2", "links.nodes.slow={1:4,0-3:10}")
    assert made.cluster.workers == 32
    assert made.links.nodes is not None
    assert (made.links.nodes.racks, made.links.nodes.slow) == ((0, 0, 1, 1), {1: 4.0, (0, 3): 10.0})


def test_several_nodes_share_cards_whatever_the_links_are() -> None:
    made = scenario("links=uniform", "links.bandwidth=1e9", "trainer.devices=4", "trainer.num_nodes=3")
    assert (made.links.nodes, made.links.bandwidth) == (Nodes(sizes=[4, 4, 4]), 1e9)
    assert scenario("links=uniform", "trainer.devices=12").links.nodes is None


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["cluster=nodes_16x8_10g", "links.nodes.racks=3"], "racks=3"),
        (["cluster=nodes_16x8_10g", "links.nodes.slow={16:2}"], "nodes.slow names 16"),
        (["cluster=nodes_16x8_10g", "links.nodes.slow={a:2}"], "links.nodes.slow names 'a'.*node"),
        (["cluster=nodes_16x8_10g", "links.all_reduce=star"], "all_reduce='star'"),
        (["trainer.num_nodes=0"], "trainer.num_nodes=0"),
        (["cluster_file=/nowhere.json"], "cluster_file=/nowhere.json"),
        (["compute.trace=/nowhere.csv"], "compute.trace=/nowhere.csv"),
        (["slow_periods=[{rank:9,from_s:1,until_s:2,factor:3}]"], "slow_periods names the rank 9"),
        (["slow_periods=[{rank:1,from_s:1,factor:3}]"], "slow_periods=.*Write for example"),
        (["slow_periods=3"], "slow_periods=3"),
    ],
)
def test_wrong_machines_are_refused_by_name(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        scenario(*overrides)


def test_the_machines_of_a_file_are_simulated(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    ClusterFile(sizes=[2, 2], latency_s=1e-4, bandwidth=1e9, step_s=[[0.1], [0.2], [0.1], [0.1]]).save(path)
    cfg = composed(f"cluster_file={path}")
    take_over_file(cfg, ["seed=3"])
    made = scenario_of(cfg)
    assert (cfg.trainer.devices, cfg.trainer.num_nodes, made.cluster.workers) == (2, 2, 4)
    assert made.cluster.compute[1] == Samples([0.2])  # type: ignore[index]
    assert made.links == ClusterFile.load(path).links()
    for given in ("trainer.devices=8", "links=uniform", "links.bandwidth=1"):
        with pytest.raises(ConfigurationError, match=f"{given} is beside cluster_file"):
            take_over_file(cfg, [given])
    ClusterFile(sizes=[2, 1]).save(path)
    take_over_file(cfg, [])
    assert (cfg.trainer.devices, cfg.trainer.num_nodes) == (3, 1)
    path.write_text(json.dumps({"format": "lightning_gossip.cluster", "version": 9}))
    with pytest.raises(ConfigurationError, match=r"cluster_file=.*version=9"):
        take_over_file(cfg, [])


def test_step_times_from_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("step,rank,step_s\n0,0,0.1\n0,1,0.3\n1,0,0.2\n")
    made = scenario(f"compute.trace={path}", "trainer.devices=2")
    assert made.cluster.compute == (Samples([0.1, 0.2], order="given"), Samples([0.3], order="given"))
    path.write_text("step_s\n0.1\n0.3\n")
    assert scenario(f"compute.trace={path}", "trainer.devices=2").cluster.compute == (Samples([0.1, 0.3]),) * 2


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no column step_s"),
        ("rank,seconds\n0,0.1\n", "no column step_s"),
        ("rank,step_s\n0,0.1\n0,x\n", "line 3"),
        ("rank,step_s\n0,-1\n", "line 2"),
        ("rank,step_s\n7,0.1\n", "line 2.*rank from 0 to 1"),
        ("rank,step_s\n0,0.1\n", r"no step of the ranks \[1\]"),
    ],
)
def test_a_wrong_csv_is_refused_by_its_line(content: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text(content)
    with pytest.raises(ConfigurationError, match=f"(?s)compute.trace=.*{named}"):
        scenario(f"compute.trace={tmp_path / 'steps.csv'}", "trainer.devices=2")


def test_slow_periods_are_those_of_the_simulator() -> None:
    made = scenario("slow_periods=[{rank:1,from_s:2,until_s:8,factor:4}]")
    assert made.cluster.slow_periods == (SlowPeriod(rank=1, from_s=2, until_s=8, factor=4),)


def test_islands_in_a_call_of_several_strategies() -> None:
    given = ["cluster=nodes_8x4_25g", *TIMES]
    names = ["ddp", "adpsgd", "adpsgd_islands"]
    found = compose_strategies(compose("simulate", given), names, given)
    assert [getattr(one, "island", None) for one in found.values()] == [None, 1, "node"]
    two = [*given, "island=2"]
    found = compose_strategies(compose("simulate", two), names, two)
    assert [getattr(one, "island", None) for one in found.values()] == [None, 2, 2]
    (alone,) = compose_strategies(compose("simulate", two), (), two).values()
    assert isinstance(alone, ADPSGD)
    assert alone.island == 2
    assert math.isfinite(scenario(*two).links.bandwidth)
