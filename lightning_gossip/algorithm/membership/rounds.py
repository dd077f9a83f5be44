r"""Rounds: each member says one value, or has failed, and all learn the same (decisions/019, 022).

Chandra and Toueg (Unreliable failure detectors for reliable distributed systems, J. ACM 43, 1996) have the problem: agreement
of workers that may fail, told by detectors that may err. The store makes it simple, since it lets the first of several writers
win.

| key of round r | written by | says |
|---|---|---|
| ``r/said`` | each adds its value; or anybody that one which has failed is absent: the first word of each counts | all values |
| ``r/arrived`` | each that has added its value | how many have |
| ``r/result/<k>``, k = 0, 1, … | the last to arrive; the first one counts | who took part, and all their values |
| ″ | any worker that has heard news which the training thread waits without knowing | look at the news, then wait for k + 1 |

A worker asks the store at most eight times a round, however many workers there are: it adds its value, counts itself, waits for
the result and reads it, counts itself among those that know it (below), waits until enough do, and deletes one of the keys of
the round before (with fewer than five workers two or three). Who arrives last reads all values in one, and writes the result.

If a member fails, a look makes all that wait read the news (:mod:`.monitor`), and the first of them that has not failed ends
the round without it, unless others are still to come: who comes, and is the last of the others by the count, tries to end the
round itself when it hears of the failure. Before it waits a worker reads no news: it knows those that its monitor has read.
Nobody waits for a worker that has counted itself last and failed before it wrote the result: its failure is news.
Two that end a round at once do no harm, since a result follows from values that do not change; where they have different
members in view, the first result counts for all.

A worker that the others hold for failed is no member from then on, whether it has failed or was only frozen. It learns that
from its mark of absence, from a result in which it is missing, or from the news.

**Where the store may be lost** (:mod:`.failover`) a worker acts by a result only when so many know it that any later quorum has
one of them, as a replica of Viewstamped Replication (Oki and Liskov, PODC 1988) executes an operation. And a round ends without
members that have failed only if the others are a quorum (:mod:`.quorum`).

| key of round r | written by | says |
|---|---|---|
| ``r/known/<level>`` | each that has read the result | how many have, since so many members have failed |
| ``r/settled/<k>`` | each that finds enough, before it goes on; the first one counts | enough know it |
| ″ | any worker that has heard news | as above: look |

If the store is lost before, the round is held once more on the next one, unless somebody brings its result there.
"""

from __future__ import annotations

import pickle
import struct
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.quorum import has_quorum, whole, witnesses
from lightning_gossip.algorithm.membership.store import (
    Append,
    Await,
    Count,
    Decide,
    Delete,
    NextStore,
    Read,
    Steps,
    StoreLostError,
    Write,
)
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import PeerError

PART_BYTES = 4 << 20  # a TCPStore drops a client that sends more than 8 MB in one value
LOOK = b"look"
_ABSENT = b"-"
_SETTLED = b"settled"
_WORD = struct.Struct("<IIQ")  # a worker's initial rank and incarnation, and how long what it says is
_KEYS = ("said", "arrived", "result", "known", "settled")  # that several write in a round


class Survivable(NamedTuple):
    """The store may be lost, and the members go on with another one.

    Args:
        least: how many workers are enough to go on, if the user has said so; None: see :func:`has_quorum`.
        islands: how ranks are islands; None where each is a worker.
    """

    least: int | None = None
    islands: Islands | None = None


class Known(NamedTuple):
    """The result of the last round that a worker has read.

    Args:
        number: of the round; -1 before the first.
        result: as it is in the store.
        settled: whether enough know it, so that this worker acts by it.
    """

    number: int = -1
    result: bytes = b""
    settled: bool = False


class Health(Protocol):
    """What a worker knows of the others; changes while a round is waited for."""

    def has_failed(self, worker: WorkerId) -> bool:
        """Whether all are told that a worker has failed; for good."""

    def ended(self) -> Collection[WorkerId]:
        """Workers whose processes are known to have ended."""

    def raise_failure(self) -> None:
        """Raise if another worker has aborted, or the store does not answer."""

    def waits_for(self, key: str | None) -> None:
        """Which key is waited for: to be written with ``LOOK`` when there is later news; None: none any more."""

    def read_news(self) -> Steps[None]:
        """Read the news."""


