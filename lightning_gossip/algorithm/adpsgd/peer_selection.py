"""Whom a worker of AD-PSGD exchanges with, how long it waits, and what becomes of a peer that fails.

Reads no clock and takes no lock; a driver calls it one call at a time (:mod:`lightning_gossip.algorithm.adpsgd.protocol`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from lightning_gossip.algorithm.adpsgd.link_shares import LinkShares
from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerPicker, Roles
from lightning_gossip.algorithm.adpsgd.repair import repaired
from lightning_gossip.algorithm.membership.failure_detector import Patience, Verdict
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import PeerError

log = logging.getLogger(__name__)

_FLOOR_S = 2.0  # an answering process may be stopped by its host for a second; a shorter deadline only loses edges
# after a failure, before the peer is drawn again: doubles from the first to the second. The first is longer than a dead worker
# takes to be suspected (four heartbeats, and one to look), or all its neighbours would wait for a connection with it
_PAUSE_S = (3.0, 30.0)


class Member(Protocol):
    """A worker, as logs call it."""

    @property
    def initial_rank(self) -> int:
        """The rank that it was started with."""

    @property
    def spoken(self) -> str:
        """Name of the worker in log lines."""


M = TypeVar("M", bound=Member)
M_contra = TypeVar("M_contra", contravariant=True)


class Monitor(Protocol[M_contra]):
    """What is known of the other workers."""

    @property
    def version(self) -> int:
        """Another number when a worker may have failed."""

    def verdict(self, worker: M_contra) -> Verdict:
        """State of a worker as the failure detector sees it."""

    def connection_lost(self, worker: M_contra) -> None:
        """Note that a worker has closed a connection."""


class ChangingPeers(Generic[M]):
    """Whom a worker exchanges with: the neighbours that are alive, in the graph of the workers that have not failed.

    A peer whose exchange fails is not drawn for a while, which doubles with each failure and ends with an exchange that works;
    one that is suspected is not drawn at all; one that has failed leaves the graph, which is repaired. Who has failed is asked
    only when the monitor says that this may have changed.

    Args:
        monitor: knows who is alive.
        me: this worker's rank among the members.
        members: in the order of the transport's ranks.
        topology: over these ranks.
        roles: as for :class:`~lightning_gossip.algorithm.adpsgd.partner_sampler.PartnerPicker`.
        picker: of this topology; its random stream goes on over repaired graphs.
        ceiling_s: the longest deadline.
        now_s: the driver's clock.
        connect_s: how long a connection may take to be made.
        reply_s: how long it may take to send an answer.
        raises: whether the first peer that fails, or breaks an exchange in its middle, ends the gossip.
        say: logs what happens to peers.

    Attributes:
        failed_exchanges: how many have failed.
    """

    def __init__(
        self,
        monitor: Monitor[M],
        me: int,
        members: Sequence[M],
        topology: Topology,
        *,
        roles: Roles,
        picker: PartnerPicker,
        ceiling_s: float,
        now_s: Callable[[], float],
        connect_s: float = 0.0,
        reply_s: float = 0.0,
        raises: bool = False,
        say: Callable[..., None] = log.warning,
    ) -> None:
        self.failed_exchanges = 0
        self._monitor = monitor
        self._members = list(members)
        self._me = me
        self._now_s = now_s
        self._connect_s = connect_s
        self._reply_s = reply_s
        self._raises = raises
        self._say = say
        self._topology = topology
        self._roles = roles
        self._drawn = _Drawn(list(range(len(members))), picker)
        self._links = LinkShares(picker.neighbours) if picker.choice == "fast_links" else None
        self._put_off: dict[int, float] = {}  # by peer that would not exchange over a slow link: until when
        self._version: int | None = None  # of the monitor, when it was asked last who has failed
        self._ceiling_s = ceiling_s
        self._patience = Patience(floor_s=_FLOOR_S, ceiling_s=ceiling_s)
        self._pauses: dict[int, tuple[float, float]] = {}  # by peer: until when, and how long that was

    @property
    def picker(self) -> PartnerPicker:
        """The sampler that draws peers at present."""
        return self._drawn.picker

    @property
    def start_share(self) -> float:
        """Exchanges to start per step of the neighbourhood; 0 for a worker that only answers."""
        return self._repair().picker.start_share

    @property
    def deadline_s(self) -> float:
        """Deadline of one chunk of a model, in seconds."""
        return self._ceiling_s if self._raises else self._patience.deadline_s  # a broken exchange cannot be made once more

    @property
    def answer_s(self) -> float:
        """Deadline of an answer, by a peer in whose queue nobody is ahead."""
        return 2 * self._patience.deadline_s  # the peer may be waiting for a third one that does not answer

    @property
    def turn_s(self) -> float:
        """How long one exchange of this worker holds up those that are queued, at the longest."""
        return self.deadline_s + self._reply_s  # one whose turn comes may have died or frozen meanwhile

    @property
    def longest_turn_s(self) -> float:
        """The longest ``turn_s`` that a peer may have."""
        return self._ceiling_s + self._reply_s

    @property
    def drain_s(self) -> float:
        """How long the exchange under way may last when the session ends."""
        # an answer, the chunks after it, and perhaps a connection made before
        return self.answer_s + 2 * self.deadline_s + self._connect_s + self._reply_s

    @property
    def looks_again_s(self) -> float:
        """How long a worker that has nothing to start waits before it asks again."""
        return 1.0  # a repaired graph may have another role for it

    def pick(self) -> int | None:
        """The peer of the next exchange; None if there is nobody at the moment."""
        alive, picker = self._repair()
        if not picker.initiates:
            return None
        at_s, known = self._now_s(), None
        for _ in range(4 * len(picker.neighbours)):
            peer = alive[picker.pick()]
            if self._monitor.verdict(self._members[peer]) is not Verdict.ALIVE:
                continue
            until_s = max(self._pauses.get(peer, (at_s, 0.0))[0], self._put_off.get(peer, at_s))
            if until_s > at_s or self.missing_s(peer) > 0.0:
                continue
            if self._links is None or peer not in self._links.times_s or not self._links.unmeasured:
                return peer
            known = peer  # what is slow shows beside others only: links that were never measured come first
        return known

    def suspected(self) -> list[int]:
        """Neighbours without a heartbeat for a while, of whom nothing else is known."""
        alive, picker = self._drawn
        neighbours = [alive[rank] for rank in picker.neighbours]
        return [peer for peer in neighbours if self._monitor.verdict(self._members[peer]) is Verdict.SUSPECTED]

    def has_failed(self, peer: int) -> bool:
        """Whether a peer has failed, as far as is known here. Reads nothing that changes, so any thread may ask."""
        return self._monitor.verdict(self._members[peer]) is Verdict.FAILED

    def missing_s(self, peer: int) -> float:
        """How long this worker would rather not exchange with a peer, because their link is slow; 0 if it may."""
        return 0.0 if self._links is None else self._links.missing_s(peer, at_s=self._now_s())

    def put_off(self, peer: int, seconds: float) -> None:
        """Note that a peer wants no exchange for so many seconds, because their link is slow."""
        self._put_off[peer] = self._now_s() + seconds

    def took(self, peer: int, seconds: float, *, waited_s: float = 0.0) -> None:
        """Note how long an exchange with a peer took that has come to its end.

        Args:
            peer: the rank.
            seconds: that it took.
            waited_s: for the answer, before it.
        """
        if self._links is not None:
            self._links.took(peer, seconds, at_s=self._now_s(), waited_s=waited_s)
        self._patience.took(seconds)
        paused = self._pauses.pop(peer, None)
        if paused is not None:
            self._say("%s: %s answers again, and both exchange models as before", self._spoken, self._members[peer].spoken)

    def gave_up(self, peer: int, seconds: float) -> None:
        """Note that an exchange with a peer was given up after so many seconds, the wait for its answer included."""
        if self._links is not None:
            self._links.broke(peer, seconds, at_s=self._now_s())

    def exchange_failed(self, peer: int, error: PeerError) -> None:
        """Something with a peer has failed; raises the error if that ends the gossip."""
        worker = self._members[peer]
        if error.closed:
            self._monitor.connection_lost(worker)
        self.failed_exchanges += 1
        if self._raises and error.phase == "exchange":
            raise error
        shortest_s, longest_s = _PAUSE_S
        if error.timed_out:
            self._patience.in_vain()
        pause_s = min(longest_s, 2 * self._pauses[peer][1]) if peer in self._pauses else shortest_s
        self._pauses[peer] = (self._now_s() + pause_s, pause_s)
        self._say("%s: no exchanges with %s for %.3g s: %s", self._spoken, worker.spoken, pause_s, error)

    def raise_failure(self) -> None:
        """Raise a PeerError if a worker has failed and that ends the gossip."""
        if self._raises and len(alive := self._repair().alive) < len(self._members):
            failed = next(worker.initial_rank for rank, worker in enumerate(self._members) if rank not in alive)
            message = f"Rank {failed} has failed, and all end (on_peer_failure='raise')."
            raise PeerError(message, rank=failed, phase="gossip")

    @property
    def _spoken(self) -> str:
        return self._members[self._me].spoken

    def _repair(self) -> _Drawn:
        version = self._monitor.version
        if version == self._version:
            return self._drawn
        me, (before, picker) = self._me, self._drawn
        alive = [
            rank
            for rank, worker in enumerate(self._members)
            if rank == me or self._monitor.verdict(worker) is not Verdict.FAILED
        ]
        if alive != before:
            graph = repaired(self._topology, alive)
            stream = picker.state_dict()["generator"]
            roles: Roles = "auto" if self._roles == "auto" else "symmetric"
            picker = PartnerPicker(graph, alive.index(me), roles=roles, choice=picker.choice)
            picker.load_state_dict({"rank": alive.index(me), "generator": stream})
            self._drawn = _Drawn(alive, picker)
            if self._links is not None:
                self._links.neighbours = tuple(alive[rank] for rank in picker.neighbours)
            neighbours = [self._members[alive[rank]].initial_rank for rank in picker.neighbours]
            self._say("%s: a neighbour has died; this worker exchanges with ranks %s now", self._spoken, neighbours)
        self._version = version
        return self._drawn


class _Drawn(NamedTuple):
    """A graph of living workers, and what draws from it."""

    alive: list[int]  # the transport's rank of each of its ranks
    picker: PartnerPicker
