"""The watch: one thread a process that beats, listens for the others' beats, and marks the dead absent.

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

from lightning_gossip.algorithm.failure_detector import Liveness, Verdict
from lightning_gossip.errors import PeerError, ProtocolError, another_failed
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.membership.heartbeats import Beats
from lightning_gossip.runtime.membership.join_requests import Doorstep, forsaken
from lightning_gossip.runtime.membership.local_processes import has_ended, identity
from lightning_gossip.runtime.membership.round_store import Board, Worker
from lightning_gossip.runtime.store_client import another, store_lost

log = logging.getLogger(__name__)

BEAT_S = 0.5
_RECONNECT_S = 2.0  # a store that is there answers in milliseconds; one that has ended is not waited for
_SILENT_BEATS = 4  # a busy host delays a thread by a second now and then


class Watch:
    """One worker's.

    Args:
        store: a connection of its own.
        prefix: of the keys of all workers.
        me: this worker.
        dead_s: silence after which a worker is dead, in seconds.
        beat_s: time between two beats, in seconds.
    """

    def __init__(self, store: Store, prefix: str, me: Worker, *, dead_s: float, beat_s: float = BEAT_S) -> None:
        self.me = me
        self._prefix = prefix
        self._connect(store)
        self._connected_s = -math.inf  # when the connection was made anew
        self._beat_s = beat_s
        self._liveness = Liveness[Worker](silent_s=min(_SILENT_BEATS * beat_s, dead_s), dead_s=dead_s)
        self._members: tuple[Worker, ...] = ()
        self._round: int | None = None
        self._use = 0  # of the Trainer, which failures are told of
        self._failure: tuple[int, str] | None = None  # of another worker in this use: its rank, and what it said
        self._lost: BaseException | None = None  # the store, if it is
        self._ended_by: BaseException | None = None  # what has ended the thread, if anything else has
        self._said: dict[str, Any] = {"beat": 0, "process": identity(), "broken": [], "ended": []}
        self._said |= {"use": 0, "failed": None, "rests": False, "outside": False}
        self._numbers: tuple[int, ...] = ()
        self._knocking: dict[Worker, str] = {}
        self._forsaken: str | None = None  # why nobody will take this worker in
        self._inside_beats = False
        self._dead: frozenset[Worker] = frozenset()  # at the last tick, of those that were listened to
        self.version = 0  # another one whenever some worker may be dead now that was not before, or the reverse
        self._wake = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    # -- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Beat from now on; again after :meth:`rest`."""
        with self._wake:
            self._said["rests"] = False
            self._stopped = False
        if self._thread is None:
            self._tell()
            self._thread = threading.Thread(target=self._run, name="gossip-watch", daemon=True)
            self._thread.start()

    def begin_use(self, use: int) -> None:
        """Another use of a Trainer begins (runtime/membership/uses.py): what has failed in those before counts no more.

        What this worker has said about its own failure stays, for those who are still in the use that it belongs to.
        """
        with self._wake:
            self._use = self._said["use"] = use
            self._failure = None

    def rest(self, timeout_s: float = 10.0) -> None:
        """Nobody watches this worker, and it watches nobody, until :meth:`start`; its thread ends. May be called twice."""
        with self._wake:
            self._stopped = True
            self._said["rests"] = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning(
                    "%s: the failure detector did not stop within %.3g s; it ends with this process", self.me.spoken, timeout_s
                )
            self._thread = None

    def look_at(self, members: Sequence[Worker], waiting_for: int | None = None, *, outside: bool = False) -> None:
        """Watch these workers.

        Args:
            members: who, this worker among them.
            waiting_for: the round that the training thread waits for, if any.
            outside: whether this worker is no member of the job, but waits to be taken in.
        """
        with self._wake:
            self._members, self._round = tuple(members), waiting_for
            self._said["outside"], self._forsaken, self._inside_beats = outside, None, False
            self._wake.notify_all()

    def be_reborn(self, me: Worker) -> None:
        """This worker goes on under a new name, since its old one is dead to the others."""
        with self._wake:
            self.me = me

    def look_out(self, numbers: Sequence[int]) -> None:
        """Also watch whoever knocks under one of these numbers; from outside, whoever may be a member."""
        with self._wake:
            self._numbers = tuple(numbers)

    def knocking(self, numbers: Sequence[int]) -> dict[Worker, str]:
        """Workers that wait to be taken in and are alive, as far as is known, and what each says about itself."""
        with self._wake:
            return {
                worker: about
                for worker, about in self._knocking.items()
                if worker.number in numbers and self._liveness.verdict(worker) is Verdict.ALIVE
            }

    def broke(self, worker: Worker) -> None:
        """A connection with a worker has closed."""
        with self._wake:
            self._liveness.broke(worker)
            self.version += 1
            self._wake.notify_all()

    def ended(self, worker: Worker) -> None:
        """A worker's process has ended without a word."""
        with self._wake:
            self._liveness.ended(worker)
            self.version += 1
            self._said["ended"] = sorted({*map(tuple, self._said["ended"]), tuple(worker)})
            self._wake.notify_all()

    def failed(self, reason: str) -> None:
        """An exception has ended the present use of a Trainer on this worker: tell the others, who end it too.

        A worker that ends because of another one passes that one's reason on, since it is the one to be known.
        """
        with self._wake:
            if not self._has_said_so:
                self._said["failed"] = [self._use, *(self._failure or (self.me.number, reason))]
            self._wake.notify_all()

    @property
    def has_failed(self) -> bool:
        """Whether this worker or another one has failed in this use of a Trainer, or the store is lost."""
        return self._has_said_so or any(why is not None for why in (self._failure, self._ended_by, self._lost))

    @property
    def _has_said_so(self) -> bool:
        said = self._said["failed"]
        return said is not None and said[0] == self._use

    def verdict(self, worker: Worker) -> Verdict:
        """About one worker, now."""
        with self._wake:
            return self._liveness.verdict(worker)

    def raise_failure(self) -> None:
        """Raise if another worker has failed, the store is gone, or nobody beats for this worker any more.

        Raises:
            PeerError: saying which.
            ProtocolError: for an error of the watch itself.
        """
        if self._ended_by is not None:
            raise ProtocolError(f"An error that should be reported has ended all: {self._bug}") from self._ended_by
        if self._failure is not None:
            raise another_failed(*self._failure, phase="watch")
        if self._lost is not None:
            raise store_lost() from self._lost

    def woken(self, word: str) -> PeerError:
        """What ends a round that is not full, since somebody has woken those who wait for it.

        Args:
            word: what with: the failure of a worker, which this one has not heard of itself yet, or any other reason.
        """
        if not word.startswith("["):
            return PeerError(word, phase="watch")
        rank, reason = json.loads(word)
        with self._wake:
            self._failure = self._failure or (rank, reason)
        return another_failed(rank, reason, phase="watch")

    def somebody_is_inside(self) -> bool:
        """Whether a member of the job beats, as seen by a worker that waits outside of it.

        Raises:
            PeerError: if nobody is in that job any more, saying why.
        """
        if self._forsaken is not None:
            raise PeerError(self._forsaken, rank=self.me.number, phase="join")
        return self._inside_beats

    # -- the watch thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._beat()
            self._tell()
        except dist.DistError as error:  # the training thread's connection ends too: the store is gone, or out of reach
            self._lost = error
        except Exception as error:  # noqa: BLE001 - kept, and raised on the training thread
            self._fail(error)

    def _beat(self) -> None:
        try:
            while self._tick():
                with self._wake:
                    if not self._stopped:
                        self._wake.wait(self._beat_s)
        except dist.DistError as error:
            self._connect_anew(error)

    def _connect(self, store: Store) -> None:
        self._store = store
        self._board = Board(store, f"{self._prefix}/round")
        self._beats = Beats(store, self._prefix)
        self._doorstep = Doorstep(store, self._prefix)

    def _connect_anew(self, error: dist.DistError) -> None:
        """One connection may break while the store is there; not again and again."""
        if now_s() - self._connected_s < self._liveness.dead_s:
            raise error
        log.warning(
            "%s: the failure detector lost its connection with the store, and connects again: %s", self.me.spoken, error
        )
        self._connect(another(self._store, timeout_s=self._liveness.dead_s, connect_s=_RECONNECT_S))
        self._connected_s = now_s()

    def _fail(self, error: Exception) -> None:
        """Nobody beats for this worker any more: it ends, and so do all, as after any other exception of a worker."""
        with self._wake:
            self._ended_by = error
            number = self._round
        self.failed(self._bug)
        try:
            self._tell()
            if number is not None:
                self._board.wake(number, json.dumps(self._said["failed"][1:]))
        except dist.DistError as gone:
            log.warning(
                "%s: the failure detector has failed, and the store cannot be reached to tell the others: %s",
                self.me.spoken,
                gone,
            )

    @property
    def _bug(self) -> str:
        return f"{type(self._ended_by).__name__} in the failure detector: {self._ended_by}"

    def _tick(self) -> bool:
        self._tell()
        with self._wake:
            members, number, outside = self._members, self._round, self._said["outside"]
        if outside:
            self._look_inside()
        else:
            self._listen([*members, *self._hear_knocks(members)], members)
        if number is not None:
            for worker in members:
                if worker != self.me and self.verdict(worker) is Verdict.DEAD:
                    self._board.mark_absent(number, worker)
            if self._failure is not None:
                self._board.wake(number, json.dumps(self._failure))
            elif not self._board.fill(number, members) and self._board.is_absent(number + 1, self.me):
                self._board.wake(number, "this worker was left out of the next one")
        with self._wake:
            return not self._stopped

    def _tell(self) -> None:
        with self._wake:
            self._said["beat"] += 1
            self._said["broken"] = sorted(self._liveness.broken)
            said = json.dumps(self._said)
        self._beats.tell(self.me, said)

    def _hear_knocks(self, members: Sequence[Worker]) -> dict[Worker, str]:
        if not members or members[0] != self.me:
            return {}  # rank 0 decides
        lives = {worker.number: worker.life for worker in members}
        knocks = self._doorstep.knocks(self._numbers)
        knocking = {worker: about for worker, about in knocks.items() if worker.life > lives.get(worker.number, 0)}
        with self._wake:
            self._knocking = knocking
        return knocking

    def _look_inside(self) -> None:
        """Whether there is anybody who could take this worker in."""
        processes = self._doorstep.processes(self._numbers)
        heard = self._listen(processes, ())
        with self._wake:
            if self._said["outside"]:  # else it has been taken in meanwhile
                alive = [worker for worker in heard if self._liveness.verdict(worker) is not Verdict.DEAD]
                self._forsaken = forsaken(self.me, processes, heard, alive)
                self._inside_beats = any(
                    not heard[worker]["outside"] and self._liveness.verdict(worker) is Verdict.ALIVE for worker in alive
                )

    def _listen(self, workers: Sequence[Worker], members: Sequence[Worker]) -> dict[Worker, dict[str, Any]]:
        """Hear these workers' beats; returns what each says."""
        heard = self._beats.read([worker for worker in workers if worker != self.me])
        at_s = now_s()
        # asks the kernel, so not while the gossip threads wait for a verdict
        ended_here = {worker for worker, (value, _) in heard.items() if has_ended(value["process"])}
        with self._wake:
            for worker, (value, life) in heard.items():
                beat = value["beat"] if not value["rests"] else -round(at_s * 1000)  # resting is as good as beating
                self._liveness.heard(worker, beat=beat, at_s=at_s, is_member=worker in members)
                for broken in value["broken"]:
                    self._suspect(Worker(*broken))
                for ended in value["ended"]:
                    self._liveness.ended(Worker(*ended))
                # one that rests has said all that it had to say, so nobody loses it unless it is waited for
                if life > worker.life or worker in ended_here:
                    self._liveness.ended(worker)
                # one that waits to be taken in ends nobody but itself
                if self._failure is None and worker in members and (said := value["failed"]) and said[0] == self._use:
                    self._failure = (said[1], said[2])
            dead = frozenset(worker for worker in workers if self._liveness.verdict(worker) is Verdict.DEAD)
            self.version += dead != self._dead
            self._dead = dead
        return {worker: value for worker, (value, _) in heard.items()}

    def _suspect(self, worker: Worker) -> None:
        # somebody else's word, while it does not beat
        if worker not in self._liveness.broken and self._liveness.verdict(worker) is not Verdict.ALIVE:
            self._liveness.broke(worker)
