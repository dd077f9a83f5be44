"""What a worker is called, also when ranks change and processes come back."""

from __future__ import annotations

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
        """The name for people.

        >>> WorkerId(0, 1).spoken, WorkerId(0, 2).spoken
        ('rank 0', 'rank 0 (second start)')
        """
        ordinals = {2: "second", 3: "third", 4: "fourth"}
        again = "" if self.incarnation == 1 else f" ({ordinals.get(self.incarnation, f'{self.incarnation}th')} start)"
        return f"rank {self.initial_rank}{again}"
