"""What a transfer between two ranks of a cluster of nodes passes: cards, uplinks of racks, links inside."""

from __future__ import annotations

import math
from functools import lru_cache

from lightning_gossip.simulation.cluster.nodes import Nodes


class Fabric:
    """The capacities of a cluster, and which of them lie between two ranks.

    Args:
        nodes: of the cluster.
        latency_s: between nodes that do not say otherwise.
        card: bytes a second of a node's card, where the nodes do not say otherwise.
        core: bytes a second of a switch that all transfers between nodes share; None for no limit.

    Attributes:
        capacities: bytes a second, by number; all finite.
        names: of them, such as ``"card 3 out"``.
        cards: of each node, the numbers of its card's two directions, out and in; None where a card is infinitely fast.
    """

    def __init__(self, nodes: Nodes, *, latency_s: float, card: float, core: float | None) -> None:
        self._nodes = nodes
        self._latency_s = latency_s
        self.capacities: list[float] = []
        self.names: list[str] = []
        slow = {key: factor for key, factor in nodes.slow.items() if isinstance(key, int)}
        self._card = [
            (card if nodes.cards is None else nodes.cards[node]) / slow.get(node, 1.0) for node in range(nodes.number)
        ]
        self.cards = [self._both_ways(f"card {node}", rate) for node, rate in enumerate(self._card)]
        self._uplinks = [self._both_ways(f"uplink {rack}", rate) for rack, rate in enumerate(self._uplink_rates())]
        self._inside = [self._both_ways(f"rank {rank}", nodes.bandwidth) for rank in range(nodes.workers)]
        self._core = None if core is None or core == math.inf else self._one("core", core)
        self.over = lru_cache(maxsize=None)(self._over)
        self.limit = lru_cache(maxsize=None)(self._limit)

    def latency_s(self, i: int, j: int) -> float:
        """Seconds of a message from rank i to rank j."""
        nodes, a, b = self._nodes, *self._ends(i, j)
        if a == b:
            return nodes.latency_s
        between_s = self._latency_s if nodes.pair_latency_s is None else nodes.pair_latency_s[a][b]
        return between_s * self._pair_factor(a, b)

    def _limit(self, i: int, j: int) -> float:
        """The most bytes a second of one transfer from rank i to rank j."""
        nodes, a, b = self._nodes, *self._ends(i, j)
        if a == b:
            return nodes.bandwidth
        rate = min(self._card[a], self._card[b])
        if nodes.pair_bandwidth is not None:
            rate = min(rate, nodes.pair_bandwidth[a][b])
        return rate / nodes.slow.get((min(a, b), max(a, b)), 1.0)

    def _over(self, i: int, j: int) -> tuple[int, ...]:
        """Numbers of the capacities that a transfer from rank i to rank j shares with others."""
        nodes, a, b = self._nodes, *self._ends(i, j)
        if a == b:
            return tuple(ways[way] for rank, way in ((i, 0), (j, 1)) if (ways := self._inside[rank]) is not None)
        passed = [ways[way] for node, way in ((a, 0), (b, 1)) if (ways := self.cards[node]) is not None]
        if nodes.racks is not None and nodes.racks[a] != nodes.racks[b]:
            passed += [ways[way] for node, way in ((a, 0), (b, 1)) if (ways := self._uplinks[nodes.racks[node]]) is not None]
        return tuple(passed) if self._core is None else (*passed, self._core)

    def _ends(self, i: int, j: int) -> tuple[int, int]:
        return self._nodes.of_rank[i], self._nodes.of_rank[j]

    def _pair_factor(self, a: int, b: int) -> float:
        slow = self._nodes.slow
        return max(slow.get((min(a, b), max(a, b)), 1.0), slow.get(a, 1.0), slow.get(b, 1.0)) if slow else 1.0

    def _uplink_rates(self) -> list[float]:
        nodes = self._nodes
        if nodes.racks is None:
            return []
        if nodes.uplinks is not None:
            return list(nodes.uplinks)
        together = [0.0] * (max(nodes.racks) + 1)
        for node, rack in enumerate(nodes.racks):
            together[rack] += self._card[node] * nodes.slow.get(node, 1.0)
        return [rate / nodes.oversubscription for rate in together]

    def _both_ways(self, name: str, rate: float) -> tuple[int, int] | None:
        return None if rate == math.inf else (self._one(f"{name} out", rate), self._one(f"{name} in", rate))

    def _one(self, name: str, rate: float) -> int:
        self.capacities.append(rate)
        self.names.append(name)
        return len(self.capacities) - 1
