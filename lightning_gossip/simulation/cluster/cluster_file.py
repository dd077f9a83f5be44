"""A cluster that was measured, as a file: cluster.json.

    {
      "format": "lightning_gossip.cluster", "version": 1,
      "nodes": [{"name": "gpu01", "ranks": [0, 1], "card_bytes_per_s": 1.25e9, "rack": "a"},
                {"name": "gpu02", "ranks": [2, 3], "card_bytes_per_s": 1.25e9, "rack": "b"}],
      "inside": {"latency_s": 5e-6, "bytes_per_s": 1e11},
      "between": {"latency_s": [[0, 5e-5], [5e-5, 0]], "bytes_per_s": [[null, 1.1e9], [1.1e9, null]]},
      "racks": {"a": {"uplink_bytes_per_s": 1.25e9}, "b": {"uplink_bytes_per_s": 1.25e9}},
      "step_s": [[0.15, 0.16], [0.15], [0.31], [0.15]],
      "about": {"anything": "of whoever wrote it"}
    }

| key | what | left out |
|---|---|---|
| ``nodes`` | each node's ranks, which count up from node to node, its card, its rack if there are any | |
| ``card_bytes_per_s`` | of all transfers of the node to others | the most of its pairs |
| ``inside`` | of a message inside a node, and of each rank's link to the others there | free |
| ``between`` | a number for all pairs of nodes, or a matrix from row to column; its diagonal is not read | free |
| ``racks`` | bytes a second from each rack to the others | one switch, never a limit |
| ``step_s`` | each rank's compute times, in seconds, without waits | not measured |
| ``about`` | not read | |

Bytes a second are those of one direction; null is no limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_gossip.algorithm.checks import is_finite, is_integer
from lightning_gossip.algorithm.laws import Law, Samples
from lightning_gossip.arguments import clear_arguments, did_you_mean
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.cluster.links import Links
from lightning_gossip.simulation.cluster.nodes import Matrix, Nodes

FORMAT, VERSION = "lightning_gossip.cluster", 1
_KEYS = ("format", "version", "nodes", "inside", "between", "racks", "step_s", "about")


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    """What is known of a cluster; the module has the file.

    Args:
        sizes: ranks of each node.
        names: of the nodes.
        cards: bytes a second of each node's card; None for the most of its pairs, or no limit.
        inside_latency_s, inside_bandwidth: between ranks of a node.
        latency_s, bandwidth: between nodes: a number, or a matrix of shape (nodes, nodes).
        racks: the name of each node's rack; None without racks.
        uplinks: bytes a second by a rack's name.
        step_s: each rank's measured compute times; None if not measured.
        about: anything of whoever wrote it.

    Raises:
        ConfigurationError: naming the key of the file.
    """

    sizes: Sequence[int]
    names: Sequence[str] = ()
    cards: Sequence[float | None] | None = None
    inside_latency_s: float = 0.0
    inside_bandwidth: float = math.inf
    latency_s: float | Matrix = 0.0
    bandwidth: float | Matrix = math.inf
    racks: Sequence[str] | None = None
    uplinks: Mapping[str, float] = field(default_factory=dict)
    step_s: Sequence[Sequence[float]] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.names or [f"node{number}" for number in range(len(self.sizes))]
        object.__setattr__(self, "names", tuple(names))
        self.links()  # refuses what cannot be
        self.laws()

    @property
    def workers(self) -> int:
        """Ranks of all nodes."""
        return sum(self.sizes)

    def laws(self) -> list[Law] | None:
        """The law of each rank's compute times, which draws from those measured; None if they were not."""
        if self.step_s is None:
            return None
        if len(self.step_s) != self.workers:
            raise ConfigurationError(
                f"step_s has {len(self.step_s)} lists for {self.workers} ranks: write one for each, or null."
            )
        return [Samples(times) for times in self.step_s]

    def links(self) -> Links:
        """Between the ranks."""
        number = len(self.sizes)
        latency_s, bandwidth = self.latency_s, self.bandwidth
        pairs = None if isinstance(bandwidth, (int, float)) else bandwidth
        cards = [self._card(node, pairs) for node in range(number)]
        racks = None if self.racks is None else [sorted(set(self.racks)).index(rack) for rack in self.racks]
        uplinks = None if self.racks is None else [self.uplinks.get(rack, math.inf) for rack in sorted(set(self.racks))]
        nodes = Nodes(
            sizes=self.sizes,
            latency_s=self.inside_latency_s,
            bandwidth=self.inside_bandwidth,
            cards=cards,
            pair_latency_s=None if isinstance(latency_s, (int, float)) else latency_s,
            pair_bandwidth=[[float(bandwidth)] * number] * number if isinstance(bandwidth, (int, float)) else bandwidth,
            racks=racks,
            uplinks=uplinks,
        )
        return Links(latency_s=latency_s if isinstance(latency_s, (int, float)) else 0.0, bandwidth=max(cards), nodes=nodes)

    def _card(self, node: int, pairs: Matrix | None) -> float:
        card = None if self.cards is None else self.cards[node]
        if card is not None:
            return card
        if pairs is None:
            return float(self.bandwidth)  # type: ignore[arg-type]
        both = [(pairs[node][other], pairs[other][node]) for other in range(len(pairs)) if other != node]
        return max((rate for rates in both for rate in rates), default=math.inf)

    def save(self, path: Path) -> None:
        """Write the file."""
        first, ranks = 0, []
        for size in self.sizes:
            ranks.append(list(range(first, first + size)))
            first += size
        nodes = [
            {
                "name": name,
                "ranks": own,
                **({} if self.cards is None or self.cards[node] is None else {"card_bytes_per_s": _rate(self.cards[node])}),
                **({} if self.racks is None else {"rack": self.racks[node]}),
            }
            for node, (name, own) in enumerate(zip(self.names, ranks, strict=True))
        ]
        written = {
            "format": FORMAT,
            "version": VERSION,
            "nodes": nodes,
            "inside": {"latency_s": self.inside_latency_s, "bytes_per_s": _rate(self.inside_bandwidth)},
            "between": {"latency_s": _matrix(self.latency_s), "bytes_per_s": _matrix(self.bandwidth)},
            **({} if self.racks is None else {"racks": {k: {"uplink_bytes_per_s": _rate(v)} for k, v in self.uplinks.items()}}),
            "step_s": None if self.step_s is None else [list(times) for times in self.step_s],
            "about": dict(self.about),
        }
        path.write_text(json.dumps(written, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> ClusterFile:
        """Read the file.

        Raises:
            ConfigurationError: naming the file and the key, in a sentence.
        """
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"cluster_file={path} cannot be read ({error}). Write the path of a cluster.json."
            ) from error
        try:
            return cls(**_fields(read))
        except ConfigurationError as error:
            raise ConfigurationError(f"cluster_file={path}: {error}") from error


def _fields(read: Any) -> dict[str, Any]:
    """The file as arguments."""
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise ConfigurationError(f'this is no description of a cluster: it has no "format": "{FORMAT}".')
    if read.get("version") != VERSION:
        raise ConfigurationError(f"version={read.get('version')!r} is not known here; this release reads version {VERSION}.")
    for key in read:
        if key not in _KEYS:
            raise ConfigurationError(f"nothing reads {key!r}.{did_you_mean(key, _KEYS)} Put what is for people into 'about'.")
    nodes = _nodes(read.get("nodes"))
    inside, between = (_mapping(read, key, ("latency_s", "bytes_per_s")) for key in ("inside", "between"))
    racks = None if nodes[0].get("rack") is None else [_rack(node, number) for number, node in enumerate(nodes)]
    card = "card_bytes_per_s"
    return {
        "sizes": [len(node["ranks"]) for node in nodes],
        "names": [str(node.get("name", f"node{number}")) for number, node in enumerate(nodes)],
        "cards": [
            None if node.get(card) is None else _number(f"nodes[{number}].{card}", node[card])
            for number, node in enumerate(nodes)
        ],
        "inside_latency_s": _number("inside.latency_s", inside.get("latency_s", 0.0), at_least=True),
        "inside_bandwidth": _unlimited("inside.bytes_per_s", inside.get("bytes_per_s")),
        "latency_s": _each_pair("between.latency_s", between.get("latency_s", 0.0), len(nodes), latency=True),
        "bandwidth": _each_pair("between.bytes_per_s", between.get("bytes_per_s"), len(nodes), latency=False),
        "racks": racks,
        "uplinks": _uplinks(read, racks),
        "step_s": _steps(read.get("step_s")),
        "about": read.get("about") or {},
    }


def _nodes(read: Any) -> list[dict[str, Any]]:
    if not isinstance(read, list) or not read or not all(isinstance(node, dict) for node in read):
        raise ConfigurationError('nodes is not a list of nodes. Write for example "nodes": [{"ranks": [0, 1]}].')
    first = 0
    for number, node in enumerate(read):
        for key in node:
            if key not in ("name", "ranks", "card_bytes_per_s", "rack"):
                raise ConfigurationError(f"nodes[{number}] has a key {key!r}, and nothing reads it.")
        ranks = node.get("ranks")
        right = isinstance(ranks, list) and all(is_integer(rank, 0) for rank in ranks)
        if not right or not ranks or ranks != list(range(first, first + len(ranks))):
            raise ConfigurationError(
                f"nodes[{number}].ranks={ranks!r}: ranks count up from node to node, and the next is {first}. Write for example"
                f" [{first}, {first + 1}]."
            )
        first += len(ranks)
    return read


def _rack(node: Mapping[str, Any], number: int) -> str:
    if not isinstance(node.get("rack"), str):
        raise ConfigurationError(f"nodes[{number}].rack={node.get('rack')!r} is no name, and other nodes have racks.")
    return str(node["rack"])


def _uplinks(read: Mapping[str, Any], racks: Sequence[str] | None) -> dict[str, float]:
    named = read.get("racks")
    if racks is None:
        if named:
            raise ConfigurationError("racks are described, and no node names its rack.")
        return {}
    if not isinstance(named, dict) or set(named) != set(racks):
        raise ConfigurationError(f"racks does not describe just {sorted(set(racks))}, which the nodes name.")
    key = "uplink_bytes_per_s"
    return {name: _unlimited(f"racks.{name}.{key}", _mapping(named, name, (key,)).get(key)) for name in named}


def _steps(read: Any) -> list[list[float]] | None:
    if read is None:
        return None
    if not isinstance(read, list) or not all(isinstance(times, list) for times in read):
        raise ConfigurationError("step_s is not a list of each rank's step times. Write [[0.15, 0.16], [0.15]], or null.")
    for rank, times in enumerate(read):
        if not times:
            raise ConfigurationError(f"step_s[{rank}] is empty. Write at least one step time in seconds, or null for step_s.")
        for place, time_s in enumerate(times):
            _number(f"step_s[{rank}][{place}]", time_s)
    return read


def _each_pair(name: str, value: Any, number: int, *, latency: bool) -> float | list[list[float]]:
    if not isinstance(value, list):
        return _number(name, value, at_least=True) if latency else _unlimited(name, value)
    if len(value) != number or not all(isinstance(row, list) and len(row) == number for row in value):
        raise ConfigurationError(f"{name} is neither a number nor a matrix of {number} × {number} nodes.")

    def of(i: int, j: int) -> float:
        if i == j:
            return 0.0 if latency else math.inf
        here = f"{name}[{i}][{j}]"
        return _number(here, value[i][j], at_least=True) if latency else _unlimited(here, value[i][j])

    return [[of(i, j) for j in range(number)] for i in range(number)]


def _mapping(read: Mapping[str, Any], name: str, known: Sequence[str]) -> Mapping[str, Any]:
    value = read.get(name) or {}
    if not isinstance(value, dict) or not set(value) <= set(known):
        raise ConfigurationError(f"{name}={value!r} is not an object of {' and '.join(known)}.")
    return value


def _unlimited(name: str, value: Any) -> float:
    return math.inf if value is None else _number(name, value)


def _number(name: str, value: Any, *, at_least: bool = False) -> float:
    if not is_finite(value) or value < 0.0 or (value == 0.0 and not at_least):
        raise ConfigurationError(f"{name}={value!r} is not a number {'of at least' if at_least else 'above'} 0.")
    return float(value)


def _rate(value: float | None) -> float | None:
    return None if value is None or value == math.inf else value


def _matrix(value: float | Matrix) -> Any:
    if isinstance(value, (int, float)):
        return _rate(value)
    return [[_rate(one) for one in row] for row in value]
