"""The protocols of membership under a schedule: a store, its callers' threads, faults, and what must hold.

Each worker has two threads, as in the runtime: one trains, one sends heartbeats. They run a program of uses of a Trainer, in
each of which they gather, broadcast, attempt collectives, pause as long as an epoch lasts, and admit who waits. A fault kills,
freezes or restarts a worker, raises an exception on one, or makes a collective fail.

| invariant | checked |
|---|---|
| all that come out of one call as members have the same result, the same members and the same generation | at each call |
| a worker that was never frozen for long, and is alive, is never excluded | at each call |
| an exception of one ends that use for all, and none after it | at each use |
| nobody waits longer than failures take to be noticed, and longer than what it waits for | at the end |
| every worker ends, and says why if it is not at the end of the program | at the end |
| the store has the keys of the last round; a fault leaves a few more | at the end |
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.membership import (
    AdoptUse,
    DeleteBelow,
    DropGroup,
    MakeGroup,
    Membership,
    Outcome,
    OwnFailureError,
    Run,
    TellChange,
)
from lightning_gossip.algorithm.membership.monitor import Heartbeat, Monitor
from lightning_gossip.algorithm.membership.news import News
from lightning_gossip.algorithm.membership.quorum import whole
from lightning_gossip.algorithm.membership.rounds import Survivable
from lightning_gossip.algorithm.membership.store import (
    Append,
    Await,
    Count,
    Decide,
    Delete,
    Encode,
    HaveEnded,
    Pause,
    Read,
    ReadAll,
    Restore,
    Swap,
    Write,
)
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import GossipError, PeerError
from tests.schedules.choices import Choices
from tests.schedules.violation import Violation, judge

HEARTBEAT_S, FAIL_AFTER_S = 0.5, 6.0
GROUP_S = 4.0  # that a collective, or the making of groups, waits for one that does not come
TIMEOUT_S = 400.0  # of a round: nobody may need it
JOIN_S = 20.0  # that one outside waits without hearing a member; an epoch may be longer
SHORT_S = 1.0  # a freeze that excludes nobody
EVENTS = 200_000
OPERATIONS = frozenset((Append, Decide, Swap, Write, Count, Read, ReadAll, Await, Delete, DeleteBelow))  # of a store


class Until(NamedTuple):
    """Wait for another thread of the same worker. No result."""

    ready: Callable[[], bool]


class Aborts(Exception):
    """An exception of the user's."""


class Thread:
    """A generator of one worker, and the effect that it waits for."""

    def __init__(self, worker: Worker, steps: Generator[Any, Any, Any], name: str) -> None:
        self.worker = worker
        self.name = name
        self.steps = steps
        self.effect: Any = None
        self.until_s = -math.inf
        self.done: list[Any] = []  # the outcome of an effect that was done, and that the generator has not been told
        self.ended = False
        self.ready = True  # whether it may run
        self.waits_for: str | Worker | None = None  # a key, a meeting, or what its worker's other thread does
        self.connection = (-1, None, "", dict[str, bytes]())  # by which look, with what, in which state, and the keys there


class Worker:
    """One process."""

    def __init__(
        self, world: World, me: WorkerId, members: list[WorkerId], *, late: bool, replacements: dict[str, Any]
    ) -> None:
        self.world = world
        self.alive = True
        self.died_s = math.inf
        self.frozen_until_s = -math.inf
        self.frozen_s = 0.0  # the longest freeze
        self.began_as = me
        self.monitor = replacements.get("monitor", Monitor)(
            "p",
            me,
            str(me),
            lambda: world.now_s,
            fail_after_s=FAIL_AFTER_S,
            heartbeat_s=HEARTBEAT_S,
            address=None if world.survivable is None else str(me),
            islands=world.islands,
        )
        self.membership = Membership(
            "p",
            members,
            self.monitor,
            lambda: world.now_s,
            min_workers=1,
            timeout_s=TIMEOUT_S,
            late=late,
            survivable=world.survivable,
        )
        for name, kind in replacements.items():
            if name == "rounds":
                self.membership.rounds = kind("p", me, self.monitor, lambda: world.now_s, TIMEOUT_S, world.survivable)
            elif name == "joining":
                self.membership.joining = kind("p", self.monitor, lambda: world.now_s)
        self.monitor.observe(members, outside=late)
        self.group: str | None = None
        self.runs: dict[str, int] = {}  # collectives begun on each group
        self.rests = self.is_resting = False
        self.stops = False  # its monitor
        self.end: str | None = None  # how its program has ended
        self.aborted: set[int] = set()  # uses that an exception has ended
        self.threads: list[Thread] = []
        world.processes[str(me)] = self


