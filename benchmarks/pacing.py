"""Batches of a fixed length in a plain loop, as ``ClusterEmulator`` makes them in Lightning's."""

from __future__ import annotations

import time


class Pacer:
    """Pads a worker's batches; a batch that is late by itself is not made up for.

    Args:
        period_s: from the call in one batch to the call in the next, everything that the loop does included.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._last_s = time.monotonic()

    def wait(self) -> None:
        """Sleep until the period is over. Call it before the backward pass, which is where others are waited for."""
        due_s = max(time.monotonic(), self._last_s + self._period_s)
        while (left_s := due_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self._last_s = due_s
