"""The thread that starts exchanges: at the pace of its neighbourhood, and with another peer if one refuses."""

from __future__ import annotations

import math
import random
from typing import Protocol

from lightning_gossip.algorithm.adpsgd.pace import backoff_s
from lightning_gossip.errors import ConfigurationError, PeerError
from lightning_gossip.runtime.adpsgd.nonfinite_guard import GossipCounters
from lightning_gossip.runtime.adpsgd.peer_selection import Partners
from lightning_gossip.runtime.adpsgd.session import Session
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.transport.base import Transport
from lightning_gossip.transport.messages import Kind, Message

_NOBODY_S = 0.25  # before a worker that is alone for the moment looks again
_PROBE_S = 0.5  # between two looks at the connections with silent peers: a beat, since nobody falls silent more often


class Worker(Protocol):
    """Whose exchanges they are."""

    counters: GossipCounters
    exchanges_per_step: float

    def message(self, kind: Kind) -> Message:
        """What it says of itself."""

    def exchange(self, peer: int, *, gives: bool) -> None:
        """Average with a peer that has agreed."""

    def layout_error(self, peer: int) -> ConfigurationError:
        """What ends the gossip with a peer that publishes something else."""


class Caller:
    """Runs on the thread ``gossip-caller``.

    Args:
        transport: asks the peers.
        partners: whom to ask.
        session: when.
        worker: for whom.
    """

    def __init__(self, transport: Transport, partners: Partners, session: Session, worker: Worker) -> None:
        self._transport = transport
        self._partners = partners
        self._session = session
        self._worker = worker
        self._backoff = random.Random(transport.rank)
        self._probed_s = -math.inf

    def call(self) -> None:
        """Start exchanges until the session has ended for good."""
        refusals = 0
        while not self._session.has_ended:
            rate = self._worker.exchanges_per_step * self._partners.start_share
            if not self._session.await_start(rate, self._partners.looks_again_s):
                self._probe()
                continue
            peer = self._partners.pick()
            if peer is None:
                self._probe()
                self._session.draw_again(now_s() + _NOBODY_S)
                continue
            mine = self._worker.message(Kind.EXCHANGE)
            answer = self._request(peer, mine)
            if answer is None:
                continue
            self._session.note_peer_step(peer, answer.step_us * 1e-6)
            if answer.kind is Kind.ACCEPT:
                self._worker.exchange(peer, gives=bool(answer.adopts))
                refusals = 0
            else:
                self._worker.counters.refused += 1
                refusals += 1
                self._session.draw_again(now_s() + self._backoff.uniform(0.0, backoff_s(refusals)))
                if answer.session == self._session.number and answer.layout != mine.layout:
                    raise self._worker.layout_error(peer)

    def _probe(self) -> None:
        """A worker that only answers would not notice that a caller of its has died.

        A probe stays unread in the connection while its peer is frozen, so it is not sent at every step.
        """
        at_s = now_s()
        if at_s - self._probed_s < _PROBE_S:
            return
        self._probed_s = at_s
        for peer in self._partners.suspected():
            try:
                self._transport.probe(peer)
            except PeerError as error:  # noqa: PERF203 - seldom more than one
                self._partners.exchange_failed(peer, error)

    def _request(self, peer: int, mine: Message) -> Message | None:
        try:
            answer = self._transport.request(peer, mine, self._partners.answer_s)
            while answer.kind is Kind.QUEUED:  # the peer is there; its deadline begins when it is this worker's turn
                turn_s = min(answer.wait_us * 1e-6, self._transport.world_size * self._partners.longest_turn_s)
                answer = self._transport.await_reply(peer, turn_s + self._partners.answer_s)
            return answer
        except BaseException as error:
            self._session.draw_again(now_s())
            if not isinstance(error, PeerError):
                raise
            self._partners.exchange_failed(peer, error)
            return None
