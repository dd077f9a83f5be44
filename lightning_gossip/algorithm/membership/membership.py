"""The members of the job, the same on all of them after each round, and what they do together that survives failures.

Every member runs the same protocols in the same order. A member that has failed is absent in the round under way, and so
excluded from all after it; the process groups are then made anew. Beside the store's operations (:mod:`.store`) there are
these effects:

| effect | what a driver does |
|---|---|
| :class:`MakeGroup` | makes the default process group of the present members, in place of the one before |
| :class:`DropGroup` | destroys it |
| :class:`Run` | runs the collective that is attempted |
| :class:`TellChange` | tells the rest of this worker that members or groups have changed |
| :class:`AdoptUse` | takes over the number of the others' use of a Trainer |
| :class:`DeleteBelow` | deletes all keys with a prefix |

The exception that an attempt has raised stays with the driver; the others are told its words.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from lightning_gossip.algorithm.membership.joining import Grant, Joining, admitters_lost
from lightning_gossip.algorithm.membership.kinds import of_one_kind
from lightning_gossip.algorithm.membership.monitor import Monitor
from lightning_gossip.algorithm.membership.quorum import whole
from lightning_gossip.algorithm.membership.rounds import Known, Rounds, Survivable
from lightning_gossip.algorithm.membership.store import (
    Await,
    Count,
    Delete,
    Encode,
    NextStore,
    Reconnect,
    Restore,
    Steps,
    StoreLostError,
    Write,
)
from lightning_gossip.algorithm.membership.worker_id import Span, WorkerId, spans_of, workers_of
from lightning_gossip.errors import PeerError, another_aborted

log = logging.getLogger(__name__)
T = TypeVar("T")

_REST_S = 5.0  # for the others to end their Trainer's work
USE_BITS = 32  # each use of a Trainer has rounds of its own: whoever has left one early misses none of the next


class Outcome(NamedTuple):
    """What a member says of its attempt at something that all make together.

    Args:
        reason: why it has failed; None if it has worked.
        may_pass: whether it may work when it is made once more.
        value: what all are told beside, if it has worked.
    """

    reason: str | None
    may_pass: bool = True
    value: Any = None


class MakeGroup(NamedTuple):
    """Effect: make the default process group. The result is the Outcome.

    Args:
        keys: prefix of the keys that the workers find each other by.
        rank: of this worker.
        size: number of members.
    """

    keys: str
    rank: int
    size: int


class DropGroup(NamedTuple):
    """Effect: destroy the default process group. No result."""


class Run(NamedTuple):
    """Effect: run the collectives of an attempt. The result is the Outcome."""


class TellChange(NamedTuple):
    """Effect: tell this worker's listeners that members or groups have changed. No result."""


class DeleteBelow(NamedTuple):
    """Effect: delete the keys below a prefix. No result."""

    prefix: str


class AdoptUse(NamedTuple):
    """Effect: take over the others' number of the use of a Trainer. No result."""

    use: int


class OwnFailureError(Exception):
    """What this worker's attempt has raised ends it: the driver has the exception.

    Args:
        effect: of which kind, :class:`Run` or :class:`MakeGroup`.
    """

    def __init__(self, effect: type) -> None:
        super().__init__(effect.__name__)
        self.effect = effect


class _Arrival(NamedTuple):
    """What a member says at the beginning of a use of a Trainer.

    Args:
        intact: whether its default group is as it was made, and nothing has ended the use before.
        generation: of its members.
        members: as it knows them (:func:`spans_of`).
        about: what the caller wants to be checked.
        address: of the store that it keeps: whoever has met knows where to meet the next time.
    """

    intact: bool
    generation: int
    members: tuple[Span, ...]
    about: Any
    address: str | None


