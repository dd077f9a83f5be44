"""What those that meet at the next store know together, and whether they may go on (:mod:`.failover`)."""

from __future__ import annotations

from typing import NamedTuple

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.news import News
from lightning_gossip.algorithm.membership.quorum import has_quorum, whole, with_mates
from lightning_gossip.algorithm.membership.rounds import Known
from lightning_gossip.algorithm.membership.worker_id import Span, WorkerId, workers_of


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
        heartbeat: what it has said last, if it rests, and others say all this for it.
        rests_here: whether the store of its view says that it rests, and has before anybody can have excluded it there. Then
            nobody excludes it, until it is bound to a later view: what had ended by then counts as ``ended_here``, too.
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
    heartbeat: bytes | None = None
    rests_here: bool = False


class Opened(NamedTuple):
    """How a view begins.

    Args:
        members: that agreed last.
        present: those that have registered, and go on.
        known: the last result.
        news: what all of them know.
        incarnations: by initial rank, the last that is known.
        resting: those of them for whom others have registered, and their last heartbeats.
    """

    members: tuple[WorkerId, ...]
    present: tuple[WorkerId, ...]
    known: Known
    news: bytes
    incarnations: dict[int, int]
    resting: dict[WorkerId, bytes]


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
        present: those of them that go on; those, too, that were admitted by a result which is not settled, since whoever has
            acted by it counts on them.
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
        expected = tuple(dict.fromkeys((*self.members, *(worker for grown in self._grown for worker in grown))))
        self._failed = with_mates(self._ended.union(*(news.failed for news in self._news)), expected, islands)
        registered = {one.worker for one in said}
        self._here = whole(registered - self._failed, islands)
        self.present = tuple(worker for worker in expected if worker in self._here)
        self._in_time = in_time.union(*(one.ended for one in said))
        # what a store that others have left since says keeps nobody from being excluded in theirs
        here = [one for one in said if self.best is not None and one.view == self.best.view]
        self._in_time_here = self._in_time.union(*self._ended_before_any_exclusion(here))
        self.missing = [worker for worker in expected if worker not in registered and worker not in self._failed]
        self.is_complete = not self.missing

    def _ended_before_any_exclusion(self, said: list[Registration]) -> list[frozenset[WorkerId]]:
        """Those that ended before anybody can have excluded one of these: of an island, any of its ranks."""
        if self._islands is None:
            return [one.ended_here for one in said]
        of_islands: dict[int, frozenset[WorkerId]] = {}
        for one in said:
            if one.worker in self._here:
                island = self._islands.island_of(one.worker.initial_rank)
                of_islands[island] = of_islands.get(island, one.ended_here) & one.ended_here
        return list(of_islands.values())

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
        proposed = workers_of(self.best.proposed) if self.best is not None else ()
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
        last = {one.worker: one.heartbeat for one in self._said}
        resting = {worker: heartbeat for worker, heartbeat in last.items() if heartbeat is not None}
        return Opened(self.members, self.present, known, news.encode(), incarnations, resting)
