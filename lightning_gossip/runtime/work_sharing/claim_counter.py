"""The shared counter behind work sharing: each worker claims the next batch of the epoch from a store.

One round trip a claim while the end of the epoch is far, a second one near it, where the claim rule asks how fast the others
are together. What a claim reads are three counters, however many workers there are.

Where a round trip takes long, :mod:`lightning_gossip.runtime.work_sharing.claim_prefetch` makes the next claim while the worker
trains.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.membership.store import StoreLostError
from lightning_gossip.algorithm.work_sharing import Advance, Claims, Consult, Leave, Ledger, OwnRate, Seen, Tell


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used; operations are atomic, and may raise StoreLostError."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter that starts at 0; returns its new value."""

    def set(self, key: str, value: bytes | str, /) -> None:
        """Set the value of a key."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of the keys are set."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Read values, waiting for those that are not set yet."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a value; False if there is none."""

    def get(self, key: str, /) -> bytes:
        """The value of a key; waits until it is set."""


class Speeds:
    """What the members tell each other of their step times, from epoch to epoch, while they are the same.

    In the store are the sum of all rates, under ``key``/rates, and each worker's part of it, which the others subtract if it
    dies. Of one that dies after it has written the one and not yet the other they subtract too much or too little: the sum is
    wrong by the rate of one worker, until the members change at the next synchronisation.

    Args:
        store: shared by all workers.
        key: prefix of the keys; new when the members change.
        rank: this worker.
        workers: how many there are.
    """

    def __init__(self, store: Store, key: str, *, rank: int, workers: int) -> None:
        self.own = OwnRate(workers)
        self.key = key
        self._store = store
        self._rank = rank

    def tell(self, tell: Tell) -> None:
        """Let the others know of this worker's step time."""
        self._note(tell.term)
        self._store.add(f"{self.key}/rates", tell.change)

    def leave(self, epoch: str) -> None:
        """Note that this worker has left an epoch."""
        self._note(self.own.term, epoch)

    def term_of(self, rank: int, epoch: str) -> int | None:
        """A dead worker's part of the sum, at least 1 so that it counts; None if it had left the epoch before."""
        key = f"{self.key}/rate/{rank}"
        if not self._store.check([key]):
            return 1
        term, left = self._store.multi_get([key])[0].decode().split(" ", 1)
        return None if left == epoch else max(1, int(term))

    def forget(self) -> None:
        """Delete this worker's part: the members have changed, and nobody asks for it any more."""
        with suppress(StoreLostError):  # with all parts
            self._store.delete_key(f"{self.key}/rate/{self._rank}")

    def _note(self, term: int, left: str = "") -> None:
        self._store.set(f"{self.key}/rate/{self._rank}", f"{term} {left}")


class EpochQueue:
    """One worker's access to the batches of one epoch.

    In the store are two counters, ``key``/next of the batches claimed and ``key``/left of the workers that claim no more and of
    their rates. Only adding changes them, so nobody waits for another.

    Args:
        store: shared by all workers.
        key: prefix of this epoch's keys; new for every epoch.
        rank: this worker.
        workers: how many there are.
        batches: positions 0 … batches − 1 are handed out, at least one to each worker.
        lookahead: batches that the data loader keeps ahead of a step.
        speeds: everybody's, the same for all epochs between two changes of the members, so that a new epoch begins with what
            the last one measured; None: nothing is known at the start.
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
        speeds: Speeds | None = None,
        gone: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self.ledger = Ledger()
        self._place = rank
        self._has_drawn = False
        self.is_lost = False  # the counters, with the store that they were in: nothing can be claimed any more
        self.batches = batches
        self._speeds = Speeds(store, key, rank=rank, workers=workers) if speeds is None else speeds
        self.protocol = Claims(place=rank, workers=workers, batches=batches, lookahead=lookahead, own_rate=self._speeds.own)
        self._store = store
        self._key = key
        self._counters = [f"{key}/next", f"{key}/left", f"{self._speeds.key}/rates"]
        self._all_set = False  # all three
        self._workers = workers
        self._gone = gone
        self._known_gone: frozenset[int] = frozenset()  # at the last look
        self._lost = 0  # the rates of those that died while they claimed, added up

    def claim(self, step_s: float | None) -> int | None:
        """Take the next batch.

        Args:
            step_s: this worker's time a batch in seconds, or None if it is not known yet.

        Returns:
            Its position in the epoch, or None if this worker is done with claiming: nothing is left, or the others will be
            faster, or the counters were lost; then what nobody has trained on is assigned anew.
        """
        position = self.draw(step_s, self.ledger.held)
        if position is not None:
            self.ledger.claim(position)
        return position

    def draw(self, step_s: float | None, held: int) -> int | None:
        """Like :meth:`claim`, without noting it in the ledger, which may be in use by another thread meanwhile.

        Args:
            step_s: this worker's time a batch in seconds; None if it is not known yet.
            held: batches that this worker holds.
        """
        is_first, self._has_drawn = not self._has_drawn, True
        if not self.is_lost:
            try:
                return perform(self.protocol.next(step_s, held), self._do)
            except StoreLostError:
                self.is_lost = True
        return self._place if is_first else None  # the one that it is sure of: each worker has to reach the epoch's end

    @property
    def left_early(self) -> bool:
        """Whether this worker has left batches to others."""
        return self.protocol.left_early

    @property
    def taken(self) -> int:
        """Batches that all workers have claimed, as far as this one knows."""
        return self.batches - self.protocol.remaining

    def first_unclaimed(self) -> int | None:
        """The first of the positions that nobody has claimed; None if the counter was lost.

        Meaningful while nobody claims, and once every worker has its first batch.
        """
        if self.is_lost:
            return None
        try:
            return min(self.batches, self._workers + self._store.add(f"{self._key}/next", 0))
        except StoreLostError:
            self.is_lost = True
            return None

    def _do(self, effect: Tell | Consult | Leave | Advance) -> Any:
        """What the protocol asks for; it says what each effect is."""
        match effect:
            case Tell():
                self._speeds.tell(effect)
            case Consult():
                if effect.dead:
                    self._look_for_dead()
                return self._look()
            case Leave():
                # Where one has died that can be wrong for a moment; what nobody takes is handed out again after the
                # synchronisation.
                left = self._store.add(f"{self._key}/left", effect.term) + self._lost
                stays = self._speeds.own.rates.read(left)[0] >= self._workers
                if not stays:
                    self._speeds.leave(self._key)
                return stays
            case Advance():
                return self._workers + self._store.add(f"{self._key}/next", 1) - 1
        return None

    def _look(self) -> Seen:
        """The three counters in one round trip, once it is known that all are set."""
        if self._all_set:
            taken, left, rates = map(int, self._store.multi_get(self._counters))
        else:
            taken, left, rates = (self._store.add(key, 0) for key in self._counters)
            self._all_set = True
        return Seen(max(0, self.batches - self._workers - taken), left + self._lost, rates)

    def _look_for_dead(self) -> None:
        gone = self._gone()
        terms = (self._speeds.term_of(rank, self._key) for rank in gone - self._known_gone)
        self._lost += sum(term for term in terms if term is not None)
        self._known_gone |= gone