class Membership:
    """The members as one worker knows them. Methods that return ``Steps`` are protocols.

    Args:
        prefix: of the keys; another job has another one.
        members: the workers that are expected, in the order of their ranks, this worker among them.
        monitor: of this worker.
        now_s: the clock, in seconds.
        min_workers: with fewer left the job ends.
        timeout_s: how long a round waits for a worker that is alive, in seconds.
        late: whether the others have begun without this worker, so that it has to be admitted.
        survivable: whether the store may be lost (:mod:`.failover`).

    Attributes:
        members: at present; a worker's place among them is its rank.
        generation: how often the members or their groups have changed.
        excluded: workers that were excluded, in that order.
        outside: whether this worker is no member (any more, or not yet): every collective is then its own.
        waiting: workers that ask to join, as the first member knew in the last round, and what each says of its model.
        met: whether there has been a first round.
        joining: how workers come later; each of its protocols is to be run by :meth:`on_store`.
        rounds: that this worker takes part in.
    """

    def __init__(
        self,
        prefix: str,
        members: Sequence[WorkerId],
        monitor: Monitor,
        now_s: Callable[[], float],
        *,
        min_workers: int,
        timeout_s: float,
        late: bool = False,
        survivable: Survivable | None = None,
    ) -> None:
        self.members = tuple(members)
        self.generation = 0
        self.excluded: list[WorkerId] = []
        self.outside = False
        self.met = False
        self.waiting: dict[WorkerId, str] = {}
        self.joining = Joining(prefix, monitor, now_s)
        self._prefix = prefix
        self._monitor = monitor
        self.rounds = Rounds(prefix, monitor.me, monitor, now_s, timeout_s, survivable)
        self._survivable = survivable
        self._min_workers = min_workers
        self._late = late
        self._admitters: tuple[WorkerId, ...] = ()  # the members that have admitted this worker
        self._oldest = 0  # generation whose keys may be there
        self._rested = ""  # where this worker was when it was resting last

    @property
    def me(self) -> WorkerId:
        """Identity of this worker."""
        return self._monitor.me

    @property
    def rank(self) -> int:
        """This worker's place among the members."""
        return self.members.index(self.me)

    # -- rounds ------------------------------------------------------------------------------------------------------

    def gather(self, mine: Any, kind: str) -> Steps[list[Any]]:
        """The values of all members that take part, in the order of their ranks (afterwards, if somebody was excluded).

        Args:
            mine: this worker's value; any that can be pickled.
            kind: what is gathered, the same on all members.

        Raises:
            PeerError: if a worker does not come, has aborted, or too few are left.
            ConfigurationError: on all members, if one of them gathers something else.
        """
        said = yield from self._hold((kind, mine))
        return _values(said, "a collective")

    def gather_for(self, rank: int, mine: Any, kind: str) -> Steps[list[Any]]:
        """Gather values, which may be large, for one rank only: the others get an empty list."""
        while not self.outside:
            members, reader = self.members, self.members[min(rank, len(self.members) - 1)]
            payload = None if self.me == reader else (yield Encode(mine))
            said = yield from self._hold((kind, None), payload)
            if self._is_outside():  # since now
                break
            _values(said, "a collective")
            if len(said) < len(members):
                continue  # groups were made meanwhile; and another one may have the rank
            found: dict[WorkerId, bytes] | None = None
            if self._survivable is not None:
                found = yield from self._read_by(reader, list(said), kind)
                if found is None:
                    continue
            if self.me != reader:
                return []
            if found is None:
                found = yield from self.rounds.payloads([worker for worker in said if worker != reader])
            if found is not None:
                theirs = dict(zip(found, (yield Restore(tuple(found.values()))), strict=True))
                return [mine if worker == reader else theirs[worker] for worker in said]
            yield from self._leave()
        return [mine]

    def _read_by(self, reader: WorkerId, said: Sequence[WorkerId], kind: str) -> Steps[dict[WorkerId, bytes] | None]:
        """The values of a round for one member, if it has read them, and all are still there; None: once more.

        They are in one store only: if that is lost all have to write them again, so nobody goes on before they are read.
        """
        found: dict[WorkerId, bytes] | None = {}
        if self.me == reader:
            found = yield from self.rounds.payloads([worker for worker in said if worker != reader])
        has_read = yield from self._hold((f"{kind}, read", found is not None))
        if self._is_outside() or len(has_read) < len(said) or not all(_values(has_read, "a collective")):
            return None
        return found

    def broadcast(self, value: Any, source: int) -> Steps[Any]:
        """The value of one rank; that of the first member left, if that one has failed."""
        sender = self.members[source]
        while True:
            said = yield from self._hold(("a broadcast", value if self.me == sender else None))
            values = dict(zip(said, _values(said, "a collective"), strict=True))
            if sender in values:
                return values[sender]
            sender = self.members[0]

    def _hold(self, mine: tuple[str, Any], payload: bytes | None = None) -> Steps[dict[WorkerId, tuple[str, Any]]]:
        """Hold one round, and exclude absent members; each member's kind and value, in the order of their ranks."""
        if self.outside:
            return {self.me: mine}
        said = yield from self._hear(mine, payload)
        if said is not None and len(said) < len(self.members):
            self._exclude([worker for worker in self.members if worker not in said])
            yield from self.make_groups()
        if said is None or self._is_outside():  # since now
            return {self.me: mine}
        return {worker: said[worker] for worker in self.members}  # others may have failed while groups were made

    def _hear(self, mine: tuple[str, Any], payload: bytes | None = None) -> Steps[dict[WorkerId, tuple[str, Any]] | None]:
        """Hold one round, with nobody excluded yet; None if this worker itself was absent, and is outside now."""
        waiting = self._monitor.join_requests() if self.rank == 0 else {}
        said = yield from self.rounds.hold(self.members, (yield Encode((*mine, waiting))), payload)
        if said is None:
            yield from self._leave()
            return None
        heard = dict(zip(said, (yield Restore(tuple(said.values()))), strict=True))
        self.waiting = next(iter(heard.values()))[2]
        here = self._whole(heard)
        if self.me not in here:
            yield from self._leave()
            return None
        return {worker: (kind, value) for worker, (kind, value, _) in heard.items() if worker in here}

    def _whole(self, workers: Collection[WorkerId]) -> frozenset[WorkerId]:
        """Those who go on: with islands not what is left of one that has lost a rank."""
        return whole(workers, self._monitor.islands)

    # -- attempts ----------------------------------------------------------------------------------------------------

    def attempt(self) -> Steps[list[Any]]:
        """Run collectives on the default group, of workers that have met, until they have worked for all that are left.

        What fails although no member has failed is tried once more, on new groups. If it fails again, or must (out of memory, a
        bad argument), all workers raise, and new groups are there for whoever catches that.

        Returns:
            The values of their outcomes, by rank.

        Raises:
            PeerError: as :meth:`gather`, and if it has failed on other workers only.
            OwnFailureError: if it has failed on this worker.
        """
        tried = False
        while not self.outside:
            generation, mine = self.generation, (yield Run())
            if mine.reason is not None:
                # only neighbours of a failed worker hear of its end; those behind them wait for workers that have given up
                yield DropGroup()
            outcomes = yield from self._outcomes(mine, Run, "the end of a collective")
            if self._is_outside():  # since now
                break
            if not _failed(outcomes):
                return [said.value for said in outcomes.values()]
            if self.generation != generation:  # somebody was excluded
                tried = False
                continue
            ends = tried or not _may_all_pass(outcomes)
            if not ends:
                log.warning("%s: a collective has failed, and is made once more: %s", self.me.spoken, _told(outcomes))
            self.generation += 1
            yield from self.make_groups()
            if ends:
                raise _failure_of(outcomes, mine, Run)
            tried = True
        own = yield Run()
        if own.reason is not None:
            raise OwnFailureError(Run)
        return [own.value]

    def make_groups(self) -> Steps[None]:
        """Make the default process group of the present members; those that fail meanwhile are excluded.

        Raises:
            PeerError: as :meth:`gather`, and if it has failed twice on other workers only.
            OwnFailureError: if it has failed twice on this worker.
        """
        tried = False
        while True:
            generation = self.generation
            mine = yield MakeGroup(self._group_keys(generation), self.rank, len(self.members))
            outcomes = yield from self._outcomes(mine, MakeGroup, "the making of groups")
            if self.generation != generation or self.outside:
                return  # somebody was excluded in this round, and the groups have been made in there
            if not _failed(outcomes):
                break
            yield DropGroup()
            if tried or not _may_all_pass(outcomes):
                yield from self._forget_groups(generation + 1)
                raise _failure_of(outcomes, mine, MakeGroup)
            log.warning("%s: the process groups could not be made, and are made once more: %s", self.me.spoken, _told(outcomes))
            self.generation += 1
            tried = True
        yield from self._forget_groups(self.generation)
        yield from self.on_store(lambda: self._monitor.learn_hosts(self.members))
        if self.rank == 0:
            yield from self.on_store(lambda: self.joining.tell_members(self.members))
        yield TellChange()

    def on_store(self, steps: Callable[[], Steps[T]]) -> Steps[T]:
        """Run a protocol that may be run again; again on the next store, if the store is lost."""
        while True:
            try:
                return (yield from steps())
            except StoreLostError:  # noqa: PERF203 - a store is lost seldom
                if self._survivable is None:
                    raise
                yield NextStore()

    def _outcomes(self, mine: Outcome, effect: type, kind: str) -> Steps[dict[WorkerId, Outcome]]:
        """How an attempt has ended for each member.

        Raises:
            OwnFailureError: if others are elsewhere: in a round that belongs to the attempt, where they raise.
            ConfigurationError: on all members, if one of them is at another call.
        """
        said = yield from self._hold((kind, mine))
        if mine.reason is not None and not all(isinstance(value, Outcome) for _, value in said.values()):
            raise OwnFailureError(effect)
        return dict(zip(said, of_one_kind(list(said.values())), strict=True))

    def _is_outside(self) -> bool:
        return self.outside

    def _group_keys(self, generation: int) -> str:
        return f"{self._prefix}/group/{generation}"

    def _forget_groups(self, generation: int) -> Steps[None]:
        """Delete the keys of the groups before a generation, which everybody has left."""
        first, self._oldest = self._oldest, generation
        if self.rank == 0:
            try:
                for old in range(first, generation):
                    yield DeleteBelow(f"{self._group_keys(old)}/")
            except StoreLostError:
                pass  # with all keys; the next round goes to the next store

    # -- uses of a Trainer -------------------------------------------------------------------------------------------

    def hello(
        self, use: int, *, intact: bool, about: Any = None, check: Callable[[Mapping[WorkerId, Any]], None] = lambda said: None
    ) -> Steps[None]:
        """Begin a use of a Trainer, with the members that come to it. Makes the default group, if it is not as it was.

        An exception may have ended the use before on this worker, on others, or on all; they may have left it at different
        points, and with different knowledge of who has failed.

        Args:
            use: its number, the same on all workers.
            intact: whether the default group is as it was made, and nothing has ended the use before on this worker.
            about: something of this worker.
            check: raises if that of all does not fit together; before any group is made.

        Raises:
            PeerError: as :meth:`gather`.
        """
        if self._late:
            self._late = False
            yield from self.stay_outside()
        if self.outside:
            return
        self.rounds.begin_at(use << USE_BITS)
        self._monitor.observe(self.members)
        if not intact:
            yield DropGroup()  # somebody may wait in a collective for this worker, which has left it
        generation = self.generation if self.met else self.generation - 1
        mine = _Arrival(intact, generation, spans_of(self.members), about, self._monitor.address)
        heard = yield from self._hear(("the beginning of a Trainer's work", mine))
        if heard is None:
            return
        said: dict[WorkerId, _Arrival] = dict(zip(heard, of_one_kind(list(heard.values())), strict=True))
        self._monitor.hosts |= {worker: theirs.address for worker, theirs in said.items() if theirs.address is not None}
        check({worker: theirs.about for worker, theirs in said.items()})
        # whoever has excluded more workers knows better: nobody that one of those present has excluded is a member
        views = {theirs.members for theirs in said.values()}
        in_all = self._whole(set(said).intersection(*map(workers_of, views)))
        members = tuple(worker for worker in self.members if worker in in_all)
        if self.me not in members:
            yield from self._leave()
            return
        generation = max(theirs.generation for theirs in said.values())
        if absent := [worker for worker in self.members if worker not in in_all]:
            self._exclude(absent)
        if absent or len(views) > 1 or not all(theirs.intact for theirs in said.values()):
            self.generation = generation + 1
            yield from self.make_groups()
        elif self.rank == 0 and not self.met:
            yield from self.on_store(lambda: self.joining.tell_members(self.members))
        self.met = True

    def rest(self) -> Steps[None]:
        """End a use of a Trainer: who holds the store waits up to 5 s for the others, which still ask it.

        Rank 0 holds it, if not torchrun's agent does, until it is lost.
        """
        where = f"{self.generation}/{self.rounds.number}"
        if self._survivable is not None and self._monitor.has_aborted:  # all hear of it, wherever they are
            where = f"aborted/{self.rounds.number >> USE_BITS}"
        key = f"{self._prefix}/resting/{where}"
        if key == self._rested:
            return  # nothing has been said since
        self._rested = key
        yield from self._last_words(lambda: self._rest(key))

    def _rest(self, key: str) -> Steps[None]:
        last = (yield Count(key)) == len(self.members)
        holds = self.rank == 0 if self._monitor.holds_store is None else self._monitor.holds_store
        waits = self._survivable is not None or not self._monitor.has_aborted
        if holds and (last or (waits and (yield Await(f"{key}/all", _REST_S)))):
            yield Delete(key)
            yield Delete(f"{key}/all")
        elif last:
            yield Write(f"{key}/all", b"1")

    def close(self) -> Steps[None]:
        """Write down that nobody is admitted any more, unless the store has ended with others that have come to their ends."""
        yield from self._last_words(self.joining.close)

    def _last_words(self, steps: Callable[[], Steps[None]]) -> Steps[None]:
        """What a worker says at its end: no other store is looked for to say it."""
        try:
            yield from steps()
        except StoreLostError:
            yield Reconnect()  # this thread may have slept through a change of stores
            try:
                yield from steps()
            except StoreLostError:
                log.info("%s: ends without a word to the others: the store has ended before", self.me.spoken)

    # -- leaving and joining -----------------------------------------------------------------------------------------

    def stay_outside(self) -> Steps[None]:
        """Be a group of one, until this worker is admitted.

        Raises:
            OwnFailureError: if that group cannot be made.
        """
        self.outside = True
        self.generation += 1
        self.members = (self.me,)
        self._monitor.observe(self.members, outside=True)
        if (yield MakeGroup(f"{self._prefix}/outside/{self.me}", 0, 1)).reason is not None:
            raise OwnFailureError(MakeGroup)
        yield TellChange()

    def _leave(self) -> Steps[None]:
        """Go outside as a new incarnation, since the others have excluded this worker."""
        log.warning(
            "Rank %d sent no heartbeat for so long that the others have excluded it (peer_timeout_s). %s.",
            self.me.initial_rank,
            "It asks to join again"
            if self._monitor.islands is None
            else "Its island ends, and comes back if it is started again",
        )
        self._monitor.leave()
        yield from self._take_next_identity()
        yield from self.stay_outside()

    def _take_next_identity(self) -> Steps[None]:
        self._monitor.take_identity((yield from self.on_store(lambda: self.joining.next_incarnation(self.me))))
        self.rounds.me = self.me

    def admit(self, joiners: Sequence[WorkerId], snapshot: Any) -> Steps[None]:
        """Admit workers that wait, at the end of the ranks. All members call it with the same joiners and snapshot.

        Args:
            joiners: the workers to admit.
            snapshot: state of the training, for them.
        """
        admitters = self.members
        self.members = (*self.members, *joiners)
        self.generation += 1
        self._monitor.observe(self.members)
        yield from self.on_store(lambda: self._monitor.learn_hosts(self.members))
        hosts = {worker: self._monitor.hosts[worker] for worker in self.members if worker in self._monitor.hosts}
        grant = Grant(self.rounds.number, self.generation, admitters, tuple(joiners), self.excluded, snapshot, hosts)
        yield from self.on_store(lambda: self.joining.grant(grant))
        yield from self.make_groups()

    def join(self, timeout_s: float, about: str) -> Steps[Any]:
        """Wait to be admitted, as a member at the end of the ranks; returns the snapshot.

        Args:
            timeout_s: how long to wait while no member sends heartbeats.
            about: this worker's model and data, for the members, who decide whether they fit.

        Raises:
            PeerError: if nobody admits this worker.
            ConfigurationError: if it does not fit.
        """
        while True:
            grant = yield from self.on_store(lambda: self.joining.await_grant(self.me, about, timeout_s))
            if grant is None:
                yield from self._take_next_identity()
                self._monitor.observe((self.me,), outside=True)
                self.members = (self.me,)
                continue
            self._admitters = grant.admitters
            self.members = (*grant.admitters, *grant.joiners)
            self.generation, self.excluded = grant.generation, list(grant.excluded)
            self._monitor.hosts |= grant.hosts
            self.rounds.begin_at(grant.round)
            self.rounds.agreed, self.rounds.proposed, self.rounds.known = grant.admitters, grant.admitters, Known()
            yield AdoptUse(grant.round >> USE_BITS)
            self._monitor.begin_use(grant.round >> USE_BITS)
            self.outside, self.met = False, True
            if (yield from self.on_store(self.rounds.was_marked_absent)):
                yield from self._leave()  # it was frozen after its request, and was excluded again
            else:
                self._monitor.observe(self.members)
                yield from self.make_groups()
            if not self.outside:
                self.check_admitters()
                return grant.snapshot

    @property
    def round(self) -> int:
        """The number of the next round: the same on all members at the same point."""
        return self.rounds.number

    def check_admitters(self) -> None:
        """Check that an admitter is left; a joiner calls it until it has the state of the training.

        Raises:
            PeerError: if none of the members that have admitted it is left: then nobody has the model that was trained.
        """
        if not self.outside and not set(self._admitters) & set(self.members):
            raise admitters_lost(self.me)

    def _exclude(self, absent: list[WorkerId]) -> None:
        self.excluded += absent
        self.members = tuple(worker for worker in self.members if worker not in absent)
        self.generation += 1
        ranks = ", ".join(str(worker.initial_rank) for worker in absent)
        self._monitor.observe(self.members)
        log.warning("%s: rank %s has failed; %d workers go on", self.me.spoken, ranks, len(self.members))
        if len(self.members) < self._min_workers:
            raise PeerError(
                f"Rank {ranks} has failed, {len(self.members)} workers are left, and min_workers={self._min_workers}: the job"
                " ends. Resume it from its last checkpoint, or pass a smaller min_workers"
                " (with on_peer_failure='raise' it is all workers).",
                rank=absent[0].initial_rank,
                phase="membership",
            )


