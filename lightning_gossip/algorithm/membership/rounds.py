r"""Rounds: each member says one value, or has failed, and all learn the same (decisions/019).

Chandra and Toueg (Unreliable failure detectors for reliable distributed systems, J. ACM 43, 1996) have the problem: agreement
of workers that may fail, told by detectors that may err. The store makes it simple, since it lets the first of several writers
win.

| key of round r | written by | says |
|---|---|---|
| ``r/<worker>`` | its owner; or anybody, as absent, for a worker that has failed; the first one counts | its value |
| ``r/arrived`` | each that has written its value | how many have |
| ``r/result/<k>``, k = 0, 1, … | the last to arrive; the first one counts | who took part, and all their values |
| ″ | any worker that has heard news which the training thread waits without knowing | look at the news, then wait for k + 1 |

A worker asks the store at most eight times a round, however many workers there are: it writes its value, counts itself, reads
the news (:mod:`.monitor`), waits for the result and reads it, and deletes its value of the round before. Who arrives last
reads all values, writes the result, and the first member deletes that of the round before.

If a member fails, a look makes all that wait read the news, and the first of them that has not failed ends the round without
it, unless others are still to come: who comes, knows of a failure and is the last of the others, by the count, tries to end the
round itself. Nobody waits for a worker that has counted itself last and failed before it wrote the result: its failure is news.
Two that end a round at once do no harm, since a result follows from values that do not change; where they have different
members in view, the first result counts for all.

A worker that the others hold for failed is no member from then on, whether it has failed or was only frozen. It learns that
from its mark of absence, from a result in which it is missing, or from the news.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from lightning_gossip.algorithm.membership.store import Await, Count, Decide, Delete, Read, ReadAll, Steps, Write
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import PeerError

PART_BYTES = 4 << 20  # a TCPStore drops a client that sends more than 8 MB in one value
LOOK = b"look"
_ABSENT = b"-"


class Health(Protocol):
    """What a worker knows of the others; changes while a round is waited for."""

    def has_failed(self, worker: WorkerId) -> bool:
        """Whether all are told that a worker has failed; for good."""

    def raise_failure(self) -> None:
        """Raise if another worker has aborted, or the store does not answer."""

    def waits_for(self, key: str | None) -> None:
        """Which key is waited for: to be written with ``LOOK`` when there is news; None: none any more."""

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

    Attributes:
        number: of the next round, the same on all members at the same point of their programs.
    """

    def __init__(self, prefix: str, me: WorkerId, health: Health, now_s: Callable[[], float], timeout_s: float) -> None:
        self.number = 0
        self.me = me
        self._prefix = prefix
        self._health = health
        self._now_s = now_s
        self._timeout_s = timeout_s
        self._mine: list[str] = []  # keys that only this worker has written, in the round under way or the last one
        self._shared: list[str] = []  # other keys of these rounds, which one worker deletes
        self._older: list[str] = []  # keys that nobody needs any more once the next round is complete

    def begin_at(self, number: int) -> None:
        """Take part from this round on, and no more in those before it, which may never be complete."""
        self._older += [*self._mine, *self._shared]
        self._mine, self._shared = [], []
        self.number = number

    def was_marked_absent(self) -> Steps[bool]:
        """Whether this worker counts as absent in the next round already."""
        head: bytes | None = yield Read(self._value_key(self.number, self.me))
        return head == _ABSENT

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
            PeerError: if a worker does not come, or has aborted.
        """
        number = self.number
        self.number += 1
        self._health.raise_failure()
        before, self._mine = self._mine, []
        shared, self._shared = self._shared, [f"{self._key(number)}/arrived"]
        self._older += before
        if self._health.has_failed(self.me):
            yield Decide(self._value_key(number, self.me), _ABSENT)
            return None
        if payload is not None:
            yield Write(self._payload_key(number, self.me), (yield from self._cut(self._payload_key(number, self.me), payload)))
            self._mine.append(self._payload_key(number, self.me))
        head = yield from self._cut(self._value_key(number, self.me), value)
        if (yield Decide(self._value_key(number, self.me), head)) == _ABSENT:
            return None
        self._mine.append(self._value_key(number, self.me))
        try:
            result = yield from self._result(number, members)
        finally:
            self._health.waits_for(None)
        if result is None:
            return None
        values = _decoded(result, members)
        if self.me not in values:
            return None
        # everybody has come to this round, and so has read the one before
        self._older += shared if self.me == next(iter(values)) else []
        while self._older:
            yield Delete(self._older.pop())
        return values

    def payloads(self, workers: Sequence[WorkerId]) -> Steps[dict[WorkerId, bytes] | None]:
        """What workers had for this one in the last round; None if they have gone on without it."""
        found = {}
        for worker in workers:
            payload = yield from self._whole(self._payload_key(self.number - 1, worker))
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
            result = yield from self._conclude(number, slot, members)
            if result is not None:
                return result
        while True:
            key = self._slot_key(number, slot)
            self._health.waits_for(key)  # before the news: what comes after it wakes
            yield from self._health.read_news()
            self._health.raise_failure()
            if self._health.has_failed(self.me):
                return None
            in_view = [worker for worker in members if not self._health.has_failed(worker)]
            # at its arrival a worker may be the last that was missing; later the first one looks
            may_end = arrived >= len(in_view) if slot == 0 else in_view[0] == self.me
            if len(in_view) < len(members) and may_end:
                result = yield from self._conclude(number, slot, members)
                if result is not None:
                    return result
            stands: bytes | None = yield Await(key, max(0.0, give_up_s - self._now_s()))
            if stands is None:
                raise PeerError(
                    f"Some worker did not come within {self._timeout_s:.3g} s, and is alive. Look at the logs of the other"
                    " ranks, or pass a longer timeout=timedelta(...).",
                    phase="rendezvous",
                    seconds=self._timeout_s,
                )
            self._shared.append(key)
            if stands != LOOK:
                return (yield from self._whole(f"{self._key(number)}/result", stands))
            slot += 1

    def _conclude(self, number: int, slot: int, members: Sequence[WorkerId]) -> Steps[bytes | None]:
        """Write the result down, if all members that have not failed have come; returns the one that stands."""
        for worker in members:
            if self._health.has_failed(worker):
                yield Decide(self._value_key(number, worker), _ABSENT)
        heads = yield ReadAll(tuple(self._value_key(number, worker) for worker in members))
        if heads is None:
            return None
        values = {}
        for worker, head in zip(members, heads, strict=True):
            if head != _ABSENT:
                value = yield from self._whole(self._value_key(number, worker), head)
                if value is None:
                    return None
                values[worker] = value
        result = yield from self._cut(f"{self._key(number)}/result", _encoded(values), by=f"{self.me}/")
        while True:
            key = self._slot_key(number, slot)
            stands: bytes = yield Decide(key, result)
            self._shared.append(key)
            if stands != LOOK:
                return (yield from self._whole(f"{self._key(number)}/result", stands))
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

    def _value_key(self, number: int, worker: WorkerId) -> str:
        return f"{self._key(number)}/{worker}"

    def _payload_key(self, number: int, worker: WorkerId) -> str:
        return f"{self._value_key(number, worker)}/payload"

    def _slot_key(self, number: int, slot: int) -> str:
        return f"{self._key(number)}/result/{slot}"


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
