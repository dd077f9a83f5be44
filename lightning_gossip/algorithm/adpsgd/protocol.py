r"""What two workers of AD-PSGD say to each other, and what each of them decides.

Lian, Zhang, Zhang, Liu: Asynchronous Decentralized Parallel SGD (ICML 2018, arXiv 1710.06952), Algorithm 1, whose averaging is
atomic and whose workers never refuse, fail or stop. Here is the rest: who asks whom and when, who may begin an exchange, who is
told to wait, and what becomes of one that is not finished.

There is no thread, clock, socket or store. What waits is a generator: it yields an *effect* and is resumed with its result. A
driver runs the generators of one worker, one at a time, so that they see its state between two effects of each other's:

| driver | effects are |
|---|---|
| :mod:`lightning_gossip.runtime.adpsgd.gossip` | messages and chunks over a transport; one lock holds while a generator runs |
| :mod:`lightning_gossip.simulation.strategies.adpsgd` | events of SimPy |
| ``tests/schedules`` | choices of a seeded scheduler |

| phase | request of this session | exchange that is due | ends by |
|---|---|---|---|
| ``CLOSED`` | refused | waits | :meth:`GossipProtocol.open` → ``OPEN`` |
| ``OPEN`` | accepted, unless busy | begins, unless busy | :meth:`GossipProtocol.drain` → ``DRAINING`` |
| ``DRAINING`` | refused | waits | the end of the exchange under way → ``CLOSED`` |
| ``STOPPED`` | refused | never begins | |

From each phase :meth:`GossipProtocol.stop` leads to ``STOPPED``. A failure is kept and refuses as ``STOPPED`` does.

| generator | effects, in this order |
|---|---|
| :meth:`~GossipProtocol.initiate` | ``Wait`` until one is due, ``Ask``, ``AwaitAnswer`` while queued, ``Average`` |
| :meth:`~GossipProtocol.respond` | ``Wait`` for a request, ``Reply``, ``Average`` |
| :meth:`~GossipProtocol.receive` | ``Reply`` that the request is queued, if others are ahead |
| :meth:`~GossipProtocol.request_sync` | ``Announce`` to each peer |
| :meth:`~GossipProtocol.drain` | ``Wait`` for the exchange under way |

**One exchange at a time**, started or answered: then no timing can make models drift apart. A worker that is asking answers a
request with a refusal, at once, so waits form no cycle: an initiator waits only for a responder that is idle or in an
exchange with somebody else, and that one ends by itself. The refused initiator draws again.

An initiator cannot know how long others hold up the responder, since what it measures is how long an exchange takes. So the
responder says at once that a request is queued, and for how long at the most; the initiator's deadline begins then.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from lightning_gossip.algorithm.adpsgd.pace import Pace, backoff_s
from lightning_gossip.algorithm.adpsgd.peer_selection import ChangingPeers
from lightning_gossip.errors import ConfigurationError, PeerError, ProtocolError

_NOBODY_S = 0.25  # before a worker that has nobody to exchange with at the moment draws again
_PROBE_S = 0.5  # between two looks at the connections with suspected peers: as often as heartbeats come
_DRAIN_WAIT_S = 1.0  # of the waits for the exchange under way
_SYNC_REQUESTS = 8  # kept at most: neighbours are in this session or the next


class Phase(Enum):
    """Phase of one worker's gossip."""

    CLOSED = "closed"
    OPEN = "open"
    DRAINING = "draining"
    STOPPED = "stopped"


# -- messages ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """An initiator's request to average with it.

    Args:
        session: that the initiator is in.
        layout: fingerprint of what it publishes; an exchange needs equal ones.
        step_s: its mean step time, in seconds; 0 if not known.
        adopts: its model is not finite, and it wants the responder's in place of it.
        ticket: what the transport wants back in the answer.
    """

    session: int
    layout: int
    step_s: float = 0.0
    adopts: bool = False
    ticket: int = 0


class Verdict(Enum):
    """A responder's decision about a request."""

    ACCEPTED = "accepted"  # the exchange begins
    REFUSED = "refused"  # draw again
    QUEUED = "queued"  # another answer follows when it is the request's turn


@dataclass(frozen=True)
class Answer:
    """A responder's answer to a request.

    Args:
        verdict: whether the exchange begins.
        session: that the responder is in.
        layout: fingerprint of what the responder publishes; an exchange needs equal ones.
        step_s: the responder's mean step time, in seconds; 0 if not known.
        adopts: the responder's model is not finite, and it wants the initiator's in place of it.
        ticket: the request's.
        wait_s: of a queued request: until its turn, in seconds, at the longest; of a refused one: not to be asked again for so
            long, because the link is slow and the responder has spent its share on slow ones.
    """

    verdict: Verdict
    session: int
    layout: int
    step_s: float = 0.0
    adopts: bool = False
    ticket: int = 0
    wait_s: float = 0.0