class Rounds:
    """The rounds of one worker, one after the other.

    Args:
        prefix: of the keys.
        me: this worker.
        health: of the others.
        now_s: the clock, in seconds.
        timeout_s: how long a round waits for a worker that is alive, in seconds.
        survivable: whether the store may be lost; None: it outlives all workers, and those that reach it go on.

    Attributes:
        number: of the next round, the same on all members at the same point of their programs.
        known: the last result.
        agreed: the members by the last settled result.
        proposed: those by the last result, settled or not: others may have found it settled meanwhile.
        taking_part: those of the round under way, or of the last one.
        moves: from store to store that this worker has made (:mod:`.failover`).
    """

    def __init__(
        self,
        prefix: str,
        me: WorkerId,
        health: Health,
        now_s: Callable[[], float],
        timeout_s: float,
        survivable: Survivable | None = None,
    ) -> None:
        self.number = 0
        self.me = me
        self._prefix = prefix
        self._health = health
        self._now_s = now_s
        self._timeout_s = timeout_s
        self._survivable = survivable
        self.known = Known()
        self.agreed: tuple[WorkerId, ...] = ()
        self.proposed: tuple[WorkerId, ...] = ()
        self.taking_part: tuple[WorkerId, ...] = ()
        self.moves = 0
        self._brought = Known()  # the result that somebody has brought to this store
        self._mine: list[str] = []  # keys that only this worker has written, in the round under way or the last one
        self._shared: list[str] = []  # other keys of these rounds, each of which one worker deletes
        self._older: list[str] = []  # keys that nobody needs any more once the next round is complete

    def begin_at(self, number: int) -> None:
        """Take part from this round on, and no more in those before it, which may never be complete."""
        self._older += [*self._mine, *self._shared]
        self._mine, self._shared = [], []
        self.number = number

    def move(self, brought: Known) -> None:
        """Go on with another store, to which somebody has brought the last result."""
        self.moves += 1
        self._brought = brought

    def was_marked_absent(self) -> Steps[bool]:
        """Whether this worker counts as absent in the next round already."""
        return (yield from self._heads(self.number)).get(self.me) == _ABSENT

    def hold(
        self, members: Sequence[WorkerId], value: bytes, payload: bytes | None = None
    ) -> Steps[dict[WorkerId, bytes] | None]:
        """Say this worker's value and learn those of all.

        Args:
            members: who takes part, this worker among them.
            value: of this worker.
            payload: for one member, who reads it by :meth:`payloads` before the next round.

        Returns:
            The values of those that take part, in the order of the members; None if this worker does not count as one any more.

        Raises:
            PeerError: if a worker does not come, or has aborted; or if there is no quorum.
        """
        number = self.number
        self.number += 1
        self.taking_part = tuple(members)
        if self.agreed and set(members) < set(self.agreed):
            self.agreed = tuple(members)  # that follows from the last result, on all
        while True:
            try:
                return (yield from self._hold(number, members, value, payload))
            except StoreLostError:  # noqa: PERF203 - a store is lost seldom
                self._health.waits_for(None)
                yield NextStore()
                self._mine, self._shared, self._older = [], [], []  # were in the store before

    def _hold(
        self, number: int, members: Sequence[WorkerId], value: bytes, payload: bytes | None
    ) -> Steps[dict[WorkerId, bytes] | None]:
        """On one store."""
        self._health.raise_failure()
        before, self._mine = self._mine, []
        shared, self._shared = self._shared, [self._said_key(number), f"{self._key(number)}/arrived"]
        self._older += before
        if self._counts_no_more(members):
            yield Append(self._said_key(number), _word(self.me, _ABSENT))
            return None
        brought = self._brought if self._brought.number == number else None
        try:
            if brought is None:
                result = yield from self._say(number, members, value, payload)
            else:
                result = brought.result
            if result is None:
                return None
            values = _decoded(result, members)
            if self.me not in values:
                return None
            if self._survivable is not None:
                self.known, self.proposed = Known(number, result), tuple(values)
                is_settled = brought is not None and brought.settled
                if not is_settled and not (yield from self._settle(number, members)):
                    return None
                self.known = Known(number, result, settled=True)
                self.agreed = tuple(worker for worker in members if worker in values)
        finally:
            self._health.waits_for(None)
        # everybody has come to this round, and so has read the one before
        self._older += _part_of(shared, list(values).index(self.me), len(values))
        try:
            while self._older:
                yield Delete(self._older.pop())
        except StoreLostError:
            self._older.clear()  # with all keys; this round is over
        return values

    def _say(self, number: int, members: Sequence[WorkerId], value: bytes, payload: bytes | None) -> Steps[bytes | None]:
        """Say this worker's value and wait for the result; None if this worker is found to count as failed."""
        if payload is not None:
            yield Write(self._payload_key(number, self.me), (yield from self._cut(self._payload_key(number, self.me), payload)))
            self._mine.append(self._payload_key(number, self.me))
        head = yield from self._cut(self._value_key(number, self.me), value)
        yield Append(self._said_key(number), _word(self.me, head))
        return (yield from self._result(number, members))

    def payloads(self, workers: Sequence[WorkerId]) -> Steps[dict[WorkerId, bytes] | None]:
        """What workers had for this one in the last round; None if they have gone on without it, or it is lost."""
        found = {}
        for worker in workers:
            try:
                payload = yield from self._whole(self._payload_key(self.number - 1, worker))
            except StoreLostError:
                return None
            if payload is None:
                return None
            found[worker] = payload
        return found

    # -- details -----------------------------------------------------------------------------------------------------

    def _result(self, number: int, members: Sequence[WorkerId]) -> Steps[bytes | None]:
        """What the round has come to; None if this worker counts as failed."""
        arrived: int = yield Count(f"{self._key(number)}/arrived")
        slot, give_up_s = 0, self._now_s() + self._timeout_s
        if arrived >= len(members):
            result = yield from self._conclude(number, slot, members, all_here=True)
            if result is not None:
                return result
        while True:
            key = self._slot_key(number, slot)
            self._health.waits_for(key)  # before the news: what comes after it wakes
            if slot:
                yield from self._health.read_news()
            self._health.raise_failure()
            if self._counts_no_more(members):
                return None
            in_view = self._present(members)
            # at its arrival a worker may be the last that was missing, and may hear of that later; else the first one looks
            may_end = arrived >= len(in_view) or (slot > 0 and in_view[0] == self.me)
            if len(in_view) < len(members) and may_end:
                result = yield from self._conclude(number, slot, members)
                if result is not None:
                    return result
            stands: bytes | None = yield Await(key, max(0.0, give_up_s - self._now_s()))
            if stands is None:
                raise self._waited_in_vain()
            self._shared.append(key)
            if stands != LOOK:
                return (yield from self._whole(f"{self._key(number)}/result", stands))
            slot += 1

    def _settle(self, number: int, members: Sequence[WorkerId]) -> Steps[bool]:
        """Wait until enough know the result of a round; False if this worker counts as failed."""
        if len(members) == 1:
            return True
        slot, give_up_s, counted = 0, self._now_s() + self._timeout_s, -1
        while True:
            self._health.waits_for(self._slot_key(number, slot, "settled"))
            self._health.raise_failure()
            if self._counts_no_more(members):
                return False
            present = self._present(members)
            level = len(members) - len(present)  # who has failed since does not count among those that know
            if level > counted:
                counted = level
                key = f"{self._key(number)}/known/{level}"
                self._shared.append(key)
                know: int = yield Count(key)
                if know >= self._enough(present, members):
                    # each of them, before it goes on: the first may have ended before it said so, and the others wait for that
                    yield from self._decide(number, slot, _SETTLED, "settled")
                    return True
            stands: bytes | None = yield Await(self._slot_key(number, slot, "settled"), max(0.0, give_up_s - self._now_s()))
            if stands is None:
                raise self._waited_in_vain()
            self._shared.append(self._slot_key(number, slot, "settled"))
            if stands != LOOK:
                return True
            slot += 1
            yield from self._health.read_news()

    def _enough(self, present: Sequence[WorkerId], members: Sequence[WorkerId]) -> int:
        """How many of those present have to know a result: of any later quorum one then knows it."""
        grows = self._voters(members) != tuple(members)
        return len(present) if grows else witnesses(len(present), len(members))

    def _counts_no_more(self, members: Sequence[WorkerId]) -> bool:
        """Whether all are told that this worker, or with islands one of its mates, has failed."""
        if self._survivable is None or self._survivable.islands is None:
            return self._health.has_failed(self.me)
        island_of = self._survivable.islands.island_of
        mine = island_of(self.me.initial_rank)
        here = [worker for worker in members if island_of(worker.initial_rank) == mine and not self._health.has_failed(worker)]
        return self.me not in whole(here, self._survivable.islands)

    def _present(self, members: Sequence[WorkerId]) -> list[WorkerId]:
        """Those that have not failed.

        Raises:
            PeerError: if they may not go on without the others.
        """
        present = [worker for worker in members if not self._health.has_failed(worker)]
        self._check_quorum(present, members)
        return present

    def _check_quorum(self, present: Collection[WorkerId], members: Sequence[WorkerId]) -> None:
        if self._survivable is None or len(present) == len(members):
            return
        voters = self._voters(members)
        least, islands = self._survivable
        if not has_quorum(present, voters, self._health.ended(), at_store=True, least=least, islands=islands):
            raise no_quorum(self.me, [worker for worker in voters if worker in present], voters)

    def _voters(self, members: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
        """Whose presence counts: not that of workers that were admitted since the last round."""
        if not self.agreed or set(members) <= set(self.agreed):
            return tuple(members)
        return tuple(worker for worker in self.agreed if worker in members)

    def _waited_in_vain(self) -> PeerError:
        return PeerError(
            f"Some worker did not come within {self._timeout_s:.3g} s, and is alive. Look at the logs of the other"
            " ranks, or pass a longer timeout=timedelta(...).",
            phase="rendezvous",
            seconds=self._timeout_s,
        )

    def _conclude(self, number: int, slot: int, members: Sequence[WorkerId], *, all_here: bool = False) -> Steps[bytes | None]:
        """Write the result down, if all members that have not failed have come; returns the one that stands.

        Args:
            number: of the round.
            slot: where the result may stand.
            members: who takes part.
            all_here: whether nobody may be absent.
        """
        absent = b"".join(_word(worker, _ABSENT) for worker in members if self._health.has_failed(worker))
        if absent:
            yield Append(self._said_key(number), absent)
        heads = yield from self._heads(number)
        values = {}
        for worker in members:
            head = heads.get(worker)
            if head is None or (all_here and head == _ABSENT):
                return None
            if head != _ABSENT:
                value = yield from self._whole(self._value_key(number, worker), head)
                if value is None:
                    return None
                values[worker] = value
        self._check_quorum(values, members)
        result = yield from self._cut(f"{self._key(number)}/result", _encoded(values), by=f"{self.me}/")
        stands = yield from self._decide(number, slot, result)
        return (yield from self._whole(f"{self._key(number)}/result", stands))

    def _heads(self, number: int) -> Steps[dict[WorkerId, bytes]]:
        """By worker what counts of that which was said in a round: the first part of its value, or that it is absent."""
        said: bytes | None = yield Read(self._said_key(number))
        return _first_words(said or b"")

    def _decide(self, number: int, slot: int, value: bytes, what: str = "result") -> Steps[bytes]:
        """Write a value into the first slot that has none; returns the one that stands."""
        while True:
            key = self._slot_key(number, slot, what)
            stands: bytes = yield Decide(key, value)
            self._shared.append(key)
            if stands != LOOK:
                return stands
            slot += 1

    def _cut(self, key: str, value: bytes, by: str = "") -> Steps[bytes]:
        """Write what one value of the store cannot hold into others; returns the first part, which says how many there are."""
        parts = [value[start : start + PART_BYTES] for start in range(PART_BYTES, len(value), PART_BYTES)]
        for index, part in enumerate(parts):
            yield Write(f"{key}/{by}{index}", part)
            self._mine.append(f"{key}/{by}{index}")
        return b"%d %s+" % (len(parts), by.encode()) + value[:PART_BYTES]

    def _whole(self, key: str, head: bytes | None = None) -> Steps[bytes | None]:
        """A value, with its other parts; None if it has been deleted meanwhile."""
        if head is None:
            head = yield Read(key)
        if head is None:
            return None
        about, value = head.split(b"+", 1)
        count, by = about.decode().split(" ")
        if not int(count):
            return value
        parts = [value]
        for index in range(int(count)):  # one at a time: others ask the store too
            part = yield Read(f"{key}/{by}{index}")
            if part is None:
                return None
            parts.append(part)
        return b"".join(parts)

    def _key(self, number: int) -> str:
        return f"{self._prefix}/round/{number}"

    def _said_key(self, number: int) -> str:
        return f"{self._key(number)}/said"

    def _value_key(self, number: int, worker: WorkerId) -> str:
        return f"{self._key(number)}/{worker}"

    def _payload_key(self, number: int, worker: WorkerId) -> str:
        return f"{self._value_key(number, worker)}/payload"

    def _slot_key(self, number: int, slot: int, what: str = "result") -> str:
        return f"{self._key(number)}/{what}/{slot}"


def _word(worker: WorkerId, says: bytes) -> bytes:
    """What a worker says, or is said of it, as it is added to what others have said."""
    return _WORD.pack(*worker, len(says)) + says


def _first_words(said: bytes) -> dict[WorkerId, bytes]:
    """By worker, what was said first."""
    first: dict[WorkerId, bytes] = {}
    start = 0
    while start < len(said):
        rank, incarnation, size = _WORD.unpack_from(said, start)
        start += _WORD.size + size
        first.setdefault(WorkerId(rank, incarnation), said[start - size : start])
    return first


def _part_of(keys: Sequence[str], place: int, workers: int) -> list[str]:
    """Which of the keys of a round that several have written one worker deletes."""
    return [key for key in keys if _KEYS.index(key.rsplit("/round/", 1)[1].split("/")[1]) % workers == place]


def _encoded(values: Mapping[WorkerId, bytes]) -> bytes:
    """The result of a round: most often many workers say the same."""
    distinct = list(dict.fromkeys(values.values()))
    place = {value: index for index, value in enumerate(distinct)}
    places = array("I", map(place.__getitem__, values.values())).tobytes()
    return pickle.dumps(([*_columns(values), places], distinct))


def _decoded(result: bytes, members: Sequence[WorkerId]) -> dict[WorkerId, bytes]:
    """The values of the members that took part, in their order."""
    (*who, column), distinct = pickle.loads(result)
    places = array("I", column)
    if who == _columns(members):  # most often all have
        return {worker: distinct[place] for worker, place in zip(members, places, strict=True)}
    workers = map(WorkerId, *(array("I", column) for column in who))
    heard = {worker: distinct[place] for worker, place in zip(workers, places, strict=True)}
    return {worker: heard[worker] for worker in members if worker in heard}


def _columns(workers: Collection[WorkerId]) -> list[bytes]:
    """Their initial ranks, and their incarnations."""
    return [array("I", column).tobytes() for column in zip(*workers, strict=True)]


def no_quorum(me: WorkerId, present: Sequence[WorkerId], members: Sequence[WorkerId]) -> PeerError:
    """What ends a worker that may not go on, since the others may."""
    here = ", ".join(str(worker.initial_rank) for worker in present)
    return PeerError(
        f"Rank {me.initial_rank} reaches {len(present)} of {len(members)} workers (rank {here}), and ends: the others may go on"
        " without these, and two halves must not both be the job (docs/survival.md). Start it again, and it joins them; with"
        " min_workers=... so many workers are enough.",
        rank=me.initial_rank,
        phase="quorum",
    )
