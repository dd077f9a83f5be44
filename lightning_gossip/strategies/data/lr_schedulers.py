"""Learning rate schedules by step that follow the work done by all workers.

With shared work a fast worker makes more steps than a slow one. If each stepped its own schedule, learning rates would differ
and the fast one would step past the end of a OneCycleLR. So such a schedule is moved to the global count instead. An epoch has
as many steps as ``estimated_stepping_batches`` counts for it, s = ⌈⌈batches / workers⌉ / accumulation⌉, and when all workers
have taken a share of it the count is ⌊share · s⌋ further than at its beginning. With equal static shares that is each worker's
own count, and it differs only after a resume on another number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any


class GlobalCountScheduler:
    """Stands in for a scheduler with ``interval="step"``; ``step()`` moves it to the global count, forwards only.

    Everything else is the scheduler's own, its state included.

    Args:
        scheduler: the user's.
        count: the global count, in steps, of the batch at hand.
        frequency: Lightning's ``frequency``: the schedule moves once in so many steps.

    Attributes:
        scheduler: the user's.
        moved: how often the schedule has been moved.
    """

    def __init__(self, scheduler: Any, count: Callable[[], int], frequency: int) -> None:
        self.scheduler = scheduler
        self._count = count
        self._frequency = frequency
        self.moved = 0

    def start_from(self, count: int) -> None:
        """Note that the schedule stands where ``count`` steps have led it: more than 0 after loading a checkpoint."""
        self.moved = count // self._frequency

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move to the global count. Arguments go to the scheduler unchanged: who passes them counts by himself."""
        if args or kwargs:
            self.scheduler.step(*args, **kwargs)
            return
        target = self._count() // self._frequency
        while self.moved < target:
            self.scheduler.step()
            self.moved += 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "scheduler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.scheduler, name)


class GlobalCount:
    """How many steps each worker would have made if all were equally fast, and the schedules that follow it.

    Args:
        batches: of a whole epoch, of all workers.
        workers: among which they are reckoned to be dealt out, also when fewer or more are there later on.
    """

    def __init__(self, batches: int, workers: int) -> None:
        self._workers: int | None = workers
        self._batches = math.ceil(batches / workers)  # of each worker if all were equally fast
        self._epoch_began = 0
        self._share = Fraction(0)
        self._accumulation = 1
        self._schedulers: list[GlobalCountScheduler] = []

    def __call__(self) -> int:
        """The count."""
        return self._epoch_began + self.steps(self._share)

    def resize(self, batches: int) -> None:
        """Set how many batches, of all workers, the epoch has that begins or goes on."""
        if self._workers is not None:
            self._batches = math.ceil(batches / self._workers)

    def steps(self, share: Fraction) -> int:
        """Steps in a share of an epoch, rounded down."""
        return math.floor(share * math.ceil(self._batches / self._accumulation))

    def begin(self, count: int, configs: Sequence[Any]) -> None:
        """Begin the fit, at an epoch's beginning.

        Args:
            count: steps made before.
            configs: of Lightning's schedulers; those with ``interval="step"`` follow the count from now on.
        """
        self._epoch_began = count
        for config in configs:
            if config.interval == "step":
                own = config.scheduler  # or one that followed the count of a tuner's fit
                own = own.scheduler if isinstance(own, GlobalCountScheduler) else own
                scheduler = GlobalCountScheduler(own, self, config.frequency)
                scheduler.start_from(count)
                config.scheduler = scheduler
                self._schedulers.append(scheduler)

    def advance(self, share: Fraction, accumulation: int) -> None:
        """Set the share of the epoch that all workers have taken together, with the batch at hand; schedules move when asked.

        Args:
            share: in [0, 1].
            accumulation: batches a step in this epoch.
        """
        self._share, self._accumulation = share, accumulation

    def end_epoch(self) -> None:
        """End the epoch, as all workers do: schedules stand at the same count everywhere."""
        self._epoch_began, self._share = self._epoch_began + self.steps(Fraction(1)), Fraction(0)
        for scheduler in self._schedulers:
            scheduler.step()

    def state(self, share: Fraction) -> dict[str, Any]:
        """For a checkpoint that is written when this share of the epoch has been trained on."""
        return {
            "batches": self._batches,
            "workers": self._workers,
            "accumulation": self._accumulation,
            "epoch_began": self._epoch_began,
            "count": self._epoch_began + self.steps(share),
            "moved": [scheduler.moved for scheduler in self._schedulers],
        }

    def load(self, state: dict[str, Any], share: Fraction) -> None:
        """Restore a saved state, after :meth:`begin`.

        Steps stay as long as they were, also on another number of workers: the schedules' own state, such as OneCycleLR's
        ``total_steps``, counts in them.

        Args:
            state: of a checkpoint.
            share: of the epoch that has been trained on; 0 if it begins anew.
        """
        self._batches, self._accumulation = state["batches"], state["accumulation"]
        self._workers = state.get("workers")  # not told by older checkpoints
        self._share = share
        self._epoch_began = state["count"] - self.steps(share) if share else state["epoch_began"]
        for scheduler, moved in zip(self._schedulers, state["moved"], strict=False):
            scheduler.moved = moved
