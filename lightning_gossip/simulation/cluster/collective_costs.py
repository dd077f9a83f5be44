"""What communication costs, in closed form: from bytes and links.

With n workers, B bytes of a vector, latency ℓ, and b the bandwidth of the slowest link in use (bytes a second):

| what | seconds |
|---|---|
| ring all-reduce | 2 (n − 1) (ℓ + (B/n)/b) |
| ring all-gather | (n − 1) (ℓ + B/b) |
| one way of a pairwise exchange | ℓ + B/b |
| in-cast: n vectors to one server | ℓ + n B/b, and the same back |

In a ring every step waits for its slowest link. On a bottleneck of C bytes a second that all share, b is at most C divided by
the transfers under way at once: n in a ring. (Patarasuk & Yuan 2009 for the ring; the counts are derived.) Where ranks share
nodes see :mod:`lightning_gossip.simulation.cluster.node_collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning_gossip.simulation.cluster import node_collectives
from lightning_gossip.simulation.cluster.links import Links
from lightning_gossip.simulation.cluster.nodes import Nodes


def all_reduce_s(links: Links, ranks: Sequence[int], nbytes: float, *, at_s: float = 0.0, seed: int = 0) -> float:
    """Seconds of an all-reduce of a vector over some ranks; arguments as for :func:`ring_all_reduce_s`."""
    if links.nodes is not None:
        return node_collectives.all_reduce_s(links, ranks, nbytes, at_s=at_s, seed=seed)
    if links.all_reduce != "tree" or len(ranks) == 1:
        return ring_all_reduce_s(links, len(ranks), nbytes, at_s=at_s, seed=seed, ranks=ranks)
    alone = replace(links, nodes=Nodes(sizes=[1] * (max(ranks) + 1)))
    return node_collectives.all_reduce_s(alone, ranks, nbytes, at_s=at_s, seed=seed)


def all_gather_s(links: Links, workers: int, nbytes: float, *, at_s: float = 0.0, seed: int = 0) -> float:
    """Seconds until every worker has everybody's ``nbytes``, in a ring; arguments as for :func:`ring_all_reduce_s`."""
    if links.nodes is not None:
        return node_collectives.all_gather_s(links, range(workers), nbytes, at_s=at_s, seed=seed)
    return ring_all_gather_s(links, workers, nbytes, at_s=at_s, seed=seed)


def islands_all_reduce_s(
    links: Links, islands: Sequence[Sequence[int]], nbytes: float, *, at_s: float = 0.0, seed: int = 0
) -> float:
    """Seconds until all ranks have the mean of their islands' models.

    The ranks of one index reduce their part of the vector over all islands, and those of an island hand their parts round.

    Args:
        links, nbytes, at_s, seed: as for :func:`ring_all_reduce_s`.
        islands: the ranks of each, as many.
    """
    if links.nodes is not None:
        return node_collectives.shards_all_reduce_s(links, islands, nbytes, at_s=at_s, seed=seed)
    rings = zip(*islands, strict=True)  # of the ranks of one index
    part = nbytes / len(islands[0])
    between_s = max(ring_all_reduce_s(links, len(ring), part, at_s=at_s, seed=seed, ranks=ring) for ring in rings)
    return between_s + hand_round_s(links, islands[0], nbytes, at_s=at_s, seed=seed)


def hand_round_s(links: Links, ranks: Sequence[int], nbytes: float, *, at_s: float = 0.0, seed: int = 0) -> float:
    """Seconds until each of an island's k ranks, which have 1/k of a vector each, has all of it."""
    if links.nodes is not None:
        return node_collectives.hand_round_s(links, ranks, nbytes, at_s=at_s, seed=seed)
    return ring_all_gather_s(links, len(ranks), nbytes / len(ranks), at_s=at_s, seed=seed, ranks=ranks)


def ring_all_reduce_s(
    links: Links, workers: int, nbytes: float, *, at_s: float = 0.0, seed: int = 0, ranks: Sequence[int] | None = None
) -> float:
    """Seconds of an all-reduce of a vector over all workers, in a ring by rank.

    Args:
        links: between them.
        workers: n.
        nbytes: of the vector.
        at_s: when it begins, for links that are slow at random.
        seed: of these.
        ranks: of the n, in the order of the ring; default: 0 … n − 1.
    """
    if workers == 1:
        return 0.0
    latency_s, seconds_per_byte = _ring(links, range(workers) if ranks is None else ranks, at_s, seed)
    return 2 * (workers - 1) * (latency_s + nbytes / workers * seconds_per_byte)


def ring_all_gather_s(
    links: Links, workers: int, nbytes: float, *, at_s: float = 0.0, seed: int = 0, ranks: Sequence[int] | None = None
) -> float:
    """Seconds until every worker has everybody's ``nbytes``; arguments as for :func:`ring_all_reduce_s`."""
    if workers == 1:
        return 0.0
    latency_s, seconds_per_byte = _ring(links, range(workers) if ranks is None else ranks, at_s, seed)
    return (workers - 1) * (latency_s + nbytes * seconds_per_byte)


def transfer_s(
    links: Links, i: int, j: int, nbytes: float, *, flows: int = 1, at_s: float = 0.0, seed: int = 0, sharing: float = 1.0
) -> float:
    """Seconds of one transfer from rank i to rank j.

    Args:
        links, nbytes, at_s, seed: as for :func:`ring_all_reduce_s`.
        i, j: the ranks.
        flows: transfers under way at once, for the bottleneck.
        sharing: transfers that divide a port among them.
    """
    factor = links.factor(i, j, at_s, seed)
    seconds_per_byte = factor * sharing / links.bandwidth
    if links.shared is not None:
        seconds_per_byte = max(seconds_per_byte, flows / links.shared)
    return links.latency_s * factor + nbytes * seconds_per_byte


def in_cast_s(links: Links, workers: int, nbytes: float, *, server: int = 0) -> float:
    """Seconds until a server has received the vectors that n workers send it at once (or they its model).

    Args:
        links: between them.
        workers: n.
        nbytes: of a vector.
        server: its rank; where there are nodes the others are all of theirs.
    """
    if links.nodes is not None:
        others = [(rank, server) for rank in range(links.nodes.workers) if rank != server]
        return max(node_collectives.at_once_s(links, others, nbytes, at_s=0.0, seed=0))
    capacity = links.bandwidth if links.shared is None else min(links.bandwidth, links.shared)
    return links.latency_s + workers * nbytes / capacity


def all_reduce_bytes(workers: int, nbytes: int) -> int:
    """Bytes that each worker sends in a ring all-reduce: 2 (n − 1)/n of the vector."""
    return math.ceil(2 * (workers - 1) / workers * nbytes)


def _ring(links: Links, ranks: Sequence[int], at_s: float, seed: int) -> tuple[float, float]:
    """The slowest link's latency and seconds a byte."""
    factor = 1.0
    if links.slow or links.slowdowns is not None:
        after = (*ranks[1:], ranks[0])
        factor = max(links.factor(rank, following, at_s, seed) for rank, following in zip(ranks, after, strict=True))
    seconds_per_byte = factor / links.bandwidth
    if links.shared is not None:
        seconds_per_byte = max(seconds_per_byte, len(ranks) / links.shared)
    return links.latency_s * factor, seconds_per_byte
