"""AD-PSGD as a Lightning strategy: asynchronous pairwise gossip behind the training thread (arXiv 1710.06952)."""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor, nn
from typing_extensions import override

from lightning_gossip.algorithm.graphs import make_topology
from lightning_gossip.algorithm.partner import PartnerPicker, Roles, resolve_roles
from lightning_gossip.algorithm.replica import Replica
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.gossip import Gossip
from lightning_gossip.runtime.rendezvous import Rendezvous
from lightning_gossip.runtime.staging import replica_of
from lightning_gossip.strategies.algorithm import Algorithm, Step
from lightning_gossip.strategies.decentralized import DecentralizedStrategy
from lightning_gossip.strategies.model import SharedModel
from lightning_gossip.strategies.options import TopologySpec, check_choice, check_number, topology_of
from lightning_gossip.strategies.reports import WorkerReport
from lightning_gossip.transport.gloo import GlooTransport


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
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_choice("roles", roles, get_args(Roles))
        check_number("exchanges_per_step", exchanges_per_step)
        check_number("exchange_timeout_s", exchange_timeout_s, above=0.0)
        self.topology = topology_of(topology)
        self.roles = roles
        self.exchanges_per_step = exchanges_per_step
        self._exchange_timeout_s = exchange_timeout_s
        self._seed = seed

    @override
    def check(self, workers: int) -> None:
        resolve_roles(make_topology(self.topology, workers), self.roles)

    @override
    def algorithm(self, timeline: Timeline) -> Algorithm:
        picker = PartnerPicker(make_topology(self.topology, self.workers), self.global_rank, roles=self.roles, seed=self._seed)
        return GossipAlgorithm(self, picker, timeline, self._exchange_timeout_s)


class GossipAlgorithm(Algorithm):
    """One worker's gossip during one fit.

    Args:
        strategy: asked for ``exchanges_per_step`` at the beginning of each session.
        picker: whom to average with.
        timeline: where exchanges are recorded.
        timeout_s: deadline of an answer and of each chunk.
    """

    def __init__(self, strategy: ADPSGDStrategy, picker: PartnerPicker, timeline: Timeline, timeout_s: float) -> None:
        self._strategy = strategy
        self._picker = picker
        self._timeline = timeline
        self._timeout_s = timeout_s
        self._gossip: Gossip | None = None
        self._replica: Replica | None = None
        self._model = SharedModel(nn.Module())
        self._session = 0
        self._restored_staleness: dict[str, Any] | None = None

    @override
    def start(self) -> None:
        self._gossip = Gossip(GlooTransport(self._timeout_s), self._picker, timeout_s=self._timeout_s, timeline=self._timeline)
        if self._restored_staleness is not None:
            self._gossip.counters.staleness.load_state_dict(self._restored_staleness)
        self._gossip.start()

    @override
    def open(self, model: nn.Module) -> None:
        before, self._model = self._model.layout, SharedModel(model)
        if self._replica is None or self._model.layout != before:
            self._replica = replica_of(self._model.tensors, retention=self._model.retention)
        else:
            self._replica.push_pull(self._model.tensors)
        self._session += 1
        self._running.exchanges_per_step = self._strategy.exchanges_per_step
        self._running.open(self._replica, session=self._session, layout=self._model.layout)

    @override
    def step(self, step: Step) -> None:
        self._running.step(self._model.tensors, step_s=step.seconds, forward_passes=step.forward_passes)

    @override
    def settle(self) -> None:
        self._running.drain(self._model.tensors)

    @override
    def average(self, meeting: Rendezvous) -> float:
        assert self._replica is not None
        distance = meeting.average(self._replica.settle())
        self._replica.copy_out(self._model.tensors)
        return distance + self._model.average_unfrozen(meeting)

    @override
    def close(self, *, together: bool) -> None:
        if self._gossip is not None:
            self._gossip.close(together=together)

    @override
    def shared(self) -> list[Tensor]:
        return self._model.tensors

    @override
    def call_meeting(self) -> None:
        self._running.call_meeting()

    @override
    def meeting_called(self) -> bool:
        return self._running.meeting_called

    @override
    def complete(self, report: WorkerReport) -> None:
        counters = self._running.counters
        report.exchanges = counters.exchanges
        report.refused = counters.refused
        report.bytes_sent = counters.bytes_sent
        report.describe_staleness(counters.staleness)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"picker": self._picker.state_dict(), "staleness": self._running.counters.staleness.state_dict()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._picker.load_state_dict(state["picker"])
        self._restored_staleness = state["staleness"]

    @property
    def _running(self) -> Gossip:
        assert self._gossip is not None, "start() comes first"
        return self._gossip
