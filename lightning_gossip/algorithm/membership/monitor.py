r"""The monitor of one worker: it sends heartbeats, listens to a few others', and spreads the news.

SWIM (Das, Gupta, Motivala, DSN 2002) is the model: a worker watches a few others, whatever the number of workers, and what one
has found out all get to know. Here the store carries both.

| key | written by | says |
|---|---|---|
| ``heartbeat/<worker>`` | its owner, about twice a second | a counter, its process, whether it is resting or outside |
| ``news`` | whoever finds out something (:mod:`.news`) | who has failed, who has aborted, who asks to join |
| ``members`` | the first member, when they change | who they are, for workers that come later |
| ``host/<worker>`` | its owner, where stores are kept in reserve | the address of the one that it keeps |
| ``stores`` | whoever writes ``members``, before that | the addresses of theirs, for workers that come later |

A tick asks the store twice: it writes the heartbeat, and reads those of the workers that it watches and the news. Nine
workers or fewer watch each other. Of more each watches eight, at equal distances around the ring of the members, so that a
host that is lost with all its workers is noticed by others; those that have failed are skipped, so that somebody watches
whoever is left.

Which of them has failed :class:`~lightning_gossip.algorithm.membership.failure_detector.FailureDetector` decides. A failure
counts once it is news: then it is the same for all, and for good.

A worker *outside* has asked to join, or has been excluded and will. It listens to members, to know whether there is anybody
who could admit it, and declares nobody failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.failure_detector import FailureDetector, Verdict
from lightning_gossip.algorithm.membership.news import Aborted, News
from lightning_gossip.algorithm.membership.quorum import with_mates
from lightning_gossip.algorithm.membership.rounds import LOOK
from lightning_gossip.algorithm.membership.store import (
    Ask,
    Decide,
    HaveEnded,
    Probe,
    Reached,
    Read,
    ReadAll,
    Steps,
    StoreLostError,
    Swap,
    Write,
)
from lightning_gossip.algorithm.membership.whereabouts import RESTS, SEEKS, WHERE, latest_view
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import PeerError, another_aborted

_REASON_CHARACTERS = 4000  # of an exception: the store takes no value of megabytes
WATCHED = 8  # workers that one watches, of those around the ring
_SUSPECT_HEARTBEATS = 4  # a busy host delays a thread by a second now and then


class Heartbeat(NamedTuple):
    """What a worker tells those who watch it.

    Args:
        number: one more each time.
        process: what names its process on its machine; None if that cannot be told.
        use: of a Trainer, that it is in.
        resting: it is between two uses, and sends no heartbeats.
        outside: it is no member.
    """

    number: int
    process: str | None
    use: int
    resting: bool
    outside: bool

    def encode(self) -> bytes:
        """As a value of the store."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, value: bytes) -> Heartbeat:
        """The heartbeat of a value of the store."""
        return cls(*json.loads(value.decode()))


