import copy
import math
import pickle
from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.topology.generators import (
    TOPOLOGIES,
    auto,
    bipartite_complete,
    complete,
    exponential,
    from_edges,
    hypercube,
    make_topology,
    ring,
    star,
    torus,
)
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import ConfigurationError

SIZES = (1, 2, 3, 4, 6, 7, 8, 9, 12, 15, 16, 32)


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def torus_rows(n: int) -> int:
    return max(side for side in range(1, math.isqrt(n) + 1) if n % side == 0)


# One row per topology: the sizes it takes, its degree where it is regular (else None), the sizes that are bipartite.
ACCEPTS: dict[str, Callable[[int], bool]] = {
    "ring": lambda n: True,
    "exponential": lambda n: n % 2 == 0 or n == 1,
    "complete": lambda n: True,
    "bipartite_complete": lambda n: True,
    "torus": lambda n: n == 1 or torus_rows(n) > 1,
    "hypercube": is_power_of_two,
    "star": lambda n: True,
    "auto": lambda n: True,
}
DEGREE: dict[str, Callable[[int], int | None]] = {
    "ring": lambda n: min(n - 1, 2),
    "exponential": lambda n: {1: 0, 2: 1, 4: 2, 6: 3, 8: 4, 12: 6, 16: 8, 32: 10}[n],
    "complete": lambda n: n - 1,
    "bipartite_complete": lambda n: n // 2 if n % 2 == 0 or n == 1 else None,
    "torus": lambda n: sum(min(side - 1, 2) for side in (torus_rows(n), n // torus_rows(n))),
    "hypercube": lambda n: n.bit_length() - 1,
    "star": lambda n: n - 1 if n <= 2 else None,
    "auto": lambda n: min(n - 1, 2) if n < 8 else None if n % 2 else {8: 4, 12: 6, 16: 8, 32: 10}[n],
}
BIPARTITE: dict[str, Callable[[int], bool]] = {
    "ring": lambda n: n % 2 == 0 or n == 1,
    "exponential": lambda n: True,
    "complete": lambda n: n <= 2,
    "bipartite_complete": lambda n: True,
    "torus": lambda n: n == 1 or (torus_rows(n) % 2 == 0 and n // torus_rows(n) % 2 == 0),
    "hypercube": lambda n: True,
    "star": lambda n: True,
    "auto": lambda n: n % 2 == 0 or n == 1 or n >= 8,
}
CASES = [(name, n) for name in TOPOLOGIES for n in SIZES if ACCEPTS[name](n)]
REFUSED = [(name, n) for name in TOPOLOGIES for n in SIZES if not ACCEPTS[name](n)]


@st.composite
def connected_graphs(draw: st.DrawFn, max_n: int = 10) -> tuple[int, list[tuple[int, int]]]:
    """A random spanning tree under random labels, and random further edges, some of them twice or turned round."""
    n = draw(st.integers(1, max_n))
    labels = draw(st.permutations(range(n)))
    edges = [(labels[draw(st.integers(0, child - 1))], labels[child]) for child in range(1, n)]
    if n > 1:
        pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda pair: pair[0] != pair[1])
        edges += draw(st.lists(pairs, max_size=12))
    return n, draw(st.permutations(edges))


@pytest.mark.parametrize(("name", "n"), CASES)
class TestConformance:
    def test_it_has_its_name_and_the_ranks_as_nodes(self, name: str, n: int) -> None:
        topology = TOPOLOGIES[name](n)
        assert topology.name == (name if name != "auto" else "ring" if n < 8 else "exponential")
        assert topology.n == n
        assert list(topology.graph.nodes) == list(range(n))

    def test_every_rank_reaches_every_other(self, name: str, n: int) -> None:
        topology = TOPOLOGIES[name](n)
        reached, border = {0}, {0}
        while border:
            border = {peer for rank in border for peer in topology.neighbours(rank)} - reached
            reached |= border
        assert reached == set(range(n))

    def test_neighbours_are_mutual_sorted_and_others(self, name: str, n: int) -> None:
        topology = TOPOLOGIES[name](n)
        for rank in range(n):
            neighbours = topology.neighbours(rank)
            assert list(neighbours) == sorted(set(neighbours))
            assert rank not in neighbours
            assert all(rank in topology.neighbours(peer) for peer in neighbours)

    def test_edges_and_degrees_say_the_same_as_neighbours(self, name: str, n: int) -> None:
        topology = TOPOLOGIES[name](n)
        from_neighbours = {(i, j) for i in range(n) for j in topology.neighbours(i) if i < j}
        assert list(topology.edges) == sorted(from_neighbours)
        assert [topology.degree(rank) for rank in range(n)] == [len(topology.neighbours(rank)) for rank in range(n)]

    def test_it_has_the_expected_degree_where_it_is_regular(self, name: str, n: int) -> None:
        topology = TOPOLOGIES[name](n)
        degrees = {topology.degree(rank) for rank in range(n)}
        expected = DEGREE[name](n)
        assert degrees == {expected} if expected is not None else len(degrees) > 1

    def test_the_bipartition_really_is_one(self, name: str, n: int) -> None:
        topology = TOPOLOGIES[name](n)
        assert (topology.bipartition is not None) == BIPARTITE[name](n)
        if topology.bipartition is not None:
            initiators, responders = topology.bipartition
            assert initiators | responders == set(range(n))
            assert not initiators & responders
            assert all((i in initiators) != (j in initiators) for i, j in topology.edges)

    def test_initiators_are_the_larger_side_and_on_a_tie_that_of_rank_0(self, name: str, n: int) -> None:
        topology = TOPOLOGIES[name](n)
        if topology.bipartition is not None:
            initiators, responders = topology.bipartition
            assert len(initiators) > len(responders) or (len(initiators) == len(responders) and 0 in initiators)

    def test_copies_are_equal_hash_alike_and_stay_frozen(self, name: str, n: int) -> None:
        topology = TOPOLOGIES[name](n)
        for twin in (pickle.loads(pickle.dumps(topology)), copy.deepcopy(topology), TOPOLOGIES[name](n)):
            assert twin == topology
            assert hash(twin) == hash(topology)
            with pytest.raises(nx.NetworkXError):
                twin.graph.add_edge(0, n)

    def test_make_topology_finds_it_by_name(self, name: str, n: int) -> None:
        assert make_topology(name, n) == TOPOLOGIES[name](n)


@pytest.mark.parametrize(("name", "n"), REFUSED)
def test_a_size_that_cannot_work_is_refused_with_the_value(name: str, n: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"'{name}': got n={n}\b.* Use "):
        TOPOLOGIES[name](n)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("n", [0, -4, 2.0, "8", None])
def test_what_is_no_number_of_workers_is_refused(name: str, n: object) -> None:
    with pytest.raises(ConfigurationError, match="n must be an integer >= 1"):
        TOPOLOGIES[name](n)  # type: ignore[arg-type]


def test_the_suite_covers_every_topology() -> None:
    assert set(TOPOLOGIES) == set(ACCEPTS) == set(DEGREE) == set(BIPARTITE)
    assert {name for name, _ in CASES} == set(TOPOLOGIES)


def test_a_ring_joins_each_rank_to_the_next() -> None:
    assert ring(4).edges == ((0, 1), (0, 3), (1, 2), (2, 3))


@pytest.mark.parametrize(("n", "degree"), [(4, 2), (8, 4), (16, 8), (32, 10), (128, 14)])
def test_the_exponential_graph_has_the_published_degrees(n: int, degree: int) -> None:
    topology = exponential(n)
    assert {topology.degree(rank) for rank in range(n)} == {degree}


def test_the_exponential_graph_has_odd_hops_in_both_directions() -> None:
    hops = {1, 3, 5, 9, 17}
    assert exponential(32).neighbours(7) == tuple(sorted({(7 + s * hop) % 32 for hop in hops for s in (1, -1)}))


def test_bipartite_complete_has_even_ranks_on_one_side() -> None:
    assert bipartite_complete(5).bipartition == (frozenset({0, 2, 4}), frozenset({1, 3}))
    assert len(bipartite_complete(5).edges) == 6


def test_a_torus_wraps_its_rows_and_columns() -> None:
    assert torus(16).neighbours(0) == (1, 3, 4, 12)


def test_a_torus_of_two_rows_has_one_edge_between_them() -> None:
    assert torus(6).neighbours(0) == (1, 2, 3)


def test_a_hypercube_joins_ranks_that_differ_in_one_bit() -> None:
    topology = hypercube(16)
    assert all((i ^ j).bit_count() == 1 for i, j in topology.edges)
    assert len(topology.edges) == 16 * 4 // 2


def test_the_leaves_of_a_star_initiate() -> None:
    assert star(5).bipartition == (frozenset({1, 2, 3, 4}), frozenset({0}))


@given(connected_graphs())
def test_from_edges_keeps_exactly_the_given_edges(graph: tuple[int, list[tuple[int, int]]]) -> None:
    n, edges = graph
    topology = from_edges(n, edges, name="mine")
    assert topology.name == "mine"
    assert topology.n == n
    assert set(topology.edges) == {(min(edge), max(edge)) for edge in edges}


@given(connected_graphs())
def test_there_is_a_bipartition_exactly_if_no_cycle_is_odd(graph: tuple[int, list[tuple[int, int]]]) -> None:
    n, edges = graph
    topology = from_edges(n, edges)
    adjacency = np.zeros((n, n), dtype=np.int64)
    for i, j in topology.edges:
        adjacency[i, j] = adjacency[j, i] = 1
    closed_odd_walks = sum(int(np.trace(np.linalg.matrix_power(adjacency, k))) for k in range(1, n + 1, 2))
    assert (topology.bipartition is None) == (closed_odd_walks > 0)
    if topology.bipartition is not None:
        assert all((i in topology.bipartition[0]) != (j in topology.bipartition[0]) for i, j in topology.edges)


def test_from_edges_takes_numpy_integers_and_lists() -> None:
    assert from_edges(3, np.array([[0, 1], [1, 2]])) == from_edges(3, [[1, 0], [2, 1]])


def test_topologies_of_other_edges_size_or_name_are_not_equal() -> None:
    assert len({ring(4), ring(6), complete(4), from_edges(4, ring(4).edges), from_edges(3, [(0, 1), (1, 2)])}) == 5
    assert ring(4) != "ring"


def test_the_callers_graph_is_copied_without_its_attributes_and_left_alone() -> None:
    graph = nx.path_graph(3)
    graph.add_edge(0, 1, weight=7.0)
    topology = Topology("path", graph)
    graph.add_edge(0, 2)
    assert topology.edges == ((0, 1), (1, 2))
    assert topology.graph.edges[0, 1] == {}


def test_a_topology_is_immutable() -> None:
    topology = ring(4)
    with pytest.raises(AttributeError):
        topology.name = "other"  # type: ignore[misc]
    with pytest.raises(nx.NetworkXError):
        topology.graph.remove_edge(0, 1)


def test_the_repr_shows_size_and_not_an_address() -> None:
    assert repr(ring(4)) == "Topology(name='ring', n=4, edges=4)"


@pytest.mark.parametrize("rank", [-1, 4, 1.5, None])
def test_a_rank_outside_the_graph_is_refused(rank: object) -> None:
    with pytest.raises(ConfigurationError, match=r"integers in \[0, 4\)"):
        ring(4).neighbours(rank)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"integers in \[0, 4\)"):
        ring(4).degree(rank)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (nx.DiGraph([(0, 1)]), "DiGraph; a topology is an undirected simple graph"),
        (nx.MultiGraph([(0, 1)]), "MultiGraph; a topology is an undirected simple graph"),
        (nx.Graph(), "nodes must be exactly the ranks"),
        (nx.Graph([(1, 2)]), r"got the nodes \[1, 2\].*convert_node_labels_to_integers"),
        (nx.Graph([("a", "b")]), "nodes must be exactly the ranks"),
        (nx.Graph([(0, 1), (1, 1)]), r"ranks \[1\] are joined to themselves"),
        (nx.Graph([(0, 1), (2, 3)]), r"2 parts.*for example \(0, 2\)"),
        (nx.empty_graph(20), "20 parts"),
        (nx.path_graph(range(1, 30)), "29 in all"),
    ],
)
def test_a_graph_that_cannot_work_is_refused_with_the_reason(graph: "nx.Graph[int]", message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Topology("mine", graph)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 3)], r"edge \(0, 3\); both ends must be ranks in \[0, 3\)"),
        ([(-1, 0)], r"edge \(-1, 0\); both ends must be ranks in \[0, 3\)"),
        ([(0, 1, 2)], r"edge \(0, 1, 2\); an edge is a pair"),
        ([0, 1], "edge 0; an edge is a pair"),
        ([(0, 1.5)], "an edge is a pair"),
        (["ab"], "an edge is a pair"),
        ([(0, 1), (1, 1), (1, 2)], "joined to themselves"),
        ([(0, 1)], "2 parts"),
        ([], "3 parts"),
    ],
)
def test_edges_that_cannot_work_are_refused_with_the_reason(edges: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        from_edges(3, edges)


def test_make_topology_takes_edges_and_passes_a_topology_through() -> None:
    mine = ring(4)
    assert make_topology(mine, 4) is mine
    assert make_topology([(0, 1), (1, 2)], 3) == from_edges(3, [(0, 1), (1, 2)])


def test_make_topology_suggests_the_name_that_was_meant() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown topology 'exponentail'; .*ring.*Did you mean 'exponential'\?"):
        make_topology("exponentail", 8)


def test_make_topology_lists_the_names_if_none_is_close() -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_topology("xyz", 8)
    assert all(name in str(caught.value) for name in TOPOLOGIES)
    assert "Did you mean" not in str(caught.value)


def test_make_topology_refuses_a_topology_of_another_size() -> None:
    with pytest.raises(ConfigurationError, match="4 ranks for 8 workers"):
        make_topology(ring(4), 8)


def test_make_topology_refuses_what_is_no_topology() -> None:
    with pytest.raises(ConfigurationError, match="got 3 as the topology"):
        make_topology(3, 8)  # type: ignore[arg-type]


def test_auto_is_a_ring_of_few_and_exponential_from_eight_on() -> None:
    assert [auto(n) for n in (1, 2, 5, 7)] == [ring(n) for n in (1, 2, 5, 7)]
    assert [auto(n) for n in (8, 16, 128)] == [exponential(n) for n in (8, 16, 128)]


@pytest.mark.parametrize("n", [9, 11, 15, 127])
def test_auto_of_an_odd_number_is_that_of_one_more_without_its_last(n: int) -> None:
    assert set(auto(n).edges) == {edge for edge in exponential(n + 1).edges if n not in edge}
    assert auto(n).bipartition is not None


@pytest.mark.parametrize("n", [2, 3, 5, 7])
def test_auto_of_a_run_that_began_with_eight_stays_exponential(n: int) -> None:
    assert auto(n, begun_with=8).name == "exponential"
    assert auto(n, begun_with=8).bipartition is not None
    assert auto(n, begun_with=7) == ring(n)
