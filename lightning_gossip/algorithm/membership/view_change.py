r"""The change of views at one store: what a worker does there from its registration until the view opens (:mod:`.failover`).

| key in the store that a worker keeps | written by | says |
|---|---|---|
| ``target`` | each that comes | the latest view that somebody wants here |
| ``<view>/count``, ``<view>/<i>`` | each that registers | what it knows: its view, its last round, members, news |
| ``<view>/result/<worker>`` | ″ | the result of its last round |
| ``<view>/opened`` | the first that sees a quorum; the first one counts | how the view begins |

| what is found | then |
|---|---|
| all have registered that have not ended, or it is as long as a silent worker takes to fail; a quorum | the view opens |
| a later view is wanted here | all register for that one |
| one that is missing waits elsewhere for a later view | this worker goes there |
| one that is missing rests, and the store where it is does not answer | it is called, and registered |
| those that are missing have excluded this worker in the view that it has left; no quorum here | it goes back as another one |
| nobody has come for twice as long as a silent worker takes to fail, and no quorum | this worker goes to the next store |
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import ClassVar

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.meeting import Meeting, Registration
from lightning_gossip.algorithm.membership.monitor import Monitor
from lightning_gossip.algorithm.membership.news import News
from lightning_gossip.algorithm.membership.rounds import Rounds
from lightning_gossip.algorithm.membership.store import (
    Count,
    Decide,
    Encode,
    Enter,
    Pause,
    Probe,
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

LOOK_S = 0.1  # between two looks of those that meet
_PROBE_S = 0.5  # between two looks at those that are missing
_TURN_S = 0.5  # after which the next one opens what the one before it should have


class Contact:
    """When a worker was last in touch with the job, and so which ends of processes tell it that somebody is absent.

    A worker that was silent and is found to have ended may have gone on meanwhile, with others, and have come to the job's end.
    So the end of those that might have been enough counts only if it was found in time: before anybody can have excluded the
    finder. Nobody excludes one that says in the store that it rests between two uses: then that matters only of those that were
    enough to open another one.

    Args:
        monitor: of this worker.
        now_s: the clock, in seconds.

    Attributes:
        last_s: when this worker was last heard in a store of the job, or heard a member from outside.
        ended: found in time: before the others can have excluded this worker.
        ended_here: found before they can have excluded it in the store of its view, where it may have rested.
    """

    def __init__(self, monitor: Monitor, now_s: Callable[[], float]) -> None:
        self.last_s = now_s()
        self.ended: frozenset[WorkerId] = frozenset()
        self.ended_here: frozenset[WorkerId] = frozenset()
        self._monitor = monitor
        self._now_s = now_s

    def keep(self) -> None:
        """Note what is known by now, in a store of the job: all that was found in time."""
        self.ended = self.ended_here = self._monitor.ended()

    def note_in_time(self) -> None:
        """Note what is known by now, if that is in time."""
        if self._now_s() < self.last_s + self._monitor.suspect_after_s:
            self.ended = self._monitor.ended()
        if self._now_s() < self._monitor.kept_until_s(self.last_s):
            self.ended_here = self._monitor.ended()

    def ended_in_time(self) -> frozenset[WorkerId]:
        """The workers whose ends were found in time, with what is known now."""
        self.note_in_time()
        return self.ended

    def note_ended(self, worker: WorkerId, at_s: float) -> None:
        """Note that a worker's process was found to have ended, at a time in seconds."""
        self._monitor.process_ended(worker)
        if at_s < self.last_s + self._monitor.suspect_after_s:
            self.ended |= {worker}
        if at_s < self._monitor.kept_until_s(self.last_s):
            self.ended_here |= {worker}

    def probe(self, workers: Collection[WorkerId]) -> Steps[list[WorkerId]]:
        """Note which of these workers have ended; the result is those that listen."""
        monitor, ended, began_s = self._monitor, self._monitor.ended(), self._now_s()
        asked = [worker for worker in workers if worker in monitor.hosts and worker not in ended and worker != monitor.me]
        found = yield Probe(tuple(monitor.hosts[worker] for worker in asked))
        for worker, reached in zip(asked, found, strict=True):
            if reached is Reached.REFUSED:
                self.note_ended(worker, began_s)
        return [worker for worker, reached in zip(asked, found, strict=True) if reached is Reached.OPEN]