class Monitor:
    """What one worker knows of the others, and how it gets to know it. :meth:`tick` and :meth:`read_news` are protocols.

    Args:
        prefix: of the keys.
        me: this worker.
        process: what names this process on its machine.
        now_s: the clock, in seconds.
        fail_after_s: time without a heartbeat after which a worker has failed, in seconds.
        heartbeat_s: time between two ticks, in seconds.
        address: of the store that this worker keeps (:mod:`.failover`); None if it keeps none.
        islands: how ranks are islands, each of which dies with the first of its ranks; None if each rank is a worker.

    Attributes:
        version: another one whenever some worker may have failed that had not before, or the reverse.
        news: as far as they were read.
        broken: the error that ends this worker, since it cannot be monitored any more.
        waiting_for: key that the training thread waits for, in a round.
        is_abandoned: whether this worker is outside, and all members that it knows are silent here.
        islands: how ranks are islands; None if each rank is a worker.
        holds_store: whether the job's store is the one that this worker keeps; None while it is the first one.
        hosts: addresses of the stores that workers keep (:mod:`.failover`), as far as they are known.
    """

    def __init__(
        self,
        prefix: str,
        me: WorkerId,
        process: str | None,
        now_s: Callable[[], float],
        *,
        fail_after_s: float,
        heartbeat_s: float,
        address: str | None = None,
        islands: Islands | None = None,
    ) -> None:
        self.me = me
        self.islands = islands
        self.address = address
        self.version = 0
        self.news = News()
        self.broken: Exception | None = None
        self._prefix = prefix
        self._now_s = now_s
        self._detector = FailureDetector[WorkerId](
            suspect_after_s=min(_SUSPECT_HEARTBEATS * heartbeat_s, fail_after_s), fail_after_s=fail_after_s
        )
        self._sent = Heartbeat(0, process, 0, resting=False, outside=False)
        self._read: bytes | None = None  # the news as they were read
        self._members: tuple[WorkerId, ...] = ()
        self._present: frozenset[WorkerId] = frozenset()  # the same, to be asked who is one
        self._neighbours: frozenset[WorkerId] = frozenset()
        self._watched: tuple[WorkerId, ...] = ()
        self._watches_all = False  # since one of them is silent
        self.holds_store: bool | None = None
        self.hosts: dict[WorkerId, str] = {}
        self._seen: set[WorkerId] = set()  # workers that have sent a heartbeat to this store; its key is never deleted
        self._counted: set[WorkerId] = set()  # workers that should send some: who does not has failed
        self._has_told_address = False  # to this store
        self._moved = False  # to another store than the first
        self._renounced = False  # this worker may not go on under its present identity
        self._has_left = False  # it was excluded, and with islands ends
        self._rests_from_s: float | None = None  # since when this store has said that this worker rests, or rested last
        self._rests_until_s = 0.0  # when it began to say the contrary
        self._ended: set[WorkerId] = set()  # their processes are known to have ended
        # found out here, and to be added to the news
        self._found = {WorkerId(me.initial_rank, earlier) for earlier in range(1, me.incarnation)}
        self._may_go_on: Callable[[Collection[WorkerId]], bool] = lambda present: True
        self._ended |= self._found
        self._resting: set[WorkerId] = set()  # between two uses, when they were heard last
        self._gone_ahead: set[WorkerId] = set()  # to a later view, though this store says that they rest
        self._lost: set[WorkerId] = set()
        self._noted: set[WorkerId] = set()  # lost connections that the detector knows of
        self._heard_since: set[WorkerId] = set()  # of these
        self._last_failed: frozenset[WorkerId] = frozenset(self._found)
        self._abort: Aborted | None = None
        self._request: str | None = None  # to join
        # of a worker outside
        self.is_abandoned = False
        self._nobody_admits: str | None = None
        self._hears_a_member = False
        # of the round that the training thread waits for
        self.waiting_for: str | None = None
        self._looks, self._looks_next_s = 0, 0.0  # at workers that rest
        self._changes = 0  # of the news that a round depends on
        self._known_changes = 0  # to the thread that waits

    # -- what others tell it -----------------------------------------------------------------------------------------

    def observe(self, members: Sequence[WorkerId], *, outside: bool = False) -> None:
        """Set the members of the job, this worker among them.

        Args:
            members: in the order of their ranks.
            outside: whether this worker is no member of the job, but waits to be admitted.
        """
        self._members, self._present = tuple(members), frozenset(members)
        self._sent = self._sent._replace(outside=outside)
        self._nobody_admits, self._hears_a_member, self.is_abandoned = None, False, False
        if self._moved and not outside:
            self._expect()
        self._choose()

    def watch(self, neighbours: Sequence[WorkerId]) -> None:
        """Listen to these members too, with whom this one exchanges; to the first few of them, if they are many."""
        self._neighbours = frozenset(neighbours[:WATCHED])
        self._choose()

    def take_identity(self, me: WorkerId) -> None:
        """Go on as a new incarnation, since the present one was excluded: what it has found out does not count any more."""
        self.me = me
        self._found = {WorkerId(me.initial_rank, earlier) for earlier in range(1, me.incarnation)}
        self._ended |= self._found
        self._renounced = self._has_told_address = False
        self._rests_from_s = None
        self._lost.clear()

    def begin_use(self, use: int) -> None:
        """Another use of a Trainer begins: an abort of one before counts no more."""
        self._sent = self._sent._replace(use=use)

    def rest(self, resting: bool) -> None:
        """Say whether heartbeats stop between two uses."""
        if resting and not self._sent.resting:
            self._rests_from_s = None
        elif self._sent.resting and not resting:
            self._rests_until_s = self._now_s()
            for worker in {*self._watched} - self._present:  # one that asks to join may have died meanwhile
                self._detector.forget(worker)
        self._sent = self._sent._replace(resting=resting)

    def connection_lost(self, worker: WorkerId) -> None:
        """Note that a connection with a worker was lost."""
        self._lost.add(worker)
        self._note(worker)
        self.version += 1  # with late heartbeats it has failed

    def process_ended(self, worker: WorkerId) -> None:
        """Note that a worker's process has ended without a word."""
        self._detector.process_ended(worker)
        self._found.add(worker)
        self._ended.add(worker)
        self._note_version()

    def renounce(self) -> None:
        """Count as failed for this worker itself, until it has another identity."""
        self._renounced = True

    def leave(self) -> None:
        """Note that the others have excluded this worker: of an island it ends, since its mates are excluded, too."""
        self._has_left = self.islands is not None

    def move(self, news: bytes) -> None:
        """Go on with another store, in which these news are, and no heartbeat yet."""
        self._moved = True
        self._has_told_address = False
        self._rests_from_s = None
        self._seen.clear()
        self._counted.clear()
        self._gone_ahead.clear()
        self._detector.listen_anew()
        self.is_abandoned = False
        self._read = self.waiting_for = None
        self._take(news)
        self._expect()

    def abort(self, reason: str) -> None:
        """Tell the others that an exception has ended the present use of a Trainer on this worker: they end it too.

        A worker that aborts because of another one passes that one's reason on, since it is the one to be known.
        """
        if not self._has_told_of_abort:
            theirs = self._aborted_by
            first = (self.me.initial_rank, reason) if theirs is None else (theirs.rank, theirs.reason)
            self._abort = Aborted(self._sent.use, self.me, first[0], first[1][:_REASON_CHARACTERS])

    def request(self, about: str | None) -> None:
        """Ask to join, with what this worker's model and data are; None: no more."""
        self._request = about

    def waits_for(self, key: str | None) -> None:
        """Which key the training thread waits for; None: none. What is known now is known to that thread."""
        self.waiting_for = key
        self._known_changes = self._changes

    # -- what it knows -----------------------------------------------------------------------------------------------

    def verdict(self, worker: WorkerId) -> Verdict:
        """The state of one worker, now; one that this worker does not watch, or not yet, is alive until its failure is news."""
        if worker in self.news.failed or worker in self._found:
            return Verdict.FAILED
        return self._detector.verdict(worker) if worker in self._watched and worker in self._counted else Verdict.ALIVE

    def failed(self) -> frozenset[WorkerId]:
        """The workers that have failed, as far as is known here."""
        return self.news.failed | self._all_failed

    def has_failed(self, worker: WorkerId) -> bool:
        """Whether the news say that a worker has failed."""
        return worker in self.news.failed or (self._renounced and worker == self.me)

    def ended(self) -> frozenset[WorkerId]:
        """Workers whose processes are known to have ended."""
        return self.news.ended | self._ended

    @property
    def suspect_after_s(self) -> float:
        """Seconds without a heartbeat before which nobody excludes a worker whose process has not ended."""
        return self._detector.suspect_after_s

    def kept_until_s(self, contact_s: float) -> float:
        """The time until which nobody with this store can have excluded this worker, which was in touch at a time, in seconds.

        While it says that it rests nobody does, if it has said so before anybody could; but of an island each rank has to.
        """
        until_s = contact_s + self.suspect_after_s
        if self._rests_from_s is not None and self._rests_from_s < until_s:
            rests_until_s = self._now_s() if self._sent.resting else self._rests_until_s
            return max(until_s, rests_until_s + self.suspect_after_s)
        return until_s

    def says_in_time_that_it_rests(self, contact_s: float) -> bool:
        """Whether the store says that this worker rests, and has before anybody can have excluded it.

        Args:
            contact_s: when this worker was in touch before, in seconds.
        """
        from_s = self._rests_from_s
        return self._sent.resting and from_s is not None and from_s < contact_s + self.suspect_after_s

    @property
    def has_aborted(self) -> bool:
        """Whether this worker or another one has aborted this use of a Trainer, or the store does not answer."""
        return self.broken is not None or self._has_told_of_abort or self._aborted_by is not None

    def raise_failure(self) -> None:
        """Raise if another worker has aborted, or this one cannot be monitored any more.

        Raises:
            PeerError: naming the first that has aborted.
            GossipError: that which this worker is broken by.
        """
        if self.broken is not None:
            raise self.broken
        if (told := self._aborted_by) is not None:
            raise another_aborted(told.rank, told.reason, phase="watch")

    def join_requests(self) -> dict[WorkerId, str]:
        """Workers that ask to join and are alive, as the first member knows, and what each says of its model and data."""
        present = {worker.initial_rank: worker.incarnation for worker in self._members}
        return {
            worker: about
            for worker, about in self.news.joining
            if worker.incarnation > present.get(worker.initial_rank, 0)
            and worker in self._watched
            and worker not in self.news.failed
            and self._detector.hears(worker)
        }

    def hears_a_member(self) -> bool:
        """Whether a member of the job sends heartbeats, as seen by a worker outside.

        Raises:
            PeerError: if no member is left, saying why.
        """
        if self._nobody_admits is not None:
            raise PeerError(self._nobody_admits, rank=self.me.initial_rank, phase="join")
        return self._hears_a_member

    @property
    def _aborted_by(self) -> Aborted | None:
        told = self.news.abort_of(self._sent.use)
        return told if told is not None and told.by != self.me and told.by in self._present else None

    @property
    def _has_told_of_abort(self) -> bool:
        return self._abort is not None and self._abort.use == self._sent.use

    @property
    def has_lost_island(self) -> bool:
        """Whether this worker's island is dead: one of its ranks has failed in the middle of its work, perhaps this one."""
        if self.islands is None or self._has_left:
            return self._has_left
        island = self.islands.island_of
        mine = island(self.me.initial_rank)
        return not self.is_outside and (self._renounced or any(island(worker.initial_rank) == mine for worker in self._fallen))

    @property
    def _fallen(self) -> frozenset[WorkerId]:
        """Members that have failed in the middle of their work."""
        return ((self.news.failed | self._found) & self._present) - self._resting

    def _of_dead_islands(self) -> frozenset[WorkerId]:
        """The members whose islands have lost a rank: they train no more, whatever they still do."""
        if self.islands is None:
            return frozenset()
        lost = {self.islands.island_of(worker.initial_rank) for worker in self._fallen}
        if not lost:
            return frozenset()
        return frozenset(worker for worker in self._present if self.islands.island_of(worker.initial_rank) in lost)

    @property
    def is_outside(self) -> bool:
        """Whether this worker is no member."""
        return self._sent.outside

    @property
    def _leads(self) -> bool:
        first = next((worker for worker in self._members if worker not in self.news.failed), None)
        return first == self.me and not self.is_outside

    def told(self) -> News:
        """The news with what was found out here."""
        return self._wanted()

    def said_last(self) -> bytes:
        """The heartbeat that this worker has sent last."""
        return self._sent.encode()

    # -- protocols ---------------------------------------------------------------------------------------------------

    def say_for(self, heartbeats: Mapping[WorkerId, bytes]) -> Steps[None]:
        """Say for workers that rest what they have said in the store before: they are waited for."""
        for worker, said in heartbeats.items():
            if worker != self.me:
                yield Decide(self._heartbeat_key(worker), said)

    def tick(self, may_go_on: Callable[[Collection[WorkerId]], bool] = lambda present: True, view: int = 0) -> Steps[None]:
        """Send a heartbeat, listen, and spread what was found out.

        Args:
            may_go_on: whether some of the members may, without those that are silent.
            view: that this worker is in (:mod:`.failover`).

        Raises:
            StoreLostError: if those that have not failed may not: they look for the others elsewhere (:mod:`.failover`).
        """
        self._may_go_on = may_go_on
        yield from self.send()
        if self.is_outside:
            yield from self._look_for_members()
        if self._leads and not self._watches_all:
            self._choose()  # those that ask to join, too
        unseen = tuple(worker for worker in self._watched if worker not in self._seen)
        if self._watches_all and unseen and (yield ReadAll(tuple(map(self._heartbeat_key, unseen)))) is not None:
            self._seen.update(unseen)  # at once, since they are many
            self._counted.update(unseen)
        for worker in self._watched:
            if worker not in self._seen and (yield Read(self._heartbeat_key(worker))) is not None:
                self._seen.add(worker)
                self._counted.add(worker)
        known = tuple(worker for worker in self._watched if worker in self._seen)
        keys = (self._news_key, *map(self._heartbeat_key, known))
        news, *heartbeats = yield ReadAll(keys, exist=True)
        at_s = self._now_s()
        self._take(news)
        heard = {worker: Heartbeat.decode(said) for worker, said in zip(known, heartbeats, strict=True)}
        ended = yield HaveEnded(tuple(heartbeat.process for heartbeat in heard.values()))
        for (worker, heartbeat), has_ended in zip(heard.items(), ended, strict=True):
            self._hear(worker, heartbeat, at_s, has_ended=has_ended)
        for worker in self._watched:
            if worker in self._counted and worker not in self._seen:
                self._detector.heard_nothing(worker, at_s=at_s)
        yield from self._look_at_one_that_rests(view)
        if not self.is_outside:
            yield from self._exclude()
            self._found |= self._of_dead_islands()
        else:
            yield from self._weigh(heard)
        self._note_version()
        yield from self.publish()
        if self.waiting_for is not None and self._known_changes < self._changes:
            yield Decide(self.waiting_for, LOOK)

    def send(self) -> Steps[None]:
        """Send a heartbeat."""
        if self.address is not None and not self._has_told_address:
            self._has_told_address = True
            self.hosts[self.me] = self.address
            yield Write(self._host_key(self.me), self.address.encode())
        self._sent = self._sent._replace(number=self._sent.number + 1)
        sent = self._sent
        yield Write(self._heartbeat_key(self.me), self.said_last())
        if sent.resting and self._rests_from_s is None:
            self._rests_from_s = self._now_s()
        if self._read is None:
            self._take((yield Decide(self._news_key, News().encode())))

    def publish(self) -> Steps[None]:
        """Add to the news what was found out here; again, if somebody else was faster.

        Raises:
            StoreLostError: as :meth:`tick`.
        """
        while self._read is not None:
            self._withdraw_if_too_few_are_heard()
            if (wanted := self._wanted()) == self.news:
                return
            later = wanted._replace(number=self.news.number + 1)
            self._take((yield Swap(self._news_key, self._read, later.encode())))

    def told_hosts(self, workers: Collection[WorkerId]) -> bytes:
        """Where workers keep their stores, as far as that is known, for those that come later."""
        return json.dumps([[*worker, self.hosts[worker]] for worker in workers if worker in self.hosts]).encode()

    def learn_hosts(self, workers: Sequence[WorkerId]) -> Steps[None]:
        """Read where workers keep their stores, if all have told that."""
        unknown = tuple(worker for worker in workers if worker not in self.hosts)
        if unknown and self.address is not None:
            found = yield ReadAll(tuple(map(self._host_key, unknown)))
            if found is not None:
                self.hosts |= {worker: told.decode() for worker, told in zip(unknown, found, strict=True)}

    def read_news(self) -> Steps[None]:
        """Read the news, for the training thread."""
        news = yield Read(self._news_key)
        if news is not None:
            self._take(news)
        self._known_changes = self._changes

    # -- details -----------------------------------------------------------------------------------------------------

    def _wanted(self) -> News:
        """The news with what was found out here; the word of a worker that has failed for the others does not count."""
        news = self.news
        if self.me in news.failed or self._renounced:
            return news
        failed = news.failed | self._found
        joining = {worker.initial_rank: (worker, about) for worker, about in news.joining}
        asks = joining.get(self.me.initial_rank)
        if self._request is not None:
            joining[self.me.initial_rank] = (self.me, self._request)
        elif asks is not None and asks[0].incarnation <= self.me.incarnation:
            del joining[self.me.initial_rank]
        return News(
            news.number,
            failed,
            ((news.lost | self._lost) - self._heard_since) - failed,
            news.with_abort(self._abort) if self._abort is not None and not self.is_outside else news.aborted,
            tuple(joining[rank] for rank in sorted(joining)),
            news.ended | (self._ended & failed),
        )

    def _exclude(self) -> Steps[None]:
        """Find out who has failed, and whose process has ended."""
        failed = self._present & self._all_failed
        if failed:
            yield from self._probe(failed)
            self._found |= failed
        elif self._watches_all:
            self._choose()

    def _withdraw_if_too_few_are_heard(self) -> None:
        """Of workers that are silent tell only where the others, whom this worker hears, may go on without them.

        Else those that are told of would leave the job when the network carries their words again, and nobody would be left who
        may go on. Of workers that are many this one watches a few only, and knows nothing of the rest: so it listens to all
        before it tells of one that is silent. All that fall silent at once do so within a heartbeat: who is late does not count
        as heard, or as silent. And others may have told of more since: so each asks again before each swap.
        """
        if self.is_outside:
            return
        silent = (self._found & self._present) - with_mates(self._ended, self._members, self.islands) - self.news.failed
        if not silent:
            return
        others = [worker for worker in self._members if worker not in self._found | self.news.failed]
        if self._may_go_on([worker for worker in others if worker == self.me or self._detector.hears(worker)]):
            return
        self._found -= silent
        if not self._may_go_on(others):
            raise StoreLostError
        self._watch_all()

    def _watch_all(self) -> None:
        """Until somebody is told of as failed, or nobody is silent any more."""
        others = [worker for worker in self._members if worker != self.me and worker not in self.news.failed]
        self._watched, self._watches_all = tuple(dict.fromkeys((*others, *self._watched))), True

    def _look_at_one_that_rests(self, view: int) -> Steps[None]:
        """Find out whether one has ended, or left this store: no heartbeat tells that, and a round may wait for it.

        So may a worker outside, who is admitted by nobody else.
        """
        if (self.waiting_for is None and not self.is_outside) or self._now_s() < self._looks_next_s:
            return
        resting = self._resting - self._ended
        rest = [worker for worker in self._watched if worker in resting and worker in self.hosts]
        if not rest:
            return
        self._looks += 1
        one = rest[self._looks % len(rest)]
        reached, told = yield Ask(self.hosts[one], (WHERE, SEEKS, RESTS))
        if reached is Reached.REFUSED:
            self._ended.add(one)
            self._detector.process_ended(one)
        elif reached is Reached.OPEN and latest_view(told) > view:
            self._gone_ahead.add(one)
        else:  # where one has left others may have, too: the next one is looked at by the next heartbeat
            self._looks_next_s = self._now_s() + self.suspect_after_s

    def _probe(self, failed: Collection[WorkerId]) -> Steps[None]:
        """Look whether the processes of workers that have failed have ended, where that can be seen by their stores."""
        unsure = sorted({*failed} - self._ended - self.news.failed)
        for worker in unsure:
            yield from self.learn_hosts([worker])  # one that fails before all have met
        if unsure := [worker for worker in unsure if worker in self.hosts]:
            found = yield Probe(tuple(self.hosts[worker] for worker in unsure))
            self._ended |= {worker for worker, reached in zip(unsure, found, strict=True) if reached is Reached.REFUSED}

    def _expect(self) -> None:
        """From now on members that send no heartbeat to this store are late."""
        for worker in self._present - self._counted - {self.me}:
            self._counted.add(worker)
            self._detector.heard_nothing(worker, at_s=self._now_s())

    def _take(self, value: bytes) -> None:
        if value == self._read:
            return
        before, news = self.news, News.decode(value)
        if self._read is not None and news.number < before.number:
            return  # read by one thread before, and taken after, the other has read later ones
        self._read, self.news = value, news
        self._lost -= self.news.lost
        self._found -= self.news.failed
        self._heard_since &= self.news.lost
        concerned = self._present | {self.me}
        if (self.news.failed ^ before.failed) & concerned or self.news.aborted != before.aborted:
            self._changes += 1
        if self.news.failed != before.failed:
            self._choose()
            self._note_version()

    @property
    def _all_failed(self) -> Set[WorkerId]:
        heard = self._counted.intersection(self._watched)
        return self._found.union(worker for worker in heard if self._detector.verdict(worker) is Verdict.FAILED)

    def _note_version(self) -> None:
        failed = self.failed()
        self.version += failed != self._last_failed
        self._last_failed = failed

    def _choose(self) -> None:
        """Whom to watch."""
        if self.is_outside:
            return  # see _look_for_members
        self._watches_all = False
        watched = dict.fromkeys(_around(self._members, self.me, self.news.failed))
        watched |= dict.fromkeys(sorted((self._neighbours & self._present) - self.news.failed - {self.me}))
        if self._leads:
            watched |= {worker: None for worker, _ in self.news.joining if worker not in self._present and worker != self.me}
        self._watched = tuple(watched)

    def _hear(self, worker: WorkerId, heartbeat: Heartbeat, at_s: float, *, has_ended: bool) -> None:
        rests = heartbeat.resting and worker not in self._gone_ahead
        (self._resting.add if rests else self._resting.discard)(worker)
        # a worker between two uses counts as alive
        count = heartbeat.number if not rests else -round(at_s * 1000)
        is_final = worker in self._present and (worker in self._found or worker in self.news.failed)
        self._detector.heard(worker, count=count, at_s=at_s, is_member=is_final)
        if worker in self._noted and worker not in self._detector.connections_lost:
            self._noted.discard(worker)
            self._heard_since.add(worker)
        elif worker in self.news.lost and worker not in self._noted and worker not in self._heard_since:
            self._note(worker)
        # the end of a resting worker excludes it only from a round that needs it
        if has_ended:
            self._detector.process_ended(worker)
            self._ended.add(worker)

    def _note(self, worker: WorkerId) -> None:
        self._detector.connection_lost(worker)
        self._noted.add(worker)

    def _look_for_members(self) -> Steps[None]:
        record = yield Read(f"{self._prefix}/members")
        members = [] if record is None else [WorkerId(*worker) for worker in json.loads(record)]
        if self.address is not None and not self.hosts.keys() >= {*members}:
            self.hosts |= hosts_of((yield Read(hosts_key(self._prefix))))
        if self.is_outside:  # else it has been admitted meanwhile
            failed = (worker for worker in members if self._detector.verdict(worker) is Verdict.FAILED)
            gone = {*failed, *(self.news.failed & {*members})}
            self._watched = _around((*members, self.me), self.me, self.news.failed if len(members) <= WATCHED else gone)
            self.is_abandoned = bool(members) and gone == set(members) - {self.me}
            if self.is_abandoned and self.address is None:
                self._nobody_admits = str(self.left_alone())

    def _weigh(self, heard: dict[WorkerId, Heartbeat]) -> Steps[None]:
        """Find out whether there is anybody who could admit this worker."""
        members = {worker: said for worker, said in heard.items() if not said.outside}
        alive = {worker: said for worker, said in members.items() if self.verdict(worker) is not Verdict.FAILED}
        self._hears_a_member = any(self._detector.hears(worker) for worker in alive)
        if alive and all(said.resting for said in alive.values()):
            yield from self._probe(alive)  # their ends are told by no heartbeat
            for worker in alive.keys() & self._ended:
                self._detector.process_ended(worker)
            aborts = [self.news.abort_of(said.use) for said in alive.values()]
            # their scripts may go on to another use, as this worker's has, if it is in a later one
            if (told := aborts[0]) is not None and None not in aborts and self._sent.use <= told.use:
                self._nobody_admits = self._said_at_the_end(f"rank {told.rank} has failed: {told.reason}")

    def left_alone(self) -> PeerError:
        """What ends a worker outside when no member is left."""
        return PeerError(self._said_at_the_end("all its members have failed"), rank=self.me.initial_rank, phase="join")

    def _said_at_the_end(self, why: str) -> str:
        return (
            f"Rank {self.me.initial_rank} waits to be admitted by a job that nobody is in any more: {why}. Start all of it,"
            " with a new store if it has one, from its last checkpoint."
        )

    @property
    def _news_key(self) -> str:
        return f"{self._prefix}/news"

    def _host_key(self, worker: WorkerId) -> str:
        return f"{self._prefix}/host/{worker}"

    def _heartbeat_key(self, worker: WorkerId) -> str:
        return f"{self._prefix}/heartbeat/{worker}"


