"""What collectives cost where ranks share nodes, in closed form.

With n ranks on N nodes of g, B bytes of a vector, latencies ℓ inside and L between nodes, and s the seconds a byte of what is
slowest of all that the transfers pass together:

| what | seconds |
|---|---|
| ring all-reduce | 2 (n − N) ℓ + 2 (N − 1) L + 2 (n − 1)/n B s;  the ring passes each card once, whatever g |
| tree all-reduce | 2 (g − 1) ℓ + 2 ⌊log₂ N⌋ L + B s/0.9;  two trees of nodes, a chain inside, s of all |
| hierarchical all-reduce | reduce-scatter inside, g of B/g between nodes, all-gather inside: rings |
| ring all-gather | (n − N) ℓ + (N − 1) L + (n − 1) B s |

Latencies and the 0.9 are those of NCCL's own model (``ncclTopoTuneModel``), by which it chooses between ring and tree; the
trees are NCCL's. All transfers are taken to be under way at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.cluster.links import Links

_TREE = 0.9  # of the bandwidth: NCCL's


class _Load:
    """Transfers that are under way at once, on all that they pass.

    Args:
        links: of the nodes.
        at_s, seed: of links that are slow at random.
    """

    def __init__(self, links: Links, at_s: float, seed: int) -> None:
        self._links = links
        self._fabric = links.fabric
        self._at_s = at_s
        self._seed = seed
        self._bytes = [0.0] * len(self._fabric.capacities)
        self._longest_s = 0.0
        self._used: dict[int, None] = {}
        self.latency_s = 0.0  # the longest between nodes
        self.inside_s = 0.0  # and inside

    def add(self, i: int, j: int, nbytes: float = 1.0) -> None:
        """Add a transfer from rank i to rank j."""
        links, fabric, nodes = self._links, self._fabric, self._links.nodes
        assert nodes is not None
        factor = links.factor(i, j, self._at_s, self._seed) if links.any_slow else 1.0
        latency_s = fabric.latency_s(i, j) * factor
        if nodes.of_rank[i] == nodes.of_rank[j]:
            self.inside_s = max(self.inside_s, latency_s)
        else:
            self.latency_s = max(self.latency_s, latency_s)
        self._longest_s = max(self._longest_s, nbytes * factor / fabric.limit(i, j))
        for capacity in fabric.over(i, j):
            self._bytes[capacity] += nbytes
            self._used[capacity] = None

    def of(self, i: int, j: int, nbytes: float) -> float:
        """Seconds of one of equal transfers among all that were added, with its latency."""
        links, fabric, capacities = self._links, self._fabric, self._fabric.capacities
        factor = links.factor(i, j, self._at_s, self._seed) if links.any_slow else 1.0
        shared_s = [self._bytes[one] / capacities[one] for one in fabric.over(i, j)]
        return fabric.latency_s(i, j) * factor + max([nbytes * factor / fabric.limit(i, j), *shared_s])

    @property
    def seconds(self) -> float:
        """Seconds until all that was added has gone through, without latency."""
        capacities = self._fabric.capacities
        return max([self._longest_s, *(self._bytes[one] / capacities[one] for one in self._used)])


def all_reduce_s(links: Links, ranks: Sequence[int], nbytes: float, *, at_s: float, seed: int) -> float:
    """Seconds of an all-reduce over some ranks, by the algorithm of the links.

    Args:
        links: with nodes.
        ranks: that take part, in ascending order.
        nbytes: of the vector.
        at_s, seed: of links that are slow at random.

    Raises:
        ConfigurationError: for a hierarchical one over nodes that have different numbers of these ranks.
    """
    if len(ranks) == 1:
        return 0.0
    together = _by_node(links, ranks)
    if links.all_reduce == "hierarchical" and len(together) > 1:
        if len({len(node) for node in together}) > 1:
            raise ConfigurationError(
                "all_reduce='hierarchical' needs as many ranks on each node, also when workers have failed. Write"
                " all_reduce='auto'."
            )
        shards_s = shards_all_reduce_s(links, together, nbytes, at_s=at_s, seed=seed)
        return shards_s + max(hand_round_s(links, node, nbytes, at_s=at_s, seed=seed) for node in together)  # reduce-scatter
    ring_s = _ring(links, ranks, nbytes, 2, at_s, seed, share=1.0 / len(ranks))
    if links.all_reduce == "ring" or len(together) == 1:
        return ring_s
    tree_s = _tree_all_reduce_s(links, together, nbytes, at_s, seed)
    return tree_s if links.all_reduce == "tree" else min(ring_s, tree_s)


def all_gather_s(links: Links, ranks: Sequence[int], nbytes: float, *, at_s: float, seed: int) -> float:
    """Seconds of a ring all-gather of so many bytes of each rank; arguments as for :func:`all_reduce_s`."""
    return _ring(links, ranks, nbytes, 1, at_s, seed) if len(ranks) > 1 else 0.0


def shards_all_reduce_s(
    links: Links, islands: Sequence[Sequence[int]], nbytes: float, *, at_s: float = 0.0, seed: int = 0
) -> float:
    """Seconds of an all-reduce over islands of k ranks: those of one index reduce their 1/k of the vector, and hand it round.

    Args:
        links: with nodes.
        islands: the ranks of each, as many.
        nbytes: of the whole vector.
        at_s, seed: of links that are slow at random.
    """
    count, size = len(islands), len(islands[0])
    load = _Load(links, at_s, seed)
    for ranks in zip(*islands, strict=True):
        for i, j in _hops(ranks):
            load.add(i, j)
    between_s = (
        2 * (count - 1) * (max(load.latency_s, load.inside_s) + nbytes / size / count * load.seconds) if count > 1 else 0.0
    )
    return between_s + max(hand_round_s(links, island, nbytes, at_s=at_s, seed=seed) for island in islands)


def hand_round_s(links: Links, ranks: Sequence[int], nbytes: float, *, at_s: float = 0.0, seed: int = 0) -> float:
    """Seconds until each of an island's ranks, which have 1/k of a vector each, has all of it."""
    return all_gather_s(links, ranks, nbytes / len(ranks), at_s=at_s, seed=seed)


