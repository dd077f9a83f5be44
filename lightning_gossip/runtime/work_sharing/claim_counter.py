"""The shared counter behind work sharing: each worker claims the next batch of the epoch from a store.

One round trip a claim while the epoch is long, a second one near its end, where the claim rule needs everybody's step time.
Where a round trip takes long, :mod:`lightning_gossip.runtime.work_sharing.claim_prefetch` makes the next claim while the worker
trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.work_sharing import Advance, Claims, Consult, Leave, Ledger

_REFRESH_CLAIMS = 16  # step times change slowly; near the end they are read before each claim
_PUBLISH_CHANGE = 0.1  # publish the own step time again when it has changed by a tenth


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used; operations are atomic."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter that starts at 0; returns its new value."""

    def set(self, key: str, value: bytes | str, /) -> None:
        """Set a value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of the keys are set."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Read values, waiting for those that are not set yet."""


class EpochQueue:
    """One worker's access to the batches of one epoch.

    Args:
        store: shared by all workers.
        key: prefix of this epoch's keys; new for every epoch.
        rank: this worker.
        workers: how many there are.
        batches: positions 0 … batches − 1 are handed out, at least one to each worker.
        lookahead: batches that the data loader keeps ahead of a step.
        speeds_key: prefix of the keys with everybody's step time, the same for all epochs of a fit, so that a new epoch
            begins with what the last one measured; default: ``key``, and nothing is known at the start.
        gone: asked for the ranks that have died; they claim no more.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        rank: int,
        workers: int,
        batches: int,
        lookahead: int,
        speeds_key: str | None = None,
        gone: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self.ledger = Ledger()
        self.batches = batches
        self.protocol = Claims(place=rank, workers=workers, batches=batches, lookahead=lookahead)
        self._store = store
        self._key = key
        self._speeds_key = key if speeds_key is None else speeds_key
        self._rank = rank
        self._workers = workers
        self._lookahead = lookahead
        self._gone = gone
        self._remaining = batches - workers
        self._step_times = np.full(workers, math.nan)
        self._published_s: float | None = None
        self._claims = 0
        self._excluded: frozenset[int] = frozenset()  # of the workers, those that were dead at the last look
        self._time_keys = {each: self._time_key(each) for each in range(workers)}  # of the others, by rank
        self._all_set = False  # these keys, and the counter; none is deleted while the epoch lasts
        self._values: list[bytes] = []  # of the step times, as they were at the last look
        if not store.check([self._time_key(rank)]):
            self._write(math.nan, left=False)

    def claim(self, step_s: float | None) -> int | None:
        """Take the next batch.

        Args:
            step_s: this worker's time a batch in seconds, or None if it is not known yet.

        Returns:
            Its position in the epoch, or None if this worker is done with claiming: nothing is left, or the others will be
            faster.
        """
        position = self.draw(step_s, self.ledger.held)
        if position is not None:
            self.ledger.claim(position)
        return position

    def draw(self, step_s: float | None, held: int) -> int | None:
        """Like :meth:`claim`, without noting it in the ledger, which may be in use by another thread meanwhile.

        Args:
            step_s: as there.
            held: batches that this worker holds.
        """
        if self.protocol.done:
            return None
        if self._claims == 0:
            self._publish(step_s)
        position = perform(self.protocol.next(step_s, held), partial(self._do, step_s, held))
        if position is None:
            self._write(math.nan if step_s is None else step_s, left=True)
        else:
            self._claims += 1
        return position

    @property
    def left_early(self) -> bool:
        """Whether this worker has left batches to others."""
        return self.protocol.left_early

    @property
    def taken(self) -> int:
        """Batches that all workers have claimed, as far as this one knows."""
        return self.batches - self._remaining

    def unclaimed(self) -> list[int]:
        """Positions that nobody has claimed; meaningful while nobody claims, and once every worker has its first batch."""
        return list(range(self._workers + self._store.add(f"{self._key}/next", 0), self.batches))

    def _do(self, step_s: float | None, held: int, effect: Consult | Leave | Advance) -> Any:
        """What the protocol asks for; it says what each effect is."""
        match effect:
            case Consult():
                self._consult(step_s, held)
                return self._remaining, self._step_times
            case Leave():
                # Where one has died that can be wrong for a moment; what nobody takes is handed out again after the
                # synchronisation.
                return self._store.add(f"{self._key}/left", 1) >= self._workers - len(self._gone())
            case Advance():
                position = self._workers + self._store.add(f"{self._key}/next", 1) - 1
                self._remaining = max(0, self.batches - position - 1)
                return position

    def _consult(self, step_s: float | None, held: int) -> None:
        """Bring the own step time, everybody's, and what remains up to date, as far as the decision needs it."""
        self._publish(step_s)
        if self._claims % _REFRESH_CLAIMS == 1 or self._is_near_end(step_s, held):
            self._exclude(self._gone())
            *values, taken = self._look()
            self._remaining = self.batches - self._workers - int(taken)
            if values and values != self._values:
                before = self._values or [b""] * len(values)
                for rank, value, old in zip(self._time_keys, values, before, strict=True):
                    if value != old:
                        self._step_times[rank] = self._read(value)
                self._values = values

    def _exclude(self, gone: frozenset[int]) -> None:
        """These have died: they claim no more, and their step times are of no use."""
        if gone != self._excluded:
            self._excluded, self._values, self._all_set = gone, [], False
            self._time_keys = {rank: self._time_key(rank) for rank in range(self._workers) if rank not in gone}
            self._step_times[list(gone)] = math.inf

    def _look(self) -> list[bytes]:
        """Everybody's step time, if all are set, and then the shared counter; one round trip, once they have been seen.

        A worker that has not begun this epoch has set nothing, and is not waited for.
        """
        keys, counter = list(self._time_keys.values()), f"{self._key}/next"
        if not self._all_set:
            taken = self._store.add(counter, 0)
            if not self._store.check(keys):
                return [str(taken).encode()]
            self._all_set = True
        return self._store.multi_get([*keys, counter])

    def _is_near_end(self, step_s: float | None, held: int) -> bool:
        fastest_s = float(np.fmin.reduce(self._step_times, initial=math.inf))
        slowness = max(1.0, (step_s or 0.0) / fastest_s) if 0.0 < fastest_s < math.inf else 1.0
        most = max(held, self._lookahead) + 1
        return self._remaining <= 4 * self._workers * most * slowness + _REFRESH_CLAIMS * self._workers

    def _publish(self, step_s: float | None) -> None:
        """Tell the others the own step time, if it has changed by much."""
        if step_s is not None and (self._published_s is None or abs(step_s / self._published_s - 1.0) > _PUBLISH_CHANGE):
            self._published_s = step_s
            self._write(step_s, left=False)

    def _write(self, step_s: float, *, left: bool) -> None:
        """Publish the own step time, and the epoch that this worker has left, if so."""
        self._store.set(self._time_key(self._rank), f"{float(step_s)!r} {self._key if left else ''}")

    def _read(self, value: bytes) -> float:
        """A worker's step time; infinite if it has left this epoch."""
        step_s, left = value.decode().split(" ", 1)
        return math.inf if left == self._key else float(step_s)

    def _time_key(self, rank: int) -> str:
        return f"{self._speeds_key}/step_s/{rank}"
