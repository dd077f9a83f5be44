"""Step times and the record of who did what when. Only this package reads a clock."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

Activity = Literal["compute", "exchange", "wait"]

_MAX_INTERVALS = 200_000  # about 10 MB; older ones are dropped


def now_s() -> float:
    """Seconds on a clock that never jumps; its zero is arbitrary."""
    return time.monotonic()


class Interval(NamedTuple):
    """One stretch of one activity, in seconds of the wall clock (comparable between workers of one machine)."""

    activity: Activity
    start_s: float
    end_s: float
    peer: int | None = None


class Timeline:
    """What one worker did and when. Appending is atomic, so any thread may record."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._intervals: deque[Interval] = deque(maxlen=_MAX_INTERVALS)

    def record(self, activity: Activity, start_s: float, end_s: float, peer: int | None = None) -> None:
        """Add an interval given in :func:`now_s` seconds."""
        self._intervals.append(Interval(activity, start_s + self._offset, end_s + self._offset, peer))

    def intervals(self) -> list[Interval]:
        """All of them, in the order in which they ended."""
        return list(self._intervals)


class StepTimer:
    """Median time between steps, over the last few; a pause (validation, a synchronisation point) does not count as a step."""

    def __init__(self, window: int = 9) -> None:
        self._periods: deque[float] = deque(maxlen=window)
        self._last_s: float | None = None

    def pause(self) -> None:
        """Forget the last tick: what comes before the next one is not a step."""
        self._last_s = None

    def tick(self, at_s: float) -> float | None:
        """Note the end of a step; returns its length in seconds, or None if the start was not seen."""
        period = None if self._last_s is None else at_s - self._last_s
        if period is not None:
            self._periods.append(period)
        self._last_s = at_s
        return period

    @property
    def median_s(self) -> float | None:
        """Seconds a step, or None before the first whole one."""
        return statistics.median(self._periods) if self._periods else None


@dataclass
class Deadline:
    """A point in time that a wait does not outlast."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """``seconds`` from now."""
        return cls(now_s() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - now_s())