def at_once_s(links: Links, transfers: Sequence[tuple[int, int]], nbytes: float, *, at_s: float, seed: int) -> list[float]:
    """Seconds until each of several transfers of so many bytes has arrived, all under way at once.

    Args:
        links: with nodes.
        transfers: sender and receiver of each.
        nbytes: of each.
        at_s, seed: of links that are slow at random.
    """
    load = _Load(links, at_s, seed)
    for i, j in transfers:
        load.add(i, j, nbytes)
    return [load.of(i, j, nbytes) for i, j in transfers]


def _ring(
    links: Links, ranks: Sequence[int], nbytes: float, times_round: int, at_s: float, seed: int, share: float = 1.0
) -> float:
    load, count, nodes = _Load(links, at_s, seed), len(ranks), len(_by_node(links, ranks))
    for i, j in _hops(ranks):
        load.add(i, j)
    latency_s = (count - nodes) * load.inside_s + (nodes - 1) * load.latency_s
    return times_round * (latency_s + (count - 1) * nbytes * share * load.seconds)


def _tree_all_reduce_s(links: Links, together: Sequence[Sequence[int]], nbytes: float, at_s: float, seed: int) -> float:
    load = _Load(links, at_s, seed)
    for child, parent in double_binary_tree(len(together)):
        for i, j in ((child, parent), (parent, child)):  # sums go up, and the result comes down
            load.add(together[i][0], together[j][0], 0.5 * nbytes)
    for ranks in together:
        for i, j in pairwise(ranks):
            load.add(i, j, nbytes)
            load.add(j, i, nbytes)
    depth = int(math.log2(len(together)))
    inside_s = (max(map(len, together)) - 1) * load.inside_s
    return 2 * (inside_s + depth * load.latency_s) + load.seconds / _TREE


def double_binary_tree(number: int) -> list[tuple[int, int]]:
    """Edges (child, parent) of NCCL's two binary trees, each of which reduces half of a vector.

    A leaf of one is none of the other, but where there are few nodes.

    >>> double_binary_tree(4)
    [(1, 2), (2, 0), (3, 2), (2, 1), (1, 3), (0, 1)]
    """
    first = list(_binary_tree(number))
    if number % 2:
        return first + [((child + 1) % number, (parent + 1) % number) for child, parent in first]
    return first + [(number - 1 - child, number - 1 - parent) for child, parent in first]


def _binary_tree(number: int) -> Iterator[tuple[int, int]]:
    for child in range(1, number):
        bit = child & -child  # the lowest that is set: the height
        parent = (child ^ bit) | (bit << 1)
        yield child, parent if parent < number else child ^ bit


def _hops(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """From each to the next, round."""
    return list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))


def _by_node(links: Links, ranks: Sequence[int]) -> list[list[int]]:
    assert links.nodes is not None
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(links.nodes.of_rank[rank], []).append(rank)
    return list(found.values())
