"""A model that is not finite stays where it is: exchanges, and the parameter server."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.apsgd.server import ParameterServer
from lightning_gossip.algorithm.topology.generators import complete, ring
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import NonFiniteError
from lightning_gossip.runtime.adpsgd.cuda_replica import replica_of
from lightning_gossip.runtime.adpsgd.exchange import Exchanger, Outcome
from lightning_gossip.runtime.apsgd.client import RemoteServer, Update
from lightning_gossip.runtime.apsgd.server import Server
from lightning_gossip.transport import Kind, Message
from tests.runtime.cluster import PATIENCE_S, Cluster, eventually
from tests.transport.memory import MemoryNetwork
from tests.workers import run_threads

FAST_S = 1e-4


def exchanged(models: list[torch.Tensor], chunk: int = 4) -> tuple[list[Replica], list[Outcome]]:
    """Two models after one exchange in chunks of a few elements."""
    network = MemoryNetwork(2)
    replicas = [replica_of([model]) for model in models]
    exchangers = [Exchanger(network.transport(rank), chunk_bytes=4 * chunk, timeout_s=PATIENCE_S) for rank in range(2)]
    outcomes = run_threads([lambda r=r: exchangers[r].run(1 - r, replicas[r]) for r in range(2)], PATIENCE_S)  # type: ignore[misc]
    return replicas, outcomes


@given(places=st.sets(st.integers(0, 19), min_size=1), value=st.sampled_from([math.nan, math.inf, -math.inf]))
@settings(max_examples=40)
def test_both_ends_skip_the_same_chunks_and_the_healthy_one_stays_finite(places: set[int], value: float) -> None:
    models = [torch.randn(20), torch.randn(20)]
    ill = models[1].clone()
    ill[sorted(places)] = value
    before = models[0] + ill
    replicas, outcomes = exchanged([models[0].clone(), ill])
    assert [outcome.refused for outcome in outcomes] == [True, True]
    assert [outcome.mine_finite for outcome in outcomes] == [True, False]
    assert bool(torch.isfinite(replicas[0].published).all())
    healthy = torch.isfinite(before)
    after = replicas[0].published + replicas[1].published
    assert torch.allclose(after[healthy], before[healthy], rtol=0, atol=1e-5)  # the sum, wherever there is one
    first = min(places) // 4 * 4
    assert torch.equal(replicas[0].published[first:], models[0][first:])  # nothing of it from there on


def test_finite_models_that_are_too_far_apart_are_left_alone() -> None:
    replicas, outcomes = exchanged([torch.full((4,), 3e38), torch.full((4,), -3e38)])
    assert all(outcome.refused and outcome.mine_finite for outcome in outcomes)
    assert all(bool(torch.isfinite(replica.published).all()) for replica in replicas)


class Ill(Cluster):
    """Rank 0's model is not finite; the others' are."""

    def __init__(self, graph: Topology, **options: Any) -> None:
        super().__init__(graph, **options)
        self.x[0][1][5] = math.nan

    def healthy_total(self) -> torch.Tensor:
        return self.models()[1:].sum(0)


def test_a_worker_whose_model_is_not_finite_ends_and_the_others_keep_their_sum() -> None:
    cluster = Ill(ring(4))  # rank 0 calls and nobody calls it, so nobody waits for its answer when it has ended
    before = cluster.healthy_total()
    cluster.start()
    try:
        cluster.open_all()
        for rank in range(4):
            cluster.gossips[rank].step(cluster.x[rank], step_s=FAST_S)
        assert eventually(lambda: cluster.gossips[0]._protocol.failure is not None)
        with pytest.raises(NonFiniteError, match="rank 0 is not finite"):
            cluster.gossips[0].step(cluster.x[0], step_s=FAST_S)
        assert eventually(lambda: sum(gossip.counters.refused_nonfinite for gossip in cluster.gossips[1:]) >= 1)
        for rank in range(1, 4):
            assert cluster.gossips[rank]._protocol.failure is None
            cluster.gossips[rank].drain(cluster.x[rank])
        # what rank 0 has sent before its bad chunk is finite, and is half of a difference: so compare with all of it
        assert bool(torch.isfinite(cluster.healthy_total()).all())
        assert torch.allclose(cluster.healthy_total()[20:], before[20:])  # chunks of 10; the bad one is the second
    finally:
        cluster.abandon()


def test_a_worker_may_take_a_neighbours_model_and_go_on() -> None:
    cluster = Ill(complete(4))
    for gossip in cluster.gossips:
        gossip._health._on_nonfinite = "adopt"
    with cluster.running():
        cluster.open_all()
        cluster.step_all(FAST_S)
        assert eventually(lambda: cluster.gossips[0].counters.adopted == 1)
        cluster.step_all(FAST_S)
        cluster.wait_for_exchanges(50)
        cluster.drain_all()
    assert bool(torch.isfinite(cluster.models()).all())
    assert cluster.distance() < 1e-3  # all four average
    assert sum(gossip.counters.refused_nonfinite for gossip in cluster.gossips) >= 1


def two_with_nothing_to_give() -> Cluster:
    cluster = Cluster(ring(2))
    for gossip, x in zip(cluster.gossips, cluster.x, strict=True):
        gossip._health._on_nonfinite = "adopt"
        x[0][:] = math.inf
    return cluster


def refuse_each_other(cluster: Cluster) -> None:
    """A session in which both ask for the other's model."""
    cluster.open_all()
    cluster.step_all(FAST_S)
    assert eventually(lambda: cluster.gossips[0].counters.refused >= 3)
    cluster.drain_all()


