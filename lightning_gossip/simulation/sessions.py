"""Who trains on what between two rendezvous.

Shared epochs are claimed as the runtime does it (:mod:`lightning_gossip.algorithm.work`): one position of the epoch is each
worker's own, the rest are claimed from one counter, ``lookahead`` batches ahead of the one in training, by the claim rule.
Two idealisations: a claim takes no time, and every worker's step time is known to all at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_gossip.algorithm.laws import FloatArray
from lightning_gossip.algorithm.work import Ledger, check_enough_batches, may_claim

_TIE = 1e-8  # relative; the rule's own tolerance and the rounding of its T* are far within it


class Task(NamedTuple):
    """One step's work: its batch as sample indices, None without a data set, and how many samples they are."""

    batch: Sequence[int] | None
    size: int


class Session(ABC):
    """The work between two rendezvous."""

    @abstractmethod
    def next(self, rank: int, step_s: float | None) -> Task | None:
        """What a worker trains on next; None if it is done.

        Args:
            rank: the worker's.
            step_s: its measured step time, None if not known yet.
        """

    def stepped(self, rank: int) -> None:  # noqa: B027 - only a shared epoch keeps account
        """A worker has trained on its task."""

    def lost(self, rank: int) -> None:  # noqa: B027
        """A worker has failed; what it holds is lost."""


class FreeSession(Session):
    """So many steps of each worker.

    Args:
        number: of steps.
        size: samples of a batch.
        samples: of the data set; None without one.
        generators: of the batches, by rank.
    """

    def __init__(self, number: int, size: int, samples: int | None, generators: Sequence[np.random.Generator]) -> None:
        self._left = [number] * len(generators)
        self._size = size
        self._samples = samples
        self._generators = generators

    def next(self, rank: int, step_s: float | None) -> Task | None:
        """See :meth:`Session.next`."""
        if not self._left[rank]:
            return None
        self._left[rank] -= 1
        if self._samples is None:
            return Task(None, self._size)
        return Task(self._generators[rank].integers(self._samples, size=self._size).tolist(), self._size)


class EqualShares(Session):
    """Every n-th batch of the epoch, as many for each worker; the first ones again where it does not come out even."""

    def __init__(self, tasks: Sequence[Task], workers: int) -> None:
        self._tasks = tasks
        self._workers = workers
        self._share = math.ceil(len(tasks) / workers)
        self._taken = [0] * workers

    def next(self, rank: int, step_s: float | None) -> Task | None:
        """See :meth:`Session.next`."""
        if self._taken[rank] == self._share:
            return None
        position = rank + self._taken[rank] * self._workers
        self._taken[rank] += 1
        return self._tasks[position % len(self._tasks)]