class World:
    """A job under one schedule.

    Args:
        choices: the schedule.
        replacements: of classes of the product, by ones with a fault.
    """

    survivable: Survivable | None = None  # whether the store may be lost
    islands: Islands | None = None

    def __init__(self, choices: Choices, **replacements: Any) -> None:
        self.choices = choices
        self.now_s = 0.0
        self.events = 0
        self.store: dict[str, bytes] = {}
        self.processes: dict[str, Worker] = {}
        self._replacements = replacements
        self.n = self._drawn_size()
        self.one_host = bool(choices.below(2))
        self.program = self._drawn_program()
        self.said: dict[tuple[int, int, str], Any] = {}  # by place in the program: what all have got there
        self.last_loss_s = 0.0  # when somebody was killed, frozen or restarted last
        self.faults = self._drawn_faults()
        self.had_faults = len(self.faults)
        self.aborts = {(fault[2], fault[3]) for fault in self.faults if fault[1] in ("abort", "crash")}
        self.crashes = {(whom, how[0]): how[1] for _, kind, whom, how in self.faults if kind == "crash"}
        self.crashed: set[int] = set()  # uses that an exception has ended whose worker did not go on
        self.meets: dict[str, set[str]] = {}  # who has come to the making of a group, or a collective
        self._threads: list[Thread] = []
        self.running = 1  # threads that have not ended
        self._enabled: list[Thread] = []  # those of them that may run
        self._stale = True  # the time, or the state of some worker, has changed since it was looked who may run
        self._looks = 0  # after such a change
        self._moved: Thread  # that has run last
        self._changed: set[str | Worker | None] = set()  # keys that came or went by that, and meetings that it has come to
        members = [WorkerId(rank, 1) for rank in range(self.n)]
        self.workers = [self._started(worker, members, late=False) for worker in members]

    def _drawn_size(self) -> int:
        return 2 + self.choices.below(7)

    def _drawn_program(self) -> list[list[str]]:
        calls = ("gather", "gather", "attempt", "broadcast", "gather_for", "admit", "epoch")
        return [[self.choices.of(calls) for _ in range(3 + self.choices.below(4))] for _ in range(1 + self.choices.below(3))]

    def _drawn_faults(self) -> list[tuple[float, str, int, Any]]:
        """When, what, to whom, for how long or where."""
        faults: list[tuple[float, str, int, Any]] = []
        for _ in range(self.choices.of((0, 1, 1, 2, 3))):
            kind = self.choices.of(("freeze", "kill", "restart", "abort", "fail", "crash"))
            at_s = self.choices.of((0.0, 0.3, 1.0, 2.0, 4.0, 9.0, 15.0))
            whom = self.choices.below(self.n)
            if kind in ("abort", "fail", "crash"):
                use = self.choices.below(len(self.program))
                how: Any = (use, self.choices.below(len(self.program[use])))
            else:
                how = self.choices.of((0.3, SHORT_S, 5.0, 12.0, 30.0))
            faults.append((at_s, kind, whom, how))
        return sorted(faults, key=lambda fault: fault[0])

    def _started(self, me: WorkerId, members: list[WorkerId], *, late: bool) -> Worker:
        self.store[f"p/incarnation/{me.initial_rank}"] = str(me.incarnation).encode()
        return self._with_threads(me, members, late=late)

    def _with_threads(self, me: WorkerId, members: list[WorkerId], *, late: bool) -> Worker:
        worker = Worker(self, me, members, late=late, replacements=self._replacements)
        worker.threads = [Thread(worker, self._train(worker), "trains"), Thread(worker, self._beat(worker), "beats")]
        return worker

    # -- programs --------------------------------------------------------------------------------------------------------

    def _beat(self, worker: Worker) -> Generator[Any, Any, None]:
        """The monitor's thread."""
        while not worker.stops:
            if worker.rests:
                yield from worker.monitor.send()
                yield from worker.monitor.publish()
                worker.is_resting = True
                yield Until(lambda: not worker.rests or worker.stops)
                worker.is_resting = False
            else:
                yield from worker.monitor.tick()
                yield Pause(HEARTBEAT_S)

    def _train(self, worker: Worker) -> Generator[Any, Any, None]:
        """The training thread: the script of a user who catches what ends a use."""
        membership, monitor = worker.membership, worker.monitor
        use = place = 0
        aborted = False
        yield from self._first_send(worker)
        try:
            while use < len(self.program):
                try:
                    if place == 0:
                        monitor.begin_use(use)
                        yield from self._wake(worker)
                        yield from self._first_send(worker)
                        intact = not aborted and worker.group is not None
                        yield from membership.hello(use, intact=intact)
                        aborted = False
                    while True:
                        if membership.outside:
                            use, place = yield from membership.join(JOIN_S, "about")
                        elif place < len(self.program[use]):
                            yield from self._call(worker, use, place)
                            place += not membership.outside
                        else:
                            break
                except (Aborts, PeerError, OwnFailureError) as error:
                    if membership.outside or getattr(error, "phase", None) == "join":
                        raise
                    if not self._is_expected(use, error):
                        raise
                    worker.aborted.add(use)
                    monitor.abort(f"{type(error).__name__}: {error}")
                    aborted = True
                use, place = use + 1, 0
                self._rest(worker)
                yield Until(lambda: worker.is_resting)
                if aborted and self._crashes(worker, use - 1):
                    yield from self._last_words(worker)
                    self._kill(worker)
                    return
                yield from membership.rest()
                if use < len(self.program) and (rest_s := self._rest_s(worker, use)):
                    yield Pause(rest_s)
            if not membership.outside:
                yield from membership.close()
            worker.end = "done"
        except (GossipError, OwnFailureError) as error:
            worker.end = f"{type(error).__name__}: {error}"
            if not self._may_end_by(error):
                raise Violation(f"{worker.began_as.spoken} has ended by {worker.end}") from error
        finally:
            worker.stops = True

    def _wake(self, worker: Worker) -> Generator[Any, Any, None]:
        """Of a worker that has rested, or begins."""
        worker.monitor.rest(resting=False)
        worker.rests = False
        yield from ()

    def _rest_s(self, worker: Worker, use: int) -> float:
        """What a worker's script does before a use, in seconds."""
        return 0.0

    def _rest(self, worker: Worker) -> None:
        worker.monitor.rest(resting=True)
        worker.rests = True

    def _last_words(self, worker: Worker) -> Generator[Any, Any, None]:
        """Of a worker that an exception ends; whoever does not keep the store does not need any."""
        yield from ()

    def _first_send(self, worker: Worker) -> Generator[Any, Any, None]:
        yield from worker.monitor.send()

    def _is_expected(self, use: int, error: Exception) -> bool:
        """Whether an exception of this use may end it."""
        if isinstance(error, Aborts):
            return True
        return any(kind in ("abort", "fail", "crash") and how[0] == use for _, kind, _, how in self.faults_drawn)

    @property
    def faults_drawn(self) -> list[tuple[float, str, int, Any]]:
        return self._all_faults

    def _may_end_by(self, error: Exception) -> bool:
        said = str(error)
        reasons = ["comes too late", "has been started again"]
        if any(kind in ("kill", "restart", "crash") for _, kind, _, _ in self._all_faults):
            reasons += ["nobody is in any more", "before it had their model"]
        # an exception ends the use of one that waits to join, too, if all that may admit it rest after it
        if any(kind == "abort" for _, kind, _, _ in self._all_faults):
            reasons += ["nobody is in any more"] if any(worker.frozen_s > SHORT_S for worker in self.workers) else []
        silent = "p/members" not in self.store or any(worker.frozen_s > SHORT_S for worker in self.workers)
        reasons += ["Has it begun"] if silent else []
        return self.had_faults > 0 and isinstance(error, PeerError) and any(reason in said for reason in reasons)

    def _call(self, worker: Worker, use: int, place: int) -> Generator[Any, Any, None]:
        membership, me = worker.membership, worker.membership.me
        if (me.initial_rank, (use, place)) in self.aborts:
            raise Aborts(f"at {use}.{place}")
        call = self.program[use][place]
        result: Any = None
        before = membership.members
        if call == "gather":
            result = yield from membership.gather((me, use, place), "values")
        elif call == "broadcast":
            result = yield from membership.broadcast((me, use, place), min(1, len(before) - 1))
        elif call == "gather_for":
            result = yield from membership.gather_for(0, (me, use, place), "values")
            if result and not membership.outside and [worker for worker, *_ in result] != list(membership.members):
                raise Violation(f"{me.spoken} has read the values of {result}")
            result = None
        elif call == "attempt":
            worker.attempts = (use, place)
            yield from membership.attempt()
        elif call == "epoch":
            yield Pause((0.1, 3.0, 30.0)[(use + place) % 3])
        else:
            requests = monitor_requests(worker)
            waiting = yield from membership.gather(requests, "who waits")
            if not membership.outside and waiting[0]:
                self._check_joiners(waiting[0])
                yield from membership.admit(waiting[0], (use, place + 1))
            result = waiting
        if not membership.outside and call != "epoch":
            self._check_agreement(worker, (use, place, call), (result, membership.members, membership.generation))

    def _crashes(self, worker: Worker, use: int) -> bool:
        """Whether a worker whose exception has ended a use does not go on."""
        news = self._store_of(worker).get("p/news")
        told = None if news is None else News.decode(news).abort_of(use)
        where = self.crashes.get((worker.began_as.initial_rank, use))
        if where is None or told is None or told.by != worker.membership.me:
            return False
        if any(call != "epoch" for call in self.program[use][where:]):  # else the others may have ended the use
            self.crashed.add(use)
        return True

    def _check_joiners(self, joiners: list[WorkerId]) -> None:
        for joiner in joiners:
            died_s = max((worker.died_s for worker in self.workers if worker.membership.me == joiner), default=math.inf)
            if self.now_s > died_s + 4 * HEARTBEAT_S + 30.0:
                raise Violation(f"{joiner.spoken} is admitted, and has been dead since {died_s}")

    def _check_agreement(self, worker: Worker, where: tuple[int, int, str], got: Any) -> None:
        others = self.said.setdefault(where, got)
        if others != got:
            raise Violation(f"at {where} {worker.membership.me.spoken} has {got}, another has {others}")
        for other in self.workers:
            # one that joins while a store is lost has to join once more
            counts = self.survivable is None or other.began_as.incarnation == 1
            if counts and other.end is None and other.began_as in worker.membership.excluded and self._is_undisturbed(other):
                raise Violation(f"{other.began_as.spoken} is alive and was excluded")

    def _is_undisturbed(self, worker: Worker) -> bool:
        return worker.alive and worker.frozen_s <= SHORT_S

    # -- the schedule ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """To the end; raises a Violation."""
        self._all_faults = list(self.faults)
        while self._alive_threads() if self._stale else self.running:
            self._advance()
        self._check_end()

    def _advance(self) -> None:
        self.events += 1
        if self.events > EVENTS:
            raise Violation(f"no end after {EVENTS} events")
        if self.faults and self.faults[0][0] <= self.now_s and self.choices.below(4) == 0:
            self._strike()
            self._stale = True
            return
        self._look_who_may_run()
        if self._enabled:
            self._resume(self._enabled[self.choices.below(len(self._enabled))])
            return
        times = [self.faults[0][0]] if self.faults else []
        for worker in self.workers:
            if worker.alive and worker.frozen_until_s > self.now_s:
                times.append(worker.frozen_until_s)
            elif worker.alive:
                times += [thread.until_s for thread in worker.threads if not thread.ended and thread.until_s > self.now_s]
        later = [at_s for at_s in [*times, *self._more_times()] if at_s > self.now_s]
        if not later:
            if self.faults:
                self._strike()
                self._stale = True
                return
            waits = [f"{thread.worker.began_as} {thread.name}: {thread.effect}" for thread in self._alive_threads()]
            raise Violation(f"nobody can go on: {waits}")
        self.now_s = min(later)
        self._stale = True
        if self.now_s > self.last_loss_s + 300.0:
            waits = [f"{thread.worker.began_as} {thread.name}: {thread.effect}" for thread in self._alive_threads()]
            raise Violation(f"after {self.now_s:.0f} s somebody still waits: {waits}")

    def _look_who_may_run(self) -> None:
        """As before, but for those that the last step has let go on, or has kept from it."""
        is_as_before = not self._stale
        if self._stale:
            self._stale = False
            self._looks += 1
            self._threads = touched = self._alive_threads()
            self.running = len(touched)
        else:
            touched = [self._moved]
            for thread in self._moved.worker.threads:
                if thread.waits_for is thread.worker:
                    touched.append(thread)
            if self._changed:
                touched += [thread for thread in self._threads if thread.waits_for in self._changed]
        self._changed.clear()
        for thread in touched:
            if (ready := self._may_run(thread)) is not thread.ready:
                thread.ready, is_as_before = ready, False
        if not is_as_before:
            self._enabled = [thread for thread in self._threads if thread.ready]

    def _alive_threads(self) -> list[Thread]:
        return [thread for worker in self.workers if worker.alive for thread in worker.threads if not thread.ended]

    def _may_run(self, thread: Thread) -> bool:
        worker = thread.worker
        if thread.ended or not worker.alive or worker.frozen_until_s > self.now_s:
            return False
        return bool(thread.done) or thread.effect is None or self._is_due(thread, thread.effect)

    def _is_due(self, thread: Thread, effect: Any) -> bool:
        """Whether what a thread waits for may happen now."""
        kind = type(effect)
        if kind is Pause:
            return thread.until_s <= self.now_s
        if kind is Await:
            return thread.until_s <= self.now_s or effect.key in self._keys(thread)
        if kind is Until:
            return bool(effect.ready())
        if kind is Run or kind is MakeGroup:
            return thread.until_s <= self.now_s or self._meeting_is_over(thread)
        return True

    def _resume(self, thread: Thread) -> None:
        """Do what a thread waits for, and let it go on; now and then others come between the two."""
        self._moved = thread
        if not thread.done and thread.effect is not None:
            thread.done = [self._asked(thread) if type(thread.effect) in OPERATIONS else self._do(thread)]
            if self.choices.below(4) == 3:
                return
        outcome = thread.done[0] if thread.done else None
        thread.done = []
        try:
            thread.effect = self._sent(thread, outcome)
        except StopIteration:
            thread.ended = True
            self.running -= 1
            return
        self._begin(thread)

    def _sent(self, thread: Thread, outcome: Any) -> Any:
        return thread.steps.send(outcome)

    def _store_of(self, worker: Worker) -> Any:
        """What the store of the job holds, as a worker knows it."""
        return self.store

    def _keys(self, thread: Thread) -> Any:
        """What the store holds that a thread is connected with."""
        return self.store

    def _more_times(self) -> list[float]:
        return []

    def _begin(self, thread: Thread) -> None:
        effect, worker = thread.effect, thread.worker
        kind = type(effect)
        thread.waits_for = None
        if kind is Pause:
            thread.until_s = self.now_s + effect.seconds
        elif kind is Await:
            thread.until_s, thread.waits_for = self.now_s + effect.seconds, effect.key
        elif kind is Until:
            thread.waits_for = worker
        elif kind is Run or kind is MakeGroup:
            if kind is MakeGroup:
                worker.group = None
                thread.meeting = (effect.keys, effect.size)
            else:
                group = worker.group or f"none of {worker.began_as}"
                worker.runs[group] = worker.runs.get(group, 0) + 1
                thread.meeting = (f"{group}/run/{worker.runs[group]}", len(worker.membership.members))
            thread.until_s, thread.waits_for = self.now_s + GROUP_S, thread.meeting[0]
            self.meets.setdefault(thread.meeting[0], set()).add(str(worker.membership.me))
            self._changed.add(thread.meeting[0])

    def _meeting_is_over(self, thread: Thread) -> bool:
        key, size = thread.meeting
        return len(self.meets[key]) >= size

    def _do(self, thread: Thread) -> Any:
        effect, worker = thread.effect, thread.worker
        match effect:
            case Pause() | Until() | AdoptUse() | TellChange():
                pass
            case HaveEnded(processes):
                return [self._sees_end(worker, self.processes[process]) for process in processes]
            case Encode(value):
                return pickle.dumps(value)
            case Restore(data):
                return [pickle.loads(each) for each in data]
            case MakeGroup(keys, _, _):
                if not self._meeting_is_over(thread):
                    return Outcome("RuntimeError: a worker does not come")
                worker.group = keys
                return Outcome(None)
            case Run():
                return self._outcome_of_run(thread)
            case DropGroup():
                worker.group = None
            case _:
                raise AssertionError(effect)
        return None

    def _asked(self, thread: Thread) -> Any:
        """The outcome of an operation of the store that a thread is connected with."""
        return self._operate(thread.effect, self._keys(thread))

    def _operate(self, operation: Any, store: dict[str, bytes]) -> Any:
        """One operation of a store."""
        match operation:
            case Read(key) | Await(key, _):
                return store.get(key)
            case ReadAll(keys, exist):
                values = [store.get(key) for key in keys]
                if exist and None in values:
                    raise Violation(f"{keys} are read as if they existed")
                return None if None in values else values
            case Write(key, value):
                self._put(store, key, value)
            case Append(key, value):
                self._put(store, key, store.get(key, b"") + value)
            case Count(key):
                return int(self._put(store, key, str(int(store.get(key, b"0")) + 1).encode()))
            case Decide(key, value):
                return store[key] if key in store else self._put(store, key, value)
            case Swap(key, expected, value):
                return self._put(store, key, value) if store.get(key) == expected else store[key]
            case Delete(key):
                self._take_out(store, key)
            case DeleteBelow(prefix):
                for key in [key for key in store if key.startswith(prefix)]:
                    self._take_out(store, key)
        return None

    def _put(self, store: dict[str, bytes], key: str, value: bytes) -> bytes:
        if key not in store:
            self._changed.add(key)
        store[key] = value
        return value

    def _take_out(self, store: dict[str, bytes], key: str) -> None:
        self._changed.add(key)
        store.pop(key, None)

    def _outcome_of_run(self, thread: Thread) -> Outcome:
        worker = thread.worker
        for fault in list(self._all_faults):
            _, kind, whom, how = fault
            if kind == "fail" and how == worker.attempts and whom in (worker.began_as.initial_rank, 0):
                return Outcome("RuntimeError: of the user's", may_pass=bool(how[1] % 2))
        if worker.membership.outside:
            return Outcome(None)
        if not self._meeting_is_over(thread) or worker.group is None:
            return Outcome("RuntimeError: a connection broke")
        return Outcome(None)

    def _sees_end(self, worker: Worker, other: Worker) -> bool:
        """Whether a worker's kernel tells that another's process has ended."""
        return self.one_host and not other.alive

    # -- faults ----------------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        _, kind, whom, how = self.faults.pop(0)
        if kind in ("abort", "fail", "crash"):
            return
        worker = next(worker for worker in reversed(self.workers) if worker.began_as.initial_rank == whom)
        if not worker.alive or worker.end is not None:
            return
        others = [other for other in self.workers if other.alive and other is not worker]
        self.last_loss_s = self.now_s
        if kind == "freeze":
            worker.frozen_until_s = self.now_s + how
            worker.frozen_s = max(worker.frozen_s, how)
            self.last_loss_s += how
            return
        if not others:
            return
        self._kill(worker)
        if kind == "restart":
            incarnation = self._incarnations(whom) + 1
            self.workers.append(self._started(WorkerId(whom, incarnation), [WorkerId(whom, incarnation)], late=True))

    def _incarnations(self, whom: int) -> int:
        return int(self.store[f"p/incarnation/{whom}"])

    def _kill(self, worker: Worker) -> None:
        worker.alive, self._stale = False, True
        worker.died_s = self.now_s
        self.last_loss_s = max(self.last_loss_s, self.now_s)
        heartbeat = self._store_of(worker).get(f"p/heartbeat/{worker.membership.me}")
        for other in self.workers:
            if not other.alive:
                continue
            if heartbeat is None or Heartbeat.decode(heartbeat).resting:
                other.monitor.process_ended(worker.membership.me)  # its launcher has seen it: nobody else can
            elif self.choices.below(2):
                other.monitor.connection_lost(worker.membership.me)

    # -- the end ---------------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        undisturbed = [worker for worker in self.workers if self._is_undisturbed(worker)]
        for worker in undisturbed:
            if worker.end != "done" and worker.began_as.incarnation == 1:
                raise Violation(f"{worker.began_as.spoken} was never disturbed, and has ended by {worker.end}")
            if worker.began_as.incarnation == 1 and (missed := self.crashed - worker.aborted):
                raise Violation(f"{worker.began_as.spoken} has not heard of the exception that ended use {missed}")
        left = [key for key in self.store if "/round/" in key or "/group/" in key or "/resting/" in key]
        rounds = {key.split("/")[2] for key in left if "/round/" in key}
        if not self.had_faults and len(rounds) > 1:
            raise Violation(f"keys of rounds {sorted(rounds)} are left")
        if len(rounds) > 2 + 3 * self.had_faults + len(self.program):
            raise Violation(f"keys of {len(rounds)} rounds are left after {self.had_faults} faults")


def monitor_requests(worker: Worker) -> list[WorkerId]:
    """The workers whose join requests a member has read; of islands those that are there with all their ranks."""
    excluded = worker.membership.excluded
    return sorted(whole([other for other in worker.monitor.join_requests() if other not in excluded], worker.world.islands))


def run(choices: Choices, **replacements: Any) -> World:
    """Run one schedule; an exception of the product is a violation too."""
    world = World(choices, **replacements)
    judge(world.run)
    return world
