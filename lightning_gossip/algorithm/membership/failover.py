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
| all have registered that have not ended, or it is as long as a silent worker takes to fail; a quorum | Decide | |
| it has opened | Adopt, and bring news, members and incarnations | goes on; excluded if it was too late |
| one that is missing waits elsewhere for a later view | | goes there |
| nobody has come for twice that time, and no quorum | | to the next one; after a while the end |
| those that are missing have stayed in the view that it has left, and have excluded it there | Adopt | as a worker that was \
excluded: under a new identity |
| the time is over, and some worker still is in an earlier view | Adopt | ″ |

A worker that was silent and is found to have ended may have gone on meanwhile, with others, and have come to the job's end. So
the end of those that might have been enough counts only if it was found in time: before anybody can have excluded this worker.
Nobody excludes one that says in the store that it rests between two uses: then that matters only of those that were enough to
open another one.

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
from collections.abc import Callable, Collection, Iterator
from typing import ClassVar, NamedTuple

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.joining import admitters_lost
from lightning_gossip.algorithm.membership.monitor import Monitor, hosts_key
from lightning_gossip.algorithm.membership.news import News
from lightning_gossip.algorithm.membership.quorum import has_quorum, whole, with_mates
from lightning_gossip.algorithm.membership.rounds import Known, Rounds, no_quorum
from lightning_gossip.algorithm.membership.store import (
    Adopt,
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
from lightning_gossip.algorithm.membership.worker_id import Span, WorkerId, spans_of, workers_of

_LOOK_S = 0.1  # between two looks of those that meet
_PROBE_S = 0.5  # between two looks at those that are missing
_TURN_S = 0.5  # after which the next one opens what the one before it should have
_VIEWS = 1 << 20  # more than there are workers
_PATIENCE = 4  # times the silence after which a worker has failed: then one without a quorum ends


class Registration(NamedTuple):
    """What a worker says when it comes to the next store.

    Args:
        worker: its identity.
        view: that it was in.
        number: of the last round whose result it has read; -1 for none.
        settled: whether it has acted by that.
        agreed: the members by the last result that it has acted by.
        proposed: those by the last one that it has read: it is a witness of that, and others may have acted by it since.
        taking_part: those of its last round.
        news: as it has read them, with what it has found out.
        ended: workers whose processes ended before they can have gone on without this one.
        ended_here: those whose processes ended before they can have excluded this one in the store of its view: more of them,
            if it rested there.
    """

    worker: WorkerId
    view: int
    number: int
    settled: bool
    agreed: tuple[Span, ...]
    proposed: tuple[Span, ...]
    taking_part: tuple[Span, ...]
    news: bytes
    ended: frozenset[WorkerId]
    ended_here: frozenset[WorkerId]


class Opened(NamedTuple):
    """How a view begins.

    Args:
        members: that agreed last.
        present: those that have registered, and go on.
        known: the last result.
        news: what all of them know.
        incarnations: by initial rank, the last that is known.
    """

    members: tuple[WorkerId, ...]
    present: tuple[WorkerId, ...]
    known: Known
    news: bytes
    incarnations: dict[int, int]


class Meeting:
    """What those that have registered know together.

    Args:
        said: by each that came.
        ended: workers whose processes are known to have ended.
        in_time: those of them whose ends were found before they can have gone on without whoever asks.
        islands: how ranks are islands; None where each is a worker.

    Attributes:
        best: the one that knows most.
        members: that it knows.
        present: those of them that go on.
        missing: those that have not come, and may be alive.
        is_complete: whether all have come that can be expected.
    """

    def __init__(
        self,
        said: list[Registration],
        ended: frozenset[WorkerId],
        in_time: frozenset[WorkerId],
        islands: Islands | None = None,
    ) -> None:
        self._islands = islands
        self.best = max(said, key=lambda one: (one.view, one.number, one.settled)) if said else None
        self.members = workers_of(self.best.agreed) if self.best is not None else ()
        self._said = said
        self._news = [News.decode(one.news) for one in said]
        self._ended = ended.union(*(news.ended for news in self._news))
        self._failed = with_mates(self._ended.union(*(news.failed for news in self._news)), self.members, islands)
        registered = {one.worker for one in said}
        self._here = whole(registered - self._failed, islands)
        self.present = tuple(worker for worker in self.members if worker in self._here)
        self._in_time = in_time.union(*(one.ended for one in said))
        # what a store that others have left since says keeps nobody from being excluded in theirs
        here = [one.ended_here for one in said if self.best is not None and one.view == self.best.view]
        self._in_time_here = self._in_time.union(*here)
        self.missing = [worker for worker in self.members if worker not in registered and worker not in self._failed]
        self.is_complete = not self.missing

    @property
    def reader(self) -> WorkerId:
        """Who has brought the last result."""
        assert self.best is not None
        return self.best.worker

    def place(self, worker: WorkerId) -> int:
        """Whose turn it is to open the view, from 0."""
        return self.present.index(worker) if worker in self.present else len(self.present)

    def may_open(self, least: int | None, *, in_vain: bool) -> bool:
        """Whether those present go on; ``in_vain``: they have waited long enough for the others."""
        if self.best is None:
            return False
        ended = self._in_time if self._may_have_gone_on(least) else self._ended
        return (self.is_complete or in_vain) and all(
            has_quorum(self._here, members, ended, at_store=False, least=least, islands=self._islands)
            for members in (self.members, *self._grown)
        )

    @property
    def _grown(self) -> list[tuple[WorkerId, ...]]:
        """The members by the last result, if some were admitted since the last settled one, and may go on by it: or none."""
        assert self.best is not None
        proposed = workers_of(self.best.proposed)
        return [proposed] if set(proposed) - {*self.members} else []

    def _may_have_gone_on(self, least: int | None) -> bool:
        """Whether those that were silent, and then ended, may have come to the job's end before: unless they were too few.

        They may have acted by the last result, and so have been enough among the members by that. With the store of the last
        view they went on only if they excluded those that are here, and in another one only if they were enough to open it.
        """
        assert self.best is not None
        return any(
            has_quorum(
                set(members) - ended - {*self.present}, members, ended, at_store=at_store, least=least, islands=self._islands
            )
            for members in (self.members, workers_of(self.best.proposed))
            for ended, at_store in ((self._in_time_here, True), (self._in_time, False))
            if members
        )

    def opened(self, result: bytes) -> Opened:
        """How the view begins."""
        assert self.best is not None
        taking_part = {worker for one in self._said for worker in workers_of(one.taking_part)}
        failed = (self._failed | taking_part | set(self.members)) - set(self.present)
        aborted = {told.use: told for news in reversed(self._news) for told in news.aborted}
        news = News(
            1 + max(news.number for news in self._news),
            failed,
            aborted=tuple(aborted[use] for use in sorted(aborted)),
            ended=self._ended & failed,
        )
        incarnations: dict[int, int] = {}
        for worker in [*self.members, *failed, *(one.worker for one in self._said)]:
            incarnations[worker.initial_rank] = max(incarnations.get(worker.initial_rank, 1), worker.incarnation)
        known = Known(self.best.number, result, self.best.settled)
        return Opened(self.members, self.present, known, news.encode(), incarnations)


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
        self._looks = 0  # at those that are missing
        self._has_looked = False
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
            began_s = self._now_s()
            if not self._has_looked and self._monitor.is_outside:
                self._contact_s = began_s  # it may have taken long from its first answer to here
            self._has_looked = True
            yield from self._monitor.tick(self._may_go_on)
            if not self._monitor.is_outside or self._monitor.hears_a_member():
                self._contact_s = began_s
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

    # -- from store to store -----------------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether this worker has no store: what it would say reaches nobody."""
        return self._lost

    def _find(self) -> Steps[None]:
        self._lost = True
        self._begin_search()
        yield Leave()
        yield from self._probe(self._rounds.agreed)  # at once
        # others outside may wait where no member is left, and say that the job is there
        give_up_s = (self._contact_s if self._monitor.is_outside else self._now_s()) + _PATIENCE * self._silent_s
        while self._now_s() < give_up_s:
            candidates = list(self._candidates())
            if (not candidates and self._monitor.hosts) or self._is_left_alone_at_admission():
                break  # all have ended
            for view, worker in candidates:
                if self._is_over or (yield from self._try(view, worker)) or (yield from self._go_back()):
                    return
                while self._now_s() < give_up_s and (ahead := self._take_ahead()) is not None:
                    if self._is_over or (yield from self._try(self._next_view(ahead), ahead)) or (yield from self._go_back()):
                        return
                if self._now_s() >= give_up_s:
                    break
            yield Pause(_LOOK_S)
        if not self._is_over:
            yield from self._give_up()

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

    def _ended_in_time(self) -> frozenset[WorkerId]:
        """Of those that ended later, when this worker was silent, nobody knows whether they went on without it."""
        if self._now_s() < self._contact_s + self._monitor.suspect_after_s:
            self._ended = self._monitor.ended()
        return self._ended

    def _candidates(self) -> Iterator[tuple[int, WorkerId]]:
        """The stores that workers keep, by the views that come next."""
        monitor = self._monitor
        if monitor.is_outside:  # what it has heard last may be of a store that the others have left
            failed = monitor.ended() | {monitor.me}
        else:
            failed = (monitor.news.failed | monitor.ended()) - {monitor.me}
        failed = with_mates(failed, self._rounds.agreed, self._islands)
        views = {worker: self._next_view(worker) for worker in monitor.hosts if worker not in failed and self._may_keep(worker)}
        yield from sorted((view, worker) for worker, view in views.items())

    def _may_keep(self, worker: WorkerId) -> bool:
        """Whether the job's store may be the one that a worker keeps: of an island, that of its first rank."""
        return self._islands is None or self._islands.place(worker.initial_rank).index == 0

    def _next_view(self, worker: WorkerId) -> int:
        own, last = worker.initial_rank + 1, max(self.view, self._promised)
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
            here, sought = yield from self._ask(worker)
            if here is not None and self._may_adopt(here[0]):
                later, there = here
                if there != address and (yield Enter(there)) is not Reached.OPEN:
                    return False
                return (yield from self._adopt(later, there))
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

        A worker outside has promised nothing under its next identity, and may have left while they were frozen.
        """
        return view >= self.view if self._monitor.is_outside else view > self.view and view >= self._promised

    def _ask(self, worker: WorkerId) -> Steps[tuple[tuple[int, str] | None, tuple[int, str] | None]]:
        """The view that a worker is in and the one that it waits for, as it says in its store, with their addresses."""
        where, seeks = (yield Read("where")), (yield Read("seeks"))
        here, sought = (
            None if told is None else (int(json.loads(told)[0]), str(json.loads(told)[1])) for told in (where, seeks)
        )
        self._elsewhere.pop(worker, None)
        if here is not None and worker != self._monitor.me and (sought is None or sought[0] <= here[0]):
            self._elsewhere[worker] = here
        return here, sought

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

    # -- where workers meet ------------------------------------------------------------------------------------------

    def _meet(self, view: int, address: str) -> Steps[bool]:
        """Register for a view, and wait for a quorum; whether it has opened."""
        came_s = self._now_s()
        while True:
            later = yield from self._target(view)
            if later <= self._promised:
                return False
            view = self._promised = later
            yield Seek(view, address)
            yield from self._register(view)
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

    def _register(self, view: int) -> Steps[None]:
        rounds, monitor = self._rounds, self._monitor
        known = rounds.known
        mine = Registration(
            monitor.me,
            self.view,
            known.number,
            known.settled,
            spans_of(rounds.agreed or rounds.taking_part),
            spans_of(rounds.proposed),
            spans_of(rounds.taking_part),
            monitor.told().encode(),
            self._ended_in_time(),
            self._ended_here,
        )
        if known.result:
            yield Write(f"{view}/result/{monitor.me}", known.result)
        said = yield Encode(mine)
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
            meeting = self.meeting(list(said.values()), self._monitor.ended(), self._ended_in_time(), self._islands)
            self._here = meeting.present
            late_s = self._now_s() - came_s - _TURN_S * meeting.place(self._monitor.me)
            if late_s >= 0.0 and not meeting.is_complete and self._now_s() >= probed_s:
                yield from self._look_around(meeting.missing, view, address)
                if self._ahead is not None or self._excluded_in is not None:
                    return False
                probed_s = self._now_s() + _PROBE_S  # from its end: what does not answer takes longer than that
            elif late_s >= 0.0 and meeting.may_open(self._least, in_vain=late_s >= self._silent_s):
                result = (yield Read(f"{view}/result/{meeting.reader}")) or b""
                yield Decide(f"{view}/opened", (yield Encode(meeting.opened(result))))
                continue
            yield Pause(_LOOK_S)
        return False

    def _look_around(self, missing: list[WorkerId], view: int, address: str) -> Steps[None]:
        """Find out who of those that are missing has ended, and whether one of the others waits elsewhere for a later view.

        Without that two sides of a network that was cut would go after each other from store to store when it is whole again.
        One that has stayed where this worker was may have excluded it there, with others: then nobody comes here any more.
        """
        there = yield from self._probe(missing)
        if not there:
            return
        self._looks += 1
        one = there[self._looks % len(there)]
        if (yield Enter(self._monitor.hosts[one])) is Reached.OPEN:
            here, sought = yield from self._ask(one)
            if any(place is not None and place[0] > view for place in (here, sought)):
                self._ahead = one
            elif here is not None and one in self._elsewhere and here[0] >= self.view:
                yield from self._look_back(*here)
        if (yield Enter(address)) is not Reached.OPEN:
            raise StoreLostError

    def _look_back(self, view: int, address: str) -> Steps[None]:
        """Find out whether those in a view have excluded this worker."""
        if (yield Enter(address, view)) is Reached.OPEN:
            news = yield Read(f"{self._prefix}/news")
            if news is not None and self._monitor.me in News.decode(news).failed:
                self._excluded_in = view, address

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
            self._rounds.move(opened.known)
        else:
            news = yield Decide(f"{prefix}/news", News().encode())
            self._rounds.move(Known())
        if renounces:
            monitor.renounce()
        monitor.holds_store = address == monitor.address
        monitor.move(news)
        self.view, self._promised, self._lost = view, view if renounces else max(view, self._promised), False
        yield from monitor.send()
        yield Publish(view, address)
        return True
