"""Nodes with unequal numbers of ranks: refused before anything is trained, with what to start instead."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.strategies import Strategy

from lightning_gossip import ADPSGDStrategy, ConfigurationError, PeriodicAveragingStrategy, ShardedADPSGDStrategy
from lightning_gossip.errors import PeerError
from tests.strategies.jobs import job
from tests.strategies.models import Net, loader, trainer
from tests.strategies.test_sharded import ShardedNet

MAKE: dict[str, Callable[[], Strategy]] = {
    "islands": lambda: ADPSGDStrategy(island="node", timeout=30.0),
    "shards": lambda: ShardedADPSGDStrategy(timeout=30.0),
    "averaging": lambda: PeriodicAveragingStrategy(island="node", timeout=30.0),
    "workers": lambda: ADPSGDStrategy(timeout=30.0),
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "test",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
    "WORLD_SIZE": "3",  # of a node with two ranks and one with one
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
}


def _model(name: str) -> Any:
    return ShardedNet() if name == "shards" else Net()


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("devices", [2, 1])
def test_torchrun_says_how_many_ranks_there_are(name: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in TORCHRUN.items():
        monkeypatch.setenv(variable, value)
    words = (
        rf"devices={devices} on this node × num_nodes=2 are {2 * devices} ranks, and the job has 3\. Each node needs equally"
    )
    with pytest.raises(ConfigurationError, match=words):
        trainer(strategy=MAKE[name](), devices=devices, num_nodes=2).fit(_model(name), loader(64))


def _by_hand(name: str, hosts: list[int]) -> str:
    """As started without torchrun, by NODE_RANK and LOCAL_RANK: what the fit ends by."""
    rank = int(os.environ["RANK"])
    node, local = next((node, rank - sum(hosts[:node])) for node in range(len(hosts)) if rank < sum(hosts[: node + 1]))
    for variable in [*TORCHRUN, "LOCAL_WORLD_SIZE"]:
        if not variable.startswith("MASTER"):
            os.environ.pop(variable, None)
    os.environ.update(NODE_RANK=str(node), LOCAL_RANK=str(local))
    with pytest.raises((ConfigurationError, PeerError)) as caught:
        trainer(strategy=MAKE[name](), devices=hosts[node], num_nodes=2).fit(_model(name), loader(64))
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", ["islands", "shards"])
def test_of_ranks_that_were_started_by_hand_one_says_it_and_nobody_waits_for_the_others(name: str) -> None:
    with job(_by_hand, name, [2, 1], workers=3) as running:
        running.start_all()
        ends = running.ends(timeout_s=90.0)
    assert any("Each node needs equally many" in end.value for end in ends), ends
    assert all(end.status is not None for end in ends), ends
