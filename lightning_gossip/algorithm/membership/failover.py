r"""What workers do when the store of the job is lost: they agree on the next one, and bring what they know there.

Each worker keeps a store in reserve. On the loss of the job's store its workers meet at the first of these that they reach, in
the order of their initial ranks, and go on with it if they are enough (:mod:`.quorum`). This is the change of views of
Viewstamped Replication (Oki and Liskov, PODC 1988; Liskov and Cowling, MIT-CSAIL-TR-2012-021), with a store in the place of a
primary: a *view* is the time of one store, rounds are the operations, and the result that was read last is the log.

Views are numbered: 0 is that of the store which the job begins with, and view c · 2²⁰ + r + 1 that of the c-th time in which
workers go to the store of initial rank r. A worker that has registered for a view never takes part in an earlier one. So of two
stores that believe to be the job's, one misses so many of its workers that it ends no round any more.

| key in the store that a worker keeps | written by | says |
|---|---|---|
| ``where`` | its owner | the view that the owner is in, and where its store is |
| ``seeks`` | its owner | the view that the owner waits for, and where |
| ``rests`` | its owner, and whoever calls it | that it rests, the k-th time, and which view it is bound to; or is awake |
| ``rests/<k>``, ``rests/<k>/result`` | its owner | what it knows, and the result of its last round |
| ``target`` | each that comes | the latest view that somebody wants here |
| ``<view>/count``, ``<view>/<i>`` | each that registers | what it knows: its view, its last round, members, news |
| ``<view>/result/<worker>`` | ″ | the result of its last round |
| ``<view>/opened`` | the first that sees a quorum; the first one counts | how the view begins |

| event | effects | then |
|---|---|---|
| an operation of the store fails | Leave | to the next worker's store |
| so many are silent that the others may not exclude them | Leave | ″: the network is cut, perhaps |
| nobody listens at a worker's store, its host answers | | that worker's process has ended |
| nothing answers | | to the next one |
| its owner is in a later view than this worker was | Enter, Adopt | goes on there, or learns that it was excluded |
| its owner is in a later view, whose store is lost, too | | to the owner's, for a view after that one |
| all have registered that have not ended, or it is as long as a silent worker takes to fail; a quorum | Decide | |
| it has opened | Adopt, and bring news, members and incarnations | goes on; excluded if it was too late |
| one that is missing waits elsewhere for a later view | | goes there |
| one that is missing rests, and the store where it is does not answer | Swap | calls it, and registers for it |
| nobody has come for twice that time, and no quorum | | to the next one; after a while the end |
| those that are missing have stayed in the view that it has left, and have excluded it there; no quorum here | Adopt \
| as a worker that was excluded: under a new identity |
| the time is over, and some worker still is in an earlier view | Adopt | ″ |

A worker that was silent and is found to have ended may have gone on meanwhile, with others, and have come to the job's end. So
the end of those that might have been enough counts only if it was found in time: before anybody can have excluded this worker.
Nobody excludes one that says in the store that it rests between two uses: then that matters only of those that were enough to
open another one.

A worker that **rests** between two uses of a Trainer runs no thread here, and notices no loss. The others may need it: perhaps
it has acted by a result that they have not read, and without it they may be too few. So before it rests it writes what it would
say at a meeting into the store that it keeps, and others register for it. By the same operation that finds it resting they bind
it to their view: when it wakes it takes part in no earlier one. In the next store it rests, too, until it comes.

Where ranks are **islands** each rank is a member, and goes from store to store for itself, since each says its own values in
rounds. But only the first rank of each keeps a store that may become the job's: a store that is lost takes its island with it,
so the next one is another island's. Islands are counted whole (:mod:`.quorum`), and a rank whose island has lost one, or that
was excluded, looks no further: it ends, and its island comes back whole.

What a view begins with: the members by the latest result that somebody of the quorum has read; all who have not registered have
failed; that result. If somebody has acted by it, it is settled; else those that wait for it settle it anew. A round without a
result is held once more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import ClassVar

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.joining import admitters_lost
from lightning_gossip.algorithm.membership.meeting import Meeting, Registration
from lightning_gossip.algorithm.membership.monitor import Monitor, hosts_key
from lightning_gossip.algorithm.membership.news import News
from lightning_gossip.algorithm.membership.quorum import has_quorum, with_mates
from lightning_gossip.algorithm.membership.rounds import Known, Rounds, no_quorum
from lightning_gossip.algorithm.membership.store import (
    Adopt,
    AtOwn,
    Count,
    Decide,
    Encode,
    Enter,
    Leave,
    Pause,
    Probe,
    Publish,
    Reached,
    Read,
    Restore,
    Seek,
    Steps,
    StoreLostError,
    Swap,
    Write,
)
from lightning_gossip.algorithm.membership.whereabouts import AWAKE, RESTS, SEEKS, WHERE, Rest, place_of
from lightning_gossip.algorithm.membership.worker_id import WorkerId, spans_of

_LOOK_S = 0.1  # between two looks of those that meet
_PROBE_S = 0.5  # between two looks at those that are missing
_TURN_S = 0.5  # after which the next one opens what the one before it should have
_VIEWS = 1 << 20  # more than there are workers
_PATIENCE = 4  # times the silence after which a worker has failed: then one without a quorum ends


class Failover:
    """The stores of one worker, one after the other. :meth:`tick` is a protocol of the monitor's thread.

    Args:
        prefix: of the job's keys.
        monitor: of this worker.
        rounds: of this worker.
        now_s: the clock, in seconds.
        silent_s: how long a worker may be silent before it has failed, in seconds.
        least: how many workers are enough, if the user has said so.
        islands: how ranks are islands; None where each is a worker.

    Attributes:
        view: that this worker is in.
        stopped: set by the driver: no heartbeats are to be sent any more.
    """

    meeting: ClassVar[type[Meeting]] = Meeting  # what those that have come know together

    def __init__(
        self,
        prefix: str,
        monitor: Monitor,
        rounds: Rounds,
        now_s: Callable[[], float],
        *,
        silent_s: float,
        least: int | None = None,
        islands: Islands | None = None,
    ) -> None:
        self.view = 0
        self.stopped = False
        self._promised = 0  # no view before this one
        self._prefix = prefix
        self._monitor = monitor
        self._rounds = rounds
        self._now_s = now_s
        self._silent_s = silent_s
        self._least = least
        self._islands = islands
        self._lost = False  # as the training thread has found out, or while this worker looks for the next store
        self._elsewhere: dict[WorkerId, tuple[int, str]] = {}  # views that others are in, and do not leave
        self._here: tuple[WorkerId, ...] = ()  # who was at the last meeting
        self._ahead: WorkerId | None = None  # one that waits for a later view elsewhere
        self._excluded_in: tuple[int, str] | None = None  # a view that others are in, and have excluded this worker
        self._looks = monitor.me.initial_rank  # at those that are missing: not all look at the same one first
        self._rests = 0  # how often it has rested
        self._waits_at = ""  # where this worker has registered last, for the view that it has promised
        self._called_to: tuple[int, str] | None = None  # where it is registered, and has rested since
        self._lies_down = False
        self._has_looked = False
        self._give_up_s = 0.0  # when this worker looks no further
        self._left_alone_in: set[int] = set()  # views in which it was outside, and has heard no member since the last one
        self._contact_s = now_s()  # when this worker was last heard in a store of the job, or heard a member from outside
        self._ended: frozenset[WorkerId] = frozenset()  # found in time: before the others can have excluded this worker
        self._ended_here: frozenset[WorkerId] = frozenset()  # ″ can have excluded it in this store, where it may have rested

    def lose(self, moves: int) -> None:
        """Note that another thread has lost the store that this worker had after so many moves."""
        self._lost |= moves == self._rounds.moves

    def tick(self) -> Steps[None]:
        """A tick of the monitor; if the store is lost, all the way to the next one.

        Raises:
            PeerError: if there is none with a quorum.
            StoreLostError: if the workers have not met yet, and so do not know each other.
        """
        try:
            if self._lost:
                raise StoreLostError
            began_s, was_outside = self._now_s(), self._monitor.is_outside
            if not self._has_looked and was_outside:
                self._contact_s = began_s  # it may have taken long from its first answer to here
            self._has_looked = True
            yield from self._monitor.tick(self._may_go_on, self.view)
            if not was_outside or self._monitor.hears_a_member():
                self._contact_s = began_s
                self._left_alone_in.clear()
            self._ended = self._ended_here = self._monitor.ended()
            if self._monitor.is_abandoned:
                yield from self._find()  # perhaps they go on elsewhere
        except StoreLostError:
            if not self._rounds.agreed and not self._monitor.is_outside:
                raise
            yield from self._find()

    def _may_go_on(self, present: Collection[WorkerId]) -> bool:
        """Whether these may exclude the other members."""
        agreed = self._rounds.agreed
        ended = self._monitor.ended()
        return not agreed or has_quorum(present, agreed, ended, at_store=True, least=self._least, islands=self._islands)

    # -- between two uses of a Trainer -------------------------------------------------------------------------------

    def lie_down(self) -> Steps[None]:
        """Say that this worker rests, and in the store that it keeps what it knows: others register for it then."""
        if not self._lost:
            try:
                yield from self._monitor.send()
                yield from self._monitor.publish()
            except StoreLostError:
                self._lost = True
        if self._lost:
            yield from self._probe(self._rounds.agreed)  # of those that end later nobody knows whether they have gone on
        if self._lies_down or not self._rounds.agreed or self._monitor.is_outside or self._monitor.has_lost_island:
            return
        self._rests += 1
        rests_here = not self._lost and self._monitor.says_in_time_that_it_rests(self._contact_s)
        mine = self._registration()._replace(heartbeat=self._monitor.said_last(), rests_here=rests_here)
        if result := self._rounds.known.result:
            yield AtOwn(Write(f"rests/{self._rests}/result", result))
        yield AtOwn(Write(f"rests/{self._rests}", (yield Encode(mine))))
        if not self.stopped:
            return  # it has woken meanwhile
        yield AtOwn(Write(RESTS, Rest(self._rests, self._promised, self._waits_at).encode()))
        self._lies_down = True

    def wake(self) -> Steps[None]:
        """Say there that this worker is awake, before it says anything else; if others have called it, it leaves the store."""
        if not self._lies_down:
            return
        self._lies_down = False
        told: bytes = yield AtOwn(Read(RESTS))
        while (stands := (yield AtOwn(Swap(RESTS, told, AWAKE)))) != AWAKE:
            told = stands
        _, view, address = Rest.decode(told)
        self._note_ended_in_time()
        if view > self.view:
            self._promised, self._called_to, self._lost = view, (view, address), True
            yield Leave()

    # -- from store to store -----------------------------------------------------------------------------------------

    def _find(self) -> Steps[None]:
        self._lost = True
        if self._monitor.is_outside:
            self._left_alone_in.add(self.view)
        self._begin_search()
        yield Leave()
        yield from self._probe(self._rounds.agreed)  # at once
        called_to, self._called_to = self._called_to, None
        if called_to is not None and (yield from self._answer(*called_to)):
            return
        self._give_up_s = (self._contact_s if self._monitor.is_outside else self._now_s()) + _PATIENCE * self._silent_s
        while not self._have_all_ended():
            if (yield from self._look_everywhere()):
                return
            if self._is_late:
                break
            yield Pause(_LOOK_S)
        if not self._is_over:
            yield from self._give_up()

    def _look_everywhere(self) -> Steps[bool]:
        """Go from store to store; whether this worker has found the job's, or looks no further."""
        for view, worker in self._candidates():
            if self._is_over or (yield from self._try(view, worker)) or (yield from self._go_back()):
                return True
            while not self._is_late and (ahead := self._take_ahead()) is not None:
                if self._is_over or (yield from self._try(self._next_view(ahead), ahead)) or (yield from self._go_back()):
                    return True
            if self._is_late and not self._monitor.is_outside:  # who is outside looks everywhere, however late it is
                break
        return self._is_over

    @property
    def _is_late(self) -> bool:
        """Whether this worker has looked, or from outside waited, for as long as it may."""
        return self._now_s() >= self._give_up_s

    def _have_all_ended(self) -> bool:
        return (bool(self._monitor.hosts) and not self._candidates()) or self._is_left_alone_at_admission()

    @property
    def _is_over(self) -> bool:
        """Whether this worker looks no further: it rests, or ends with its island."""
        return self.stopped or self._monitor.has_lost_island

    def _has_lost_admitters(self) -> bool:
        """Whether this worker has been admitted, but has acted by no result yet, and the members of before have ended."""
        agreed, monitor = self._rounds.agreed, self._monitor
        return bool(agreed) and not monitor.is_outside and monitor.me not in agreed and monitor.ended().issuperset(agreed)

    def _is_left_alone_at_admission(self) -> bool:
        """Whether nobody is left with whom a worker that has just been admitted could go on."""
        taking_part = self._rounds.taking_part
        others = {*taking_part} - with_mates([self._monitor.me], taking_part, self._islands)
        return self._has_lost_admitters() and self._monitor.ended() >= others

    def _begin_search(self) -> None:
        self._elsewhere, self._ahead, self._here, self._excluded_in = {}, None, (), None

    def _take_ahead(self) -> WorkerId | None:
        ahead, self._ahead = self._ahead, None
        return ahead

    def _probe(self, workers: Collection[WorkerId]) -> Steps[list[WorkerId]]:
        """Note which of these workers have ended; the result is those that listen."""
        monitor, ended, began_s = self._monitor, self._monitor.ended(), self._now_s()
        asked = [worker for worker in workers if worker in monitor.hosts and worker not in ended and worker != monitor.me]
        found = yield Probe(tuple(monitor.hosts[worker] for worker in asked))
        for worker, reached in zip(asked, found, strict=True):
            if reached is Reached.REFUSED:
                self._note_ended(worker, began_s)
        return [worker for worker, reached in zip(asked, found, strict=True) if reached is Reached.OPEN]

    def _note_ended(self, worker: WorkerId, at_s: float) -> None:
        self._monitor.process_ended(worker)
        if at_s < self._contact_s + self._monitor.suspect_after_s:
            self._ended |= {worker}
        if at_s < self._monitor.kept_until_s(self._contact_s):
            self._ended_here |= {worker}

    def _note_ended_in_time(self) -> None:
        """Of those that ended later, when this worker was silent, nobody knows whether they went on without it."""
        if self._now_s() < self._contact_s + self._monitor.suspect_after_s:
            self._ended = self._monitor.ended()
        if self._now_s() < self._monitor.kept_until_s(self._contact_s):
            self._ended_here = self._monitor.ended()

    def _ended_in_time(self) -> frozenset[WorkerId]:
        self._note_ended_in_time()
        return self._ended

    def _candidates(self) -> list[tuple[int, WorkerId]]:
        """The stores that workers keep, by the views that come next."""
        monitor = self._monitor
        if monitor.is_outside:  # what it has heard last may be of a store that the others have left
            failed = monitor.ended() | {monitor.me}
        else:
            failed = (monitor.news.failed | monitor.ended()) - {monitor.me}
        failed = with_mates(failed, self._rounds.agreed, self._islands)
        views = {worker: self._next_view(worker) for worker in monitor.hosts if worker not in failed and self._may_keep(worker)}
        return sorted((view, worker) for worker, view in views.items())

    def _may_keep(self, worker: WorkerId) -> bool:
        """Whether the job's store may be the one that a worker keeps: of an island, that of its first rank."""
        return self._islands is None or self._islands.place(worker.initial_rank).index == 0

    def _next_view(self, worker: WorkerId, *, after: int = 0) -> int:
        own, last = worker.initial_rank + 1, max(self.view, self._promised, after)
        return last + ((own - last) % _VIEWS or _VIEWS)

    def _try(self, view: int, worker: WorkerId) -> Steps[bool]:
        """Go to the store that a worker keeps; whether it is the job's now."""
        address = self._monitor.hosts[worker]
        reached = yield Enter(address)
        if reached is Reached.REFUSED:
            self._note_ended(worker, self._now_s())
        if reached is not Reached.OPEN:
            return False
        try:
            here, sought, _ = yield from self._ask(worker)
            if here is not None and self._may_adopt(here[0]):
                later, there = here
                if there == address or (yield Enter(there)) is Reached.OPEN:
                    return (yield from self._adopt(later, there))
                if (yield Enter(address)) is not Reached.OPEN:
                    return False
                view = self._next_view(worker, after=later)  # that store is lost, too: those that were there go to the next one
            if self._monitor.is_outside:
                return False
            if sought is not None and sought[0] > max(self._promised, self.view) and sought[1] != address:
                if (yield Enter(sought[1])) is Reached.OPEN:
                    return (yield from self._meet(*sought))
                if (yield Enter(address)) is not Reached.OPEN:
                    return False
            return self._may_keep(worker) and (yield from self._meet(view, address))
        except StoreLostError:
            return False

    def _may_adopt(self, view: int) -> bool:
        """Whether to go on in a view that others are in.

        A worker outside has promised nothing under its next identity, and may have left while they were frozen. But others
        outside may wait where no member is left, and say that the job is there: when its time is over it goes to no view again.
        """
        if self._monitor.is_outside:
            return view >= self.view and not (self._is_late and view in self._left_alone_in)
        return view > self.view and view >= self._promised

    def _ask(self, worker: WorkerId) -> Steps[tuple[tuple[int, str] | None, tuple[int, str] | None, bytes | None]]:
        """The view that a worker is in and the one that it waits for, with their addresses, and whether it rests.

        That is what stands in its store. One that rests waits for the view that it was called to.
        """
        here, sought = place_of((yield Read(WHERE))), place_of((yield Read(SEEKS)))
        rests: bytes | None = yield Read(RESTS)
        rest = None if rests == AWAKE else rests
        if rest is not None and (bound := Rest.decode(rest)).address and (sought is None or bound.view > sought[0]):
            sought = (bound.view, bound.address)
        self._elsewhere.pop(worker, None)
        if here is not None and worker != self._monitor.me and (sought is None or sought[0] <= here[0]):
            self._elsewhere[worker] = here
        return here, sought, rest

    def _give_up(self) -> Steps[None]:
        """Nobody is there with whom this worker may go on under its identity."""
        if self._elsewhere and not self._monitor.is_outside and (yield from self._renounce(*max(self._elsewhere.values()))):
            return
        if self._monitor.is_outside:
            raise self._monitor.left_alone()
        if self._has_lost_admitters():
            raise admitters_lost(self._monitor.me)
        me = self._monitor.me
        members = sorted({*self._rounds.agreed, *self._rounds.proposed}) or [me]
        raise no_quorum(me, self._here or (me,), members)

    def _go_back(self) -> Steps[bool]:
        """Go to those that have excluded this worker, as another one; whether it has."""
        found, self._excluded_in = self._excluded_in, None
        return found is not None and (yield from self._renounce(*found))

    def _renounce(self, view: int, address: str) -> Steps[bool]:
        """Go on in a view that others are in, under another identity; False if its store is lost, too."""
        try:
            return (yield Enter(address)) is Reached.OPEN and (yield from self._adopt(view, address, renounces=True))
        except StoreLostError:
            return False

    def _answer(self, view: int, address: str) -> Steps[bool]:
        """Go where others have registered for this worker while it rested; whether the job's store is there now."""
        try:
            if (yield Enter(address)) is not Reached.OPEN:
                return False
            yield Seek(view, address)
            return (yield from self._await_opened(view, address, self._now_s())) and (yield from self._adopt(view, address))
        except StoreLostError:
            return False

    # -- where workers meet ------------------------------------------------------------------------------------------

    def _meet(self, view: int, address: str) -> Steps[bool]:
        """Register for a view, and wait for a quorum; whether it has opened."""
        came_s = self._now_s()
        while True:
            later = yield from self._target(view)
            if later <= self._promised:
                return False
            view = self._promised = later
            self._waits_at = address
            yield Seek(view, address)
            yield from self._say_here(view)
            if (yield from self._await_opened(view, address, came_s)):
                return (yield from self._adopt(view, address))
            if self._is_over or self._ahead is not None or self._excluded_in is not None:
                return False

    def _target(self, view: int) -> Steps[int]:
        """The latest view that somebody wants here: this one, unless there is a later one."""
        wanted = str(view).encode()
        stands: bytes = yield Decide("target", wanted)
        while int(stands) < view:
            stands = yield Swap("target", stands, wanted)
        return int(stands)

    def _registration(self) -> Registration:
        rounds, monitor = self._rounds, self._monitor
        return Registration(
            monitor.me,
            self.view,
            rounds.known.number,
            rounds.known.settled,
            spans_of(rounds.agreed or rounds.taking_part),
            spans_of(rounds.proposed),
            spans_of(rounds.taking_part),
            monitor.told().encode(),
            self._ended_in_time(),
            self._ended_here,
        )

    def _say_here(self, view: int) -> Steps[None]:
        mine = self._registration()
        if self.stopped:
            mine = mine._replace(heartbeat=self._monitor.said_last())
        yield from self._register(view, mine.worker, (yield Encode(mine)), self._rounds.known.result)

    @staticmethod
    def _register(view: int, worker: WorkerId, said: bytes, result: bytes) -> Steps[None]:
        if result:
            yield Write(f"{view}/result/{worker}", result)
        place = yield Count(f"{view}/count")
        yield Write(f"{view}/{place}", said)

    def _await_opened(self, view: int, address: str, came_s: float) -> Steps[bool]:
        """Whether a view has opened; False if a later one is wanted, or there is no quorum, and nobody has come for long."""
        said: dict[int, Registration] = {}
        probed_s = last_s = self._now_s()
        while self._now_s() < last_s + 2 * self._silent_s and not self._is_over:
            if (yield Read(f"{view}/opened")) is not None:
                return True
            if (yield from self._target(view)) != view:
                return False
            count = int((yield Read(f"{view}/count")) or 0)
            for place in range(1, count + 1):
                if place not in said and (value := (yield Read(f"{view}/{place}"))) is not None:
                    (said[place],) = yield Restore((value,))
                    last_s = self._now_s()
            known = [said[place] for place in sorted(said)]
            meeting = self.meeting(known, self._monitor.ended(), self._ended_in_time(), self._islands)
            self._here = meeting.present
            late_s = self._now_s() - came_s - _TURN_S * meeting.place(self._monitor.me)
            if late_s >= 0.0 and not meeting.is_complete and self._now_s() >= probed_s:
                yield from self._look_around(meeting.missing, view, address)
                if meeting.may_open(self._least, in_vain=True):
                    self._excluded_in = None  # those that are here are enough, with this one: so those there are not
                if self._ahead is not None or self._excluded_in is not None:
                    return False
                probed_s = self._now_s() + _PROBE_S  # from its end: what does not answer takes longer than that
            elif late_s >= 0.0 and meeting.may_open(self._least, in_vain=late_s >= self._silent_s):
                result = (yield Read(f"{view}/result/{meeting.reader}")) or b""
                yield Decide(f"{view}/opened", (yield Encode(meeting.opened(result))))
                continue
            yield Pause(_LOOK_S)
        if not self.stopped:
            return False
        yield from self._say_here(view)  # else the others would take it for silent
        return (yield Read(f"{view}/opened")) is not None

    def _look_around(self, missing: list[WorkerId], view: int, address: str) -> Steps[None]:
        """Find out who of those that are missing has ended or rests, and whether one of the others waits for a later view.

        Without that two sides of a network that was cut would go after each other from store to store when it is whole again.
        One that has stayed where this worker was may have excluded it there, with others: then nobody comes here any more.
        """
        there = yield from self._probe(missing)
        if not there:
            return
        self._looks += 1
        one = there[self._looks % len(there)]
        called = None
        if (yield Enter(self._monitor.hosts[one])) is Reached.OPEN:
            here, sought, rest = yield from self._ask(one)
            if any(found is not None and found[0] > view for found in (here, sought)):
                self._ahead = one
            elif here is not None and one in self._elsewhere and here[0] >= self.view:
                is_there = yield from self._look_back(*here)
                if not is_there and rest is not None:
                    called = yield from self._call(one, rest, view, address)
            elif rest is not None and not (yield from self._has_opened(Rest.decode(rest))):
                called = yield from self._call(one, rest, view, address)
        if (yield Enter(address)) is not Reached.OPEN:
            raise StoreLostError
        if called is not None:
            yield from self._register(view, one, *called)

    def _has_opened(self, rest: Rest) -> Steps[bool]:
        """Whether the view that a worker was called to while it rested has opened, and its store answers."""
        if not rest.address or (yield Enter(rest.address)) is not Reached.OPEN:
            return False
        return (yield Read(f"{rest.view}/opened")) is not None

    def _look_back(self, view: int, address: str) -> Steps[bool]:
        """Find out whether those in a view are still there, and if so whether they have excluded this worker."""
        if (yield Enter(address, view)) is not Reached.OPEN:
            return False
        news = yield Read(f"{self._prefix}/news")
        if news is not None and self._monitor.me in News.decode(news).failed:
            self._excluded_in = view, address
        return True

    def _call(self, worker: WorkerId, rest: bytes, view: int, address: str) -> Steps[tuple[bytes, bytes] | None]:
        """Bind a worker that rests to a view; what it says, and the result of its last round. None: it has woken."""
        number, called_to, _ = Rest.decode(rest)
        if called_to > view or (yield Enter(self._monitor.hosts[worker])) is not Reached.OPEN:
            return None
        wanted, ended = Rest(number, view, address).encode(), self._monitor.ended()
        if (yield Swap(RESTS, rest, wanted)) != wanted:
            return None  # or another one has called it to another view
        (said,) = yield Restore(((yield Read(f"rests/{number}")),))
        if said.rests_here:  # until it was bound nobody can have excluded it
            said = said._replace(ended_here=said.ended_here | ended)
        return (yield Encode(said)), (yield Read(f"rests/{number}/result")) or b""

    def _adopt(self, view: int, address: str, *, renounces: bool = False) -> Steps[bool]:
        """Go on with a store that has opened, and bring what every store of the job has."""
        monitor, prefix = self._monitor, self._prefix
        if view > 0:
            (opened,) = yield Restore(((yield Read(f"{view}/opened")),))
        else:  # the first store never was opened
            opened = None
        yield Adopt(view, address)
        if opened is not None:
            news: bytes = yield Decide(f"{prefix}/news", opened.news)
            yield Decide(hosts_key(prefix), monitor.told_hosts(opened.present))
            yield Decide(f"{prefix}/members", json.dumps(opened.present).encode())
            for rank, incarnation in opened.incarnations.items():
                yield Decide(f"{prefix}/incarnation/{rank}", str(incarnation).encode())
            yield from monitor.say_for(opened.resting)
            self._rounds.move(opened.known)
        else:
            news = yield Decide(f"{prefix}/news", News().encode())
            self._rounds.move(Known())
        if renounces:
            monitor.renounce()
        monitor.holds_store = address == monitor.address
        monitor.move(news)
        self.view, self._promised, self._lost = view, view if renounces else max(view, self._promised), False
        self._waits_at = ""
        yield from monitor.send()
        yield Publish(view, address)
        return True
