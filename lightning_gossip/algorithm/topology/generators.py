"""The graphs by name: a ring, the exponential graph of the paper, and others.

Every generator takes n = 1 too (plain training, nobody to average with), and raises ConfigurationError for n < 1. To
add one, write the function and its row in `TOPOLOGIES`; the conformance suite then covers it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from lightning_gossip.algorithm.topology.exact_graphs import SEQUENCES
from lightning_gossip.algorithm.topology.mixing import MixingWeights
from lightning_gossip.algorithm.topology.networkx_later import nx
from lightning_gossip.algorithm.topology.sequence import TopologySequence
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.arguments import did_you_mean
from lightning_gossip.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_gossip.algorithm.topology.topology import IntGraph


EXPONENTIAL_FROM = 8  # workers, where ``"auto"`` ends to be a ring


def ring(n: int) -> Topology:
    """A cycle: rank i averages with i±1. Bipartite for even n, as in AD-PSGD; an odd one has no sides."""
    n = _size("ring", n)
    return Topology("ring", nx.cycle_graph(n) if n > 1 else nx.empty_graph(1))  # cycle_graph(1) is a self loop


def exponential(n: int) -> Topology:
    """The bipartite exponential graph: hops 1, 3, 5, 9, 17, … = 1 and 1+2^i, in both directions, each hop < n.

    Only odd hops, because an even one would join two ranks of equal parity. Hops h and n-h are the same edges, so the
    degree is 2, 4, 8, 10, 14 for n = 4, 8, 16, 32, 128. Reference: the published AD-PSGD code.

    Raises:
        ConfigurationError: if n > 1 is odd: around an odd cycle odd hops join equal parities too.

    >>> exponential(16).neighbours(0)
    (1, 3, 5, 7, 9, 11, 13, 15)
    """
    n = _size("exponential", n)
    if n > 1 and n % 2:
        raise ConfigurationError(
            f"topology 'exponential': got n={n}; graphs of odd hops are bipartite for an even number of workers only. "
            f"Use {n - 1} or {n + 1} workers, or 'complete', 'bipartite_complete' or 'ring', which take any number."
        )
    hops = [1, *(1 + 2**i for i in range(1, n.bit_length()))]
    return Topology("exponential", nx.circulant_graph(n, [hop for hop in hops if hop < n]))


def auto(n: int, *, begun_with: int = 1) -> Topology:
    """A ring below 8 workers, the exponential graph from 8 on; an odd number has that of one more, without its last rank.

    A ring needs the fewest connections, and mixes the worse the longer it is. A graph is called what it is, ``"ring"`` or
    ``"exponential"``.

    Args:
        n: workers.
        begun_with: as many as the run began with, if more: one of 8 or more workers that loses some stays with the exponential
            graph, which mixes faster and has two sides, where a ring of an odd number has none.

    >>> auto(4).name, auto(8).name, auto(9).bipartition is None, auto(7, begun_with=8).name
    ('ring', 'exponential', False, 'exponential')
    """
    n = _size("auto", n)
    if max(n, begun_with) < EXPONENTIAL_FROM or n == 1:
        return ring(n)
    return Topology("exponential", exponential(n + n % 2).graph.subgraph(range(n)))


def complete(n: int) -> Topology:
    """Everybody may average with everybody. Not bipartite for n > 2."""
    return Topology("complete", nx.complete_graph(_size("complete", n)))


def bipartite_complete(n: int) -> Topology:
    """Every even rank may average with every odd rank. n need not be even."""
    n = _size("bipartite_complete", n)
    evens = (n + 1) // 2
    graph = nx.complete_bipartite_graph(evens, n - evens)  # nodes 0..evens-1 are one side
    ranks = [*range(0, n, 2), *range(1, n, 2)]
    return Topology("bipartite_complete", nx.relabel_nodes(graph, dict(enumerate(ranks))))


def torus(n: int) -> Topology:
    """A two-dimensional grid with wrapped borders, as square as n allows; rank = row × columns + column.

    A side of 2 has one edge and not two between its rows, since going up and down meets the same worker. Bipartite if
    both sides are even.

    Raises:
        ConfigurationError: if n is prime: the grid would be a single row.

    >>> torus(12).neighbours(0)  # 3 rows of 4
    (1, 3, 4, 8)
    """
    n = _size("torus", n)
    rows = max(side for side in range(1, math.isqrt(n) + 1) if n % side == 0)
    if rows == 1 < n:
        raise ConfigurationError(
            f"topology 'torus': got n={n}, a prime; both sides of the grid must be at least 2. "
            "Use a number of workers with two factors (4, 6, 8, 9, ...), or 'ring', which takes any number."
        )
    grid = nx.grid_2d_graph(rows, n // rows, periodic=n > 1)  # a single worker would be wrapped onto itself
    return Topology("torus", nx.convert_node_labels_to_integers(grid, ordering="sorted"))


def hypercube(n: int) -> Topology:
    """Ranks whose binary numbers differ in one bit are neighbours. Bipartite by the parity of the bits.

    Raises:
        ConfigurationError: if n is not a power of two.

    >>> hypercube(8).neighbours(0)
    (1, 2, 4)
    """
    n = _size("hypercube", n)
    dimension = n.bit_length() - 1
    if n != 2**dimension:
        raise ConfigurationError(
            f"topology 'hypercube': got n={n}; it needs a power of two. Use {2**dimension} or {2 ** (dimension + 1)} "
            "workers, or 'exponential', which takes any even number."
        )
    cube = nx.hypercube_graph(dimension) if dimension else nx.empty_graph(1)  # hypercube_graph(0) has no node
    # Nodes are tuples of bits (plain bits in dimension 1): their order is that of the binary numbers.
    return Topology("hypercube", nx.convert_node_labels_to_integers(cube, ordering="sorted"))


def star(n: int) -> Topology:
    """Rank 0 is the hub and all others are its leaves; they start the exchanges (see `Topology.bipartition`)."""
    return Topology("star", nx.star_graph(_size("star", n) - 1))


def from_edges(n: int, edges: Iterable[Iterable[int]], *, name: str = "custom") -> Topology:
    """A topology from a list of edges, for example the links that a cluster really has.

    Args:
        n: workers, >= 1.
        edges: pairs of ranks in [0, n); their order and repetitions do not matter.
        name: what to call it in logs.

    Raises:
        ConfigurationError: if an edge is not a pair of ranks, joins a rank to itself, or the graph is not connected.

    >>> from_edges(3, [(0, 1), (1, 2)]).neighbours(1)
    (0, 2)
    """
    graph: IntGraph = nx.empty_graph(_size(name, n))
    for edge in edges:
        try:
            i, j = (operator.index(end) for end in edge)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"topology {name!r}: got the edge {edge!r}; an edge is a pair of ranks. Write it as (0, 1)."
            ) from None
        if not (0 <= i < n and 0 <= j < n):
            raise ConfigurationError(
                f"topology {name!r}: got the edge {(i, j)}; both ends must be ranks in [0, {n}). "
                "Correct the edge or the number of workers."
            )
        graph.add_edge(i, j)
    return Topology(name, graph)


TOPOLOGIES: Mapping[str, Callable[[int], Topology]] = MappingProxyType(
    {
        "ring": ring,
        "exponential": exponential,
        "complete": complete,
        "bipartite_complete": bipartite_complete,
        "torus": torus,
        "hypercube": hypercube,
        "star": star,
        "auto": auto,
    }
)
"""Name → generator. A new topology is one function above and one row here."""


def make_topology(spec: str | Topology | TopologySequence | Iterable[Iterable[int]], n: int) -> Topology:
    """The topology that a configuration value means.

    Args:
        spec: a name in `TOPOLOGIES`, a `Topology` of n ranks, or the edges for `from_edges`.
        n: workers, >= 1.

    Raises:
        ConfigurationError: for an unknown name, a topology of another size, one that changes from round to round, or whatever
            the generator refuses.
    """
    changing = spec.name if isinstance(spec, TopologySequence) else spec
    if isinstance(spec, TopologySequence) or (isinstance(spec, str) and spec in SEQUENCES):
        raise ConfigurationError(
            f"topology {changing!r} is another graph in each round, and only dpsgd makes rounds together: write strategy=dpsgd"
            f" for it, or here a graph that stays the same ({', '.join(TOPOLOGIES)})."
        )
    if isinstance(spec, Topology):
        if spec.n != n:
            raise ConfigurationError(
                f"got a topology {spec.name!r} of {spec.n} ranks for {n} workers; the two must be equal. "
                f"Build it for {n}, or pass its name and let the number of workers decide."
            )
        return spec
    if isinstance(spec, str):
        if spec not in TOPOLOGIES:
            known = (*TOPOLOGIES, *SEQUENCES)
            hint = did_you_mean(spec, known) or " Write one of these, or pass a list of edges."
            raise ConfigurationError(f"unknown topology {spec!r}; the known ones are {', '.join(known)}.{hint}")
        return TOPOLOGIES[spec](n)
    if not isinstance(spec, Iterable):
        raise ConfigurationError(
            f"got {spec!r} as the topology; it is a name ({', '.join(TOPOLOGIES)}), a Topology, or a list of edges "
            'such as [(0, 1), (1, 2)]. Write for example topology="ring".'
        )
    return from_edges(n, spec)


def make_sequence(
    spec: str | Topology | TopologySequence | Iterable[Iterable[int]], n: int, *, weights: MixingWeights = "metropolis"
) -> TopologySequence:
    """The mixing matrices, one a round, that a configuration value means.

    Args:
        spec: as for :func:`make_topology`, which gives one round; a name in `SEQUENCES`; or a `TopologySequence` of n ranks.
        n: workers, >= 1.
        weights: of a graph that stays the same. The others have their own.

    Raises:
        ConfigurationError: as :func:`make_topology`, and for a sequence of another size.
    """
    if isinstance(spec, TopologySequence):
        if spec.n != n:
            raise ConfigurationError(
                f"got a sequence of topologies {spec.name!r} of {spec.n} ranks for {n} workers; the two must be equal. "
                f"Build it for {n}, or pass its name and let the number of workers decide."
            )
        return spec
    if isinstance(spec, str) and spec in SEQUENCES:
        return SEQUENCES[spec](n)
    return TopologySequence.fixed(make_topology(spec, n), weights)


def _size(name: str, n: int) -> int:
    try:
        size = operator.index(n)
    except TypeError:
        size = 0
    if size < 1:
        raise ConfigurationError(f"topology {name!r}: got n={n!r} workers; n must be an integer >= 1. Pass the world size.")
    return size
