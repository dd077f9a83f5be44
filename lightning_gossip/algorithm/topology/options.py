"""A topology as an option."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_gossip.algorithm.options import Options
from lightning_gossip.algorithm.topology.exact_graphs import SEQUENCES
from lightning_gossip.algorithm.topology.generators import TOPOLOGIES, auto, make_topology
from lightning_gossip.algorithm.topology.sequence import TopologySequence
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import ConfigurationError

TopologySpec = str | Topology | TopologySequence | Iterable[tuple[int, int]]
"""A sequence, or the name of one, where the algorithm makes rounds."""


@dataclass(frozen=True, kw_only=True)
class TopologyOptions(Options):
    """Options of an algorithm on a graph.

    Args:
        topology: who averages with whom: a name, a topology, or the edges.
    """

    topology: TopologySpec = "ring"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_topology()

    def _check_topology(self) -> None:
        object.__setattr__(self, "topology", topology_of(self.topology))

    @property
    def topology_name(self) -> str:
        """What the option says, in messages."""
        return self.topology if isinstance(self.topology, str) else getattr(self.topology, "name", "custom")

    def graph_name(self, workers: int) -> str:
        """What the graph of so many workers is called in logs: ``"auto"`` is one graph or the other."""
        return auto(workers).name if self.topology == "auto" else self.topology_name

    def check(self, workers: int) -> None:
        """Refuse what does not fit the number of workers.

        Raises:
            ConfigurationError: naming the option.
        """
        make_topology(self.topology, workers)


def topology_of(spec: TopologySpec) -> str | Topology | tuple[tuple[int, int], ...]:
    """A topology whose size is not known yet: a name that exists, a Topology, or the edges.

    Raises:
        ConfigurationError: for an unknown name, for one that changes from round to round, and for what is no topology.
    """
    if isinstance(spec, (str, TopologySequence)):
        make_topology(spec, 1)
    elif not isinstance(spec, Topology):
        try:
            return tuple((int(a), int(b)) for a, b in spec)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"topology={spec!r} is neither a name ({', '.join(TOPOLOGIES)}) nor pairs of ranks such as [(0, 1), (1, 2)]."
            ) from None
    return spec  # type: ignore[return-value]  # a sequence was refused


def rounds_of(spec: TopologySpec) -> str | Topology | TopologySequence | tuple[tuple[int, int], ...]:
    """Check a topology as an option where the graph may change from round to round; names stay names.

    Raises:
        ConfigurationError: for an unknown name, and for what is no topology.
    """
    if isinstance(spec, TopologySequence) or (isinstance(spec, str) and spec in SEQUENCES):
        return spec
    return topology_of(spec)
