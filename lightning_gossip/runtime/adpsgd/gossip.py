"""The gossip of one worker: threads that average its published model with its peers' while it trains.

What is said and decided is :class:`~lightning_gossip.algorithm.adpsgd.protocol.GossipProtocol`; here are the threads that run
its generators, and what its effects are: messages and chunks over a transport.

| thread | runs | waits for |
|---|---|---|
| training (the caller's) | ``open``, ``step``, ``drain``, ``close`` | the network in ``drain`` and ``close`` only |
| ``gossip-listener`` | ``receive`` for each request | a message, without a deadline; STOP ends it |
| ``gossip-responder`` | ``respond`` | a request, until the listener ends; a chunk, with a deadline |
| ``gossip-initiator`` | ``initiate`` | its pace, an answer, a chunk: all with deadlines |
| ``gossip-monitor`` (the failure detector's) | :meth:`Gossip.look` | another thread's chunk, when it ends the exchange |

No lock is held across the network:

| lock | guards | held for | taken inside |
|---|---|---|---|
| ``_lock`` | the protocol, its peers, the threads that wait | a generator from one effect to the next; after a failure \
also the repair of the graph | |
| the failure detector's | verdicts on peers | a few instructions | ``_lock``, or none |
| ``_averages`` | which exchange is under way, and whether one may begin | a few instructions; by ``look`` also while it \
waits for the turn's | |
| the turn's (:mod:`~lightning_gossip.runtime.adpsgd.exchange`) | whether an exchange may still touch the model | one chunk: \
copied and encoded, or decoded and merged | ``_averages``, or none |
| the replica's | y and m | one copy, of a chunk (gossip threads) or of the model (training thread; a model that is given); \
of parameters on a device no copy | the turn's, or none |

A failure on a gossip thread ends that thread, is kept, and is raised on the training thread at its next step.

Gloo wakes nobody who waits for a chunk of which a part has come when the connection closes, and nothing that another thread
does wakes it before its deadline. So when the failure detector has found that the peer of the exchange under way has failed,
another thread goes on with the protocol in the place of the one that waits (:meth:`Gossip.look`). That one ends at its deadline
and touches nothing any more.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_gossip.algorithm.adpsgd.peer_selection import ChangingPeers
from lightning_gossip.algorithm.adpsgd.protocol import (
    Announce,
    Answer,
    Ask,
    Average,
    Averaged,
    AwaitAnswer,
    Effect,
    GossipProtocol,
    Probe,
    Reply,
    Steps,
    Verdict,
    Wait,
)
from lightning_gossip.algorithm.adpsgd.replica import PublishedModel
from lightning_gossip.algorithm.compression.pairwise import Codec, make_codec
from lightning_gossip.algorithm.compression.wires import Wire
from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.runtime.adpsgd.exchange import Exchanger, GivenUpError
from lightning_gossip.runtime.adpsgd.messages import answer_of, answer_to_wire, request_of, request_to_wire
from lightning_gossip.runtime.adpsgd.nonfinite_guard import GossipCounters, Health, Reaction
from lightning_gossip.runtime.clock import Deadline, Timeline, now_s
from lightning_gossip.runtime.store_client import store_errors
from lightning_gossip.transport.base import Transport
from lightning_gossip.transport.messages import Kind, Message
from lightning_gossip.transport.threads import new_thread

log = logging.getLogger(__name__)

_CUT_OFF_S = 0.2  # for threads that nothing holds up


class _Exchange:
    """The exchange under way, and the generator that waits for its end.

    Args:
        peer: its rank.
        steps: that generator, of the protocol.
    """

    def __init__(self, peer: int, steps: Steps) -> None:
        self.peer = peer
        self.steps = steps
        self.thread = threading.current_thread()


class Gossip:
    """One worker's published model and the threads that average it.

    Args:
        transport: connection to the other workers. Owned: closed with this object.
        peers: whom to average with, and what becomes of one that fails.
        timeline: where exchanges are recorded.
        chunk_bytes: see :class:`~lightning_gossip.runtime.adpsgd.exchange.Exchanger`.
        counters: to go on with.
        refuse_nonfinite: whether a model that is not finite is kept out of healthy ones; the same on all workers.
        on_nonfinite: what this worker does when its own is not; see :mod:`lightning_gossip.runtime.adpsgd.nonfinite_guard`.
        wire: how models are written for the wire, the same on all workers; see
            :mod:`lightning_gossip.algorithm.compression.pairwise`.
        survives_store: whether the loss of the store, by which requests go, only ends the exchanges.
    """

    def __init__(
        self,
        transport: Transport,
        peers: ChangingPeers[Any],
        *,
        timeline: Timeline | None = None,
        chunk_bytes: int = 4 << 20,
        counters: GossipCounters | None = None,
        refuse_nonfinite: bool = True,
        on_nonfinite: Reaction = "raise",
        wire: Wire = "float32",
        survives_store: bool = False,
    ) -> None:
        self._survives_store = survives_store
        self.counters = GossipCounters() if counters is None else counters
        self._transport = transport
        self._peers = peers
        self._timeline = timeline if timeline is not None else Timeline()
        self._exchanger = Exchanger(
            transport, chunk_bytes=chunk_bytes, timeout_s=peers.deadline_s, refuse_nonfinite=refuse_nonfinite
        )
        self._health = Health(transport.rank, self._exchanger, on_nonfinite=on_nonfinite, counters=self.counters)
        self._wire = wire
        self._replica: PublishedModel | None = None
        self._codec: Codec | None = None
        self._protocol = GossipProtocol(
            transport.rank,
            transport.world_size,
            peers,
            self.counters,
            now_s=now_s,
            generator=random.Random(transport.rank),
        )
        self._lock = threading.Lock()
        self._averages = threading.Condition()  # guards the next two
        self._under_way: _Exchange | None = None
        self._may_average = True
        self._waiting: list[tuple[Wait, threading.Condition]] = []
        self._threads: list[threading.Thread] = []

    # -- the training thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads. Nothing is exchanged before :meth:`open`."""
        targets: list[tuple[str, Callable[[], None]]] = [
            ("gossip-listener", self._listen),
            ("gossip-responder", lambda: self._run(self._protocol.respond())),
            ("gossip-initiator", lambda: self._run(self._protocol.initiate())),
        ]
        for name, target in targets:
            thread = new_thread(name, self._guarded, target)
            thread.start()
            self._threads.append(thread)

    def open(self, replica: PublishedModel, *, session: int, layout: int, exchanges_per_step: float = 1.0) -> None:
        """Begin a session: the replica has just been published, and may be averaged from now on.

        Args:
            replica: the published model, with a lock.
            session: the same number on all workers, larger each time.
            layout: fingerprint of what the replica holds; must be equal on all workers.
            exchanges_per_step: completed exchanges that each worker should see in one step of its neighbourhood; 0 for none.
        """
        self.raise_failure()
        published = replica.settle()  # what was pushed last has arrived
        if self._codec is None or replica is not self._replica:
            self._codec = make_codec(self._wire, published)
        with self._lock:
            self._health.begin_session()
            self._replica = replica
            self._protocol.exchanges_per_step = exchanges_per_step
            self._protocol.open(session, layout)
            self._wake()

    def step(self, tensors: Sequence[Tensor], *, step_s: float | None, forward_passes: int = 1, pulls: bool = True) -> None:
        """Push the local update and pull the merges, or leave it to a later step; waits neither for the network nor a device.

        Args:
            tensors: the training thread's x, changed in place.
            step_s: how long this step took, in seconds; None if not known.
            forward_passes: since the last step (gradient accumulation).
            pulls: False to leave both to a later step in any case.

        Raises:
            Exception: whatever ended a gossip thread.
        """
        self.raise_failure()
        replica = self._open_replica()
        if pulls:
            replica.step(tensors, forward_passes=forward_passes)
        else:
            replica.skip(forward_passes=forward_passes)
        self._record_staleness(replica)
        with self._lock:
            self._protocol.stepped(step_s)
            self._wake()

    def drain(self, tensors: Sequence[Tensor]) -> PublishedModel:
        """End the session: no new exchange, the one under way ends, and x takes over the last merges.

        Call it when every worker has arrived at the synchronisation point; until then the gossip goes on.

        Returns:
            The replica, which nobody else touches until the next :meth:`open`; published equals x.

        Raises:
            PeerError: when the exchange under way does not end in time.
        """
        self._run(self._protocol.drain())
        if self.is_cut_off:
            self._end_averages()
        self.raise_failure()
        self._exchanger.release()  # the average needs memory of its own
        replica = self._open_replica()
        # no forward pass since the last pull: running statistics take over all of the merges
        replica.push_pull(tensors, forward_passes=0)
        replica.settle()
        self._record_staleness(replica)
        return replica

    def _end_averages(self) -> None:
        """Begin none any more, and wait for that under way, which needs no store."""
        deadline = Deadline.after(self._peers.drain_s)
        with self._averages:
            self._may_average = False
            self._averages.wait_for(lambda: self._under_way is None, deadline.left_s)

    def request_sync(self) -> None:
        """Ask all workers to synchronise after their current step."""
        self._run(self._protocol.request_sync())

    @property
    def sync_requested(self) -> bool:
        """Whether somebody has asked for a synchronisation in this session."""
        return self._protocol.is_sync_requested

    @property
    def is_ill(self) -> bool:
        """Whether an exchange of this session has found this worker's own model not finite, under ``"meet"``."""
        return self._health.is_ill

    @property
    def is_open(self) -> bool:
        """Whether a session is open."""
        return self._protocol.is_open

    @property
    def exchanges_per_step(self) -> float:
        """Completed exchanges that each worker should see in one step of its neighbourhood; may be set within a session."""
        return self._protocol.exchanges_per_step

    @exchanges_per_step.setter
    def exchanges_per_step(self, rate: float) -> None:
        with self._lock:
            self._protocol.exchanges_per_step = rate
            self._wake()

    def raise_failure(self) -> None:
        """Raise what ended a gossip thread, if anything did, or that a worker has failed, where that ends all."""
        if self._protocol.failure is not None and not self.is_cut_off:
            with store_errors():
                raise self._protocol.failure
        with self._lock:
            self._peers.raise_failure()

    @property
    def is_cut_off(self) -> bool:
        """Whether the store of requests is lost: there are no exchanges any more, and the members go to another store."""
        return self._survives_store and isinstance(self._protocol.failure, dist.DistError)

    def look(self) -> None:
        """Give up the exchange under way, if the failure detector has found that its peer has failed. From any thread."""
        exchange = self._under_way
        if exchange is None or not self._peers.has_failed(exchange.peer):
            return
        with self._averages:
            if self._under_way is not exchange:
                return
            self._exchanger.give_up()
            self._under_way = None
            self._averages.notify_all()
        failed = PeerError(f"Rank {exchange.peer} has failed in an exchange.", rank=exchange.peer, phase="exchange")
        thread = new_thread(exchange.thread.name, self._guarded, lambda: self._run(exchange.steps, failed))
        with self._lock:
            self._threads = [thread if each is exchange.thread else each for each in self._threads]
            thread.start()

    def close(self, *, timeout_s: float = 10.0) -> None:
        """End the threads and free the transport. May be called twice.

        Args:
            timeout_s: deadline for the threads.
        """
        transport = self._transport
        with self._lock:
            if not self._protocol.stop():
                return
            self._wake()
            threads = list(self._threads)
        if self.is_cut_off:  # its listener has ended; one that waits for an answer ends by its own deadline
            timeout_s = min(timeout_s, _CUT_OFF_S)
        else:
            self._tell_listener()
        deadline = Deadline.after(timeout_s)
        for thread in threads:
            thread.join(deadline.left_s)
        alive = [thread.name for thread in threads if thread.is_alive()]
        if alive and not self.is_cut_off:
            log.warning("rank %d: its threads %s did not end within %.3g s", transport.rank, ", ".join(alive), timeout_s)
        transport.close()  # a thread that is late finds it closed, and ends by that

    def _tell_listener(self) -> None:
        try:
            self._transport.post(self._transport.rank, Message(Kind.STOP))
        except PeerError as error:
            log.warning("rank %d: could not tell its listening thread to end: %s", self._transport.rank, error)

    # -- the gossip threads ------------------------------------------------------------------------------------------

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:  # noqa: BLE001 - kept, and raised on the training thread
            with self._lock:
                self._protocol.fail(error)
                self._wake()

    def _run(self, steps: Steps, result: Any = None) -> None:
        """Run a generator of the protocol on the calling thread, to its end or until another thread goes on with it.

        Args:
            steps: the generator.
            result: of the effect that it waits for, if it has been run before.
        """
        error: BaseException | None = None
        while True:
            with self._lock:
                try:
                    effect = steps.send(result) if error is None else steps.throw(error)
                except StopIteration:
                    return
                finally:
                    self._wake()
                if isinstance(effect, Wait):
                    self._wait(effect)
                    result = error = None
                    continue
            result, error = None, None
            try:
                result = self._average(effect, steps) if isinstance(effect, Average) else self._do(effect)
            except GivenUpError:
                return
            except PeerError as lost:
                result = lost
            except BaseException as raised:  # noqa: BLE001 - thrown into the generator, which tidies up and lets it out
                error = raised

    def _wait(self, wait: Wait) -> None:
        """Give the lock away until a wait is over."""
        woken = threading.Condition(self._lock)
        self._waiting.append((wait, woken))
        try:
            while not wait.ready() and (left_s := wait.until_s - now_s()) > 0.0:
                woken.wait(min(left_s, threading.TIMEOUT_MAX))
        finally:
            self._waiting.remove((wait, woken))

    def _wake(self) -> None:
        """Wake the threads whose wait an event or an effect has ended; under the lock."""
        for wait, woken in self._waiting:
            if wait.ready():
                woken.notify()

    def _do(self, effect: Effect) -> Any:
        """What an effect is in this world; a PeerError is a result."""
        match effect:
            case Ask(peer, request, timeout_s):
                return answer_of(self._transport.request(peer, request_to_wire(request), timeout_s))
            case AwaitAnswer(peer, timeout_s):
                return answer_of(self._transport.await_reply(peer, timeout_s))
            case Reply(peer, answer):
                self._reply(peer, answer)
            case Probe(peer):
                self._transport.probe(peer)
            case Announce(peer, session):
                self._transport.post(peer, Message(Kind.SYNC, session))
        return None

    def _reply(self, peer: int, answer: Answer) -> None:
        if answer.verdict is Verdict.QUEUED:
            self._transport.tell(peer, answer_to_wire(answer))
        else:
            self._transport.reply(peer, answer_to_wire(answer))

    def _average(self, average: Average, steps: Steps) -> Averaged:
        peer, exchange = average.peer, _Exchange(average.peer, steps)
        with self._averages:
            if not self._may_average:
                raise PeerError(f"The exchange with rank {peer} came too late: the store is lost.", rank=peer, phase="exchange")
            self._under_way = exchange
        try:
            return self._averaged(peer, average.gives, average.timeout_s)
        finally:
            self._end(exchange)

    def _end(self, exchange: _Exchange) -> None:
        with self._averages:
            if self._under_way is not exchange:
                raise GivenUpError
            self._under_way = None
            self._averages.notify_all()

    def _averaged(self, peer: int, gives: bool, timeout_s: float) -> Averaged:
        started_s = now_s()
        self._exchanger.timeout_s = timeout_s
        outcome = self._health.exchange(peer, self._open_replica(), self._codec, gives=gives)
        ended_s = now_s()
        self.counters.exchanges += not outcome.refused
        self.counters.bytes_sent += outcome.bytes_sent
        self.counters.exchange_s += ended_s - started_s
        self._timeline.record("exchange", started_s, ended_s, peer)
        return Averaged(adopts=self._health.adopts)

    def _listen(self) -> None:
        try:
            while self._read():
                pass
        finally:
            with self._lock:
                self._protocol.hears_no_more()
                self._wake()

    def _read(self) -> bool:
        """One message; False if it was the last."""
        try:
            peer, message = self._transport.next_message()
        except PeerError as error:
            if error.rank is None:
                raise
            with self._lock:
                self._peers.exchange_failed(error.rank, error)
            return True
        if message.kind is Kind.SYNC:
            # a worker that is not yet in that session synchronises after its first step there
            with self._lock:
                self._protocol.sync_requested(message.session)
        elif message.kind is Kind.EXCHANGE:
            self._run(self._protocol.receive(peer, request_of(message)))
        elif message.kind is not Kind.STOP:
            self._transport.refuse(peer, f"{message.kind.name} is not for a gossip listener")
        return message.kind is not Kind.STOP

    def _record_staleness(self, replica: PublishedModel) -> None:
        for staleness in replica.take_staleness():
            self.counters.staleness.record(staleness)

    def _open_replica(self) -> PublishedModel:
        if self._replica is None:
            raise ProtocolError("No session has been opened yet.")
        return self._replica
