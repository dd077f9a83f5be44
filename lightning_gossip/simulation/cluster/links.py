"""The links between the workers: latency, bandwidth, slow ones, one bottleneck that all share, nodes.

Every worker has one full-duplex port of the same bandwidth, and every pair a link through the two ports. With nodes the port is
a node's network card, which its ranks share. A slow link or a slow port divides the bandwidth and multiplies the latency by its
factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from lightning_gossip.algorithm.checks import check_choice, check_not_negative, check_positive, is_finite
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.cluster.fabric import Fabric
from lightning_gossip.simulation.cluster.nodes import Nodes
from lightning_gossip.simulation.cluster.slow_links import Slow, slow_links

AllReduceAlgorithm = Literal["auto", "ring", "tree", "hierarchical"]

_MASK = (1 << 64) - 1


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class RandomSlowdowns:
    """Links that are slow at random: in each period each link is slow with a probability, independently of all else.

    What a transfer finds when it begins holds until it ends.

    Args:
        probability: that a link is slow in a period, in [0, 1].
        factor: by how much, ≥ 1.
        period_s: seconds that a link stays as it is, above 0.
    """

    probability: float
    factor: float
    period_s: float

    def __post_init__(self) -> None:
        if not is_finite(self.probability) or not 0.0 <= self.probability <= 1.0:
            raise ConfigurationError(f"slowdowns.probability={self.probability!r} is not in [0, 1]. Write for example 0.01.")
        if not is_finite(self.factor) or self.factor < 1.0:
            raise ConfigurationError(f"slowdowns.factor={self.factor!r} is not a factor of at least 1. Write for example 10.0.")
        check_positive("slowdowns.period_s", self.period_s)

    def factor_of(self, seed: int, low: int, high: int, at_s: float) -> float:
        """The factor of the link between two ranks at a time: a hash and not a generator, so that nobody's draw moves it."""
        if self.probability <= 0.0:
            return 1.0
        word = seed & _MASK
        for value in (low, high, int(at_s / self.period_s)):
            word = _mix(word ^ _mix(value))
        return self.factor if word / 2.0**64 < self.probability else 1.0


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class Links:
    """How long what is sent takes. The default costs nothing.

    Args:
        latency_s: seconds of a message between any two workers, with nodes between any two of these, at least 0.
        bandwidth: bytes a second of each worker's port, with nodes of each node's card, in each direction, above 0; infinity
            for no limit.
        slow: factor ≥ 1 of a link, by the pair of its ranks, or of a worker's port, by its rank.
        shared: bytes a second of a bottleneck that all transfers share fairly, with nodes those between these; None for none.
        slowdowns: at random, of each link, with nodes of each pair of these; None for none.
        nodes: which workers share a machine and its card; None: each has its own.
        all_reduce: what an all-reduce over all workers does, see
            :mod:`lightning_gossip.simulation.cluster.collective_costs`; ``"auto"``: the quicker of ring and tree, as NCCL
            chooses, where there are nodes, and else a ring.

    Raises:
        ConfigurationError: naming the key.
    """

    latency_s: float = 0.0
    bandwidth: float = math.inf
    slow: Slow = field(default_factory=dict)
    shared: float | None = None
    slowdowns: RandomSlowdowns | None = None
    nodes: Nodes | None = None
    all_reduce: AllReduceAlgorithm = "auto"

    def __post_init__(self) -> None:
        check_not_negative("latency_s", self.latency_s)
        if self.bandwidth != math.inf:
            check_positive("bandwidth", self.bandwidth)
        if self.shared is not None and self.shared != math.inf:
            check_positive("shared", self.shared)
        object.__setattr__(self, "slow", slow_links("slow", self.slow))
        if self.nodes is not None and not isinstance(self.nodes, Nodes):
            raise ConfigurationError(f"nodes={self.nodes!r} are no Nodes. Write for example nodes=Nodes(sizes=[8, 8]).")
        check_choice("all_reduce", self.all_reduce, get_args(AllReduceAlgorithm))
        if self.all_reduce == "hierarchical" and (self.nodes is None or len(set(self.nodes.sizes)) > 1):
            raise ConfigurationError(
                "all_reduce='hierarchical' sums inside nodes of one size first: it needs nodes, all with as many ranks. Write"
                " all_reduce='auto'."
            )

    @classmethod
    def one_slow(cls, i: int, j: int, factor: float, **options: Any) -> Links:
        """Equal links but the one between ranks i and j."""
        return cls(slow={(i, j): factor}, **options)

    def check(self, workers: int) -> None:
        """Refuse links of workers that do not exist.

        Raises:
            ConfigurationError: naming them.
        """
        if self.nodes is not None and self.nodes.workers != workers:
            raise ConfigurationError(
                f"nodes have {self.nodes.workers} ranks and there are {workers} workers: write nodes whose sizes add up to it."
            )
        for key in self.slow:
            if max(key if isinstance(key, tuple) else (key,)) >= workers:
                raise ConfigurationError(f"slow names {key!r}, and there are {workers} workers: ranks are 0 to {workers - 1}.")

    def factor(self, i: int, j: int, at_s: float, seed: int) -> float:
        """How many times slower the link between two ranks is at a time."""
        factor = 1.0
        low, high = (i, j) if i < j else (j, i)
        if self.slow:
            slow = self.slow
            factor = max(slow.get((low, high), 1.0), slow.get(low, 1.0), slow.get(high, 1.0))
        if self.slowdowns is not None:
            if self.nodes is not None:  # ranks count up from node to node
                low, high = self.nodes.of_rank[low], self.nodes.of_rank[high]
                if low == high:
                    return factor
            factor *= self.slowdowns.factor_of(seed, low, high, at_s)
        return factor

    @property
    def any_slow(self) -> bool:
        """Whether some links are slower than others."""
        return bool(self.slow) or self.slowdowns is not None

    @cached_property
    def fabric(self) -> Fabric:
        """What transfers between ranks of nodes pass."""
        assert self.nodes is not None
        return Fabric(self.nodes, latency_s=self.latency_s, card=self.bandwidth, core=self.shared)


def _mix(word: int) -> int:
    """SplitMix64's output function (Steele, Lea, Flood 2014): every bit of the word changes half of the result's."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
