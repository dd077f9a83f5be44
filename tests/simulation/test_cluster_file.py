"""cluster.json: what is written is read, what it says is simulated, and what is wrong in it is said in a sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import ADPSGD, Cluster, ClusterFile, Samples, Steps, simulate

WHOLE = ClusterFile(
    sizes=[2, 2, 1],
    names=["gpu01", "gpu02", "gpu03"],
    cards=[1.25e9, None, 2.5e9],
    inside_latency_s=5e-6,
    inside_bandwidth=1e11,
    latency_s=[[0.0, 5e-5, 6e-5], [5e-5, 0.0, 7e-5], [6e-5, 7e-5, 0.0]],
    bandwidth=[[math.inf, 1.1e9, 1e9], [1.1e9, math.inf, math.inf], [1e9, 9e8, math.inf]],
    racks=["a", "a", "b"],
    uplinks={"a": 2e9, "b": math.inf},
    step_s=[[0.15, 0.16], [0.15], [0.31, 0.3], [0.15], [0.1]],
    about={"by": "a test"},
)


@pytest.mark.parametrize(
    "cluster",
    [
        WHOLE,
        ClusterFile(sizes=[8] * 16, latency_s=5e-5, bandwidth=1.25e9),
        ClusterFile(sizes=[1]),
        ClusterFile(sizes=[1, 1], latency_s=[[0.0, 1.0], [2.0, 0.0]], bandwidth=[[math.inf, 3.0], [4.0, math.inf]]),
    ],
)
def test_what_is_saved_is_loaded(cluster: ClusterFile, tmp_path: Path) -> None:
    cluster.save(tmp_path / "cluster.json")
    again = ClusterFile.load(tmp_path / "cluster.json")
    assert (again.workers, again.names, again.step_s) == (cluster.workers, cluster.names, cluster.step_s)
    assert again.links() == cluster.links()
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "cluster.json").read_text()


def test_the_file_is_what_the_simulator_has() -> None:
    links, laws = WHOLE.links(), WHOLE.laws()
    assert links.nodes is not None
    assert laws is not None
    assert laws[2] == Samples([0.31, 0.3])
    assert links.nodes.cards == (1.25e9, math.inf, 2.5e9)  # the second's is the most of its pairs
    fabric = links.fabric
    assert (fabric.latency_s(0, 1), fabric.latency_s(1, 2), fabric.latency_s(2, 4)) == (5e-6, 5e-5, 7e-5)
    assert (fabric.limit(0, 2), fabric.limit(2, 4), fabric.limit(4, 2)) == (1.1e9, 2.5e9, 9e8)
    assert [fabric.names[one] for one in fabric.over(0, 4)] == ["card 0 out", "card 2 in", "uplink 0 out"]
    result = simulate(ADPSGD(topology="ring"), Cluster(5, laws), work=Steps(number=20), links=links, model_bytes=10**6)
    assert result.workers[2].busy_s > 1.8 * result.workers[1].busy_s


def written(**changes: Any) -> dict[str, Any]:
    whole = {
        "format": "lightning_gossip.cluster",
        "version": 1,
        "nodes": [{"ranks": [0, 1], "card_bytes_per_s": 1e9}, {"ranks": [2, 3]}],
        "inside": {"latency_s": 1e-6},
        "between": {"latency_s": 1e-4, "bytes_per_s": [[None, 1e9], [1e9, None]]},
        "step_s": None,
    }
    return {**whole, **changes}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "cannot be read"),
        ([], '"format"'),
        (written(format="other"), '"format"'),
        (written(version=2), "version=2"),
        (written(step=[1]), "'step'.*'step_s'"),
        (written(nodes=[]), "nodes is not a list"),
        (written(nodes=[{"ranks": [0, 2]}]), r"nodes\[0\]\.ranks=\[0, 2\].*the next is 0"),
        (written(nodes=[{"ranks": [0]}, {"ranks": [0]}]), r"nodes\[1\]\.ranks=\[0\].*the next is 1"),
        (written(nodes=[{"ranks": [0]}, {"ranks": []}]), r"nodes\[1\]\.ranks=\[\]"),
        (written(nodes=[{"ranks": [0], "gpus": 4}]), r"nodes\[0\].*'gpus'"),
        (written(nodes=[{"ranks": [0], "card_bytes_per_s": -1}, {"ranks": [1]}]), r"nodes\[0\]\.card_bytes_per_s=-1"),
        (written(nodes=[{"ranks": [0], "rack": "a"}, {"ranks": [1]}]), r"nodes\[1\]\.rack=None"),
        (written(nodes=[{"ranks": [0], "rack": "a"}, {"ranks": [1], "rack": "b"}]), "racks does not describe"),
        (written(racks={"a": {}}), "no node names its rack"),
        (written(inside={"latency_s": -1}), "inside.latency_s=-1"),
        (written(inside={"latency": 1}), "inside=.*latency_s and bytes_per_s"),
        (written(between={"latency_s": [[0, 1]]}), "between.latency_s is neither a number nor a matrix of 2 × 2"),
        (written(between={"bytes_per_s": [[None, 0], [1, None]]}), r"between.bytes_per_s\[0\]\[1\]=0"),
        (written(step_s=[[0.1]]), "1 lists for 4 ranks"),
        (written(step_s=[[0.1], [], [0.1], [0.1]]), r"step_s\[1\] is empty"),
        (written(step_s=[[0.1], ["x"], [0.1], [0.1]]), r"step_s\[1\]\[0\]='x'"),
        (written(step_s=3), "step_s is not a list"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name_and_key(content: object, named: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigurationError, match=f"(?s)cluster_file=.*{named}"):
        ClusterFile.load(path)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.json cannot be read"):
        ClusterFile.load(tmp_path / "nowhere.json")


def test_what_may_be_left_out() -> None:
    file = ClusterFile(sizes=[2, 2])
    assert (file.names, file.laws()) == (("node0", "node1"), None)
    assert file.links().fabric.limit(0, 2) == math.inf
