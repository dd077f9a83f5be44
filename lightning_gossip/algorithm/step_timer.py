"""What a worker's time goes to, and how long its steps take, as it measures them itself."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Literal

Activity = Literal["compute", "exchange", "wait"]

_SHORTEST_S = 1e-12  # so that a rate is finite; late in a long run a shorter step is lost in the rounding of the time


class StepTimer:
    """Median time between steps, over the last few; a pause (validation, a synchronisation point) does not count as a step."""

    def __init__(self, window: int = 9) -> None:
        self._steps_s: deque[float] = deque(maxlen=window)
        self._last_s: float | None = None

    def begin(self, at_s: float | None = None) -> None:
        """Note that a step begins, at a time that may not be known: what was before is no step."""
        self._last_s = at_s

    def tick(self, at_s: float) -> float | None:
        """Note the end of a step; returns its length in seconds, or None if its beginning is not known."""
        step_s = None if self._last_s is None else max(at_s - self._last_s, _SHORTEST_S)
        if step_s is not None:
            self._steps_s.append(step_s)
        self._last_s = at_s
        return step_s

    @property
    def median_s(self) -> float | None:
        """Seconds a step, or None before the first whole one."""
        return statistics.median(self._steps_s) if self._steps_s else None
