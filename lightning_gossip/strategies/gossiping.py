"""One worker's gossip during one fit: what :class:`~lightning_gossip.strategies.adpsgd.ADPSGDStrategy` runs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gossip.algorithm.codecs import Wire
from lightning_gossip.algorithm.edge_order import edge_order
from lightning_gossip.algorithm.finite import all_finite
from lightning_gossip.algorithm.partner import PartnerPicker, Roles
from lightning_gossip.algorithm.replica import Replica
from lightning_gossip.algorithm.topology import Topology
from lightning_gossip.errors import NonFiniteError
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.connection import another
from lightning_gossip.runtime.gossip import Gossip
from lightning_gossip.runtime.health import GossipCounters, OnNonFinite
from lightning_gossip.runtime.membership import Membership
from lightning_gossip.runtime.partners import ChangingPartners
from lightning_gossip.runtime.rendezvous import Rendezvous, together
from lightning_gossip.runtime.staging import replica_of
from lightning_gossip.strategies.algorithm import Algorithm, Step
from lightning_gossip.strategies.model import SharedModel
from lightning_gossip.strategies.nonfinite import error_of, mean_of_healthy
from lightning_gossip.strategies.optimizer_state import OptimizerStates
from lightning_gossip.strategies.reports import WorkerReport
from lightning_gossip.transport.base import Transport
from lightning_gossip.transport.edges import EdgeTransport
from lightning_gossip.transport.gloo import GlooTransport
from lightning_gossip.transport.memory import MemoryNetwork

_FOREVER_S = 10 * 365 * 86400.0  # the listener ends by a message, never by a time-out


class GossipOptions(Protocol):
    """What it asks of its strategy."""

    exchanges_per_step: float
    refuse_nonfinite: bool
    on_nonfinite: OnNonFinite
    wire: Wire
    roles: Roles
    optimizers: list[Optimizer]

    @property
    def members(self) -> Membership | None:
        """Who is in the job, where deaths are survived."""

    @property
    def keys(self) -> str:
        """Prefix of the job's keys in the store."""

    @property
    def global_rank(self) -> int:
        """Of this worker."""

    def picker(self) -> tuple[Topology, PartnerPicker]:
        """The graph of the present workers, and this one's partners in it."""


