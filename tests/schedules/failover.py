"""The protocols of membership under a schedule in which the job's store may be lost: workers keep stores in reserve.

The world is that of :mod:`tests.schedules.membership`, with its programs and invariants; but the store lives in rank 0's
process, or in an agent beside it, and each worker keeps one. Faults kill workers (rank 0 often), the agent, whole hosts, and
part the network in two for a while. A connection over a part that the network does not carry stalls, and is lost after some
time; one with a process that has ended is lost at once, unless its host has ended with it.

| invariant beside those of membership | checked |
|---|---|
| all that come out of one call have the same result, on whichever side of a partition they are | at each call |
| who was killed excepted, all go on after the loss of a store, unless hosts or the network have failed | at the end |
| if a partition is all that happens, who was excluded meanwhile goes back soon after it | when it does |
| if a long partition, or the end of a host, is all that happens, more than half go on, all of them | at the end |
| after a partition, or the end of hosts, at most one side goes on, and the other says why it ends | at the end |
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from typing_extensions import override

from lightning_gossip.algorithm.membership.failover import Failover
from lightning_gossip.algorithm.membership.membership import USE_BITS, MakeGroup, Outcome, OwnFailureError, Run
from lightning_gossip.algorithm.membership.monitor import Heartbeat, hosts_key, hosts_of
from lightning_gossip.algorithm.membership.quorum import has_quorum, with_mates
from lightning_gossip.algorithm.membership.rounds import Survivable
from lightning_gossip.algorithm.membership.store import (
    Adopt,
    Ask,
    AtOwn,
    Await,
    Count,
    Enter,
    Leave,
    NextStore,
    Pause,
    Probe,
    Publish,
    Reached,
    Reconnect,
    Seek,
    StoreLostError,
    Write,
)
from lightning_gossip.algorithm.membership.whereabouts import RESTS
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import PeerError
from tests.schedules.choices import Choices
from tests.schedules.membership import (
    FAIL_AFTER_S,
    GROUP_S,
    HEARTBEAT_S,
    OPERATIONS,
    SHORT_S,
    TIMEOUT_S,
    Thread,
    Until,
    Worker,
    World,
)
from tests.schedules.violation import Violation, judge

LONG_S = 30.0  # a trouble that is longer has the job go on elsewhere
LOST_S = 6.0  # that the kernel waits for a host that does not answer
CONNECT_S = 1.0
BACK_S = 2 * FAIL_AFTER_S  # that a worker may take to go back to the others, who exclude it meanwhile
ENDS_S = 10.0  # after which the process of a worker that is done has ended
PRIMARY = "primary"
_LOOKS = frozenset((Enter, Probe, Ask))
_LOST = object()


class Hosted(World):
    """A job whose store may be lost, under one schedule."""

    survivable = Survivable()

    def __init__(self, choices: Choices, **replacements: Any) -> None:
        self.servers: dict[str, dict[int | str, dict[str, bytes]]] = {PRIMARY: {}}  # by address: the keys of each view
        self.ended_s: dict[int, float] = {}  # when hosts ended, by initial rank: one worker a host
        self.parts: list[tuple[float, float, frozenset[int]]] = []  # from when, until when, one of the sides
        self.agent = False
        self.primary_lost = False
        self.silences: list[tuple[float, float]] = []  # from when, until when somebody froze, or the network was cut
        self.broken: dict[tuple[int, int | None], dict[str, set[tuple[float, float]]]] = {}  # what has broken attempts
        self.done_s: dict[str, float] = {}  # when a worker was seen to be done, by the address of its store
        self.unclear = False  # hosts or the network have failed
        self.rests_s: list[list[float]] = []  # before each use but the first, by initial rank
        self._prepares_s = 0.0  # what the next worker that comes back takes from its first answer to its first heartbeat
        super().__init__(choices, **replacements)
        self.fails = any(kind == "fail" for _, kind, _, _ in self.faults)
        self.agent = bool(choices.below(2))
        for _ in self.program[1:]:
            rest = choices.of(((0.0,), (0.0, 3.0, 40.0), (40.0,)))
            self.rests_s.append([choices.of(rest) for _ in range(self.n)])

    @override
    def _rest_s(self, worker: Worker, use: int) -> float:
        return self.rests_s[use - 1][worker.began_as.initial_rank]

    @override
    def _drawn_faults(self) -> list[tuple[float, str, int, Any]]:
        faults: list[tuple[float, str, int, Any]] = []
        kinds = ["first", "kill", "restart", "freeze", "abort", "fail", "crash", "agent"]
        if not self.one_host:
            kinds += ["part", "part", "power", "first"]
        for _ in range(self.choices.of((1, 0, 1, 2, 3))):
            kind = self.choices.of(kinds)
            at_s = self.choices.of((1.0, 0.0, 0.3, 2.0, 4.0, 9.0, 15.0))
            whom = 0 if kind == "first" else self.choices.below(self.n)
            if kind in ("abort", "fail", "crash"):
                use = self.choices.below(len(self.program))
                how: Any = (use, self.choices.below(len(self.program[use])))
            elif kind == "part":
                side = frozenset(rank for rank in range(self.n) if self.choices.below(2))
                how = (self.choices.of((0.3, SHORT_S, 5.0, 12.0, 30.0, 200.0)), side)
            else:
                how = self.choices.of((0.3, SHORT_S, 5.0, 12.0, 30.0))
            faults.append((at_s, "kill" if kind == "first" else kind, whom, how))
        return sorted(faults, key=lambda fault: fault[0])

    @override
    def _started(self, me: WorkerId, members: list[WorkerId], *, late: bool) -> Worker:
        job = (PRIMARY, 0)
        if late:
            alive = [each for each in self.workers if each.alive and each.job is not None and each.job[0] in self.servers]
            job = max((each.job for each in alive if each.began_as.initial_rank != me.initial_rank), key=lambda job: job[1])
        self._space(job)[f"p/incarnation/{me.initial_rank}"] = str(me.incarnation).encode()
        worker = Worker(self, me, members, late=late, replacements=self._replacements)
        failover = self._replacements.get("failover", Failover)
        worker.failover = failover(
            "p",
            worker.monitor,
            worker.membership.rounds,
            lambda: self.now_s,
            silent_s=FAIL_AFTER_S,
            islands=self.islands,
            view=job[1],
        )
        worker.job, worker.host = job, self._host_of_rank(me.initial_rank)
        worker.connected, worker.began_s, worker.adopted_s = 0, self.now_s, self.now_s
        worker.prepares_s = self._prepares_s if late else 0.0
        worker.began_s += worker.prepares_s
        worker.rested_s = math.inf
        told = json.loads(self._space(job).get("p/members", b"[]")) if late else members
        worker.told = {WorkerId(*one) for one in told}  # who the members were when it came
        if late:  # with the first answer that it gets
            worker.monitor.hosts |= hosts_of(self._space(job).get(hosts_key("p")))
        self.servers[str(me)] = {}
        self._publish(worker, *reversed(job))
        worker.threads = [Thread(worker, self._train(worker), "trains"), Thread(worker, self._beat(worker), "beats")]
        for thread in worker.threads:
            thread.server = job
        return worker

    def _publish(self, worker: Worker, view: int, address: str) -> None:
        self._space((str(worker.began_as), "meet"))["where"] = json.dumps([view, address]).encode()

    @override
    def _train(self, worker: Worker) -> Generator[Any, Any, None]:
        if worker.prepares_s:
            yield Pause(worker.prepares_s)
        yield from super()._train(worker)

    @override
    def _beat(self, worker: Worker) -> Generator[Any, Any, None]:
        if worker.prepares_s:
            yield Pause(worker.prepares_s)
        while not worker.stops:
            if worker.rests:
                yield from worker.failover.lie_down()
                worker.is_resting = True
                yield Until(lambda: not worker.rests or worker.stops)
                worker.is_resting = False
            else:
                try:
                    yield from worker.failover.tick()
                except PeerError as error:
                    worker.monitor.broken, worker.is_resting = error, True
                    return
                except StoreLostError:
                    worker.monitor.broken = PeerError("the store was lost before the workers had met")
                    worker.is_resting = True
                    return
                if worker.monitor.has_lost_island and not worker.rests:
                    self._end_with_island(worker)
                    return
                yield Pause(HEARTBEAT_S)

    def _end_with_island(self, worker: Worker) -> None:
        """As its process does then."""
        raise AssertionError(worker)

    @override
    def _first_send(self, worker: Worker) -> Generator[Any, Any, None]:
        with suppress(StoreLostError):  # the thread that sends heartbeats finds another one
            yield from worker.monitor.send()

    @override
    def _wake(self, worker: Worker) -> Generator[Any, Any, None]:
        worker.woke_s = self.now_s
        yield from worker.failover.wake()
        worker.failover.stopped = False
        yield from super()._wake(worker)

    @override
    def _rest(self, worker: Worker) -> None:
        super()._rest(worker)
        worker.failover.stopped = True
        worker.rested_s = self.now_s

    @override
    def _last_words(self, worker: Worker) -> Generator[Any, Any, None]:
        yield from worker.membership.rest()

    # -- who reaches whom ------------------------------------------------------------------------------------------------

    def _host_of_rank(self, rank: int) -> int:
        return rank

    def _ranks_on(self, host: int) -> frozenset[int]:
        return frozenset({host})

    def _host_of(self, address: str) -> int:
        return 0 if address == PRIMARY else self.processes[address].host

    def _carried(self, one: int, other: int) -> float:
        """Since when the network does not carry anything between two hosts; −∞: it does."""
        if not self.parts:
            return -math.inf
        now = [(from_s, side) for from_s, until_s, side in self.parts if from_s <= self.now_s < until_s]
        return min((from_s for from_s, side in now if (one in side) != (other in side)), default=-math.inf)

    def _connection(self, thread: Thread) -> tuple[str, dict[str, bytes]]:
        """Whether a thread's connection stands, stalls, or is lost; and the keys there."""
        look, server, state, keys = thread.connection
        if look != self._looks or server is not thread.server or self._stale:
            state, keys = self._state(thread), self._keys(thread)
            thread.connection = (self._looks, thread.server, state, keys)
        return state, keys

    def _state(self, thread: Thread) -> str:
        if thread.server is None:
            return "lost"
        address, host = thread.server[0], self._host_of(thread.server[0])
        cut_s = self._carried(thread.worker.host, host)
        since_s = max(cut_s, thread.begun_s) if cut_s > -math.inf else -math.inf
        if host in self.ended_s:
            since_s = max(thread.begun_s, self.ended_s[host])
        elif address not in self.servers and since_s == -math.inf:
            return "lost"
        if since_s > -math.inf:
            return "lost" if self.now_s >= since_s + LOST_S else "stalls"
        owner = self._owner(address)
        return "stalls" if owner is not None and owner.frozen_until_s > self.now_s else "stands"

    def _owner(self, address: str) -> Worker | None:
        if address == PRIMARY:
            return None if self.agent else self.workers[0] if self.workers else None
        return self.processes.get(address)

    def _reached(self, worker: Worker, address: str) -> Reached:
        host = self._host_of(address)
        if host in self.ended_s or self._carried(worker.host, host) > -math.inf:
            return Reached.SILENT
        if address not in self.servers:
            return Reached.REFUSED
        owner = self._owner(address)
        if owner is not None and owner.end is not None:
            self.done_s.setdefault(address, self.now_s)
            if self.now_s >= self.done_s[address] + ENDS_S and not self._has_members(address):
                del self.servers[address]
                self._stale = True
                return Reached.REFUSED  # its process has ended
        return Reached.SILENT if owner is not None and owner.frozen_until_s > self.now_s else Reached.OPEN

    def _has_members(self, address: str) -> bool:
        """Whether members are in a store: whoever holds it does not end before they do, but waits for none that is outside."""
        return any(each.job is not None and each.job[0] == address and not each.membership.outside for each in self.workers)

    def _space(self, job: tuple[str, int | str]) -> dict[str, bytes]:
        return self.servers[job[0]].setdefault(job[1], {})

    @override
    def _store_of(self, worker: Worker) -> Any:
        return self._space(worker.job) if worker.job is not None and worker.job[0] in self.servers else {}

    @override
    def _keys(self, thread: Thread) -> Any:
        return self._space(thread.server) if thread.server is not None and thread.server[0] in self.servers else {}

    # -- effects ---------------------------------------------------------------------------------------------------------

    @override
    def _begin(self, thread: Thread) -> None:
        thread.begun_s = self.now_s
        if thread.connection[2] != "stands":  # what else becomes of it depends on when the operation has begun
            thread.connection = (-1, None, "", {})
        super()._begin(thread)
        kind = type(thread.effect)
        if kind is NextStore:
            thread.waits_for = thread.worker
        elif kind in _LOOKS:
            addresses = thread.effect.addresses if kind is Probe else (thread.effect.address,)
            silent = any(self._reached(thread.worker, address) is Reached.SILENT for address in addresses)
            thread.until_s = self.now_s + CONNECT_S * silent

    @override
    def _is_due(self, thread: Thread, effect: Any) -> bool:
        kind, worker = type(effect), thread.worker
        if kind in OPERATIONS:
            state, _ = self._connection(thread)
            return state == "lost" or (state == "stands" and (kind is not Await or super()._is_due(thread, effect)))
        if kind in _LOOKS:
            return thread.until_s <= self.now_s
        if kind is NextStore:
            worker.failover.lose(worker.connected)
            return worker.membership.rounds.moves > worker.connected or worker.monitor.broken is not None or worker.stops
        return super()._is_due(thread, effect)

    @override
    def _more_times(self) -> list[float]:
        times = [at_s for from_s, until_s, _ in self.parts for at_s in (from_s, until_s)]
        for thread in self._alive_threads():
            if type(thread.effect) in OPERATIONS and not thread.done and self._connection(thread)[0] == "stalls":
                starts = [thread.begun_s, *self.ended_s.values(), *(from_s for from_s, _, _ in self.parts)]
                times += [start_s + LOST_S for start_s in starts]
        return times

    @override
    def _meeting_is_over(self, thread: Thread) -> bool:
        if not super()._meeting_is_over(thread):
            return False
        names = self.meets[thread.meeting[0]]
        hosts = {self._host_of_rank(int(name.split(".")[0])) for name in names}
        return all(self._carried(one, other) == -math.inf for one in hosts for other in hosts)

    @override
    def _do(self, thread: Thread) -> Any:
        worker = thread.worker
        match thread.effect:
            case NextStore():
                if worker.monitor.broken is not None:
                    return worker.monitor.broken
                self._reconnect(thread)
            case Reconnect():
                self._reconnect(thread)
            case Leave():
                if self._is_unclear():
                    worker.frozen_s = max(worker.frozen_s, 2 * SHORT_S)  # to those that stay it is as silent
                for each in worker.threads:
                    each.server = None
                worker.job, self._stale = None, True
            case Probe(addresses):
                return [self._reached(worker, address) for address in addresses]
            case Ask(address, keys):
                there = self._reached(worker, address)
                space = self._space((address, "meet")) if there is Reached.OPEN else {}
                return there, tuple(space.get(key) for key in keys)
            case Enter(address, view):
                reached = self._reached(worker, address)
                thread.server = (address, "meet" if view is None else view) if reached is Reached.OPEN else None
                return reached
            case Adopt(view, address):
                worker.job, worker.adopted_s = (address, view), self.now_s
                thread.server = worker.job
                if view < worker.failover.promised and not worker.membership.outside and not self._is_unclear():
                    raise Violation(f"{worker.began_as.spoken} gives its identity up, and nobody was silent for long")
                if not worker.membership.outside and view <= max(worker.failover.view, worker.failover.promised - 1):
                    self._check_is_soon(worker)
            case Publish(view, address):
                self._publish(worker, view, address)
                self._check_view(worker, view)
            case AtOwn(operation):
                return self._operate(operation, self._space((str(worker.began_as), "meet")))
            case Seek(view, address):
                self._space((str(worker.began_as), "meet"))["seeks"] = json.dumps([view, address]).encode()
            case Run() | MakeGroup():
                outcome: Outcome = super()._do(thread)
                if outcome.reason is not None:
                    self._note_broken(thread)
                return outcome
            case _:
                return super()._do(thread)
        return None

    def _note_broken(self, thread: Thread) -> None:
        """An attempt has failed for a worker: perhaps since somebody was silent for longer than it waits."""
        use = thread.worker.membership.rounds.number >> USE_BITS
        call = (use, thread.worker.attempts[1] if type(thread.effect) is Run else None)
        began_s = thread.until_s - GROUP_S
        long = {(from_s, until_s) for from_s, until_s in self.silences if until_s - from_s > GROUP_S}
        causes = {(from_s, until_s) for from_s, until_s in long if from_s <= self.now_s and until_s > began_s}
        self.broken.setdefault(call, {}).setdefault(thread.meeting[0], set()).update(causes)

    @override
    def _is_expected(self, use: int, error: Exception) -> bool:
        return super()._is_expected(use, error) or self._has_repeated_in_vain(use, error)

    def _has_repeated_in_vain(self, use: int, error: Exception) -> bool:
        """Whether two silences have broken an attempt and its repeat, each longer than that waits: there is one repeat."""
        words = ("a connection broke", "a worker does not come", OwnFailureError.__name__)
        if not isinstance(error, OwnFailureError) and not any(each in str(error) for each in words):
            return False
        for (broken_in, _), attempts in self.broken.items():
            for one, other in itertools.combinations(attempts.values(), 2):
                if broken_in == use and one and other and len(one | other) > 1:
                    return True
        return False

    @override
    def _asked(self, thread: Thread) -> Any:
        state, keys = self._connection(thread)
        return _LOST if state == "lost" else self._operate(thread.effect, keys)

    @override
    def _sent(self, thread: Thread, outcome: Any) -> Any:
        if outcome is _LOST:
            return thread.steps.throw(StoreLostError())
        if isinstance(outcome, PeerError):
            return thread.steps.throw(outcome)
        return thread.steps.send(outcome)

    def _check_is_soon(self, worker: Worker) -> None:
        """Who was cut off is not long in finding that the others have excluded it, when the network carries again."""
        if self.primary_lost or any(each.end == "done" for each in self.workers):
            return  # nobody is left to exclude it
        if [kind for _, kind, _, _ in self._all_faults] != ["part"]:
            return
        stay = [each.membership.me for each in self.workers if each.alive and each.job == worker.job and each is not worker]
        dead = [each.membership.me for each in self.workers if not each.alive]
        if not has_quorum(stay, worker.membership.rounds.agreed, dead, at_store=True, islands=self.islands):
            return  # nor may the others exclude it
        healed_s = self.parts[0][1]
        others = [each for each in self.workers if each.host != worker.host]
        late_s = self.now_s - max(worker.woke_s, min(self._excludes_from_s(each, healed_s) for each in others))
        rest = sum(self._rests(each) for each in self.workers)  # who are asked one after the other
        if late_s > BACK_S + rest * worker.monitor.suspect_after_s:
            raise Violation(f"{worker.began_as.spoken} goes back to the others {late_s:.1f} s after it could")

    @staticmethod
    def _excludes_from_s(worker: Worker, healed_s: float) -> float:
        """Since when a worker is awake for as long as it takes to exclude those that are silent, after a cut."""
        if worker.rested_s == math.inf or worker.rested_s >= healed_s + FAIL_AFTER_S:
            return healed_s
        return math.inf if worker.rests else max(healed_s, worker.woke_s)

    def _check_view(self, worker: Worker, view: int) -> None:
        """Whoever goes on knows that all who have not come have failed: nobody waits for them once more."""
        told = self._store_of(worker).get("p/members")
        if view == 0 or told is None or worker.membership.outside:
            return  # or the store has ended since
        present = {WorkerId(*one) for one in json.loads(told)}
        missing = {*worker.membership.rounds.agreed} - present - worker.monitor.news.failed
        if worker.membership.me in present and missing:
            raise Violation(f"{worker.began_as.spoken} goes on, and waits for {sorted(missing)}, who have not come")

    @staticmethod
    def _reconnect(thread: Thread) -> None:
        thread.server = thread.worker.job
        thread.worker.connected = thread.worker.membership.rounds.moves

    # -- faults and the end ----------------------------------------------------------------------------------------------

    @override
    def _strike(self) -> None:
        _, kind, whom, how = self.faults[0]
        if kind == "agent":
            self.faults.pop(0)
            if self.agent and self.servers.pop(PRIMARY, None) is not None:
                self.last_loss_s = self.now_s
                self._note_loss()
        elif kind == "part":
            self.faults.pop(0)
            length_s, side = how
            self.parts.append((self.now_s, self.now_s + length_s, side))
            self.silences.append((self.now_s, self.now_s + length_s))
            self.last_loss_s = self.now_s + length_s
            self._note_loss()
            self.unclear = True
            for worker in self.workers:
                worker.frozen_s = max(worker.frozen_s, length_s)
        elif kind == "power":
            self._end_host(whom, self.faults.pop(0))
        elif kind == "restart" and not any(
            each.alive and each.job is not None and each.job[0] in self.servers and self._outlives(each.job[0], whom)
            for each in self.workers
            if each.began_as.initial_rank != whom
        ):
            self.faults.pop(0)  # nobody could tell it where the store is
        else:
            if kind == "freeze":
                self.silences.append((self.now_s, self.now_s + how))
            before_s, self._prepares_s = self.last_loss_s, how if kind == "restart" and how > SHORT_S else 0.0
            super()._strike()
            self.last_loss_s = max(before_s, self.last_loss_s)

    def _outlives(self, address: str, rank: int) -> bool:
        return self._host_of(address) != self._host_of_rank(rank) or (address == PRIMARY and self.agent)

    def _end_host(self, whom: int, fault: Any) -> None:
        host = self._host_of_rank(whom)
        last = [next(w for w in reversed(self.workers) if w.began_as.initial_rank == rank) for rank in self._ranks_on(host)]
        there = [worker for worker in last if worker.alive and worker.end is None]
        if not there or not any(each.alive for each in self.workers if each not in last):
            return
        if not all(worker.membership.rounds.agreed and not self._rests(worker) for worker in there):
            return  # nobody notices that a worker has ended that sends no heartbeats yet, or none between two uses
        self.ended_s[host] = self.now_s
        self.unclear = True
        for worker in there:
            self._kill(worker)
        self._note_loss()
        for each in self.workers:
            each.frozen_s = max(each.frozen_s, 2 * SHORT_S)

    def _rests(self, worker: Worker) -> bool:
        """Whether it rests between two uses, is about to, or says so still."""
        heartbeat = self._store_of(worker).get(f"p/heartbeat/{worker.membership.me}")
        return worker.rests or (heartbeat is not None and Heartbeat.decode(heartbeat).resting)

    def _note_loss(self) -> None:
        if not all(worker.membership.rounds.agreed for worker in self.workers if worker.alive):
            self.primary_lost = True
            self.last_loss_s += TIMEOUT_S * len(self.program)  # who waits for the first meeting does so in each use
            for worker in self.workers:
                worker.frozen_s = max(worker.frozen_s, 2 * SHORT_S)

    @override
    def _crashes(self, worker: Worker, use: int) -> bool:
        if worker.job is None or worker.job[0] not in self.servers:
            return False  # it could tell nobody
        crashes = super()._crashes(worker, use)
        if {kind for _, kind, _, _ in self._all_faults} & {"kill", "restart", "agent", "part", "power"}:
            self.crashed.clear()  # whoever has heard of it may have lost the store before the others had
        return crashes

    @override
    def _incarnations(self, whom: int) -> int:
        return max(worker.membership.me.incarnation for worker in self.workers if worker.began_as.initial_rank == whom)

    @override
    def _kill(self, worker: Worker) -> None:
        host = worker.host
        if host in self.ended_s:
            worker.alive, self._stale = False, True
            worker.died_s, self.last_loss_s = self.now_s, max(self.last_loss_s, self.now_s)
        else:
            super()._kill(worker)
        self.servers.pop(str(worker.began_as), None)
        if host == 0 and (host in self.ended_s or (not self.agent and worker.began_as == WorkerId(0, 1))):
            self.servers.pop(PRIMARY, None)
            self._note_loss()

    @override
    def _may_end_by(self, error: Exception) -> bool:
        said = str(error)
        if isinstance(error, OwnFailureError):
            return self.fails
        if isinstance(error, PeerError) and "before the workers had met" in said:
            return self.primary_lost
        if isinstance(error, PeerError) and error.phase == "rendezvous" and self.primary_lost and self.now_s >= TIMEOUT_S:
            return True  # some have not met, and end
        if isinstance(error, PeerError) and error.phase == "quorum":
            # or the others have come to the job's end
            is_over = any(worker.end == "done" for worker in self.workers)
            return is_over or self._is_unclear() or self._most_have_died_while_it_rested(error.rank)
        if isinstance(error, PeerError) and "all its members have failed" in said:
            outside = next(each for each in self.workers if each.alive and each.membership.me.initial_rank == error.rank)
            return not any(self._might_admit(worker, outside) for worker in self.workers)
        return super()._may_end_by(error)

    def _most_have_died_while_it_rested(self, rank: int | None) -> bool:
        """Whether those that are left are not enough by themselves: nobody knows whether the dead had gone on without them."""
        worker = next(each for each in self.workers if each.alive and each.membership.me.initial_rank == rank)
        members = worker.membership.rounds.agreed
        until_s = worker.woke_s + FAIL_AFTER_S
        died = [each.membership.me for each in self.workers if worker.rested_s <= each.died_s <= until_s]
        return 2 * len(set(members) - with_mates(died, members, self.islands)) <= len(members)

    def _might_admit(self, member: Worker, outside: Worker) -> bool:
        """Whether a worker goes on as a member, and one outside knows it, and has been able to reach it all the time."""
        goes_on = member.alive and member.end is None and member.monitor.broken is None and not member.membership.outside
        if self.now_s < outside.began_s + 4 * FAIL_AFTER_S:
            return goes_on and member.began_as in outside.told  # it has not looked for as long as it should
        since_s = self.now_s - 4 * FAIL_AFTER_S
        one, other = member.host, outside.host
        was_cut = self._was_cut(one, other, since_s)
        # and does not look for the next store itself, or is about to
        is_there = member.job is not None and member.adopted_s < since_s and self._reaches(member, member.job[0], since_s)
        is_known = str(member.began_as) in outside.monitor.hosts.values()
        was_frozen = max(member.frozen_until_s, outside.frozen_until_s) >= since_s
        return goes_on and is_there and is_known and not was_cut and not was_frozen

    def _was_cut(self, one: int, other: int, since_s: float) -> bool:
        """Whether two hosts were apart at some time since then."""
        return any(until_s > since_s and (one in side) != (other in side) for _, until_s, side in self.parts)

    def _reaches(self, worker: Worker, address: str, since_s: float) -> bool:
        """Whether a worker has been able to reach a store all the time since then."""
        host = self._host_of(address)
        is_up = address in self.servers and host not in self.ended_s
        return is_up and not self._was_cut(worker.host, host, since_s)

    def _is_unclear(self) -> bool:
        """Whether somebody was silent for long who may be alive."""
        return self.unclear or any(worker.frozen_s > SHORT_S for worker in self.workers)

    @override
    def _check_end(self) -> None:
        for worker in self.workers:
            if worker.end is not None and "two halves" in worker.end:  # which :meth:`_may_end_by` has seen
                worker.frozen_s = max(worker.frozen_s, 2 * SHORT_S)
        super()._check_end()
        ended = [worker for worker in self.workers if worker.alive and worker.end == "done" and not worker.membership.outside]
        # a script may catch what ends a use; whoever was excluded in an aborted one finds out in the next
        done = [worker for worker in ended if worker.monitor.broken is None and len(self.program) - 1 not in worker.aborted]
        if len({(worker.membership.members, worker.membership.generation) for worker in done}) > 1:
            sides = [(worker.membership.members, worker.failover.view) for worker in done]
            raise Violation(f"two sides are the job at the end: {sides}")
        self._check_who_goes_on()

    def _check_who_goes_on(self) -> None:
        """If one trouble for long is all that has happened, those that are enough go on without a loss."""
        if len(self._all_faults) != 1 or self.primary_lost:
            return
        _, kind, whom, how = self._all_faults[0]
        hosts = frozenset(map(self._host_of_rank, range(self.n)))
        if kind == "part" and how[0] >= LONG_S:
            sides = [how[1], hosts - how[1]]
        elif kind == "power" and self.ended_s:
            sides = [hosts - {self._host_of_rank(whom)}]
        else:
            return
        for worker in self.workers:
            side = next((side for side in sides if worker.host in side), frozenset())
            if 2 * len(side) > len(hosts) and (worker.end != "done" or worker.began_as != worker.membership.me):
                raise Violation(
                    f"{worker.began_as.spoken} is one of {len(side)} of {len(hosts)}, and has ended by {worker.end}"
                )


