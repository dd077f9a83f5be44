"""All connections stand after about as many steps as the largest degree, however many workers there are."""

from __future__ import annotations

import pytest

from lightning_gossip.algorithm.adpsgd.repair import repaired
from lightning_gossip.algorithm.topology.edge_order import edge_colours, edge_order
from lightning_gossip.algorithm.topology.generators import bipartite_complete, complete, exponential, ring, star, torus
from lightning_gossip.algorithm.topology.topology import Topology

GRAPHS = [
    *(ring(n) for n in (2, 3, 4, 5, 8, 64, 101)),
    *(complete(n) for n in (2, 7, 16)),
    star(9),
    torus(36),
    exponential(64),
    bipartite_complete(12),
    repaired(ring(12), [0, 1, 2, 4, 5, 8, 9, 11]),
]


def steps(order: list[list[int]]) -> int:
    """Until all edges stand, if each worker comes to one after the other and an edge takes both ends one step."""
    waiting, count = [list(peers) for peers in order], 0
    while any(waiting):
        met = [
            (rank, peers[0])
            for rank, peers in enumerate(waiting)
            if peers and rank < peers[0] and waiting[peers[0]][:1] == [rank]
        ]
        assert met, "a cycle of waits"
        for rank, peer in met:
            del waiting[rank][0], waiting[peer][0]
        count += 1
    return count


@pytest.mark.parametrize("topology", GRAPHS, ids=lambda topology: f"{topology.name} {topology.n}")
def test_edges_that_share_a_worker_differ_in_colour(topology: Topology) -> None:
    colours = edge_colours(topology)
    assert set(colours) == set(topology.edges)
    for rank in range(topology.n):
        at_rank = [colour for edge, colour in colours.items() if rank in edge]
        assert len(set(at_rank)) == len(at_rank) == topology.degree(rank)


@pytest.mark.parametrize("topology", GRAPHS, ids=lambda topology: f"{topology.name} {topology.n}")
def test_all_edges_stand_after_about_as_many_steps_as_the_largest_degree(topology: Topology) -> None:
    degree = max(topology.degree(rank) for rank in range(topology.n))
    order = [edge_order(topology, rank) for rank in range(topology.n)]
    assert [sorted(peers) for peers in order] == [list(topology.neighbours(rank)) for rank in range(topology.n)]
    assert steps(order) <= max(1, 2 * degree - 1)


@pytest.mark.parametrize(
    "topology",
    [
        *(ring(n) for n in (8, 16, 32, 64)),
        *(star(n) for n in (9, 64)),
        *(exponential(n) for n in (8, 12, 16, 64, 100, 256)),
        *(complete(n) for n in (8, 16, 64)),
        torus(64),
        bipartite_complete(16),
    ],
    ids=lambda topology: f"{topology.name} {topology.n}",
)
def test_the_usual_graphs_stand_after_as_many_steps_as_the_largest_degree(topology: Topology) -> None:
    degree = max(topology.degree(rank) for rank in range(topology.n))
    assert steps([edge_order(topology, rank) for rank in range(topology.n)]) == degree
    by_rank = steps([sorted(topology.neighbours(rank)) for rank in range(topology.n)])
    assert by_rank == degree if topology.name == "star" else by_rank > 1.5 * degree  # shows that the order can fail


@pytest.mark.parametrize("topology", [ring(33), complete(15), repaired(exponential(64), [*range(60)])])
def test_an_odd_graph_takes_a_step_or_two_more(topology: Topology) -> None:
    degree = max(topology.degree(rank) for rank in range(topology.n))
    assert steps([edge_order(topology, rank) for rank in range(topology.n)]) <= degree + 2


def test_a_longer_ring_takes_no_longer() -> None:
    longer = ring(200)
    assert steps([edge_order(longer, rank) for rank in range(longer.n)]) <= 3
