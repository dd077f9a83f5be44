"""The heartbeat monitor: one thread a process that sends heartbeats, reads the others', and marks failed members absent.

It has a connection to the store of its own, since a connection serves one call at a time and the training thread's may wait.
Its lock guards what the threads share and is never held while the store is asked.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_gossip.algorithm.failure_detector import FailureDetector, Verdict
from lightning_gossip.errors import PeerError, ProtocolError, another_aborted
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.membership.heartbeats import Heartbeats
from lightning_gossip.runtime.membership.join_requests import JoinRequestReader, why_nobody_admits
from lightning_gossip.runtime.membership.local_processes import has_ended, identity
from lightning_gossip.runtime.membership.round_store import RoundStore, WorkerId
from lightning_gossip.runtime.store_client import another, store_lost

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
_RECONNECT_S = 2.0  # a store that is there answers in milliseconds; one that has ended is not waited for
_SUSPECT_HEARTBEATS = 4  # a busy host delays a thread by a second now and then


class HeartbeatMonitor:
    """Heartbeat thread of one process, and what it knows of the other workers (docs/design.md has their states).

    Args:
        store: a connection, used by nobody else.
        prefix: of the keys of all workers.
        me: this worker.
        fail_after_s: time without a heartbeat after which a worker has failed, in seconds.
        heartbeat_s: time between two heartbeats, in seconds.

    Attributes:
        version: another one whenever some worker may have failed that had not before, or the reverse.
    """

    def __init__(
        self, store: Store, prefix: str, me: WorkerId, *, fail_after_s: float, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self.me = me
        self._prefix = prefix
        self._connect(store)
        self._connected_s = -math.inf  # when the connection was made anew
        self._heartbeat_s = heartbeat_s
        self._detector = FailureDetector[WorkerId](
            suspect_after_s=min(_SUSPECT_HEARTBEATS * heartbeat_s, fail_after_s), fail_after_s=fail_after_s
        )
        self._members: tuple[WorkerId, ...] = ()
        self._round: int | None = None
        self._use = 0  # of the Trainer; an abort belongs to one
        self._aborted_by: tuple[int, str] | None = None  # another worker in this use: its rank, and its exception
        self._store_error: BaseException | None = None  # if the store does not answer any more
        self._error: BaseException | None = None  # any other error that has ended the thread
        self._message: dict[str, Any] = {"count": 0, "process": identity(), "connections_lost": [], "processes_ended": []}
        self._message |= {"use": 0, "aborted": None, "resting": False, "outside": False}
        self._initial_ranks: tuple[int, ...] = ()  # of workers that may ask to join, or be members
        self._requests: dict[WorkerId, str] = {}
        self._nobody_admits: str | None = None  # why nobody will admit this worker
        self._hears_a_member = False
        self._failed: frozenset[WorkerId] = frozenset()  # at the last tick, of those that were listened to
        self.version = 0
        self._wake = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    # -- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Send heartbeats from now on; again after :meth:`rest`."""
        with self._wake:
            self._message["resting"] = False
            self._stopped = False
        if self._thread is None:
            self._send()
            self._thread = threading.Thread(target=self._run, name="gossip-monitor", daemon=True)
            self._thread.start()

    def begin_use(self, use: int) -> None:
        """Another use of a Trainer begins (runtime/membership/uses.py): an abort of one before counts no more.

        What this worker has said about its own abort stays, for those who are still in the use that it belongs to.
        """
        with self._wake:
            self._use = self._message["use"] = use
            self._aborted_by = None

    def rest(self, timeout_s: float = 10.0) -> None:
        """Send and read no heartbeats until :meth:`start`; the thread ends. May be called twice."""
        with self._wake:
            self._stopped = True
            self._message["resting"] = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning(
                    "%s: the failure detector did not stop within %.3g s; it ends with this process", self.me.spoken, timeout_s
                )
            self._thread = None

    def observe(self, members: Sequence[WorkerId], waiting_for: int | None = None, *, outside: bool = False) -> None:
        """Set the workers whose heartbeats are read.

        Args:
            members: of the job, this worker among them.
            waiting_for: the round that the training thread waits for, if any.
            outside: whether this worker is no member of the job, but waits to be admitted.
        """
        with self._wake:
            self._members, self._round = tuple(members), waiting_for
            self._message["outside"], self._nobody_admits, self._hears_a_member = outside, None, False
            self._wake.notify_all()

    def take_identity(self, me: WorkerId) -> None:
        """Go on as a new incarnation, since the present one was excluded."""
        with self._wake:
            self.me = me

    def expect(self, initial_ranks: Sequence[int]) -> None:
        """Also read the heartbeats of workers that ask to join with these ranks; from outside, of those that may be members."""
        with self._wake:
            self._initial_ranks = tuple(initial_ranks)

    def join_requests(self, initial_ranks: Sequence[int]) -> dict[WorkerId, str]:
        """Workers that wait to be admitted and are alive, as far as is known, and what each says of its model and data."""
        with self._wake:
            return {
                worker: about
                for worker, about in self._requests.items()
                if worker.initial_rank in initial_ranks and self._detector.verdict(worker) is Verdict.ALIVE
            }

    def connection_lost(self, worker: WorkerId) -> None:
        """Note that a connection with a worker was lost."""
        with self._wake:
            self._detector.connection_lost(worker)
            self.version += 1
            self._wake.notify_all()

    def process_ended(self, worker: WorkerId) -> None:
        """Note that a worker's process has ended without a word."""
        with self._wake:
            self._detector.process_ended(worker)
            self.version += 1
            self._message["processes_ended"] = sorted({*map(tuple, self._message["processes_ended"]), tuple(worker)})
            self._wake.notify_all()

    def abort(self, reason: str) -> None:
        """Tell the others that an exception has ended the present use of a Trainer on this worker: they end it too.

        A worker that aborts because of another one passes that one's reason on, since it is the one to be known.
        """
        with self._wake:
            if not self._has_told_of_abort:
                self._message["aborted"] = [self._use, *(self._aborted_by or (self.me.initial_rank, reason))]
            self._wake.notify_all()

    @property
    def has_aborted(self) -> bool:
        """Whether this worker or another one has aborted this use of a Trainer, or the store does not answer."""
        return self._has_told_of_abort or any(why is not None for why in (self._aborted_by, self._error, self._store_error))

    @property
    def _has_told_of_abort(self) -> bool:
        told = self._message["aborted"]
        return told is not None and told[0] == self._use

    def verdict(self, worker: WorkerId) -> Verdict:
        """The state of one worker, now."""
        with self._wake:
            return self._detector.verdict(worker)

    def raise_failure(self) -> None:
        """Raise if another worker has aborted, the store does not answer, or this worker sends no heartbeats any more.

        Raises:
            PeerError: saying which.
            ProtocolError: for an error of the monitor itself.
        """
        if self._error is not None:
            raise ProtocolError(f"An error that should be reported has ended all: {self._bug}") from self._error
        if self._aborted_by is not None:
            raise another_aborted(*self._aborted_by, phase="watch")
        if self._store_error is not None:
            raise store_lost() from self._store_error

    def woken(self, word: str) -> PeerError:
        """The error that ends a round which is not full although somebody has woken those who wait for it.

        Args:
            word: the reason: the abort of a worker, which this one has not heard of itself yet, or any other.
        """
        if not word.startswith("["):
            return PeerError(word, phase="watch")
        rank, reason = json.loads(word)
        with self._wake:
            self._aborted_by = self._aborted_by or (rank, reason)
        return another_aborted(rank, reason, phase="watch")

    def hears_a_member(self) -> bool:
        """Whether a member of the job sends heartbeats, as seen by a worker outside.

        Raises:
            PeerError: if no member is left, saying why.
        """
        if self._nobody_admits is not None:
            raise PeerError(self._nobody_admits, rank=self.me.initial_rank, phase="join")
        return self._hears_a_member

    # -- the monitor thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._tick_while_connected()
            self._send()
        except dist.DistError as error:  # the training thread's connection ends too: the store has ended, or is out of reach
            self._store_error = error
        except Exception as error:  # noqa: BLE001 - kept, and raised on the training thread
            self._abort_on(error)

    def _tick_while_connected(self) -> None:
        try:
            while self._tick():
                with self._wake:
                    if not self._stopped:
                        self._wake.wait(self._heartbeat_s)
        except dist.DistError as error:
            self._connect_anew(error)

    def _connect(self, store: Store) -> None:
        self._store = store
        self._round_store = RoundStore(store, f"{self._prefix}/round")
        self._heartbeats = Heartbeats(store, self._prefix)
        self._join_requests = JoinRequestReader(store, self._prefix)

    def _connect_anew(self, error: dist.DistError) -> None:
        """Connect again, unless that was tried a moment ago: one connection may break while the store is there."""
        if now_s() - self._connected_s < self._detector.fail_after_s:
            raise error
        log.warning(
            "%s: the failure detector lost its connection with the store, and connects again: %s", self.me.spoken, error
        )
        self._connect(another(self._store, timeout_s=self._detector.fail_after_s, connect_s=_RECONNECT_S))
        self._connected_s = now_s()

    def _abort_on(self, error: Exception) -> None:
        """End this worker, which sends no heartbeats any more, and so all, as after any other exception of a worker."""
        with self._wake:
            self._error = error
            number = self._round
        self.abort(self._bug)
        try:
            self._send()
            if number is not None:
                self._round_store.wake(number, json.dumps(self._message["aborted"][1:]))
        except dist.DistError as lost:
            log.warning(
                "%s: the failure detector has failed, and the store cannot be reached to tell the others: %s",
                self.me.spoken,
                lost,
            )

    @property
    def _bug(self) -> str:
        return f"{type(self._error).__name__} in the failure detector: {self._error}"

    def _tick(self) -> bool:
        self._send()
        with self._wake:
            members, number, outside = self._members, self._round, self._message["outside"]
        if outside:
            self._look_for_members()
        else:
            self._listen([*members, *self._read_join_requests(members)], members)
        if number is not None:
            for worker in members:
                if worker != self.me and self.verdict(worker) is Verdict.FAILED:
                    self._round_store.mark_absent(number, worker)
            if self._aborted_by is not None:
                self._round_store.wake(number, json.dumps(self._aborted_by))
            elif not self._round_store.wake_if_full(number, members) and self._round_store.is_absent(number + 1, self.me):
                self._round_store.wake(number, "this worker was excluded from the next one")
        with self._wake:
            return not self._stopped

    def _send(self) -> None:
        with self._wake:
            self._message["count"] += 1
            self._message["connections_lost"] = sorted(self._detector.connections_lost)
            message = json.dumps(self._message)
        self._heartbeats.send(self.me, message)

    def _read_join_requests(self, members: Sequence[WorkerId]) -> dict[WorkerId, str]:
        if not members or members[0] != self.me:
            return {}  # rank 0 decides
        present = {worker.initial_rank: worker.incarnation for worker in members}
        found = self._join_requests.requests(self._initial_ranks)
        requests = {
            worker: about for worker, about in found.items() if worker.incarnation > present.get(worker.initial_rank, 0)
        }
        with self._wake:
            self._requests = requests
        return requests

    def _look_for_members(self) -> None:
        """Find out whether there is anybody who could admit this worker."""
        newest = self._join_requests.newest(self._initial_ranks)
        heard = self._listen(newest, ())
        with self._wake:
            if self._message["outside"]:  # else it has been admitted meanwhile
                not_failed = [worker for worker in heard if self._detector.verdict(worker) is not Verdict.FAILED]
                self._nobody_admits = why_nobody_admits(self.me, newest, heard, not_failed)
                self._hears_a_member = any(
                    not heard[worker]["outside"] and self._detector.verdict(worker) is Verdict.ALIVE for worker in not_failed
                )

    def _listen(self, workers: Sequence[WorkerId], members: Sequence[WorkerId]) -> dict[WorkerId, dict[str, Any]]:
        """Read these workers' heartbeats; returns what each says."""
        heard = self._heartbeats.read([worker for worker in workers if worker != self.me])
        at_s = now_s()
        # asks the kernel, so not while the gossip threads wait for a verdict
        ended_here = {worker for worker, (value, _) in heard.items() if has_ended(value["process"])}
        with self._wake:
            for worker, (value, newest) in heard.items():
                # a worker between two uses counts as alive
                count = value["count"] if not value["resting"] else -round(at_s * 1000)
                self._detector.heard(worker, count=count, at_s=at_s, is_member=worker in members)
                for lost in value["connections_lost"]:
                    self._note_lost_connection(WorkerId(*lost))
                for ended in value["processes_ended"]:
                    self._detector.process_ended(WorkerId(*ended))
                # the end of a resting worker excludes it only from a round that needs it
                if newest > worker.incarnation or worker in ended_here:
                    self._detector.process_ended(worker)
                # a worker outside aborts nobody but itself
                if self._aborted_by is None and worker in members and (told := value["aborted"]) and told[0] == self._use:
                    self._aborted_by = (told[1], told[2])
            failed = frozenset(worker for worker in workers if self._detector.verdict(worker) is Verdict.FAILED)
            self.version += failed != self._failed
            self._failed = failed
        return {worker: value for worker, (value, _) in heard.items()}

    def _note_lost_connection(self, worker: WorkerId) -> None:
        # by somebody else's word, while its heartbeats are late
        if worker not in self._detector.connections_lost and self._detector.verdict(worker) is not Verdict.ALIVE:
            self._detector.connection_lost(worker)
