"""How far the clocks of the workers are apart, from what each measured pair saw of each other's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import networkx as nx

from lightning_gossip.doctor.report import Link


def offsets(workers: int, links: Iterable[Link]) -> list[tuple[float, float] | None]:
    """How far each worker's clock is ahead of rank 0's, in seconds, and how sure that is.

    A pair knows the other's clock to half the round trip of its quickest message (Cristian 1989). From rank 0 to each worker
    the pairs are followed whose errors have the least sum.

    Args:
        workers: n.
        links: measured pairs.

    Returns:
        By rank: offset and error bound, in seconds; None where no chain of pairs leads.
    """
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(workers))
    for link in links:
        if link.clock_s is not None and link.clock_error_s is not None:
            graph.add_edge(link.i, link.j, weight=link.clock_error_s, ahead=link.clock_s)
    found: list[tuple[float, float] | None] = [None] * workers
    for rank, path in nx.single_source_dijkstra_path(graph, 0).items():
        steps = [(1 if one < other else -1, graph[one][other]) for one, other in itertools.pairwise(path)]
        found[rank] = (
            sum((sign * edge["ahead"] for sign, edge in steps), 0.0),
            sum((edge["weight"] for _, edge in steps), 0.0),
        )
    return found
