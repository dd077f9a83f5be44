"""The graph of the survivors: connected, bipartite where it was, and never worse than what is left."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.adpsgd.partner_sampler import resolve_roles
from lightning_gossip.algorithm.adpsgd.repair import repaired, topology_for
from lightning_gossip.algorithm.topology.generators import TOPOLOGIES, make_topology, ring, star
from lightning_gossip.algorithm.topology.topology import Topology

SIZES = {"torus": (4, 6, 8, 9, 12), "hypercube": (2, 4, 8, 16), "exponential": (2, 4, 8, 12)}


@st.composite
def losses(draw: st.DrawFn) -> tuple[Topology, list[int]]:
    name = draw(st.sampled_from(sorted(TOPOLOGIES)))
    n = draw(st.sampled_from(SIZES.get(name, tuple(range(2, 13)))))
    left = draw(st.sets(st.integers(0, n - 1), min_size=1))
    return make_topology(name, n), sorted(left)


@given(losses())
def test_the_survivors_stay_connected_keep_their_edges_and_their_bipartition(loss: tuple[Topology, list[int]]) -> None:
    whole, left = loss
    graph = repaired(whole, left)  # a Topology is connected, or its construction fails
    assert graph.n == len(left)
    kept = {(i, j) for i in range(graph.n) for j in range(i + 1, graph.n) if whole.graph.has_edge(left[i], left[j])}
    added = set(graph.edges) - kept
    assert kept <= set(graph.edges)
    assert len(added) == nx.number_connected_components(whole.graph.subgraph(left)) - 1
    if whole.bipartition is not None:
        assert graph.bipartition is not None


def test_a_ring_that_has_lost_workers_becomes_a_chain() -> None:
    graph = repaired(ring(8), [0, 1, 3, 4, 6, 7])
    assert sorted(graph.degree(rank) for rank in range(6)) == [1, 1, 2, 2, 2, 2]


def test_the_leaves_of_a_star_find_each_other_when_the_hub_is_gone() -> None:
    assert repaired(star(5), [1, 2, 3, 4]).n == 4


@given(st.data())
def test_every_set_of_members_has_a_topology(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from((2, 4, 8)))
    spec: str | Topology | list[tuple[int, int]] = data.draw(st.sampled_from([*sorted(TOPOLOGIES), ring(size)]))
    if spec == "torus" and size == 2:
        return  # a prime
    members = data.draw(st.lists(st.integers(0, size + 2), min_size=1, max_size=size + 2, unique=True))
    topology = topology_for(spec, members, size, "auto")
    assert topology.n == len(members)


def test_a_named_graph_is_what_a_run_of_that_size_would_have() -> None:
    assert topology_for("ring", [0, 2, 3], 4, "auto") == ring(3)


@pytest.mark.parametrize(("spec", "left"), [("exponential", [0, 1, 2, 4, 5, 6, 7]), ("ring", [0, 1, 3])])
def test_where_the_name_does_not_take_the_number_or_the_roles_the_old_graph_is_repaired(spec: str, left: list[int]) -> None:
    size = 8 if spec == "exponential" else 4
    topology = topology_for(spec, left, size, "bipartite")
    assert resolve_roles(topology, "bipartite") == "bipartite"
    assert topology == repaired(make_topology(spec, size), left)


def test_auto_keeps_the_kind_of_graph_that_the_run_began_with_and_grows_into_the_other() -> None:
    left = [0, 1, 2, 4, 5, 6, 7]
    assert topology_for("auto", left, 8, "auto") == repaired(make_topology("exponential", 8), [0, 1, 2, 3, 4, 5, 6])
    assert topology_for("auto", [0, 1, 2, 4, 5], 6, "auto") == ring(5)
    assert topology_for("auto", list(range(8)), 4, "auto") == make_topology("exponential", 8)


@pytest.mark.parametrize("size", [7, 8])
def test_auto_has_the_roles_that_are_asked_for_whoever_has_died(size: int) -> None:
    topology = topology_for("auto", [0, 1, 2, 4, 5], size - size % 2, "bipartite")
    assert resolve_roles(topology, "bipartite") == "bipartite"
