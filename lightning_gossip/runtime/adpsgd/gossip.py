"""The gossip of one worker: threads that average its published model with its neighbours' while it trains.

| thread | does | waits for |
|---|---|---|
| training (the caller's) | ``open``, ``step``, ``drain``, ``close`` | the network in ``drain`` and ``close`` only |
| ``gossip-listener`` | reads requests and calls to a meeting | a message, without a deadline; STOP ends it |
| ``gossip-responder`` | answers requests, one after the other | a request, until the listener ends; a chunk, with a deadline |
| ``gossip-caller`` | starts exchanges, if this worker initiates | its pace, a reply, a chunk: all with deadlines |

Two locks. ``_model_lock`` guards the replica and is held for one copy only: a chunk (gossip threads) or the model
(training thread); never across the network. The other is the session's condition (runtime/adpsgd/session.py), held for a few
instructions; the queue of requests has one of its own (runtime/adpsgd/request_queue.py).

One exchange at a time, started or answered: then no timing can make models drift apart. A worker that is calling
answers a request with a refusal, at once, so nobody waits in a cycle: a caller waits only for a responder that is idle or in
the middle of an exchange with somebody else, and that one ends by itself. The refused caller draws again.

Who has to wait for others' exchanges is told so at once, and how long at the most: its deadline begins when it is its turn. It
cannot know by itself, since what it measures is how long an exchange takes, and not how many others call the same worker.

A failure on a gossip thread ends that thread, is kept, and is raised on the training thread at its next step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerPicker
from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.compression.pairwise import Codec, Wire, make_codec
from lightning_gossip.errors import ConfigurationError, PeerError, ProtocolError
from lightning_gossip.runtime.adpsgd.exchange import Exchanger
from lightning_gossip.runtime.adpsgd.initiator import Caller
from lightning_gossip.runtime.adpsgd.nonfinite_guard import GossipCounters, Health, OnNonFinite
from lightning_gossip.runtime.adpsgd.peer_selection import FixedPartners, Partners
from lightning_gossip.runtime.adpsgd.request_queue import Requests
from lightning_gossip.runtime.adpsgd.session import Session
from lightning_gossip.runtime.clock import Deadline, Timeline, now_s
from lightning_gossip.transport.base import Transport
from lightning_gossip.transport.messages import Kind, Message

log = logging.getLogger(__name__)


class Gossip:
    """One worker's published model and the threads that average it.

    Args:
        transport: connection to the other workers. Owned: closed with this object.
        picker: whom to average with, and whether this worker starts exchanges; a picker alone means that the first failure of a
            peer ends the gossip.
        exchanges_per_step: completed exchanges that each worker should see in one step of its neighbourhood; 0 for none.
        timeout_s: the longest deadline of a reply and of each chunk.
        timeline: where exchanges are recorded.
        chunk_bytes: see :class:`~lightning_gossip.runtime.adpsgd.exchange.Exchanger`.
        counters: to go on with.
        refuse_nonfinite: whether a model that is not finite is kept out of healthy ones; the same on all workers.
        on_nonfinite: what this worker does when its own is not; see :mod:`lightning_gossip.runtime.adpsgd.nonfinite_guard`.
        wire: how models are written for the wire, the same on all workers; see
            :mod:`lightning_gossip.algorithm.compression.pairwise`.
    """

    def __init__(
        self,
        transport: Transport,
        picker: PartnerPicker | Partners,
        *,
        exchanges_per_step: float = 1.0,
        timeout_s: float = 120.0,
        timeline: Timeline | None = None,
        chunk_bytes: int = 4 << 20,
        counters: GossipCounters | None = None,
        refuse_nonfinite: bool = True,
        on_nonfinite: OnNonFinite = "raise",
        wire: Wire = "float32",
    ) -> None:
        self.counters = GossipCounters() if counters is None else counters
        self.exchanges_per_step = exchanges_per_step
        self._transport = transport
        self._partners = FixedPartners(picker, timeout_s) if isinstance(picker, PartnerPicker) else picker
        self._timeline = timeline if timeline is not None else Timeline()
        self._exchanger = Exchanger(transport, chunk_bytes=chunk_bytes, timeout_s=timeout_s, refuse_nonfinite=refuse_nonfinite)
        self._model_lock = threading.Lock()
        self._health = Health(
            transport.rank, self._exchanger, self._model_lock, on_nonfinite=on_nonfinite, counters=self.counters
        )
        self._wire = wire
        self._replica: Replica | None = None
        self._codec: Codec | None = None
        self._layout = 0
        self._session = Session()
        self._requests = Requests()
        self._caller = Caller(transport, self._partners, self._session, self)
        self._threads: list[threading.Thread] = []

    # -- the training thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads. Nothing is exchanged before :meth:`open`."""
        targets: list[tuple[str, Callable[[], None]]] = [
            ("gossip-listener", self._listen),
            ("gossip-responder", self._respond),
        ]
        if self._partners.initiates or not isinstance(self._partners, FixedPartners):
            targets.append(("gossip-caller", self._caller.call))
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
        if self._codec is None or replica is not self._replica:
            self._codec = make_codec(self._wire, replica.settle())
        self._replica, self._layout = replica, layout
        self._session.open(session)

    def step(self, tensors: Sequence[Tensor], *, step_s: float | None, forward_passes: int = 1) -> None:
        """Push the local update and pull the merges; never waits for the network.

        Args:
            tensors: the training thread's x, changed in place.
            step_s: how long this step took, in seconds; None if not known.
            forward_passes: since the last step (gradient accumulation).

        Raises:
            Exception: whatever ended a gossip thread.
        """
        self.raise_failure()
        with self._model_lock:
            staleness = self._open_replica().push_pull(tensors, forward_passes=forward_passes)
        self.counters.staleness.record(staleness)
        if step_s is not None:
            self._session.note_own_step(step_s)

    def drain(self, tensors: Sequence[Tensor]) -> Replica:
        """End the session: no new exchange, the one under way ends, and x takes over the last merges.

        Call it when every worker has arrived at the rendezvous; until then the gossip goes on.

        Returns:
            The replica, which nobody else touches until the next :meth:`open`; published equals x.

        Raises:
            PeerError: when the exchange under way does not end in time.
        """
        self._session.drain(self._partners.drain_s)
        self.raise_failure()
        self._exchanger.release()  # a rendezvous needs memory of its own
        replica = self._open_replica()
        with self._model_lock:
            # no forward pass since the last pull: running statistics take over all of the merges
            replica.push_pull(tensors, forward_passes=0)
        return replica

    def request_sync(self) -> None:
        """Ask all workers to come to a rendezvous after their current step."""
        for peer in range(self._transport.world_size):
            if peer != self._transport.rank:
                try:
                    self._transport.post(peer, Message(Kind.SYNC, self._session.number))
                except PeerError as error:
                    self._partners.exchange_failed(peer, error)
        self._session.note_meeting(self._session.number)

    @property
    def sync_requested(self) -> bool:
        """Whether somebody has asked for a rendezvous in this session."""
        return self._session.sync_requested

    @property
    def is_open(self) -> bool:
        """Whether a session is open."""
        return self._session.is_open

    def raise_failure(self) -> None:
        """Raise what ended a gossip thread, if anything did."""
        self._session.raise_failure()

    def close(self, *, together: bool, timeout_s: float = 10.0) -> None:
        """End the threads and free the transport. May be called twice.

        Args:
            together: all workers close now: each one's STOP message ends its successor's listener. Otherwise (after a
                failure) the listener is left to the end of the process, since only a message from another worker wakes it;
                except where a worker's message to itself does.
            timeout_s: deadline for the threads.
        """
        if not self._session.stop():
            return
        transport = self._transport
        ends_all = together or transport.wakes_itself
        if ends_all:
            try:
                transport.post((transport.rank + (not transport.wakes_itself)) % transport.world_size, Message(Kind.STOP))
            except PeerError as error:
                log.warning("rank %d: could not tell a listening thread to end: %s", transport.rank, error)
        else:
            self._requests.close()  # the listener, which would, is left alone
        deadline = Deadline.after(timeout_s)
        for thread in self._threads:
            if ends_all or thread.name != "gossip-listener":
                thread.join(deadline.left_s)
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if ends_all and alive:
            log.warning("rank %d: its threads %s did not end within %.3g s", transport.rank, ", ".join(alive), timeout_s)
        if ends_all or not alive:  # a thread that is late finds the transport closed, and ends by that
            transport.close()

    # -- the gossip threads ------------------------------------------------------------------------------------------

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:  # noqa: BLE001 - kept, and raised on the training thread
            self._session.fail(error)

    def _listen(self) -> None:
        try:
            while self._read():
                pass
        finally:
            self._requests.close()

    def _read(self) -> bool:
        """One message; False if it was the last."""
        try:
            peer, message = self._transport.next_message()
        except PeerError as error:
            if error.rank is None:
                raise
            self._partners.exchange_failed(error.rank, error)
            return True
        if message.kind is Kind.SYNC:
            # a worker that is not yet in that session comes to the meeting after its first step there
            self._session.note_meeting(message.session)
        elif message.kind is Kind.EXCHANGE:
            self._let_wait(peer, message)
        elif message.kind is not Kind.STOP:
            self._transport.refuse(peer, f"{message.kind.name} is not for a gossip listener")
        return message.kind is not Kind.STOP

    def _let_wait(self, peer: int, request: Message) -> None:
        """Until its turn, which is now if nobody is ahead; else the peer is told."""
        ahead = self._requests.ahead(peer)
        if ahead:
            wait_us = int(ahead * self._partners.turn_s * 1e6)
            try:
                self._transport.tell(peer, self._answer_to(request, Kind.QUEUED, wait_us=wait_us))
            except PeerError as error:
                self._partners.exchange_failed(peer, error)
                return
        if not self._requests.put(peer, request):
            self._answer(peer, request)  # the gossip has ended, so with a refusal

    def _respond(self) -> None:
        try:
            while (taken := self._requests.take()) is not None:
                self._answer(*taken)
        finally:
            self._requests.close()

    def _answer(self, peer: int, request: Message) -> None:
        accepted = self._session.begin(request.session)
        same_layout = request.layout == self._layout
        both_adopt = bool(request.adopts) and self._health.adopts  # nobody has a model to give
        goes_ahead = accepted and same_layout and not both_adopt
        self._session.note_peer_step(peer, request.step_us * 1e-6)
        try:
            self._transport.reply(peer, self._answer_to(request, Kind.ACCEPT if goes_ahead else Kind.REFUSE))
        except BaseException as error:
            if accepted:
                self._session.end()
            if not isinstance(error, PeerError):
                raise
            self._partners.exchange_failed(peer, error)
            return
        if goes_ahead:
            self.exchange(peer, gives=bool(request.adopts))
        elif accepted:
            self._session.end()
            if not same_layout:
                raise self.layout_error(peer)

    def exchange(self, peer: int, *, gives: bool) -> None:
        """The exchange itself; this worker is busy when it begins and free when it ends."""
        started_s = now_s()
        try:
            self._exchanger.timeout_s = self._partners.deadline_s
            outcome = self._health.exchange(peer, self._open_replica(), self._codec, gives=gives)
            ended_s = now_s()
            self.counters.exchanges += not outcome.refused
            self.counters.bytes_sent += outcome.bytes_sent
            self.counters.exchange_s += ended_s - started_s
            self._timeline.record("exchange", started_s, ended_s, peer)
            self._partners.took(peer, ended_s - started_s)
        except PeerError as error:
            self._partners.exchange_failed(peer, error)
        finally:
            self._session.end()

    def message(self, kind: Kind) -> Message:
        """What this worker says of itself with a request or an answer."""
        step_us = int(self._session.own_step_s * 1e6)
        return Message(kind, self._session.number, self._layout, step_us, adopts=int(self._health.adopts))

    def _answer_to(self, request: Message, kind: Kind, *, wait_us: int = 0) -> Message:
        return replace(self.message(kind), value=request.value, wait_us=wait_us)

    def layout_error(self, peer: int) -> ConfigurationError:
        """What ends the gossip with a peer that publishes something else."""
        return ConfigurationError(
            f"Rank {peer} publishes other tensors than rank {self._transport.rank}. The parameters with"
            " requires_grad, their shapes, types and memory formats, and the option wire, must be the same on all ranks when an"
            " epoch begins."
        )

    def _open_replica(self) -> Replica:
        if self._replica is None:
            raise ProtocolError("No session has been opened yet.")
        return self._replica