# -- effects -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wait:
    """Wait until ``ready()``, which only an event or a generator of this worker can bring about, or until a time. No result.

    Args:
        until_s: on the driver's clock; infinite for no deadline.
        ready: is asked after each event and each effect of this worker.
    """

    until_s: float
    ready: Callable[[], bool]


@dataclass(frozen=True)
class Ask:
    """Send a request and wait for its answer. The result is the answer, or the PeerError."""

    peer: int
    request: Request
    timeout_s: float


@dataclass(frozen=True)
class AwaitAnswer:
    """Wait for the next answer to a request that was queued. The result is the answer, or the PeerError."""

    peer: int
    timeout_s: float


@dataclass(frozen=True)
class Reply:
    """Send an answer. The result is None, or the PeerError."""

    peer: int
    answer: Answer


@dataclass(frozen=True)
class Average:
    """Exchange half-differences with a peer that does the same now. The result is an :class:`Averaged`, or the PeerError.

    Args:
        peer: the rank.
        gives: give it this worker's model instead, since its own is not finite.
        timeout_s: deadline of each piece of the model.
    """

    peer: int
    gives: bool
    timeout_s: float


@dataclass(frozen=True)
class Averaged:
    """An exchange has come to its end.

    Args:
        adopts: this worker's model is not finite, and it will ask for a peer's.
    """

    adopts: bool = False


@dataclass(frozen=True)
class Probe:
    """See whether the connection with a peer still stands. The result is None, or the PeerError."""

    peer: int


@dataclass(frozen=True)
class Announce:
    """Tell a peer that somebody asks for a synchronisation in a session. The result is None, or the PeerError."""

    peer: int
    session: int


Effect = Wait | Ask | AwaitAnswer | Reply | Average | Probe | Announce
Steps = Generator[Effect, Any, None]


class Counts(Protocol):
    """Counter of refused requests."""

    refused: int


