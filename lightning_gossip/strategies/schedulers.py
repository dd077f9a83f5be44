"""Learning rate schedules by step that follow the work done by all workers.

With shared work a fast worker makes more steps than a slow one. If each stepped its own schedule, learning rates would differ
and the fast one would step past the end of a OneCycleLR. So such a schedule is moved to the global count instead: batches
taken by all workers ÷ (workers · accumulation).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class GlobalCountScheduler:
    """Stands in for a scheduler with ``interval="step"``; ``step()`` moves it to the global count, forwards only.

    Everything else is the scheduler's own, its state included.

    Args:
        scheduler: the user's.
        count: the global count, in steps, of the batch at hand.
        frequency: Lightning's ``frequency``: the schedule moves once in so many steps.
    """

    def __init__(self, scheduler: Any, count: Callable[[], int], frequency: int) -> None:
        self._scheduler = scheduler
        self._count = count
        self._frequency = frequency
        self._moved = 0

    def start_from(self, count: int) -> None:
        """The schedule stands where ``count`` steps have led it: 0 at the beginning, more after loading a checkpoint."""
        self._moved = count // self._frequency

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move to the global count. Arguments go to the scheduler unchanged: who passes them counts by himself."""
        if args or kwargs:
            self._scheduler.step(*args, **kwargs)
            return
        target = self._count() // self._frequency
        while self._moved < target:
            self._scheduler.step()
            self._moved += 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_scheduler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._scheduler, name)