def _values(said: Mapping[WorkerId, tuple[str, Any]], phase: str) -> list[Any]:
    """What members say in a round that is no end of an attempt."""
    for worker, (_, value) in said.items():
        if isinstance(value, Outcome) and value.reason is not None:  # its attempt has failed before it came to this round
            raise another_aborted(worker.initial_rank, value.reason, phase)
    return of_one_kind(list(said.values()))


def _failed(outcomes: Mapping[WorkerId, Outcome]) -> list[tuple[WorkerId, Outcome]]:
    return [(worker, said) for worker, said in outcomes.items() if said.reason is not None]


def _may_all_pass(outcomes: Mapping[WorkerId, Outcome]) -> bool:
    return all(said.may_pass for said in outcomes.values())


def _told(outcomes: Mapping[WorkerId, Outcome]) -> str:
    return "; ".join(f"rank {worker.initial_rank}: {said.reason}" for worker, said in _failed(outcomes))


def _failure_of(outcomes: Mapping[WorkerId, Outcome], mine: Outcome, effect: type) -> Exception:
    """What ends this worker when an attempt has failed for good: its own failure, or the first of the others'."""
    if mine.reason is not None:
        return OwnFailureError(effect)
    worker, outcome = _failed(outcomes)[0]
    return another_aborted(worker.initial_rank, outcome.reason or "", "a collective")
