"""AD-PSGD under virtual time: asynchronous pairwise gossip behind the training (Lian et al. 2018, arXiv 1710.06952).

Here is what all workers share; one worker is :class:`~lightning_gossip.simulation.gossip.Worker`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from simpy.events import Event

from lightning_gossip.algorithm.checks import check_choice, is_finite
from lightning_gossip.algorithm.codecs import Wire, exchange_bytes
from lightning_gossip.algorithm.graphs import make_topology
from lightning_gossip.algorithm.partner import PartnerChoice, PartnerPicker, Roles, resolve_roles
from lightning_gossip.algorithm.topology import Topology
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.asynchronous import Rendezvous
from lightning_gossip.simulation.costs import ring_all_reduce_s
from lightning_gossip.simulation.gossip import Worker
from lightning_gossip.simulation.network import then
from lightning_gossip.simulation.record import Distances
from lightning_gossip.simulation.run import Process, Run, Strategy
from lightning_gossip.simulation.sessions import Session

TopologySpec = str | Topology | Iterable[Iterable[int]]
AtRendezvous = Literal["adopt", "evaluate"]
WorkSharing = Literal["auto"] | bool


@dataclass(frozen=True, kw_only=True)
class ADPSGD(Strategy):
    """Asynchronous pairwise gossip; the options of :class:`~lightning_gossip.strategies.ADPSGDStrategy`.

    Args:
        topology: who averages with whom: a name, a topology, or the edges.
        roles: ``"auto"``, ``"bipartite"`` or ``"symmetric"``.
        exchanges_per_step: averagings that a worker takes part in per step of its neighbourhood; 0 for none.
        work_sharing: ``"auto"`` and ``True`` share an epoch by the claim rule; ``False`` gives equal shares.
        at_rendezvous: ``"adopt"`` makes every worker take the mean at an epoch's end; ``"evaluate"`` only looks at it.
        seed: of the partner choice; None for the run's.
        wire: how a model is sent; see :mod:`lightning_gossip.algorithm.codecs`.
        partner_choice: ``"uniform"`` or ``"fast_links"``; see :mod:`lightning_gossip.algorithm.partner`.
    """

    name = "adpsgd"
    shares_work = True

    topology: TopologySpec = "ring"
    roles: Roles = "auto"
    exchanges_per_step: float = 1.0
    work_sharing: WorkSharing = "auto"
    at_rendezvous: AtRendezvous = "adopt"
    seed: int | None = None
    wire: Wire = "float32"
    partner_choice: PartnerChoice = "uniform"

    def __post_init__(self) -> None:
        check_choice("wire", self.wire, get_args(Wire))
        check_choice("partner_choice", self.partner_choice, get_args(PartnerChoice))
        check_choice("work_sharing", self.work_sharing, (True, False, "auto"))
        check_choice("roles", self.roles, get_args(Roles))
        check_at_rendezvous(self.at_rendezvous)
        if not is_finite(self.exchanges_per_step) or self.exchanges_per_step < 0.0:
            raise ConfigurationError(f"exchanges_per_step={self.exchanges_per_step!r} is not a number of at least 0.")

    @property
    def topology_name(self) -> str:
        """See :class:`Strategy`."""
        return topology_name(self.topology)

    def check(self, workers: int) -> None:
        """See :meth:`Strategy.check`."""
        resolve_roles(make_topology(self.topology, workers), self.roles)

    def start(self, run: Run) -> None:
        """See :meth:`Strategy.start`."""
        Gossip(self, run).start()


def topology_name(spec: TopologySpec) -> str:
    """What a graph is called in logs."""
    return spec if isinstance(spec, str) else getattr(spec, "name", "custom")


def check_at_rendezvous(value: object) -> None:
    """Refuse what is not known.

    Raises:
        ConfigurationError: naming the key.
    """
    check_choice("at_rendezvous", value, get_args(AtRendezvous))


class Gossip:
    """All workers of a run of AD-PSGD."""

    def __init__(self, strategy: ADPSGD, run: Run) -> None:
        self.run = run
        self.wire = strategy.wire
        numel = run.nbytes // run.models.x.element_size()
        self.exchange_bytes = run.nbytes if self.wire == "float32" else exchange_bytes(self.wire, numel)
        self.adopts = strategy.at_rendezvous == "adopt"
        self.is_open = False
        self.session: Session
        n, d = run.workers, run.models.numel
        self.published = torch.zeros(n, d, dtype=run.models.x.dtype)
        self.merges = torch.zeros_like(self.published)
        topology = make_topology(strategy.topology, n)
        seed = run.seed if strategy.seed is None else strategy.seed
        pickers = [
            PartnerPicker(topology, rank, roles=strategy.roles, seed=seed, choice=strategy.partner_choice) for rank in range(n)
        ]
        self.workers = [Worker(self, rank, picker, strategy.exchanges_per_step) for rank, picker in enumerate(pickers)]
        run.current = lambda: self.published
        self.meeting = Rendezvous(
            run, settle=self._drain, average=self._average, open_session=self._open, cost_s=self._average_s
        )
        self._drained: Event | None = None

    def start(self) -> None:
        """Begin."""
        for worker in self.workers:
            worker.start()
        self.meeting.begin()
        for rank, at_s in sorted(self.run.cluster.failures.items()):
            then(self.run.environment.timeout(at_s), self.workers[rank].fail)

    def note_end_of_exchange(self) -> None:
        """Somebody has become free."""
        if self._drained is not None and not any(worker.busy for worker in self.workers):
            self._drained.succeed()
            self._drained = None

    def _open(self, session: Session) -> None:
        self.session = session
        self.is_open = True
        for worker in self.workers:
            if not worker.failed:
                worker.open()

    def _drain(self) -> Process:
        """No new exchange; those under way end; every x takes over the last merges."""
        self.is_open = False
        self.run.record.event(self.run.environment.now, "close", -1)
        if any(worker.busy for worker in self.workers):
            self._drained = self.run.environment.event()
            yield self._drained
        for rank in self.run.living:
            self.workers[rank].replica.push_pull([self.run.models.rows[rank]], forward_passes=0)

    def _average_s(self) -> float:
        run = self.run
        return ring_all_reduce_s(run.links, len(run.living), run.nbytes, at_s=run.environment.now, seed=run.seed)

    def _average(self) -> Distances | None:
        living, models = self.run.living, self.run.models
        distance = self.run.distance(self.published)
        if self.adopts and models.numel:
            mean = self.published[living].sum(0).div_(len(living))
            for rank in living:
                self.workers[rank].replica.settle().copy_(mean)
                self.workers[rank].replica.copy_out([models.rows[rank]])
        return distance
