"""Peer selection: which peer a worker exchanges with next, and what follows when an exchange with a peer fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from typing_extensions import override

from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerPicker, Roles
from lightning_gossip.algorithm.adpsgd.repair import repaired
from lightning_gossip.algorithm.failure_detector import Patience, Verdict
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.membership.monitor import HeartbeatMonitor
from lightning_gossip.runtime.membership.round_store import WorkerId
from lightning_gossip.transport.pairwise_groups import CONNECT_S, REPLY_S

log = logging.getLogger(__name__)

_FLOOR_S = 2.0  # an answering process may be stopped by its host for a second; a shorter deadline only loses edges
# after a failure, before the peer is drawn again: doubles from the first to the second. The first is longer than it takes to
# suspect a worker that has failed (four heartbeats, and one to look), or its neighbours would all wait for a connection with it
_PAUSE_S = (3.0, 30.0)


class Partners(Protocol):
    """Selection of peers, as the gossip threads use it; ranks are the transport's."""

    @property
    def initiates(self) -> bool:
        """Whether this worker starts exchanges at present."""

    @property
    def start_share(self) -> float:
        """Share of this worker's exchanges that it starts itself."""

    @property
    def deadline_s(self) -> float:
        """Deadline of one chunk; of an answer too, unless it may have to wait for such a deadline itself."""

    @property
    def answer_s(self) -> float:
        """Deadline of an answer, by a peer in whose queue nobody is ahead."""

    @property
    def turn_s(self) -> float:
        """How long one exchange of this worker holds up those that wait for their turn, at the longest."""

    @property
    def longest_turn_s(self) -> float:
        """The longest :attr:`turn_s` of any worker."""

    @property
    def drain_s(self) -> float:
        """How long the exchange under way may last when all meet."""

    @property
    def looks_again_s(self) -> float:
        """How long a worker that has nothing to start waits before it asks again."""

    def pick(self) -> int | None:
        """The next partner; None if there is nobody at present."""

    def suspected(self) -> list[int]:
        """Neighbours that are suspected: their heartbeats are late, and nothing else is known of them."""

    def took(self, peer: int, seconds: float) -> None:
        """An exchange with a peer went well."""

    def exchange_failed(self, peer: int, error: PeerError) -> None:
        """An exchange with a peer failed; raises the error if that ends the gossip."""


class FixedPartners(Partners):
    """One picker, one deadline; the first failure ends the gossip (``on_peer_failure="raise"``).

    Args:
        picker: draws.
        timeout_s: the deadline.
    """

    def __init__(self, picker: PartnerPicker, timeout_s: float) -> None:
        self._picker = picker
        self._timeout_s = timeout_s

    @property
    @override
    def initiates(self) -> bool:
        return self._picker.initiates

    @property
    @override
    def start_share(self) -> float:
        return self._picker.start_share

    @property
    @override
    def deadline_s(self) -> float:
        return self._timeout_s

    @property
    @override
    def answer_s(self) -> float:
        return self._timeout_s

    @property
    @override
    def turn_s(self) -> float:
        return self._timeout_s

    @property
    @override
    def longest_turn_s(self) -> float:
        return self._timeout_s

    @property
    @override
    def drain_s(self) -> float:
        return self._timeout_s

    @property
    @override
    def looks_again_s(self) -> float:
        return self._timeout_s  # a picker does not change its mind

    @override
    def pick(self) -> int | None:
        return self._picker.pick()

    @override
    def suspected(self) -> list[int]:
        return []

    @override
    def took(self, peer: int, seconds: float) -> None:
        self._picker.took(peer, seconds)

    @override
    def exchange_failed(self, peer: int, error: PeerError) -> None:
        raise error