class GossipAlgorithm(Algorithm):
    """One worker's gossip during one fit.

    Args:
        strategy: asked for ``exchanges_per_step`` at the beginning of each session.
        timeline: where exchanges are recorded.
        timeout_s: the longest deadline of an answer and of each chunk.
    """

    def __init__(self, strategy: GossipOptions, timeline: Timeline, timeout_s: float) -> None:
        self._strategy = strategy
        self._timeline = timeline
        self._timeout_s = timeout_s
        self._gossip: Gossip | None = None
        self._picker: PartnerPicker | None = None
        self._partners: ChangingPartners | None = None
        self._counters = GossipCounters()
        self._failed = 0
        self._replica: Replica | None = None
        self._model = SharedModel(nn.Module())
        self._layout = 0  # of the replica
        self._session = 0
        self._restored_picker: dict[str, Any] | None = None

    @override
    def start(self) -> None:
        members = self._strategy.members
        if members is None:
            _, self._picker = self._picked()
            transport: Transport = GlooTransport(self._timeout_s)
            partners: PartnerPicker | ChangingPartners = self._picker
        else:
            transport = members.attempt(self._connect)
            assert self._partners is not None
            partners = self._partners
        self._gossip = Gossip(
            transport,
            partners,
            timeout_s=self._timeout_s,
            timeline=self._timeline,
            counters=self._counters,
            refuse_nonfinite=self._strategy.refuse_nonfinite,
            on_nonfinite=self._strategy.on_nonfinite,
            wire=self._strategy.wire,
        )
        self._gossip.start()

    def _picked(self) -> tuple[Topology, PartnerPicker]:
        topology, picker = self._strategy.picker()
        if self._restored_picker is not None:
            picker.load_state_dict(self._restored_picker)
        return topology, picker

    def _connect(self) -> Transport:
        """Connect with those who are members now, and draw partners among them. Collective; new keys each time."""
        members = self._strategy.members
        assert members is not None
        topology, self._picker = self._picked()
        self._session = max(self._session, members.generation << 20)  # the same on all, those included that have just come
        self._partners = ChangingPartners(
            members.watch,
            members.members,
            topology,
            roles=self._strategy.roles,
            picker=self._picker,
            ceiling_s=self._timeout_s,
        )
        if len(members.members) == 1:
            return MemoryNetwork(1).transport(0)
        transport = EdgeTransport(
            members.store,
            another(members.store, timeout_s=_FOREVER_S),
            another(members.store),
            another(members.store),
            f"{self._strategy.keys}/gossip/{members.generation}/{members.round}",
            rank=members.rank,
            world_size=len(members.members),
            timeout_s=self._timeout_s,
        )
        transport.make_edges(edge_order(topology, members.rank))
        return transport

    @override
    def follow_members(self) -> None:
        if self._gossip is not None:
            self._gossip.close(together=True)
        if self._partners is not None:
            self._failed += self._partners.dropped
        self._restored_picker = None  # of the ranks before
        self.start()

    @override
    def open(self, model: SharedModel) -> None:
        before, self._layout = self._layout, model.layout
        self._model = model
        if self._replica is None or self._layout != before:
            self._replica = replica_of(list(self._model.tensors), retention=self._model.retention)
        else:
            self._replica.push_pull(self._model.tensors)
        self._session += 1
        self._running.exchanges_per_step = self._strategy.exchanges_per_step
        self._running.open(self._replica, session=self._session, layout=_with_wire(self._layout, self._strategy.wire))

    @override
    def step(self, step: Step) -> None:
        with self._watching_health():
            self._running.step(self._model.tensors, step_s=step.seconds, forward_passes=step.forward_passes)

    @override
    def settle(self) -> None:
        with self._watching_health():
            self._running.drain(self._model.tensors)

    @contextmanager
    def _watching_health(self) -> Iterator[None]:
        """Say which tensor is not finite; and after another model has been taken over, momentum is of no use any more."""
        replica = self._replica
        assert replica is not None
        before = replica.replacements
        try:
            yield
        except NonFiniteError as error:
            raise error_of(self._strategy.global_rank, self._model.names, self._model.tensors) from error
        if replica.replacements != before:
            OptimizerStates(self._strategy.optimizers).reset()

    @override
    def average(self, meeting: Rendezvous) -> float:
        replica = self._replica
        assert replica is not None
        begun = False

        def average() -> float:
            nonlocal begun
            if begun:  # a worker died in the middle: y is half averaged, and x still is what it was
                replica.push_pull(self._model.tensors, forward_passes=0)
            begun = True
            return meeting.average(replica.settle())

        distance = together(average)
        # of a mean that is not finite every worker's distance is not; else a distance that is not has overflowed
        if self._strategy.refuse_nonfinite and not (math.isfinite(distance) or all_finite(replica.settle())):
            names, rule, rank = self._model.names, self._strategy.on_nonfinite, self._strategy.global_rank
            distance, was_finite = mean_of_healthy(meeting, replica, names, self._model.tensors, rule, rank)
            if not was_finite:
                self._counters.adopted += 1
                OptimizerStates(self._strategy.optimizers).reset()
        replica.copy_out(self._model.tensors)
        return distance

    @override
    def close(self, *, together: bool) -> None:
        if self._gossip is not None:
            self._gossip.close(together=together)

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
        report.refused_nonfinite = counters.refused_nonfinite
        report.adopted = counters.adopted
        report.bytes_sent = counters.bytes_sent
        report.failed = self._failed + (self._partners.dropped if self._partners is not None else 0)
        report.describe_staleness(counters.staleness)

    @override
    def state_dict(self) -> dict[str, Any]:
        assert self._picker is not None
        picker = self._picker if self._partners is None else self._partners.picker
        return {"picker": picker.state_dict(), "staleness": self._counters.staleness.state_dict()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored_picker = state["picker"]
        self._counters.staleness.load_state_dict(state["staleness"])

    @property
    def _running(self) -> Gossip:
        assert self._gossip is not None, "start() comes first"
        return self._gossip


def _with_wire(layout: int, wire: Wire) -> int:
    """A fingerprint that workers have in common if they publish the same tensors and write them alike, 63 bits."""
    return layout ^ zlib.crc32(wire.encode())
