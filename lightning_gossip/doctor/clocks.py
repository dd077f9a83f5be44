"""How far the clocks of the workers are apart, from what each measured pair saw of each other's."""

from __future__ import annotations

from collections.abc import Iterable

import networkx as nx

from lightning_gossip.doctor.report import Link


def offsets(workers: int, links: Iterable[Link]) -> list[tuple[float, float] | None]:
    """Of each worker's clock to rank 0's: seconds ahead, and how sure that is.

    A pair knows the other's clock to half the round trip of its quickest message (Cristian 1989). From rank 0 to each worker the
    pairs are followed whose errors have the least sum.

    Args:
        workers: n.
        links: measured pairs.

    Returns:
        By rank: offset and error bound, in seconds; None where no chain of pairs leads.
    """
    graph = nx.Graph()
    graph.add_nodes_from(range(workers))
    for link in links:
        if link.clock_s is not None and link.clock_error_s is not None:
            graph.add_edge(link.i, link.j, weight=link.clock_error_s, ahead=link.clock_s)
    found: list[tuple[float, float] | None] = [None] * workers
    errors, paths = nx.single_source_dijkstra(graph, 0)
    for rank, path in paths.items():
        ahead = sum((1 if one < other else -1) * graph[one][other]["ahead"] for one, other in zip(path, path[1:], strict=False))
        found[rank] = (float(ahead), float(errors[rank]))
    return found