class ChangingPartners(Partners):
    """Draws among the neighbours that are alive, in the graph of the workers that have not failed.

    A peer whose exchange fails is not drawn for a while, which doubles with each failure and ends with an exchange that works;
    one that is suspected is not drawn at all; one that has failed leaves the graph, which is repaired. Who has failed is asked
    only when the monitor says that this may have changed.

    Used by the gossip threads; the training thread reads the counts. One lock, held for a few instructions, guards the patience
    and the pauses; the graph and what draws from it are one value, replaced at once.

    Args:
        monitor: knows the states of the workers.
        members: in the order of the transport's ranks.
        topology: over these ranks.
        roles: as for :class:`~lightning_gossip.algorithm.adpsgd.partner_sampler.PartnerPicker`.
        picker: of this topology; its random stream goes on over repaired graphs.
        ceiling_s: the longest deadline.

    Attributes:
        failed_exchanges: how many have failed.
    """

    def __init__(
        self,
        monitor: HeartbeatMonitor,
        members: Sequence[WorkerId],
        topology: Topology,
        *,
        roles: Roles,
        picker: PartnerPicker,
        ceiling_s: float,
    ) -> None:
        self.failed_exchanges = 0
        self._monitor = monitor
        self._members = list(members)
        self._me = self._members.index(monitor.me)
        self._topology = topology
        self._roles = roles
        self._graph = _Graph(list(range(len(members))), picker)
        self._version: int | None = None  # of the monitor, when it was asked last who has failed
        self._ceiling_s = ceiling_s
        self._patience = Patience(floor_s=_FLOOR_S, ceiling_s=ceiling_s)
        self._pauses: dict[int, tuple[float, float]] = {}  # by peer: until when, and how long that was
        self._lock = threading.Lock()

    @property
    def picker(self) -> PartnerPicker:
        """What draws at present."""
        return self._graph.picker

    @property
    @override
    def initiates(self) -> bool:
        return self._repair().picker.initiates

    @property
    @override
    def start_share(self) -> float:
        return self._repair().picker.start_share

    @property
    @override
    def deadline_s(self) -> float:
        return self._patience.deadline_s

    @property
    @override
    def answer_s(self) -> float:
        return 2 * self._patience.deadline_s  # the peer may be waiting for a third one that does not answer

    @property
    @override
    def turn_s(self) -> float:
        return self.deadline_s + REPLY_S  # one whose turn comes may have failed or frozen meanwhile

    @property
    @override
    def longest_turn_s(self) -> float:
        return self._ceiling_s + REPLY_S

    @property
    @override
    def drain_s(self) -> float:
        # an answer, the chunks after it, and perhaps a connection made before
        return 2 * self.answer_s + CONNECT_S + REPLY_S

    @property
    @override
    def looks_again_s(self) -> float:
        return 1.0  # a repaired graph may have another role for it

    @override
    def pick(self) -> int | None:
        present, picker = self._repair()
        if not picker.initiates:
            return None
        at_s = now_s()
        for _ in range(4 * len(picker.neighbours)):
            peer = present[picker.pick()]
            if self._monitor.verdict(self._members[peer]) is Verdict.ALIVE and self._pauses.get(peer, (at_s, 0.0))[0] <= at_s:
                return peer
        return None

    @override
    def suspected(self) -> list[int]:
        present, picker = self._graph
        neighbours = [present[rank] for rank in picker.neighbours]
        return [peer for peer in neighbours if self._monitor.verdict(self._members[peer]) is Verdict.SUSPECTED]

    @override
    def took(self, peer: int, seconds: float) -> None:
        present, picker = self._graph
        if peer in present:
            picker.took(present.index(peer), seconds)
        with self._lock:
            self._patience.took(seconds)
            paused = self._pauses.pop(peer, None)
        if paused is not None:
            log.warning(
                "%s: %s answers again, and both exchange models as before", self._monitor.me.spoken, self._members[peer].spoken
            )

    @override
    def exchange_failed(self, peer: int, error: PeerError) -> None:
        worker = self._members[peer]
        if error.closed:
            self._monitor.connection_lost(worker)
        shortest_s, longest_s = _PAUSE_S
        with self._lock:
            self.failed_exchanges += 1
            if error.timed_out:
                self._patience.in_vain()
            pause_s = min(longest_s, 2 * self._pauses[peer][1]) if peer in self._pauses else shortest_s
            self._pauses[peer] = (now_s() + pause_s, pause_s)
        log.warning("%s: no exchanges with %s for %.3g s: %s", self._monitor.me.spoken, worker.spoken, pause_s, error)

    def _repair(self) -> _Graph:
        version = self._monitor.version
        if version == self._version:
            return self._graph
        me, (before, picker) = self._me, self._graph
        present = [
            rank
            for rank, worker in enumerate(self._members)
            if rank == me or self._monitor.verdict(worker) is not Verdict.FAILED
        ]
        if present != before:
            graph = repaired(self._topology, present)
            stream = picker.state_dict()["generator"]
            roles: Roles = "auto" if self._roles == "auto" else "symmetric"
            picker = PartnerPicker(graph, present.index(me), roles=roles, choice=picker.choice)
            picker.load_state_dict({"rank": present.index(me), "generator": stream})
            self._graph = _Graph(present, picker)
            neighbours = [self._members[present[rank]].initial_rank for rank in picker.neighbours]
            log.warning(
                "%s: a neighbour has failed; this worker exchanges with ranks %s now", self._monitor.me.spoken, neighbours
            )
        self._version = version
        return self._graph


class _Graph(NamedTuple):
    """A graph of the workers that have not failed, and the sampler of partners in it."""

    present: list[int]  # the transport's rank of each of its ranks
    picker: PartnerPicker
