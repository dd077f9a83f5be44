"""What a worker is called, also when ranks change and processes come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class WorkerId(NamedTuple):
    """Identity of one process of the job.

    Args:
        initial_rank: the rank that it was started with; stays when ranks change.
        incarnation: 1 for the first process with this rank, one more for each that came back.
    """

    initial_rank: int
    incarnation: int

    def __str__(self) -> str:
        """The name in the store's keys."""
        return f"{self.initial_rank}.{self.incarnation}"

    @property
    def spoken(self) -> str:
        """Name of the worker in log lines.

        >>> WorkerId(0, 1).spoken, WorkerId(0, 2).spoken
        ('rank 0', 'rank 0 (second start)')
        """
        ordinals = {2: "second", 3: "third", 4: "fourth"}
        again = "" if self.incarnation == 1 else f" ({ordinals.get(self.incarnation, f'{self.incarnation}th')} start)"
        return f"rank {self.initial_rank}{again}"


class Span(NamedTuple):
    """Workers with consecutive initial ranks and one incarnation.

    Args:
        first: initial rank of the first.
        size: number of workers.
        incarnation: of all.
    """

    first: int
    size: int
    incarnation: int


def spans_of(workers: Sequence[WorkerId]) -> tuple[Span, ...]:
    """Workers in their order, written shortly: where all tell all of them, the names of thousands would be too much.

    >>> spans_of([WorkerId(0, 1), WorkerId(1, 1), WorkerId(3, 1), WorkerId(2, 2)])
    (Span(first=0, size=2, incarnation=1), Span(first=3, size=1, incarnation=1), Span(first=2, size=1, incarnation=2))
    """
    starts = [place for place, worker in enumerate(workers) if place == 0 or not _follows(worker, workers[place - 1])]
    ends = [*starts, len(workers)][1:]
    return tuple(
        Span(workers[start].initial_rank, end - start, workers[start].incarnation)
        for start, end in zip(starts, ends, strict=True)
    )


def _follows(worker: WorkerId, before: WorkerId) -> bool:
    return worker == (before.initial_rank + 1, before.incarnation)


def workers_of(spans: Sequence[Span]) -> tuple[WorkerId, ...]:
    """The workers of spans that :func:`spans_of` has written.

    >>> workers_of([Span(0, 2, 1), Span(3, 1, 2)]) == (WorkerId(0, 1), WorkerId(1, 1), WorkerId(3, 2))
    True
    """
    return tuple(WorkerId(rank, span.incarnation) for span in spans for rank in range(span.first, span.first + span.size))
