"""The graph of those who are left.

When workers fail the graph is restricted to the present ones, and if it falls into parts, bridges join them. A bridge closes no
cycle, so a bipartite graph stays bipartite and its roles go on excluding cycles of waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_gossip.algorithm.adpsgd.partner_sampler import Roles, resolve_roles
from lightning_gossip.algorithm.topology.generators import auto, make_topology
from lightning_gossip.algorithm.topology.networkx_later import nx
from lightning_gossip.algorithm.topology.options import TopologySpec
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import ConfigurationError


def repaired(topology: Topology, present: Sequence[int]) -> Topology:
    """The topology of the present workers, connected.

    The ends of a bridge are the ranks of fewest neighbours in their parts: a ring that has lost two workers becomes a chain.

    Args:
        topology: of all.
        present: ranks in it, each once; the k-th of them is rank k in the result.

    >>> from lightning_gossip.algorithm.topology.generators import ring, star
    >>> repaired(ring(6), [0, 1, 3, 4]).edges  # 2 and 5 have failed: 0-1 and 3-4, joined
    ((0, 1), (0, 2), (2, 3))
    >>> repaired(star(4), [1, 2, 3]).edges  # the hub has failed
    ((0, 1), (1, 2))
    """
    graph = nx.Graph(topology.graph.subgraph(present))
    graph = nx.relabel_nodes(graph, {rank: number for number, rank in enumerate(present)})
    parts = sorted(nx.connected_components(graph), key=min)
    for before, after in pairwise(parts):
        graph.add_edge(*(min(part, key=lambda rank: (graph.degree(rank), rank)) for part in (before, after)))
    return Topology(topology.name, graph)


def topology_for(spec: TopologySpec, workers: Sequence[int], size: int, roles: Roles) -> Topology:
    """The topology of the present members.

    A graph given by its name is what a run started with that many workers would have, where the name takes their number; any
    other is repaired. With ``"auto"`` a run that began with an exponential graph keeps to it. A member beyond the graph's
    size (a new worker) is tied to the one of fewest neighbours.

    Args:
        spec: the option.
        workers: numbers of the members, in the order of their ranks.
        size: workers at the start.
        roles: the option; a graph that cannot have them is repaired instead.
    """
    members = len(workers)
    if isinstance(spec, str):
        try:
            topology = auto(members, begun_with=size) if spec == "auto" else make_topology(spec, members)
            resolve_roles(topology, roles)
        except ConfigurationError:
            pass  # the name does not take this number of workers: its graph of all is repaired below
        else:
            return topology
    whole = make_topology(spec, size)
    known = [rank for rank, worker in enumerate(workers) if worker < size]
    graph = nx.empty_graph(members)
    if known:
        left = repaired(whole, [workers[rank] for rank in known])
        graph.add_edges_from((known[i], known[j]) for i, j in left.edges)
    attached = list(known)
    for rank in range(members):
        if rank not in known:
            if attached:
                graph.add_edge(rank, min(attached, key=lambda other: (graph.degree(other), other)))
            attached.append(rank)
    return Topology(whole.name, graph)
