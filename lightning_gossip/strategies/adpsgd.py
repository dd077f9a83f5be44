"""AD-PSGD as a Lightning strategy: asynchronous pairwise gossip behind the training thread (arXiv 1710.06952)."""

from __future__ import annotations

from typing import Any, get_args

from typing_extensions import override

from lightning_gossip.algorithm.codecs import Wire
from lightning_gossip.algorithm.graphs import make_topology
from lightning_gossip.algorithm.partner import PartnerChoice, PartnerPicker, Roles, resolve_roles
from lightning_gossip.algorithm.repair import topology_for
from lightning_gossip.algorithm.topology import Topology
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.health import OnNonFinite
from lightning_gossip.strategies.algorithm import Algorithm
from lightning_gossip.strategies.decentralized import DecentralizedStrategy
from lightning_gossip.strategies.gossiping import GossipAlgorithm
from lightning_gossip.strategies.options import (
    TopologySpec,
    check_choice,
    check_nonfinite,
    check_number,
    seconds_of,
    topology_of,
)
from lightning_gossip.strategies.survival import JoinerOptimizer, OnPeerFailure, Survival

_SEED_STRIDE = 1_000_003


class ADPSGDStrategy(DecentralizedStrategy):
    """Asynchronous Decentralized Parallel SGD: each worker trains on its own model and averages it, in the background, with a
    random neighbour's.

    Args:
        topology: who averages with whom: a name of :data:`~lightning_gossip.algorithm.TOPOLOGIES`, a
            :class:`~lightning_gossip.algorithm.Topology`, or the edges as pairs of ranks.
        roles: ``"bipartite"`` as in the paper (one side calls, the other answers), ``"symmetric"`` (everybody does both; a busy
            worker refuses), or ``"auto"``: bipartite where the graph allows it.
        exchanges_per_step: averagings that a worker takes part in per step of its neighbourhood (on a regular
            graph); 0 for none.
        exchange_timeout_s: deadline, in seconds, of an answer and of each chunk of a model.
        seed: of the partner choice.
        on_peer_failure: ``"continue"``: a worker whose process ends without a word (killed, machine gone) is left out, and the
            others go on; ``"raise"``: all end. An exception in a worker's code ends all either way.
        min_workers: with fewer left the job ends, with a PeerError.
        max_workers: how many may be in the job when workers come later; as many as it began with, if None.
        peer_timeout_s: silence, in seconds, after which a worker is taken for dead although no connection has closed.
        joiner_optimizer: a worker that comes later begins with a ``"copy"`` of another one's optimizer state, or ``"fresh"``.
        refuse_nonfinite: keep NaN and infinities out: an exchange that would bring them into a healthy model is refused and
            counted, and the mean at a rendezvous is never made with one.
        wire: how a model is sent: ``"float32"`` as it is; ``"int8"`` or ``"int16"`` in a quarter or half of the bytes, as the
            last digits of each element, in a unit that follows the difference of the two models; ``"bfloat16"`` rounded.
            Whatever the rounding, what one end adds the other subtracts.
        partner_choice: ``"uniform"`` among a worker's neighbours, or ``"fast_links"``: the shorter their exchanges last the
            more often, and each with at least a quarter of its uniform share.
        on_nonfinite: what a worker does whose own model is not finite: ``"raise"`` ends the job with a NonFiniteError;
            ``"adopt"`` makes it go on from a neighbour's model (at a rendezvous, the mean of the healthy ones) with a fresh
            optimizer state.
        store: ``"tcp://host:port"``, where the workers meet, if it is to outlive rank 0 (``python -m lightning_gossip.store``).
        options: see :class:`~lightning_gossip.strategies.DecentralizedStrategy`.

    Example::

        import lightning_gossip
        trainer = Trainer(strategy="adpsgd", devices=4)                                # a ring
        trainer = Trainer(strategy=ADPSGDStrategy(topology="exponential"), devices=8)
    """

    name = "adpsgd"

    def __init__(
        self,
        *,
        topology: TopologySpec = "ring",
        roles: Roles = "auto",
        exchanges_per_step: float = 1.0,
        exchange_timeout_s: float = 120.0,
        seed: int = 0,
        on_peer_failure: OnPeerFailure = "continue",
        min_workers: int = 1,
        max_workers: int | None = None,
        peer_timeout_s: float = 30.0,
        joiner_optimizer: JoinerOptimizer = "copy",
        refuse_nonfinite: bool = True,
        on_nonfinite: OnNonFinite = "raise",
        wire: Wire = "float32",
        partner_choice: PartnerChoice = "uniform",
        store: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.survival = Survival(on_peer_failure, min_workers, max_workers, peer_timeout_s, joiner_optimizer, store)
        check_choice("roles", roles, get_args(Roles))
        check_number("exchanges_per_step", exchanges_per_step)
        check_number("seed", seed)
        self.refuse_nonfinite, self.on_nonfinite = check_nonfinite(refuse_nonfinite, on_nonfinite)
        check_choice("wire", wire, get_args(Wire))
        self.wire = wire
        check_choice("partner_choice", partner_choice, get_args(PartnerChoice))
        self.partner_choice: PartnerChoice = partner_choice
        self.topology = topology_of(topology)
        self.roles = roles
        self.exchanges_per_step = exchanges_per_step
        self._exchange_timeout_s = seconds_of("exchange_timeout_s", exchange_timeout_s)
        self._seed = seed

    @property
    @override
    def collective_timeout_s(self) -> float:
        return min(self._exchange_timeout_s, self.timeout_s)

    @override
    def check(self, workers: int) -> None:
        resolve_roles(make_topology(self.topology, workers), self.roles)
        if self.survival.min_workers > workers:
            raise ConfigurationError(f"min_workers={self.survival.min_workers} is more than the {workers} workers of the job.")

    @override
    def algorithm(self, timeline: Timeline) -> Algorithm:
        return GossipAlgorithm(self, timeline, self._exchange_timeout_s)

    def picker(self) -> tuple[Topology, PartnerPicker]:
        """The graph of the present workers, and this one's partners in it."""
        members = self.members
        if members is None:
            topology = make_topology(self.topology, self.workers)
            return topology, self._picker_of(topology, self.global_rank, self._seed)
        numbers = [worker.number for worker in members.members]
        topology = topology_for(self.topology, numbers, self.workers, self.roles)
        seed = self._seed + _SEED_STRIDE * members.generation  # ranks change, and two of them must not repeat one stream
        return topology, self._picker_of(topology, members.rank, seed)

    def _picker_of(self, topology: Topology, rank: int, seed: int) -> PartnerPicker:
        return PartnerPicker(topology, rank, roles=self.roles, seed=seed, choice=self.partner_choice)