class InRounds(Hosted):
    """Troubles come in the middle of a round: when so many workers have counted themselves as knowing its result, or rest.

    By the clock they come most often while all train, or wait.
    """

    @override
    def __init__(self, choices: Choices, **replacements: Any) -> None:
        self.known = 0  # times that workers have counted themselves, or rested
        self.due: list[int] = []  # at which of them the troubles come
        super().__init__(choices, **replacements)

    @override
    def _drawn_faults(self) -> list[tuple[float, str, int, Any]]:
        faults = super()._drawn_faults() or [(0.0, "kill", 0, 0.3)]
        calls = sum(len(use) for use in self.program)
        self.due = sorted(self.choices.below(2 * self.n * calls) for _ in faults)
        return [(math.inf, *fault[1:]) for fault in faults]

    @override
    def _asked(self, thread: Thread) -> Any:
        self.known += type(thread.effect) is Count and "/known/" in thread.effect.key
        return super()._asked(thread)

    @override
    def _do(self, thread: Thread) -> Any:
        effect = thread.effect
        self.known += type(effect) is AtOwn and type(effect.operation) is Write and effect.operation.key == RESTS
        return super()._do(thread)

    @override
    def _advance(self) -> None:
        if self.due and self.due[0] <= self.known and self.faults:
            self.due.pop(0)
            self._strike()
            self._stale = True
        else:
            super()._advance()


def run(choices: Choices, **replacements: Any) -> Hosted:
    """Run one schedule; an exception of the product is a violation too."""
    world = Hosted(choices, **replacements)
    judge(world.run)
    return world


def run_in_rounds(choices: Choices, **replacements: Any) -> Hosted:
    """Run one schedule whose troubles come in the middle of rounds."""
    world = InRounds(choices, **replacements)
    judge(world.run)
    return world
