"""The thread that drives the monitor of one process: heartbeats, failures, news.

It has a connection to the store of its own, since a connection serves one call at a time and the training thread's may wait.
Its lock guards what the threads share and is never held while the store is asked.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.failover import Failover
from lightning_gossip.algorithm.membership.failure_detector import Verdict
from lightning_gossip.algorithm.membership.monitor import Monitor
from lightning_gossip.algorithm.membership.rounds import LOOK, Rounds
from lightning_gossip.algorithm.membership.store import (
    Adopt,
    Ask,
    AtOwn,
    Decide,
    Enter,
    Leave,
    Probe,
    Publish,
    Reached,
    Seek,
    Steps,
    StoreLostError,
)
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.runtime.clock import Deadline, now_s
from lightning_gossip.runtime.membership.local_processes import identity
from lightning_gossip.runtime.membership.store_operations import StoreOperations
from lightning_gossip.runtime.membership.stores import Stores, ask_keys, parse, reach_all
from lightning_gossip.runtime.process_end import end_at_once
from lightning_gossip.runtime.store_client import another, store_errors, store_lost
from lightning_gossip.transport.threads import new_thread

log = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT_S = 0.5


class HeartbeatMonitor:
    """Heartbeat thread of one process, and what it knows of the other workers (docs/design.md has their states).

    Args:
        store: a connection, used by nobody else.
        prefix: of the keys of all workers.
        me: this worker.
        fail_after_s: time without a heartbeat after which a worker has failed, in seconds.
        heartbeat_s: time between two heartbeats, in seconds.
        stores: where others are if the store is lost; None: it outlives all workers.
        islands: how ranks are islands; a process whose island has lost a rank is ended at once. None without islands.

    Attributes:
        protocol: what is driven; used under ``lock``.
        lock: guards the protocol, and wakes the thread.
        looked: called by the thread, without the lock, after each look at the others and after the last; returns soon.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        me: WorkerId,
        *,
        fail_after_s: float,
        heartbeat_s: float = HEARTBEAT_S,
        stores: Stores | None = None,
        islands: Islands | None = None,
    ) -> None:
        self.stores = stores
        self.protocol = Monitor(
            prefix,
            me,
            identity(),
            now_s,
            fail_after_s=fail_after_s,
            heartbeat_s=heartbeat_s,
            address=None if stores is None else stores.own,
            islands=islands,
        )
        self.lock = threading.Condition()
        self.looked: Callable[[], None] = lambda: None
        self._store = store
        self._failover: Failover | None = None
        self._operations = StoreOperations(store, self._of_stores)
        self._connected_s = -math.inf  # when the connection was made anew
        self._prefix = prefix
        self._fail_after_s = fail_after_s
        self._heartbeat_s = heartbeat_s
        self._stopped = False
        self._thread: threading.Thread | None = None

    def survive(self, rounds: Rounds, least: int | None) -> None:
        """Find another store when the job's is lost.

        Args:
            rounds: of this worker.
            least: how many workers are enough to go on, if the user has said so.
        """
        assert self.stores is not None
        self._failover = Failover(
            self._prefix,
            self.protocol,
            rounds,
            now_s,
            silent_s=self._fail_after_s,
            least=least,
            islands=self.protocol.islands,
            view=self.stores.view,
        )

    # -- any thread --------------------------------------------------------------------------------------------------

    @property
    def me(self) -> WorkerId:
        """Identity of this worker."""
        return self.protocol.me

    @property
    def version(self) -> int:
        """A number that changes whenever some worker may have failed that had not before, or the reverse."""
        return self.protocol.version

    def start(self) -> None:
        """Send heartbeats from now on; again after :meth:`rest`."""
        if self._thread is None and self._failover is not None:
            with store_errors():  # where its own does not answer
                self._drive(self._failover.wake())
        with self.lock:
            self.protocol.rest(resting=False)
            self._stopped = False
            if self._failover is not None:
                self._failover.stopped = False
        if self._thread is None:
            self._send_once()
            self._thread = new_thread("gossip-monitor", self._run)
            self._thread.start()

    def rest(self, timeout_s: float = 10.0) -> None:
        """Send and read no heartbeats until :meth:`start`; the thread ends. May be called twice."""
        with self.lock:
            self._stopped = True
            if self._failover is not None:
                self._failover.stopped = True
            self.protocol.rest(resting=True)
            self.lock.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning(
                    "%s: the failure detector did not stop within %.3g s; it ends with this process", self.me.spoken, timeout_s
                )
            self._thread = None

    def begin_use(self, use: int) -> None:
        """Begin another use of a Trainer (runtime/membership/uses.py): an abort of one before counts no more."""
        with self.lock:
            self.protocol.begin_use(use)

    def observe(self, members: Sequence[WorkerId], *, outside: bool = False) -> None:
        """Set the members of the job, this worker among them, or that this worker is outside."""
        with self.lock:
            self.protocol.observe(members, outside=outside)
            self.lock.notify_all()

    def watch(self, neighbours: Sequence[WorkerId]) -> None:
        """Listen to these members, with whom this one exchanges."""
        with self.lock:
            self.protocol.watch(neighbours)

    def join_requests(self) -> dict[WorkerId, str]:
        """Workers that wait to be admitted and are alive, as far as is known, and what each says of its model and data."""
        with self.lock:
            return self.protocol.join_requests()

    def connection_lost(self, worker: WorkerId) -> None:
        """Note that a connection with a worker was lost."""
        with self.lock:
            self.protocol.connection_lost(worker)
            self.lock.notify_all()

    def process_ended(self, worker: WorkerId) -> None:
        """Note that a worker's process has ended without a word."""
        with self.lock:
            self.protocol.process_ended(worker)
            self.lock.notify_all()

    def abort(self, reason: str) -> None:
        """Tell the others that an exception has ended the present use of a Trainer on this worker: they end it too."""
        with self.lock:
            self.protocol.abort(reason)
            self.lock.notify_all()

    @property
    def has_aborted(self) -> bool:
        """Whether this worker or another one has aborted this use of a Trainer, or the store does not answer."""
        with self.lock:
            return self.protocol.has_aborted

    def verdict(self, worker: WorkerId) -> Verdict:
        """The state of one worker, now."""
        with self.lock:
            return self.protocol.verdict(worker)

    def failed(self) -> frozenset[WorkerId]:
        """The workers that have failed, as far as is known here."""
        with self.lock:
            return self.protocol.failed()

    def raise_failure(self) -> None:
        """Raise if another worker has aborted, the store does not answer, or this worker sends no heartbeats any more.

        Raises:
            PeerError: saying which.
            ProtocolError: for an error of the monitor itself.
        """
        with self.lock:
            self.protocol.raise_failure()

    def await_island(self) -> None:
        """Wait, after an error of the network, until it is clear whether the island is dead, which ends this process.

        Returns when somebody has aborted, or when a rank that had failed would be known to have.
        """
        deadline = Deadline.after(self._fail_after_s + 4 * self._heartbeat_s)
        with self.lock:
            while deadline.left_s and not self.protocol.has_aborted and self._thread is not None:
                self.lock.wait(min(self._heartbeat_s, deadline.left_s))

    def lose(self, moves: int) -> None:
        """Note that the training thread has lost the store that this worker had after so many moves."""
        with self.lock:
            if self._failover is not None:
                self._failover.lose(moves)
            self.lock.notify_all()

    def await_next_store(self, rounds: Rounds, moves: int) -> None:
        """Wait until this worker has gone on with another store.

        Raises:
            GossipError: if there is none.
        """
        self.lose(moves)
        with self.lock:
            self.lock.wait_for(lambda: rounds.moves > moves or self.protocol.broken is not None or self._thread is None)
            if self.protocol.broken is not None:
                raise self.protocol.broken
            if rounds.moves <= moves:
                raise store_lost()

    # -- the monitor thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._tick_while_connected()
            if self._failover is not None:
                self._drive(self._failover.lie_down())
            else:
                self._send_once()
                self._drive(self.protocol.publish())
        except StoreLostError as error:
            if not self._stopped:
                self._break(store_lost(), error)
        except PeerError as error:
            self._break(error, error.__cause__)
        except dist.DistError as error:  # the training thread's connection ends too: the store has ended, or is out of reach
            self._break(store_lost(), error)
        except Exception as error:  # noqa: BLE001 - kept, and raised on the training thread
            self._abort_on(error)
            self.looked()

    def _break(self, error: PeerError, cause: BaseException | None) -> None:
        error.__cause__ = cause
        with self.lock:
            self.protocol.broken = error
            self.lock.notify_all()
        self.looked()

    def _send_once(self) -> None:
        """Send a heartbeat, if there is a store; else the next tick finds one."""
        try:
            self._drive(self.protocol.send())
        except StoreLostError as error:
            log.info("%s: has lost the store: %s", self.me.spoken, error.__cause__)

    def _tick_while_connected(self) -> None:
        try:
            while not self._stopped:
                self._drive(self.protocol.tick() if self._failover is None else self._failover.tick())
                self.looked()
                self._end_with_island()
                with self.lock:
                    if not self._stopped:
                        self.lock.wait(self._heartbeat_s)
        except dist.DistError as error:
            self._connect_anew(error)

    def _end_with_island(self) -> None:
        """End this process if its island is dead; by no exception, for which the training thread may have no ear."""
        with self.lock:
            is_dead = self.protocol.has_lost_island and not self._stopped
        if is_dead:
            end_at_once(
                f"{self.me.spoken}: a rank of its island has failed or was excluded, and an island trains with all its ranks or"
                " not at all: this one ends, too. The other islands go on."
            )

    def _connect_anew(self, error: dist.DistError) -> None:
        """Connect again, unless that was tried a moment ago: one connection may break while the store is there."""
        if now_s() - self._connected_s < self._fail_after_s:
            raise error
        log.warning(
            "%s: the failure detector lost its connection with the store, and connects again: %s", self.me.spoken, error
        )
        self._store = another(self._store, timeout_s=self._fail_after_s)
        self._operations.use(self._store)
        self._connected_s = now_s()

    def _abort_on(self, error: Exception) -> None:
        """End this worker, which sends no heartbeats any more, and so all, as after any other exception of a worker."""
        bug = f"{type(error).__name__} in the failure detector: {error}"
        broken = ProtocolError(f"An error that should be reported has ended all: {bug}")
        broken.__cause__ = error
        with self.lock:
            self.protocol.abort(bug)
            self.protocol.broken = broken
            waits_for = self.protocol.waiting_for
        try:
            self._drive(self.protocol.send())
            self._drive(self.protocol.publish())
            if waits_for is not None:
                self._do(Decide(waits_for, LOOK))
        except (dist.DistError, StoreLostError) as lost:
            log.warning(
                "%s: the failure detector has failed, and the store cannot be reached to tell the others: %s",
                self.me.spoken,
                lost,
            )

    def _drive(self, steps: Steps[T]) -> T:
        return perform(steps, self._do, lock=self.lock, outcomes=(StoreLostError,))

    def _do(self, effect: Any) -> Any:
        try:
            return self._operations(effect)
        except dist.DistError as error:
            if self._failover is None:
                raise
            log.info("%s: the store does not answer: %s", self.me.spoken, str(error).split("\n", 1)[0])
            raise StoreLostError(str(error)) from error

    @property
    def _of_stores(self) -> dict[type, Callable[[Any], Any]]:
        """The effects of :mod:`lightning_gossip.algorithm.membership.failover`."""
        stores = self.stores
        if stores is None:
            return {
                Probe: lambda effect: [Reached.SILENT] * len(effect.addresses),
                Ask: lambda effect: (Reached.SILENT, (None,) * len(effect.keys)),
            }

        def enter(effect: Enter) -> Reached:
            reached, store = stores.enter(effect.address, effect.view)
            log.info("%s: looks for the next store at %s: %s", self.me.spoken, effect.address, reached.value)
            if store is not None:
                self._operations.use(store)
            return reached

        def adopt(effect: Adopt) -> None:
            stores.adopt(effect.view, effect.address)
            self._operations.use(stores.connect(timeout_s=self._fail_after_s))

        def leave(_: Leave) -> None:
            log.warning("%s: has lost the job's store, and looks for the next one", self.me.spoken)
            stores.leave()

        def publish(effect: Publish) -> None:
            stores.publish(effect.view, effect.address)
            self._tell_where(stores)

        return {
            Probe: lambda effect: reach_all(effect.addresses),
            Ask: lambda effect: ask_keys(effect.address, effect.keys),
            AtOwn: lambda effect: stores.at_own(effect.operation),
            Enter: enter,
            Adopt: adopt,
            Leave: leave,
            Publish: publish,
            Seek: lambda effect: stores.seek(effect.view, effect.address),
        }

    def _tell_where(self, stores: Stores) -> None:
        host, port = parse(stores.own)
        with self.lock:
            self.lock.notify_all()
        log.warning(
            "%s: goes on, with the job's store at %s. Workers come back by this one's: MASTER_ADDR=%s MASTER_PORT=%d, and the"
            " other variables as before.",
            self.me.spoken,
            stores.address,
            host,
            port,
        )
