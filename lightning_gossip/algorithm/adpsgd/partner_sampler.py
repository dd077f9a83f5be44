"""Whom to average with next.

AD-PSGD (Lian et al. 2018, arXiv 1710.06952): a worker draws a neighbour at random and both take the
mean. On a bipartite graph only one side starts exchanges and the other only answers; since waits then point from
initiators to responders alone, they cannot form a cycle. On other graphs both start and answer (symmetric roles), and
a busy worker must refuse.

The draw is uniform among *all* neighbours, free or not, and the initiator waits for the one it drew. Drawing only among
those that are free at the moment freezes the pairing once an exchange takes about as long as a step: the same two
workers finish together, find each other free, and meet again (seen: the decay of the consensus distance falls 10 to
100 times).

Where links differ, how often the slow ones are used may be limited: :mod:`lightning_gossip.algorithm.adpsgd.link_shares`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np

from lightning_gossip.algorithm.checks import check_choice
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError, ProtocolError

Roles = Literal["auto", "bipartite", "symmetric"]
PartnerChoice = Literal["uniform", "fast_links"]
ResolvedRoles = Literal["bipartite", "symmetric"]

_PART_STRIDE = 7_368_787  # of seeds, from one part of a model to the next


def resolve_roles(topology: Topology, roles: Roles = "auto") -> ResolvedRoles:
    """Which roles the workers of a topology play.

    Args:
        topology: the graph.
        roles: ``"bipartite"``: initiators only start, responders only answer; ``"symmetric"``: everybody does both;
            ``"auto"``: bipartite where the graph allows it, since that alone excludes cycles of waits without
            refusing anyone.

    Raises:
        ConfigurationError: for other `roles`, or ``"bipartite"`` on a graph without a bipartition.

    >>> from lightning_gossip.algorithm.topology.generators import ring
    >>> resolve_roles(ring(4)), resolve_roles(ring(5))
    ('bipartite', 'symmetric')
    """
    if roles == "symmetric":
        return "symmetric"
    if roles == "auto":
        return "symmetric" if topology.bipartition is None else "bipartite"
    if roles != "bipartite":
        raise ConfigurationError(f"got roles={roles!r}; write one of {', '.join(map(repr, get_args(Roles)))}.")
    if topology.bipartition is None:
        raise ConfigurationError(
            f"got roles='bipartite' for the topology {topology.name!r} of {topology.n} ranks, which has an odd cycle "
            "and so no two sides. Write roles='auto' or 'symmetric', or use an even ring, 'exponential' or "
            "'bipartite_complete'."
        )
    return "bipartite"


@clear_arguments
class PartnerPicker:
    """Draws the partners of one rank, from a random stream of its own.

    Streams of different ranks are independent although they share the seed, and a stream does not depend on the other
    ranks' pace.

    Args:
        topology: the graph.
        rank: whose partners, in [0, n).
        roles: as in `resolve_roles`.
        seed: >= 0, the same on all ranks.
        choice: ``"uniform"``, or ``"fast_links"`` if who draws is to leave out slow links at times.
        part: number of the part of the model that is averaged, where each part has partners of its own.

    Attributes:
        rank: as given.
        choice: as given.
        roles: the resolved roles, ``"bipartite"`` or ``"symmetric"``.
        neighbours: whom it draws from, in ascending order.
        initiates: whether this rank starts exchanges.
        answers: whether this rank answers those of others. A single worker (n = 1) does neither.

    Raises:
        ConfigurationError: if `rank`, `roles`, `seed` or `choice` is outside its range.

    >>> from lightning_gossip.algorithm.topology.generators import ring
    >>> picker = PartnerPicker(ring(8), 2, seed=1)
    >>> picker.initiates, picker.answers, picker.start_share
    (True, False, 1.0)
    >>> {picker.pick() for _ in range(50)} == {1, 3}
    True
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        *,
        roles: Roles = "auto",
        seed: int = 0,
        choice: PartnerChoice = "uniform",
        part: int = 0,
    ) -> None:
        check_choice("choice", choice, get_args(PartnerChoice))
        self.choice = choice
        self.neighbours = topology.neighbours(rank)
        self.rank = int(rank)
        self.roles = resolve_roles(topology, roles)
        bipartite = topology.bipartition if self.roles == "bipartite" else None
        self.initiates = bool(self.neighbours) and (bipartite is None or rank in bipartite[0])
        self.answers = bool(self.neighbours) and (bipartite is None or rank in bipartite[1])
        if not isinstance(seed, (int, np.integer)) or seed < 0:
            raise ConfigurationError(f"got seed={seed!r}; it must be an integer >= 0. Write for example seed=0.")
        # spawn_key and not seed + rank: the latter would give rank 1 of seed 0 the stream of rank 0 of seed 1.
        sequence = np.random.SeedSequence(int(seed) + _PART_STRIDE * part, spawn_key=(self.rank,))
        self._generator = np.random.Generator(np.random.PCG64(sequence))

    @property
    def start_share(self) -> float:
        """Exchanges that this rank should start per step of its neighbourhood, for about one a step per worker.

        An exchange has two ends. With bipartite roles initiators start one a step (1.0) and responders none (0.0);
        with symmetric roles each starts one every other step (0.5) and on regular graphs is called as often. 0.0 for a
        single worker.
        """
        if not self.initiates:
            return 0.0
        return 1.0 if self.roles == "bipartite" else 0.5

    def pick(self) -> int:
        """The partner of the next exchange that this rank starts, drawn among all its neighbours.

        Raises:
            ProtocolError: if this rank does not start exchanges. A responder that did could close a cycle of waits.
        """
        if not self.initiates:
            raise ProtocolError(
                f"rank {self.rank} was asked to start an exchange, but with {self.roles} roles and "
                f"{len(self.neighbours)} neighbours it does not start any. Ask `initiates` first."
            )
        return self.neighbours[int(self._generator.integers(len(self.neighbours)))]

    def state_dict(self) -> dict[str, Any]:
        """The position in the random stream, as plain values (strings, integers, dicts) for a checkpoint."""
        return {"rank": self.rank, "generator": dict(self._generator.bit_generator.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the stream where `state_dict` was taken; the seed of this picker no longer matters.

        Args:
            state: of the same rank. The topology may differ: the stream goes on over the new neighbours.

        Raises:
            ConfigurationError: for another rank's state (two ranks would then draw the same numbers), or a value that
                is no state.
        """
        if state.get("rank") != self.rank:
            raise ConfigurationError(
                f"got the partner state of rank {state.get('rank')!r} for rank {self.rank}; each rank continues its "
                "own stream. Load the state saved by the same rank, or none."
            )
        try:
            self._generator.bit_generator.state = state["generator"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the partner state of rank {self.rank} cannot be read ({error!r}); pass what state_dict() returned, or none."
            ) from error
