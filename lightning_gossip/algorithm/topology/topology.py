"""Communication graphs: who may average with whom.

A `Topology` is an undirected, connected graph over the ranks 0..n-1. AD-PSGD (Lian, Zhang, Zhang, Liu; ICML 2018;
arXiv 1710.06952) uses one random edge of it per exchange, D-PSGD all edges at once. AD-PSGD wants *bipartite* graphs:
where exchanges start from one side only, waits point one way and cannot form a cycle.

letter → name: n → `Topology.n`, the number of workers; E → `Topology.edges`; d_i → `Topology.degree`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lightning_gossip.algorithm.topology.networkx_later import nx
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError

if TYPE_CHECKING:
    # Subscriptable in the stubs only; at run time (typing.get_type_hints) networkx is not there yet.
    IntGraph = nx.Graph[int]
else:
    IntGraph = Any


@clear_arguments
@dataclass(frozen=True, eq=False, repr=False)
class Topology:
    """An immutable, connected, undirected graph over the ranks 0..n-1.

    Hashable, picklable, and equal to another topology of the same name, size and edges.

    Args:
        name: what it is called in logs and summaries, for example ``"ring"``.
        graph: an undirected `networkx.Graph`, nodes exactly 0..n-1, connected, without self loops. Its structure is
            copied and frozen; attributes are dropped, so that no edge weight leaks into a Laplacian.

    Raises:
        ConfigurationError: for a directed or multigraph, other node labels, a self loop, or a graph in several parts.

    >>> from lightning_gossip.algorithm import ring
    >>> square = ring(4)
    >>> square.n, square.edges, square.neighbours(0), square.degree(0)
    (4, ((0, 1), (0, 3), (1, 2), (2, 3)), (1, 3), 2)
    """

    name: str
    graph: IntGraph

    def __post_init__(self) -> None:
        graph = self.graph
        if graph.is_directed() or graph.is_multigraph():
            raise ConfigurationError(
                f"topology {self.name!r}: got a {type(graph).__name__}; a topology is an undirected simple graph. "
                "Convert it with networkx.Graph(graph)."
            )
        n = graph.number_of_nodes()
        if n == 0 or set(graph.nodes) != set(range(n)):
            raise ConfigurationError(
                f"topology {self.name!r}: got the nodes {_shortened(graph.nodes)}; the nodes must be exactly the ranks "
                "0..n-1 with n >= 1. Relabel them with networkx.convert_node_labels_to_integers(graph)."
            )
        loops = sorted(nx.nodes_with_selfloops(graph))
        if loops:
            raise ConfigurationError(
                f"topology {self.name!r}: the ranks {_shortened(loops)} are joined to themselves; a worker averages "
                "with other workers only. Leave these edges out."
            )
        parts = sorted(sorted(part) for part in nx.connected_components(graph))
        if len(parts) > 1:
            raise ConfigurationError(
                f"topology {self.name!r}: the graph falls into {len(parts)} parts, the first is "
                f"{_shortened(parts[0])}; models in different parts never meet. Add edges until every rank reaches "
                f"every other, for example ({parts[0][0]}, {parts[1][0]})."
            )
        plain: IntGraph = nx.Graph()
        plain.add_nodes_from(range(n))
        plain.add_edges_from(sorted((min(i, j), max(i, j)) for i, j in graph.edges))
        object.__setattr__(self, "graph", nx.freeze(plain))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return (self.name, self.n, self.edges) == (other.name, other.n, other.edges)

    def __hash__(self) -> int:
        return hash((self.name, self.n, self.edges))

    def __repr__(self) -> str:
        return f"Topology(name={self.name!r}, n={self.n}, edges={len(self.edges)})"

    @property
    def n(self) -> int:
        """The number of workers."""
        return self.graph.number_of_nodes()

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """All edges (i, j) with i < j, in ascending order."""
        return tuple(sorted((min(i, j), max(i, j)) for i, j in self.graph.edges))

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` may average with, in ascending order.

        Raises:
            ConfigurationError: if `rank` is not in [0, n).
        """
        return tuple(sorted(self.graph.adj[self._checked(rank)]))

    def degree(self, rank: int) -> int:
        """The number of neighbours of `rank`.

        Raises:
            ConfigurationError: if `rank` is not in [0, n).
        """
        return len(self.graph.adj[self._checked(rank)])

    @cached_property
    def bipartition(self) -> tuple[frozenset[int], frozenset[int]] | None:
        """The two sides (initiators, responders) if every edge joins one to the other, else None.

        Initiators are the larger side, on a tie the side that holds rank 0. If each starts one exchange a step, every
        worker of the larger side has about one a step, and the others at least one. The other way round a worker of
        the larger side would be called less than once a step: on a star only 1/(n-1) times.

        >>> from lightning_gossip.algorithm import ring, star
        >>> ring(4).bipartition == (frozenset({0, 2}), frozenset({1, 3}))
        True
        >>> [sorted(side) for side in star(4).bipartition]  # the leaves call the hub
        [[1, 2, 3], [0]]
        >>> ring(5).bipartition is None
        True
        """
        if not nx.is_bipartite(self.graph):
            return None
        colour = nx.bipartite.color(self.graph)
        with_zero = frozenset(rank for rank in colour if colour[rank] == colour[0])
        without_zero = frozenset(colour) - with_zero
        return (with_zero, without_zero) if len(with_zero) >= len(without_zero) else (without_zero, with_zero)

    def _checked(self, rank: int) -> int:
        if rank not in self.graph:
            raise ConfigurationError(
                f"topology {self.name!r}: got rank {rank!r}; ranks are the integers in [0, {self.n}). Pass one of them."
            )
        return rank


def _shortened(nodes: Iterable[Any]) -> str:
    listed = list(nodes)
    return str(listed) if len(listed) <= 8 else f"[{', '.join(map(repr, listed[:8]))}, ... {len(listed)} in all]"
