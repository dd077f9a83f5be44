"""Nodes: ranks behind one network card, fast links inside, racks of nodes behind oversubscribed switches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lightning_gossip.algorithm.checks import check_integer, check_not_negative, is_finite
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.cluster.slow_links import Slow, slow_links

Matrix = Sequence[Sequence[float]]


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Which ranks share a machine, and what is between machines.

    Each node has one full-duplex network card, and all its ranks' transfers to other nodes share it max-min fairly. Its
    bandwidth is that of :class:`~lightning_gossip.simulation.Links`, or ``cards``.

    Args:
        sizes: ranks of each node; ranks count up from node to node, as torchrun numbers them.
        latency_s: seconds of a message inside a node.
        bandwidth: bytes a second of each rank's link to the others of its node (NVLink, PCIe, shared memory), each direction.
        cards: bytes a second of each node's card, by node; None: all as ``Links.bandwidth``.
        pair_latency_s: seconds of a message from one node to another, shape (nodes, nodes); the diagonal is not read. None: all
            as ``Links.latency_s``.
        pair_bandwidth: the most bytes a second of one transfer from one node to another, likewise; None for no limit but the
            cards'.
        slow: factor ≥ 1 of a path, by the pair of its nodes, or of a node's card, by its node.
        racks: number of each node's rack, from 0, by node; None: one switch for all, which never limits.
        uplinks: bytes a second from each rack to the others, each direction, by rack; None: see ``oversubscription``.
        oversubscription: bytes a second of a rack's cards together over those of its uplink, above 0, where there are racks.

    Raises:
        ConfigurationError: naming the key.
    """

    sizes: Sequence[int]
    latency_s: float = 0.0
    bandwidth: float = math.inf
    cards: Sequence[float] | None = None
    pair_latency_s: Matrix | None = None
    pair_bandwidth: Matrix | None = None
    slow: Slow = field(default_factory=dict)
    racks: Sequence[int] | None = None
    uplinks: Sequence[float] | None = None
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        sizes = _listed("nodes.sizes", self.sizes, "[8, 8, 8, 8]")
        if not sizes:
            raise ConfigurationError("nodes.sizes is empty. Write how many ranks each node has, for example [8, 8, 8, 8].")
        for size in sizes:
            check_integer("a node's size in nodes.sizes", size, example=8)
        object.__setattr__(self, "sizes", sizes)
        check_not_negative("nodes.latency_s", self.latency_s)
        _check_rate("nodes.bandwidth", self.bandwidth)
        if self.cards is not None:
            object.__setattr__(self, "cards", self._by("nodes.cards", self.cards, self.number, "nodes"))
        self._check_matrix("nodes.pair_latency_s", self.pair_latency_s)
        self._check_matrix("nodes.pair_bandwidth", self.pair_bandwidth)
        object.__setattr__(self, "slow", slow_links("nodes.slow", self.slow))
        for key in self.slow:
            if max(key if isinstance(key, tuple) else (key,)) >= self.number:
                raise ConfigurationError(f"nodes.slow names {key!r}, and nodes are 0 to {self.number - 1}.")
        self._check_racks()

    @classmethod
    def equal(
        cls,
        number: int,
        ranks: int,
        *,
        latency_s: float = 0.0,
        bandwidth: float = math.inf,
        slow: Slow | None = None,
        racks: int = 1,
        oversubscription: float = 1.0,
    ) -> Nodes:
        """Nodes of the same size, in racks of the same size.

        Args:
            number: of nodes.
            ranks: of each.
            racks: how many; consecutive nodes share one.
            latency_s, bandwidth, slow, oversubscription: as for the class.

        >>> Nodes.equal(4, 8, racks=2).racks
        (0, 0, 1, 1)
        """
        check_integer("trainer.num_nodes", number, example=16)
        check_integer("trainer.devices", ranks, example=8)
        check_integer("nodes.racks", racks, example=4)
        if number % racks:
            raise ConfigurationError(f"nodes.racks={racks} does not divide the {number} nodes. Write a number that does.")
        return cls(
            sizes=[ranks] * number,
            latency_s=latency_s,
            bandwidth=bandwidth,
            slow={} if slow is None else slow,
            racks=None if racks == 1 else [node * racks // number for node in range(number)],
            oversubscription=oversubscription,
        )

    @property
    def number(self) -> int:
        """How many nodes."""
        return len(self.sizes)

    @cached_property
    def of_rank(self) -> tuple[int, ...]:
        """Each rank's node."""
        return tuple(node for node, size in enumerate(self.sizes) for _ in range(size))

    @property
    def workers(self) -> int:
        """Ranks of all nodes."""
        return len(self.of_rank)

    def ranks(self, node: int) -> range:
        """The ranks of a node."""
        first = self.of_rank.index(node)
        return range(first, first + self.sizes[node])

    def for_workers(self, workers: int) -> Nodes:
        """So many ranks on such nodes: the first ones, or all over and over, the last one perhaps not full.

        Racks and slow cards stay where they are; more nodes than these have racks and cards as these.

        >>> Nodes(sizes=[8, 8]).for_workers(20).sizes
        (8, 8, 4)
        """
        sizes: list[int] = []
        while (left := workers - sum(sizes)) > 0:
            sizes.append(min(left, self.sizes[len(sizes) % self.number]))
        count, mine = len(sizes), range(len(sizes))
        racks = None if self.racks is None else [self._rack_again(node) for node in mine]
        return replace(
            self,
            sizes=sizes,
            cards=None if self.cards is None else [self.cards[node % self.number] for node in mine],
            pair_latency_s=self._again(self.pair_latency_s, count),
            pair_bandwidth=self._again(self.pair_bandwidth, count),
            slow={key: factor for key, factor in self.slow.items() if _last(key) < count},
            racks=racks,
            uplinks=None
            if self.uplinks is None or racks is None
            else [self.uplinks[rack % len(self.uplinks)] for rack in range(max(racks) + 1)],
        )

    def _rack_again(self, node: int) -> int:
        assert self.racks is not None
        return self.racks[node % self.number] + node // self.number * (max(self.racks) + 1)

    def _again(self, matrix: Matrix | None, count: int) -> Matrix | None:
        if matrix is None:
            return None
        n = self.number
        others = sorted(value for i, row in enumerate(matrix) for j, value in enumerate(row) if i != j)
        if not others:
            return None
        usual = others[len(others) // 2]  # between copies of one node
        return [
            [usual if i % n == j % n and i != j else float(matrix[i % n][j % n]) for j in range(count)] for i in range(count)
        ]

    def _check_racks(self) -> None:
        if not is_finite(self.oversubscription) or self.oversubscription <= 0.0:
            raise ConfigurationError(
                f"nodes.oversubscription={self.oversubscription!r} is not a number above 0. Write for example 4.0."
            )
        if self.racks is None:
            if self.uplinks is not None or self.oversubscription != 1.0:
                raise ConfigurationError("nodes.oversubscription and nodes.uplinks are of racks: write nodes.racks, too.")
            return
        racks = _listed("nodes.racks", self.racks, "[0, 0, 1, 1]")
        for rack in racks:
            check_integer("a rack in nodes.racks", rack, at_least=0, example=0)
        if len(racks) != self.number or set(racks) != set(range(max(racks) + 1)):
            raise ConfigurationError(
                f"nodes.racks={list(racks)} does not give each of {self.number} nodes a rack, counted from 0. Write for"
                " example [0, 0, 1, 1] for four nodes."
            )
        object.__setattr__(self, "racks", racks)
        if self.uplinks is not None:
            object.__setattr__(self, "uplinks", self._by("nodes.uplinks", self.uplinks, max(racks) + 1, "racks"))

    def _by(self, name: str, values: Sequence[float], number: int, of: str) -> tuple[float, ...]:
        listed = _listed(name, values, "[1.25e9, 1.25e9]")
        if len(listed) != number:
            raise ConfigurationError(f"{name} has {len(listed)} values for {number} {of}: write one for each.")
        for value in listed:
            _check_rate(f"a value of {name}", value)
        return tuple(float(value) for value in listed)

    def _check_matrix(self, name: str, matrix: Matrix | None) -> None:
        if matrix is None:
            return
        rows = [_listed(name, row, "one row for each node") for row in _listed(name, matrix, "one row for each node")]
        if len(rows) != self.number or any(len(row) != self.number for row in rows):
            raise ConfigurationError(f"{name} is not a matrix of {self.number} × {self.number} nodes.")
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                if i != j and "latency" in name:
                    check_not_negative(f"{name}[{i}][{j}]", value)
                elif i != j:
                    _check_rate(f"{name}[{i}][{j}]", value)
        object.__setattr__(self, name.removeprefix("nodes."), tuple(rows))


def _listed(name: str, values: object, example: str) -> tuple:  # type: ignore[type-arg]
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ConfigurationError(f"{name}={values!r} is not a list. Write for example {example}.")
    return tuple(values)


def _check_rate(name: str, value: object) -> None:
    if value != math.inf and (not is_finite(value) or value <= 0.0):  # type: ignore[operator]
        raise ConfigurationError(f"{name}={value!r} is not a number of bytes a second above 0. Write for example 1.25e9.")


def _last(key: int | tuple[int, int]) -> int:
    return max(key) if isinstance(key, tuple) else key
