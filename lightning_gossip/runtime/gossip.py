"""The gossip of one worker: two threads that average its published model with its neighbours' while it trains.

| thread | does | waits for |
|---|---|---|
| training (the caller's) | ``open``, ``step``, ``drain``, ``close`` | the network in ``drain`` and ``close`` only |
| ``gossip-listener`` | answers requests, notes calls to a meeting | a message, without a deadline; STOP ends it |
| ``gossip-caller`` | starts exchanges, if this worker initiates | its pace, a reply, a chunk: all with deadlines |

Two locks. ``_model_lock`` guards the replica and is held for one copy only: a chunk (gossip threads) or the model
(training thread); never across the network. ``_state`` is a condition that guards the phase and ``_busy``, and is held for a
few instructions.

One exchange at a time, started or answered (``_busy``): then no timing can make models drift apart. A worker that is busy
answers a request with a refusal, at once, so nobody waits in a cycle: a caller waits only for a listener that is idle or in
the middle of an exchange with somebody else, and that one ends by itself. The caller then draws again.

A failure on a gossip thread ends that thread, is kept, and is raised on the training thread at its next step.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from lightning_gossip.algorithm.partner import PartnerPicker
from lightning_gossip.algorithm.replica import Replica
from lightning_gossip.algorithm.staleness import StalenessHistogram
from lightning_gossip.errors import ConfigurationError, PeerError, ProtocolError
from lightning_gossip.runtime.clock import Deadline, Timeline, now_s
from lightning_gossip.runtime.exchange import Exchanger
from lightning_gossip.transport.base import Kind, Message, Transport

log = logging.getLogger(__name__)

_BACKOFF_S = (0.0005, 0.05)  # after a refusal, a random wait that doubles from the first to the second


class _Phase(Enum):
    CLOSED = "closed"  # between sessions: requests are refused
    OPEN = "open"
    CLOSING = "closing"  # no new exchange; the one under way ends
    STOPPED = "stopped"  # for good


@dataclass
class GossipCounters:
    """What a worker's gossip has done so far."""

    exchanges: int = 0
    refused: int = 0
    bytes_sent: int = 0
    exchange_s: float = 0.0
    staleness: StalenessHistogram = field(default_factory=StalenessHistogram)