def hosts_key(prefix: str) -> str:
    """Key of what :meth:`Monitor.told_hosts` says."""
    return f"{prefix}/stores"


def hosts_of(told: bytes | None) -> dict[WorkerId, str]:
    """What :meth:`Monitor.told_hosts` has said: addresses of stores; none if nobody has said it."""
    return {} if told is None else {WorkerId(rank, incarnation): address for rank, incarnation, address in json.loads(told)}


def _around(members: Sequence[WorkerId], me: WorkerId, failed: Any) -> tuple[WorkerId, ...]:
    """Whom a worker watches: all others if they are few, else some at equal distances around the ring; none that has failed."""
    if len(members) <= WATCHED + 1:
        return tuple(worker for worker in members if worker != me and worker not in failed)
    place, watched = members.index(me), dict[WorkerId, None]()
    for step in range(WATCHED):
        start = place + max(1, step * len(members) // WATCHED)
        around = (members[(start + further) % len(members)] for further in range(len(members)))
        found = next((worker for worker in around if worker != me and worker not in failed and worker not in watched), None)
        if found is not None:
            watched[found] = None
    return tuple(watched)


def replaced(me: WorkerId) -> PeerError:
    """What ends the older of two processes of one initial rank."""
    return PeerError(
        f"Rank {me.initial_rank} sent no heartbeat, and has been started again. This process, the older one, ends.",
        rank=me.initial_rank,
        phase="join",
    )
