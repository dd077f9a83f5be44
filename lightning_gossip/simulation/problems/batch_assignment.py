"""Who trains on what between two synchronisation points.

Shared epochs are claimed by the runtime's protocol (:class:`~lightning_gossip.algorithm.work_sharing.Claims`), ``lookahead``
batches ahead of the one in training. One idealisation: a claim takes no time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.work_sharing import (
    Advance,
    Claims,
    Consult,
    Leave,
    Ledger,
    OwnRate,
    Seen,
    Tell,
    check_enough_batches,
)
from lightning_gossip.simulation.problems.label_skew import IntArray


class Task(NamedTuple):
    """The work of one step of a worker.

    Args:
        batch: sample indices; None without a data set.
        size: how many samples.
        parts: of an island, each rank's, by index; empty for a single worker, whose task it is.
    """

    batch: Sequence[int] | None
    size: int
    parts: tuple[Task, ...] = ()


def together(parts: Sequence[Task]) -> Task:
    """The work of one step of an island, from that of each of its ranks."""
    return Task(None, sum(part.size for part in parts), tuple(parts))


class Session(ABC):
    """The work between two synchronisation points."""

    @abstractmethod
    def next(self, rank: int, step_s: float | None) -> Task | None:
        """What a worker trains on next; None if it is done.

        Args:
            rank: the worker's.
            step_s: its measured step time, None if not known yet.
        """

    def stepped(self, rank: int) -> None:  # noqa: B027 - only a shared epoch keeps account
        """Note that a worker has trained on its task."""

    def lost(self, rank: int) -> None:  # noqa: B027
        """Note that a worker has failed."""

    @property
    def unfinished(self) -> list[Task]:
        """What nobody has trained on, of workers that have failed or left to one that did: to be handed out again."""
        return []


class FreeSession(Session):
    """So many steps of each worker.

    Args:
        number: of steps.
        size: samples of a batch.
        samples: of the data set; None without one.
        generators: of the batches, by rank.
        shares: by rank, the samples of each worker, where it has its own; None for all.
        island: ranks that step together.
    """

    def __init__(
        self,
        number: int,
        size: int,
        samples: int | None,
        generators: Sequence[np.random.Generator],
        shares: Sequence[IntArray] | None = None,
        *,
        island: int = 1,
    ) -> None:
        self._left = [number] * (len(generators) // island)
        self._island = island
        self._size = size
        self._samples = samples
        self._generators = generators
        self._shares = shares

    @override
    def next(self, rank: int, step_s: float | None) -> Task | None:
        if not self._left[rank]:
            return None
        self._left[rank] -= 1
        if self._island > 1:
            first = rank * self._island
            return together([self._task(mate) for mate in range(first, first + self._island)])
        return self._task(rank)

    def _task(self, rank: int) -> Task:
        if self._samples is None:
            return Task(None, self._size)
        if self._shares is not None:
            own = self._shares[rank]
            return Task(own[self._generators[rank].integers(len(own), size=self._size)].tolist(), self._size)
        return Task(self._generators[rank].integers(self._samples, size=self._size).tolist(), self._size)


class OwnShares(Session):
    """Each worker's own samples, as many batches for each; what a failed one has not trained on is lost with it.

    Args:
        batches: by rank.
    """

    def __init__(self, batches: Sequence[Sequence[Sequence[int]]]) -> None:
        self._batches = batches
        self._taken = [0] * len(batches)

    @override
    def next(self, rank: int, step_s: float | None) -> Task | None:
        number = self._taken[rank]
        if number == len(self._batches[rank]):
            return None
        self._taken[rank] += 1
        batch = self._batches[rank][number]
        return Task(batch, len(batch))


class EqualShares(Session):
    """Every n-th batch of the epoch, as many for each worker; the first ones again where it does not come out even.

    Args:
        tasks: of the epoch, by position.
        members: the workers that take part, by rank.
    """

    def __init__(self, tasks: Sequence[Task], members: Sequence[int]) -> None:
        self._tasks = tasks
        self._places = {rank: place for place, rank in enumerate(members)}
        self._share = math.ceil(len(tasks) / len(members))
        self._taken = dict.fromkeys(members, 0)
        self._stepped = dict.fromkeys(members, 0)
        self._lost: set[int] = set()

    @override
    def next(self, rank: int, step_s: float | None) -> Task | None:
        if self._taken[rank] == self._share:
            return None
        self._taken[rank] += 1
        return self._tasks[self._position(rank, self._taken[rank] - 1) % len(self._tasks)]

    @override
    def stepped(self, rank: int) -> None:
        self._stepped[rank] += 1

    @override
    def lost(self, rank: int) -> None:
        if rank in self._places:
            self._lost.add(rank)

    @property
    @override
    def unfinished(self) -> list[Task]:
        left = [self._position(rank, number) for rank in self._lost for number in range(self._stepped[rank], self._share)]
        return [self._tasks[position] for position in sorted(left) if position < len(self._tasks)]

    def _position(self, rank: int, number: int) -> int:
        return self._places[rank] + number * len(self._places)


class SharedEpoch(Session):
    """Every worker claims the next batch, unless others would be done with it sooner.

    Args:
        tasks: of the epoch, by position.
        members: the workers that take part, by rank; each is sure of one batch.
        own_rates: by rank, what the others know of each worker; kept from epoch to epoch, and changed.
        lookahead: see :class:`Epochs`.
    """

    def __init__(self, tasks: Sequence[Task], *, members: Sequence[int], own_rates: Sequence[OwnRate], lookahead: int) -> None:
        check_enough_batches(len(tasks), len(members))
        self._tasks = tasks
        self._lookahead = lookahead
        self._own_rates = own_rates
        self._next = len(members)  # the first positions are the members' own
        self._left = 0  # the sum of the rates of those that claim no more
        self._rates = sum(own_rates[rank].term for rank in members)  # and that of all
        self._ledgers = {rank: Ledger() for rank in members}
        self._claims = {
            rank: Claims(
                place=place,
                workers=len(members),
                batches=len(tasks),
                lookahead=lookahead,
                own_rate=own_rates[rank],
            )
            for place, rank in enumerate(members)
        }
        self._begun: set[int] = set()
        self._done: set[int] = set()
        self._lost: set[int] = set()
        self._places = {rank: place for place, rank in enumerate(members)}

    @override
    def next(self, rank: int, step_s: float | None) -> Task | None:
        ledger = self._ledgers[rank]
        if rank not in self._begun:
            self._begun.add(rank)
            for _ in range(self._lookahead):
                self._claim(rank, step_s)
        if not ledger.held:
            return None
        self._claim(rank, step_s)
        return self._tasks[ledger.current]

    @override
    def stepped(self, rank: int) -> None:
        self._ledgers[rank].step()

    @override
    def lost(self, rank: int) -> None:
        if rank not in self._claims:
            return
        self._lost.add(rank)
        if rank not in self._done:
            self._done.add(rank)
            self._left += self._own_rates[rank].term or 1

    @property
    @override
    def unfinished(self) -> list[Task]:
        if not self._lost:
            return []
        unclaimed = range(self._next, len(self._tasks))
        unbegun = [self._places[rank] for rank in self._lost - self._begun]
        held = [position for rank in self._lost for position in self._ledgers[rank].unstepped()]
        return [self._tasks[position] for position in sorted({*held, *unbegun, *unclaimed})]

    @property
    def remaining(self) -> int:
        """Batches that nobody has claimed."""
        return len(self._tasks) - self._next

    def _claim(self, rank: int, step_s: float | None) -> None:
        if rank in self._done:
            return
        position = perform(self._claims[rank].next(step_s, self._ledgers[rank].held), self._do)
        if position is None:
            self._done.add(rank)
        else:
            self._ledgers[rank].claim(position)

    def _do(self, effect: Tell | Consult | Leave | Advance) -> Any:
        """What the protocol asks for; it says what each effect is."""
        match effect:
            case Tell():
                self._rates += effect.change
            case Consult():
                return Seen(self.remaining, self._left, self._rates)
            case Leave():
                self._left += effect.term
                return self._own_rates[0].rates.read(self._left)[0] >= len(self._claims)
            case Advance():
                position, self._next = self._next, min(self._next + 1, len(self._tasks))
                return position
        return None