class ViewChange:
    """Where one worker meets the others, and what it finds there.

    Args:
        prefix: of the job's keys.
        monitor: of this worker.
        rounds: of this worker.
        contact: of this worker with the job.
        now_s: the clock, in seconds.
        silent_s: how long a worker may be silent before it has failed, in seconds.
        least: how many workers are enough, if the user has said so.
        islands: how ranks are islands; None where each is a worker.
        view: that this worker is in.

    Attributes:
        view: that this worker is in.
        promised: it takes part in no view before this one.
        waits_at: where it has registered last, for the view that it has promised; empty if nowhere.
        stopped: whether it rests: no heartbeats are to be sent any more.
        here: who was at the last meeting.
        ahead: one that waits for a later view elsewhere.
        elsewhere: views that others are in, and do not leave, with their addresses.
        excluded_in: one of these in which this worker was excluded.
    """

    meeting: ClassVar[type[Meeting]] = Meeting  # what those that have come know together

    def __init__(
        self,
        prefix: str,
        monitor: Monitor,
        rounds: Rounds,
        contact: Contact,
        now_s: Callable[[], float],
        *,
        silent_s: float,
        least: int | None,
        islands: Islands | None,
        view: int,
    ) -> None:
        self.view = view
        self.promised = 0
        self.waits_at = ""
        self.stopped = False
        self._prefix = prefix
        self._monitor = monitor
        self._rounds = rounds
        self._contact = contact
        self._now_s = now_s
        self._silent_s = silent_s
        self._least = least
        self._islands = islands
        self._looks = monitor.me.initial_rank  # at those that are missing: not all look at the same one first
        self.begin()

    def begin(self) -> None:
        """Forget what was found when this worker looked for a store before."""
        self.here: tuple[WorkerId, ...] = ()
        self.ahead: WorkerId | None = None
        self.elsewhere: dict[WorkerId, tuple[int, str]] = {}
        self.excluded_in: tuple[int, str] | None = None

    def take_ahead(self) -> WorkerId | None:
        """The one that waits for a later view elsewhere, if one was found since this was asked last."""
        ahead, self.ahead = self.ahead, None
        return ahead

    def adopt(self, view: int, *, renounces: bool) -> None:
        """Note that this worker goes on in a view; if it renounces its identity it has promised nothing else."""
        self.view, self.promised = view, view if renounces else max(view, self.promised)
        self.waits_at = ""

    @property
    def is_over(self) -> bool:
        """Whether this worker looks no further: it rests, or ends with its island."""
        return self.stopped or self._monitor.has_lost_island

    def meet(self, view: int, address: str) -> Steps[int | None]:
        """Register for a view, or the later one that is wanted here, and wait for a quorum; which has opened, if one has."""
        came_s = self._now_s()
        while True:
            later = yield from self._target(view)
            if later <= self.promised:
                return None
            view = self.promised = later
            self.waits_at = address
            yield Seek(view, address)
            yield from self._say_here(view)
            if (yield from self.await_opened(view, address, came_s)):
                return view
            if self.is_over or self.ahead is not None or self.excluded_in is not None:
                return None

    def _target(self, view: int) -> Steps[int]:
        """The latest view that somebody wants here: this one, unless there is a later one."""
        wanted = str(view).encode()
        stands: bytes = yield Decide("target", wanted)
        while int(stands) < view:
            stands = yield Swap("target", stands, wanted)
        return int(stands)

    def registration(self) -> Registration:
        """What this worker says where workers meet."""
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
            self._contact.ended_in_time(),
            self._contact.ended_here,
        )

    def _say_here(self, view: int) -> Steps[None]:
        mine = self.registration()
        if self.stopped:
            mine = mine._replace(heartbeat=self._monitor.said_last())
        yield from self._register(view, mine.worker, (yield Encode(mine)), self._rounds.known.result)

    @staticmethod
    def _register(view: int, worker: WorkerId, said: bytes, result: bytes) -> Steps[None]:
        if result:
            yield Write(f"{view}/result/{worker}", result)
        place = yield Count(f"{view}/count")
        yield Write(f"{view}/{place}", said)

    def await_opened(self, view: int, address: str, came_s: float) -> Steps[bool]:
        """Whether a view has opened; False if a later one is wanted, or there is no quorum, and nobody has come for long.

        Args:
            view: that this worker is registered for.
            address: of the store where it is.
            came_s: when it came there, in seconds.
        """
        said: dict[int, Registration] = {}
        probed_s = last_s = self._now_s()
        while self._now_s() < last_s + 2 * self._silent_s and not self.is_over:
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
            meeting = self.meeting(known, self._monitor.ended(), self._contact.ended_in_time(), self._islands)
            self.here = meeting.present
            late_s = self._now_s() - came_s - _TURN_S * meeting.place(self._monitor.me)
            if late_s >= 0.0 and not meeting.is_complete and self._now_s() >= probed_s:
                yield from self._look_around(meeting.missing, view, address)
                if meeting.may_open(self._least, in_vain=True):
                    self.excluded_in = None  # those that are here are enough, with this one: so those there are not
                if self.ahead is not None or self.excluded_in is not None:
                    return False
                probed_s = self._now_s() + _PROBE_S  # from its end: what does not answer takes longer than that
            elif late_s >= 0.0 and meeting.may_open(self._least, in_vain=late_s >= self._silent_s):
                result = (yield Read(f"{view}/result/{meeting.reader}")) or b""
                yield Decide(f"{view}/opened", (yield Encode(meeting.opened(result))))
                continue
            yield Pause(LOOK_S)
        if not self.stopped:
            return False
        yield from self._say_here(view)  # else the others would take it for silent
        return (yield Read(f"{view}/opened")) is not None

    def ask(self, worker: WorkerId) -> Steps[tuple[tuple[int, str] | None, tuple[int, str] | None, bytes | None]]:
        """The view that a worker is in and the one that it waits for, with their addresses, and whether it rests.

        That is what stands in its store. One that rests waits for the view that it was called to.
        """
        here, sought = place_of((yield Read(WHERE))), place_of((yield Read(SEEKS)))
        rests: bytes | None = yield Read(RESTS)
        rest = None if rests == AWAKE else rests
        if rest is not None and (bound := Rest.decode(rest)).address and (sought is None or bound.view > sought[0]):
            sought = (bound.view, bound.address)
        self.elsewhere.pop(worker, None)
        if here is not None and worker != self._monitor.me and (sought is None or sought[0] <= here[0]):
            self.elsewhere[worker] = here
        return here, sought, rest

    def _look_around(self, missing: list[WorkerId], view: int, address: str) -> Steps[None]:
        """Find out who of those that are missing has ended or rests, and whether one of the others waits for a later view.

        Without that two sides of a network that was cut would go after each other from store to store when it is whole again.
        One that has stayed where this worker was may have excluded it there, with others: then nobody comes here any more.
        """
        there = yield from self._contact.probe(missing)
        if not there:
            return
        self._looks += 1
        one = there[self._looks % len(there)]
        called = None
        if (yield Enter(self._monitor.hosts[one])) is Reached.OPEN:
            here, sought, rest = yield from self.ask(one)
            if any(found is not None and found[0] > view for found in (here, sought)):
                self.ahead = one
            elif here is not None and one in self.elsewhere and here[0] >= self.view:
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
            self.excluded_in = view, address
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