class Gossip:
    """One worker's published model and the threads that average it.

    Args:
        transport: connection to the other workers. Owned: closed with this object.
        picker: whom to average with, and whether this worker starts exchanges.
        exchanges_per_step: completed exchanges that each worker should see in one step of its neighbourhood; 0 for none.
        timeout_s: deadline of a reply and of each chunk.
        timeline: where exchanges are recorded.
        chunk_bytes: see :class:`~lightning_gossip.runtime.exchange.Exchanger`.
    """

    def __init__(
        self,
        transport: Transport,
        picker: PartnerPicker,
        *,
        exchanges_per_step: float = 1.0,
        timeout_s: float = 120.0,
        timeline: Timeline | None = None,
        chunk_bytes: int = 4 << 20,
    ) -> None:
        self.counters = GossipCounters()
        self.exchanges_per_step = exchanges_per_step
        self._transport = transport
        self._picker = picker
        self._timeout_s = timeout_s
        self._timeline = timeline if timeline is not None else Timeline()
        self._exchanger = Exchanger(transport, chunk_bytes=chunk_bytes, timeout_s=timeout_s)
        self._model_lock = threading.Lock()
        self._replica: Replica | None = None
        self._layout = 0
        self._state = threading.Condition()
        self._phase = _Phase.CLOSED
        self._session = -1  # none yet; the first may be 0
        self._busy = False
        self._started_s: float | None = None  # start of the last exchange that this worker began in this session
        self._not_before_s = 0.0  # after a refusal
        self._own_step_s = 0.0
        self._peer_step_s: dict[int, float] = {}
        self._meeting_session = -2  # the last session in which a rendezvous was asked for
        self._failure: BaseException | None = None
        self._backoff = random.Random(transport.rank)
        self._threads: list[threading.Thread] = []

    # -- the training thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads. Nothing is exchanged before :meth:`open`."""
        targets: list[tuple[str, Callable[[], None]]] = [("gossip-listener", self._listen)]
        if self._picker.initiates:
            targets.append(("gossip-caller", self._call))
        for name, target in targets:
            thread = threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def open(self, replica: Replica, *, session: int, layout: int) -> None:
        """Begin a session: the replica has just been published, and may be averaged from now on.

        Args:
            replica: the published model.
            session: the same number on all workers, larger each time.
            layout: fingerprint of what the replica holds; must be equal on all workers.
        """
        self.raise_failure()
        with self._state:
            if self._phase is not _Phase.CLOSED:
                raise ProtocolError(f"A session cannot open while the gossip is {self._phase.value}.")
            self._replica = replica
            self._session = session
            self._layout = layout
            self._phase = _Phase.OPEN
            self._started_s = None
            self._not_before_s = 0.0
            self._state.notify_all()

    def step(self, tensors: Sequence[Tensor], *, step_s: float | None, forward_passes: int = 1) -> None:
        """Push the local update and pull the merges; never waits for the network.

        Args:
            tensors: the training thread's x, changed in place.
            step_s: how long this worker's step takes, in seconds; None if not known yet.
            forward_passes: since the last step (gradient accumulation).

        Raises:
            Exception: whatever ended a gossip thread.
        """
        self.raise_failure()
        with self._model_lock:
            staleness = self._open_replica().push_pull(tensors, forward_passes=forward_passes)
        self.counters.staleness.record(staleness)
        if step_s is not None and step_s != self._own_step_s:
            with self._state:
                self._own_step_s = step_s
                self._state.notify_all()

    def drain(self, tensors: Sequence[Tensor]) -> Replica:
        """End the session: no new exchange, the one under way ends, and x takes over the last merges.

        Call it when every worker has arrived at the rendezvous; until then the gossip goes on.

        Returns:
            The replica, which nobody else touches until the next :meth:`open`; published equals x.

        Raises:
            PeerError: when the exchange under way does not end in time.
        """
        with self._state:
            if self._phase is _Phase.OPEN:
                self._phase = _Phase.CLOSING
                self._state.notify_all()
            if not self._state.wait_for(lambda: not self._busy or self._failure is not None, self._timeout_s):
                raise PeerError(
                    f"An exchange did not end within {self._timeout_s:.3g} s of the rendezvous. Look at the logs of"
                    " the other ranks.",
                    phase="drain",
                    seconds=self._timeout_s,
                )
            if self._phase is _Phase.CLOSING:
                self._phase = _Phase.CLOSED
        self.raise_failure()
        self._exchanger.release()  # a rendezvous needs memory of its own
        replica = self._open_replica()
        with self._model_lock:
            # no forward pass since the last pull: running statistics take over all of the merges
            replica.push_pull(tensors, forward_passes=0)
        return replica

    def call_meeting(self) -> None:
        """Ask all workers to come to a rendezvous after their current step."""
        for peer in range(self._transport.world_size):
            if peer != self._transport.rank:
                self._transport.post(peer, Message(Kind.MEET, self._session))
        self._note_meeting(self._session)

    @property
    def meeting_called(self) -> bool:
        """Whether somebody has asked for a rendezvous in this session."""
        return self._meeting_session == self._session

    @property
    def is_open(self) -> bool:
        """Whether a session is open."""
        return self._phase is _Phase.OPEN

    def raise_failure(self) -> None:
        """Raise what ended a gossip thread, if anything did."""
        if self._failure is not None:
            raise self._failure

    def close(self, *, together: bool, timeout_s: float = 10.0) -> None:
        """End the threads and free the transport. May be called twice.

        Args:
            together: all workers close now: each one's STOP message ends its successor's listener. Otherwise (after a
                failure) the listener is left to the end of the process, since only a message from another worker wakes it.
            timeout_s: deadline for the threads.
        """
        with self._state:
            if self._phase is _Phase.STOPPED:
                return
            self._phase = _Phase.STOPPED
            self._state.notify_all()
        if together:
            successor = (self._transport.rank + 1) % self._transport.world_size
            try:
                self._transport.post(successor, Message(Kind.STOP))
            except PeerError as error:
                log.warning("rank %d: %s", self._transport.rank, error)
        deadline = Deadline.after(timeout_s)
        for thread in self._threads:
            if together or thread.name != "gossip-listener":
                thread.join(deadline.left_s)
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if together and alive:
            log.warning("rank %d: %s did not end within %.3g s", self._transport.rank, ", ".join(alive), timeout_s)
        if not alive:
            self._transport.close()

    # -- the gossip threads ------------------------------------------------------------------------------------------

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:  # noqa: BLE001 - kept, and raised on the training thread
            with self._state:
                if self._phase is not _Phase.STOPPED:
                    self._failure = self._failure or error
                self._state.notify_all()

    def _listen(self) -> None:
        while True:
            peer, message = self._transport.next_message()
            if message.kind is Kind.STOP:
                return
            if message.kind is Kind.MEET:
                # a worker that is not yet in that session comes to the meeting after its first step there
                self._note_meeting(message.session)
            elif message.kind is Kind.EXCHANGE:
                self._answer(peer, message)
            else:
                raise ProtocolError(f"Rank {peer} sent {message.kind.name} to the inbox.")

    def _answer(self, peer: int, request: Message) -> None:
        accepted = self._begin(request.session)
        same_layout = request.layout == self._layout
        self._note_step_time(peer, request.step_us)
        try:
            self._transport.reply(peer, self._message(Kind.ACCEPT if accepted and same_layout else Kind.REFUSE))
        except BaseException:
            if accepted:
                self._end()
            raise
        if accepted and same_layout:
            self._exchange(peer)
        elif accepted:
            self._end()
            raise self._layout_error(peer)

    def _call(self) -> None:
        refusals = 0
        while self._await_start():
            peer = self._picker.pick()
            answer = self._request(peer)
            self._note_step_time(peer, answer.step_us)
            if answer.kind is Kind.ACCEPT:
                self._exchange(peer)
                refusals = 0
            else:
                self._end()
                if answer.session == self._session and answer.layout != self._layout:
                    raise self._layout_error(peer)
                self.counters.refused += 1
                refusals += 1
                ceiling_s = min(_BACKOFF_S[0] * 2.0**refusals, _BACKOFF_S[1])
                self._draw_again_at(now_s() + self._backoff.uniform(0.0, ceiling_s))

    def _request(self, peer: int) -> Message:
        try:
            return self._transport.request(peer, self._message(Kind.EXCHANGE), self._timeout_s)
        except BaseException:
            self._end()
            raise

    def _exchange(self, peer: int) -> None:
        """The exchange itself; this worker is busy when it begins and free when it ends."""
        started_s = now_s()
        try:
            sent = self._exchanger.run(peer, _Locked(self._open_replica(), self._model_lock))
            with self._model_lock:
                self._open_replica().exchange_done()
            ended_s = now_s()
            self.counters.exchanges += 1
            self.counters.bytes_sent += sent
            self.counters.exchange_s += ended_s - started_s
            self._timeline.record("exchange", started_s, ended_s, peer)
        finally:
            self._end()

    def _begin(self, session: int) -> bool:
        """Become busy, if an exchange of this session may begin."""
        with self._state:
            if self._phase is not _Phase.OPEN or self._failure is not None:
                return False
            if self._busy or session != self._session:
                return False
            self._busy = True
            return True

    def _end(self) -> None:
        with self._state:
            self._busy = False
            self._state.notify_all()

    def _await_start(self) -> bool:
        """Wait until this worker should start an exchange, and become busy; False when the gossip has stopped."""
        with self._state:
            while self._phase is not _Phase.STOPPED and self._failure is None:
                wait_s = self._timeout_s  # until a notification; the limit only bounds a mistake
                if self._phase is _Phase.OPEN and not self._busy and self.exchanges_per_step > 0:
                    wait_s = min(wait_s, self._next_start_s() - now_s())
                    if wait_s <= 0:
                        self._busy = True
                        self._started_s = now_s()
                        return True
                self._state.wait(wait_s)
            return False

    def _next_start_s(self) -> float:
        """When to start the next exchange: at once in a new session, then one pace after the start of the last."""
        paced_s = 0.0 if self._started_s is None else self._started_s + self._pace_s()
        return max(paced_s, self._not_before_s)

    def _draw_again_at(self, at_s: float) -> None:
        """After a refusal the pace does not count: the start that it was for is still due."""
        with self._state:
            self._started_s = None
            self._not_before_s = at_s

    def _pace_s(self) -> float:
        """Seconds between starts: the neighbourhood's step time over the rate. A slow worker mixes at its neighbours' pace.

        The lower median, so that in a pair the faster one sets the pace. Infinite while no step time is known.
        """
        known = [step_s for step_s in (self._own_step_s, *self._peer_step_s.values()) if step_s > 0]
        rate = self.exchanges_per_step * self._picker.start_share
        return statistics.median_low(known) / rate if known and rate > 0 else math.inf

    def _note_step_time(self, peer: int, step_us: int) -> None:
        if step_us > 0:
            with self._state:
                self._peer_step_s[peer] = step_us * 1e-6
                self._state.notify_all()

    def _message(self, kind: Kind) -> Message:
        with self._state:
            return Message(kind, self._session, self._layout, int(self._own_step_s * 1e6))

    def _note_meeting(self, session: int) -> None:
        with self._state:
            self._meeting_session = max(self._meeting_session, session)

    def _layout_error(self, peer: int) -> ConfigurationError:
        return ConfigurationError(
            f"Rank {peer} publishes other tensors than rank {self._transport.rank}. The parameters with"
            " requires_grad, their shapes, types and memory formats must be the same on all ranks when an epoch begins."
        )

    def _open_replica(self) -> Replica:
        if self._replica is None:
            raise ProtocolError("No session has been opened yet.")
        return self._replica


class _Locked:
    """A replica as an exchange sees it: each copy under the model lock."""

    def __init__(self, replica: Replica, lock: threading.Lock) -> None:
        self._replica = replica
        self._lock = lock
        self.numel = replica.numel
        self.dtype: torch.dtype = replica.dtype

    def snapshot(self, chunk: slice, out: Tensor) -> None:
        with self._lock:
            self._replica.snapshot(chunk, out)

    def merge(self, chunk: slice, half_difference: Tensor) -> None:
        with self._lock:
            self._replica.merge(chunk, half_difference)
