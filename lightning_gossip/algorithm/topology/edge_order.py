"""In which order the workers make their connections, so that nobody waits for a chain of others.

Both ends of an edge have to come to it, and each worker comes to one edge at a time. If all order their edges by a proper edge
colouring (edges that share a worker differ in colour), an edge waits for edges of smaller colours only: all stand after as many
steps as there are colours. By rank instead, worker k of a ring waits for worker k − 1, and so for all before it.

Greedily, each edge gets the smallest colour that is free at both of its ends: at most 2Δ − 1 colours for the largest degree Δ
(Vizing's theorem: Δ or Δ + 1 would do). Edges of the same hop, j − i modulo n, are cycles, and come in the order of walking
along them, so that two colours alternate there. With an even number of workers a ring, an exponential and a complete graph then
have Δ colours.
"""

from __future__ import annotations

import math
from functools import cache

from lightning_gossip.algorithm.topology.topology import Topology


def edge_colours(topology: Topology) -> dict[tuple[int, int], int]:
    """A proper colouring of the edges, the same wherever it is computed.

    Args:
        topology: the graph.

    Returns:
        The colour of each edge (i, j) with i < j, counted from 0.

    >>> from lightning_gossip.algorithm.topology.generators import ring
    >>> edge_colours(ring(4))
    {(0, 1): 0, (1, 2): 1, (2, 3): 0, (0, 3): 1}
    """
    n = topology.n

    @cache
    def step(hop: int) -> tuple[int, int]:
        """How many cycles the edges of this hop make, and by how many places each edge goes on in one."""
        cycles = math.gcd(hop, n)
        return cycles, pow(hop // cycles, -1, n // cycles)

    def place(edge: tuple[int, int]) -> tuple[int, int, int]:
        """Hop, cycle and place in it."""
        first, hop = edge[0], edge[1] - edge[0]
        if 2 * hop > n:
            first, hop = edge[1], n - hop
        cycles, inverse = step(hop)
        return hop, first % cycles, first // cycles * inverse % (n // cycles)

    used = [0] * topology.n  # at each worker, a bit for each colour
    colours = {}
    for i, j in sorted(topology.edges, key=place):
        taken = used[i] | used[j]
        free = ~taken & (taken + 1)  # the lowest bit that is not set
        used[i] |= free
        used[j] |= free
        colours[i, j] = free.bit_length() - 1
    return colours


def edge_order(topology: Topology, rank: int) -> list[int]:
    """The neighbours of a worker in the order in which it connects with them.

    Args:
        topology: the graph.
        rank: whose neighbours.

    >>> from lightning_gossip.algorithm.topology.generators import ring
    >>> [edge_order(ring(4), rank) for rank in range(4)]
    [[1, 3], [0, 2], [3, 1], [2, 0]]
    """
    colours = edge_colours(topology)
    return sorted(topology.neighbours(rank), key=lambda peer: colours[min(rank, peer), max(rank, peer)])
