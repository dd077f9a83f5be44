"""The clock, and the record of who did what when. Only this package reads a clock."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_gossip.algorithm.step_timer import Activity
from lightning_gossip.runtime.chrome_trace import write_trace

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

    def save(self, path: str | os.PathLike[str], *, rank: int = 0) -> Path:
        """Write ``timeline.json`` or the like, which https://ui.perfetto.dev opens; returns the file.

        Args:
            path: of the file.
            rank: of the worker, for its name. Times begin at its first interval.
        """
        return write_trace({rank: self.intervals()}, path)


@dataclass
class Deadline:
    """A point in time that a wait does not outlast."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Make a deadline that is ``seconds`` from now."""
        return cls(now_s() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - now_s())