def test_a_worker_that_was_given_the_mean_meanwhile_takes_nobodys_model() -> None:
    """Its neighbour had nothing to give before all met."""
    with two_with_nothing_to_give().running() as cluster:
        refuse_each_other(cluster)
        cluster.reset(40)
        cluster.open_all()
        cluster.step_all(FAST_S)
        cluster.wait_for_exchanges(20)
        cluster.drain_all()
    assert [gossip.counters.adopted for gossip in cluster.gossips] == [0, 0]


def test_two_that_both_have_nothing_to_give_refuse_each_other() -> None:
    with two_with_nothing_to_give().running() as cluster:
        refuse_each_other(cluster)
    assert [gossip.counters.adopted for gossip in cluster.gossips] == [0, 0]


def test_without_the_option_everything_is_merged_as_before() -> None:
    cluster = Ill(complete(4))
    for gossip in cluster.gossips:
        gossip._exchanger._refuses = False
    with cluster.running():
        cluster.open_all()
        cluster.step_all(FAST_S)
        cluster.wait_for_exchanges(20)
        cluster.drain_all()
    assert not bool(torch.isfinite(cluster.healthy_total()).all())


# -- the parameter server --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [True, False], ids=["the server's own rank", "another rank"])
@pytest.mark.parametrize("leaving", [False, True], ids=["pull", "leave"])
def test_the_server_refuses_an_update_that_is_not_finite(local: bool, leaving: bool) -> None:
    network = MemoryNetwork(2)
    server = Server(network.transport(0), timeout_s=PATIENCE_S, turn_timeout_s=PATIENCE_S)
    server.start()
    try:
        server.open(1, 7, ParameterServer(torch.ones(5), workers=2, max_staleness=0, on_stale="drop"))
        remote = RemoteServer(network.transport(1), 0, timeout_s=PATIENCE_S, turn_timeout_s=PATIENCE_S)
        link = server if local else remote
        out = torch.empty(5)
        link.pull(1, 7, out)
        bad = Update(torch.tensor([0.0, math.nan, 0.0, 0.0, 0.0]))
        served = link.leave(1, bad) if leaving else link.pull(1, 7, out, bad)
        assert served.refused
        assert served.staleness is None
        assert served.version == 0
        assert server.model.tolist() == [1.0] * 5
        if not leaving:
            good = link.pull(1, 7, out, Update(torch.ones(5)))
            assert (good.refused, good.staleness, good.version) == (False, 0, 1)
            assert out.tolist() == [1.5] * 5
    finally:
        network.transport(1).post(0, Message(Kind.STOP))
        server.close(together=True)