class GossipProtocol:
    """The state of one worker's gossip, apart from its model.

    Args:
        rank: of this worker, in [0, world_size).
        world_size: workers.
        peers: whom to exchange with, and how long to wait for them.
        counts: where refused requests are counted.
        now_s: the driver's clock.
        generator: of the waits after a refusal.
        exchanges_per_step: completed exchanges that each worker should see in one step of its neighbourhood; 0 for none.

    Attributes:
        session: the present or last session, -1 before the first.
        layout: fingerprint of what is published in it.
        busy: whether an exchange is under way, or an answer is waited for.
        adopts: whether this worker's model is not finite and it asks for a peer's.
        failure: what has ended the gossip.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        peers: ChangingPeers[Any],
        counts: Counts,
        *,
        now_s: Callable[[], float],
        generator: random.Random,
        exchanges_per_step: float = 1.0,
    ) -> None:
        self.exchanges_per_step = exchanges_per_step
        self.session = -1
        self.layout = 0
        self.phase = Phase.CLOSED
        self.busy = False
        self.adopts = False
        self.failure: BaseException | None = None
        self._rank = rank
        self._world_size = world_size
        self._peers = peers
        self._counts = counts
        self._now_s = now_s
        self._generator = generator
        self._pace = Pace()
        self._queue: dict[int, Request] = {}  # by peer, in the order of arrival: a worker asks one peer at a time
        self._answering = False  # a request that was taken from the queue
        self._hears = True  # requests may come
        self._responds = True
        self._sync_requests: set[int] = set()  # sessions
        self._probed_s = -math.inf
        self._answer_by_s = -math.inf  # the deadline of the answer that is or was waited for last

    # -- events ----------------------------------------------------------------------------------------------------------

    def open(self, session: int, layout: int) -> None:
        """Begin a session, in which exchanges may begin: the model has just been published.

        Args:
            session: the same number on all workers, larger each time.
            layout: fingerprint of what is published; must be equal on all workers.

        Raises:
            ProtocolError: if another one is open, or the gossip has stopped.
        """
        if self.phase is not Phase.CLOSED:
            raise ProtocolError(f"A session cannot open while the gossip is {self.phase.value}.")
        self.session, self.layout, self.phase = session, layout, Phase.OPEN
        self.adopts = False  # what is published now may be a mean that was given to this worker
        self._sync_requests = {asked for asked in self._sync_requests if asked >= session}
        self._pace.begin_session()

    def stepped(self, step_s: float | None) -> None:
        """Note a step of this worker and how long it took, in seconds; None if that is not known."""
        if step_s is not None:
            self._pace.step(step_s)

    def sync_requested(self, session: int) -> None:
        """Note that somebody asks for a synchronisation in a session, which may not have begun here, or be over."""
        if session >= self.session and len(self._sync_requests) < _SYNC_REQUESTS:
            self._sync_requests.add(session)

    def hears_no_more(self) -> None:
        """Note that no request will come any more; those that are queued are still answered."""
        self._hears = False

    def fail(self, error: BaseException) -> None:
        """Note that a driver could not go on: the first error is kept, unless the gossip has stopped before."""
        if self.phase is not Phase.STOPPED:
            self.failure = self.failure or error

    def stop(self) -> bool:
        """End the gossip: no exchange begins any more. Returns False if that was so already."""
        stops = self.phase is not Phase.STOPPED
        self.phase = Phase.STOPPED
        return stops

    # -- what is asked ---------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a session is open."""
        return self.phase is Phase.OPEN

    @property
    def has_ended(self) -> bool:
        """Whether no exchange will begin any more."""
        return self.phase is Phase.STOPPED or self.failure is not None

    @property
    def is_sync_requested(self) -> bool:
        """Whether somebody has asked for a synchronisation in this session."""
        return self.session in self._sync_requests

    # -- generators ------------------------------------------------------------------------------------------------------

    def initiate(self) -> Steps:
        """Start exchanges at the pace of the neighbourhood, until the gossip has ended."""
        refusals = 0
        while not self.has_ended:
            due_s = self._due_s()
            if due_s > self._now_s():
                until_s = min(due_s, self._now_s() + self._peers.looks_again_s)
                yield Wait(until_s, lambda due_s=due_s: self.has_ended or self._due_s() < due_s)  # type: ignore[misc]
                if self._due_s() > self._now_s():
                    yield from self._probe()
            elif (peer := self._peers.pick()) is None:
                self._pace.draw_again(self._now_s() + _NOBODY_S)
                yield from self._probe()
            else:
                refusals = yield from self._start(peer, refusals)

    def _start(self, peer: int, refusals: int) -> Generator[Effect, Any, int]:
        """Ask a peer, and average if it agrees; returns the refusals in a row."""
        self.busy = True
        self._pace.start(self._now_s())
        asked_s = self._now_s()
        request = Request(self.session, self.layout, self._pace.own_step_s, self.adopts)
        try:
            timeout_s = self._peers.answer_s
            self._answer_by_s = self._now_s() + timeout_s
            answer = yield Ask(peer, request, timeout_s)
            while isinstance(answer, Answer) and answer.verdict is Verdict.QUEUED:
                timeout_s = min(answer.wait_s, self._world_size * self._peers.longest_turn_s) + self._peers.answer_s
                self._answer_by_s = self._now_s() + timeout_s
                answer = yield AwaitAnswer(peer, timeout_s)
            if isinstance(answer, PeerError):
                self._pace.draw_again(self._now_s())
                self._peers.exchange_failed(peer, answer)
                return refusals
            self._note_step(peer, answer.step_s)
            if answer.verdict is Verdict.ACCEPTED:
                yield from self._average(peer, gives=answer.adopts, asked_s=asked_s)
                return 0
            if answer.wait_s > 0.0:
                self._peers.put_off(peer, answer.wait_s)
        finally:
            self.busy = False
        self._counts.refused += 1
        refusals += 1
        self._pace.draw_again(self._now_s() + self._generator.uniform(0.0, backoff_s(refusals)))
        if answer.session == self.session and answer.layout != request.layout:
            raise self._layout_error(peer)
        return refusals

    def respond(self) -> Steps:
        """Answer the requests of the queue, one after the other, until none waits and none will come."""
        try:
            while True:
                yield Wait(math.inf, lambda: bool(self._queue) or not self._hears)
                if not self._queue:
                    return
                peer = next(iter(self._queue))
                self._answering = True
                yield from self._answer(peer, self._queue.pop(peer))
                self._answering = False
        finally:
            self._responds = False

    def receive(self, peer: int, request: Request) -> Steps:
        """Queue a request that has come, and tell its sender so if others are ahead."""
        ahead = self._ahead(peer) if self._responds else 0
        if ahead:
            queued = self._answer_to(request, Verdict.QUEUED, wait_s=ahead * self._peers.turn_s)
            failed = yield Reply(peer, queued)
            if failed is not None:
                self._peers.exchange_failed(peer, failed)
                return
        if self._responds:
            self._queue[peer] = request  # at the end, or in the place that the peer has
        else:
            yield from self._answer(peer, request)  # the gossip has ended, so with a refusal

    def request_sync(self) -> Steps:
        """Ask all workers to synchronise after their current step."""
        for peer in range(self._world_size):
            if peer != self._rank:
                failed = yield Announce(peer, self.session)
                if failed is not None:
                    self._peers.exchange_failed(peer, failed)
        self.sync_requested(self.session)

    def drain(self) -> Steps:
        """End the session: no new exchange; over when the one under way has ended, or the gossip has failed.

        Raises:
            PeerError: if it does not end in time.
        """
        if self.phase is Phase.OPEN:
            self.phase = Phase.DRAINING
        began_s, allowed_s, waited_s = self._now_s(), self._peers.drain_s, 0.0
        while self.busy and self.failure is None:
            queued_s = max(0.0, self._answer_by_s - began_s)  # a request may wait for its turn at a worker that is stopped
            if waited_s >= allowed_s + queued_s:
                raise PeerError(
                    f"An exchange did not end within {waited_s:.3g} s of its drain. Look at the logs of the other ranks.",
                    phase="drain",
                    seconds=waited_s,
                )
            # in short waits: a worker that was itself stopped for a while must not take that for the peer's delay
            wait_s = min(_DRAIN_WAIT_S, allowed_s + queued_s - waited_s)
            yield Wait(self._now_s() + wait_s, lambda: not self.busy or self.failure is not None)
            waited_s += wait_s
        if self.phase is Phase.DRAINING:
            self.phase = Phase.CLOSED

    # -- details ---------------------------------------------------------------------------------------------------------

    def _due_s(self) -> float:
        """When the next exchange is to start here; infinite if none may."""
        if self.busy or self.phase is not Phase.OPEN or self.failure is not None:
            return math.inf
        rate = self.exchanges_per_step * self._peers.start_share
        return self._pace.next_start_s(rate) if rate > 0.0 else math.inf

    def _answer(self, peer: int, request: Request) -> Steps:
        accepts = self.phase is Phase.OPEN and self.failure is None and not self.busy and request.session == self.session
        same_layout = request.layout == self.layout
        both_adopt = request.adopts and self.adopts  # nobody has a model to give
        put_off_s = 0.0 if request.adopts or self.adopts else self._peers.missing_s(peer)
        goes_ahead = accepts and same_layout and not both_adopt and put_off_s <= 0.0
        self._note_step(peer, request.step_s)
        if not goes_ahead:
            failed = yield Reply(peer, self._answer_to(request, Verdict.REFUSED, wait_s=put_off_s))
            if failed is not None:
                self._peers.exchange_failed(peer, failed)
            elif accepts and not same_layout:
                raise self._layout_error(peer)
            return
        self.busy = True
        try:
            failed = yield Reply(peer, self._answer_to(request, Verdict.ACCEPTED))
            if failed is not None:
                self._peers.exchange_failed(peer, failed)
            else:
                yield from self._average(peer, gives=request.adopts)
        finally:
            self.busy = False

    def _average(self, peer: int, *, gives: bool, asked_s: float | None = None) -> Steps:
        """The exchange itself; this worker is busy, and has waited for it since it asked."""
        began_s = self._now_s()
        result = yield Average(peer, gives, self._peers.deadline_s)
        if isinstance(result, PeerError):
            if result.timed_out:
                self._peers.gave_up(peer, self._now_s() - (began_s if asked_s is None else asked_s))
            self._peers.exchange_failed(peer, result)
        else:
            self.adopts = result.adopts
            waited_s = 0.0 if asked_s is None else began_s - asked_s
            self._peers.took(peer, self._now_s() - began_s, waited_s=waited_s)

    def _probe(self) -> Steps:
        """A worker that only answers would not notice that one which asks it has died.

        What is sent stays unread in the connection while its peer is frozen, so it is not sent at every step.
        """
        at_s = self._now_s()
        if at_s - self._probed_s < _PROBE_S:
            return
        self._probed_s = at_s
        for peer in self._peers.suspected():
            failed = yield Probe(peer)
            if failed is not None:
                self._peers.exchange_failed(peer, failed)

    def _ahead(self, peer: int) -> int:
        """Exchanges before that of a peer that asks now, the one under way included."""
        order = list(self._queue)
        return self._answering + (order.index(peer) if peer in order else len(order))

    def _answer_to(self, request: Request, verdict: Verdict, *, wait_s: float = 0.0) -> Answer:
        return Answer(verdict, self.session, self.layout, self._pace.own_step_s, self.adopts, request.ticket, wait_s)

    def _note_step(self, peer: int, step_s: float) -> None:
        if step_s > 0.0:
            self._pace.peer_step(peer, step_s)

    def _layout_error(self, peer: int) -> ConfigurationError:
        return ConfigurationError(
            f"Rank {peer} publishes other tensors than rank {self._rank}. The parameters with"
            " requires_grad, their shapes, types and memory formats, and the option wire, must be the same on all ranks when an"
            " epoch begins."
        )