class SharedEpoch(Session):
    """Every worker claims the next batch, unless others would be done with it sooner.

    Args:
        tasks: of the epoch, by position.
        members: the workers that take part, by rank; each is sure of one batch.
        speeds_s: everybody's step time, NaN where it is not known; kept from epoch to epoch, and changed.
        lookahead: see :class:`Epochs`.

    Attributes:
        left_early: the workers that have left batches to faster ones.
    """

    def __init__(self, tasks: Sequence[Task], *, members: Sequence[int], speeds_s: list[float], lookahead: int) -> None:
        check_enough_batches(len(tasks), len(members))
        self.left_early: set[int] = set()
        self._tasks = tasks
        self._lookahead = lookahead
        self._speeds_s = speeds_s
        self._places = {rank: place for place, rank in enumerate(members)}
        self._times_s = [speeds_s[rank] for rank in members]  # what the rule sees; infinite for those that have left
        self._times = np.array(self._times_s)
        self._next = len(members)  # the first positions are the members' own
        self._ledgers = {rank: Ledger() for rank in members}
        self._begun: set[int] = set()
        self._done: set[int] = set()
        self._known = sum(not math.isnan(time_s) for time_s in self._times_s)
        self._rate = math.fsum(1.0 / time_s for time_s in self._times_s if time_s > 0.0)

    def next(self, rank: int, step_s: float | None) -> Task | None:
        """See :meth:`Session.next`."""
        ledger = self._ledgers[rank]
        if rank not in self._begun:
            self._begun.add(rank)
            ledger.claim(self._places[rank])
            for _ in range(self._lookahead - 1):
                self._claim(rank, step_s)
        if not ledger.held:
            return None
        self._claim(rank, step_s)
        return self._tasks[ledger.current]

    def stepped(self, rank: int) -> None:
        """See :meth:`Session.stepped`."""
        self._ledgers[rank].step()

    def lost(self, rank: int) -> None:
        """See :meth:`Session.lost`."""
        if rank in self._places and rank not in self._done:
            self._done.add(rank)
            self._set_time(rank, math.inf)

    @property
    def remaining(self) -> int:
        """Batches that nobody has claimed."""
        return len(self._tasks) - self._next

    def _claim(self, rank: int, step_s: float | None) -> None:
        if rank in self._done:
            return
        if step_s is not None:
            self._speeds_s[rank] = step_s
            self._set_time(rank, step_s)
        others_claim = len(self._done) < len(self._places) - 1  # the last one never leaves
        if self.remaining and (not others_claim or self._may(rank, step_s)):
            self._ledgers[rank].claim(self._next)
            self._next += 1
            return
        if self.remaining:
            self.left_early.add(rank)
        self._done.add(rank)
        self._set_time(rank, math.inf)

    def _may(self, rank: int, step_s: float | None) -> bool:
        """The claim rule, asked in full only where the answer is open.

        T* is at least remaining / Σ 1/p_j, so where that alone allows the claim the rule does too; it takes as long as there
        are workers, and an epoch has most of its claims far from its end. Near the end, whether T* is above or below a time is
        seen from how many batches could be done by then; the bisection for T* itself is left for what is a tie.
        """
        held = self._ledgers[rank].held
        if step_s is not None:
            own_s = (held + 1) * step_s
            if own_s * self._most_rate() * (1.0 + 1e-9) <= self.remaining:
                return True
            if self._known == len(self._times_s):
                holding = self._holding(rank, held)
                if self._done_by(own_s * (1.0 - _TIE), holding) >= self.remaining:
                    return False
                if self._done_by(own_s * (1.0 + _TIE), holding) < self.remaining:
                    return True
        return may_claim(
            held=held,
            own_step=step_s,
            remaining=self.remaining,
            claimed=self._claimed,
            step_times=self._times_s,
            rank=self._places[rank],
            lookahead=self._lookahead,
        )

    @property
    def _claimed(self) -> int:
        return len(self._tasks) - self.remaining

    def _holding(self, rank: int, held: int) -> FloatArray:
        """held_j as the rule takes it: this worker's own, and of the others what they hold on the average."""
        others = max(1, len(self._times_s) - 1)
        holding = np.full(len(self._times_s), min(self._lookahead + 0.5, (self._claimed - held) / others))
        holding[self._places[rank]] = held
        return holding

    def _done_by(self, time_s: float, holding: FloatArray) -> float:
        """Σ_j max(0, ⌊T/p_j − held_j⌋), of those that still claim."""
        return float(np.maximum(np.floor(time_s / self._times - holding), 0.0).sum())

    def _most_rate(self) -> float:
        """Σ 1/p_j of those that still claim; where one is not known, the fastest known one's."""
        unknown = len(self._times_s) - self._known
        if not unknown:
            return self._rate
        return self._rate + unknown / min((p for p in self._times_s if not math.isnan(p)), default=math.nan)

    def _set_time(self, rank: int, time_s: float) -> None:
        place = self._places[rank]
        before_s = self._times_s[place]
        if math.isnan(before_s):
            self._known += 1
        else:
            self._rate -= 1.0 / before_s
        self._times_s[place] = self._times[place] = time_s
        self._rate += 1.0 / time_s
