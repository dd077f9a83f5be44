"""How often a worker starts exchanges.

AD-PSGD (Lian et al. 2018, arXiv 1710.06952) averages once in a step. Whose step? A slow worker that started one exchange in a
step of its own would mix less than everybody else, so the pace is its neighbourhood's.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

_BACKOFF_S = (0.0005, 0.05)
_STEPS = 64  # of which a step time is the mean; a mean of m is off by about the variance over m


def backoff_s(refusals: int) -> float:
    """The longest wait after so many refusals in a row, in seconds; the initiator draws uniformly below it.

    It doubles from half a millisecond to 50 ms: a busy worker is free again after an exchange, which may be short or long.

    >>> [backoff_s(refusals) for refusals in (0, 1, 2, 5000)]
    [0.0005, 0.001, 0.002, 0.05]
    """
    shortest_s, longest_s = _BACKOFF_S
    doublings = min(refusals, math.ceil(math.log2(longest_s / shortest_s)))  # 2.0**1024 is no float
    return min(shortest_s * 2.0**doublings, longest_s)


class Pace:
    """When the next exchange is due: one start per step time of the neighbourhood, over the rate.

    A worker's step time is the mean of its last 64 steps, so that whatever their law there is one exchange a step on the
    average; with their median there would be 1.4 where step times are exponential. A slow worker mixes at its neighbours' pace:
    that is the lower median of the known step times, so that in a pair the faster one sets it. While none is known, one
    exchange a session and no more. Reads no clock and takes no lock.

    Attributes:
        own_step_s: mean seconds a step of this worker, 0 if not known.
        neighbours_step_s: the lower median of the known step times of this worker and its neighbours; 0 if none is known.
    """

    def __init__(self) -> None:
        self.own_step_s = 0.0
        self.neighbours_step_s = 0.0
        self._peer_step_s: dict[int, float] = {}
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._started_s: float | None = None  # start of the last exchange that this worker began in this session
        self._not_before_s = 0.0  # after a refusal

    def step(self, seconds: float) -> None:
        """Note that this worker has made a step, which took so long."""
        self._steps_s.append(seconds)
        self.own_step_s = statistics.fmean(self._steps_s)
        self._compare()

    def peer_step(self, peer: int, seconds: float) -> None:
        """Note a neighbour's step time, as it has told it; 0 if it does not know it yet."""
        if self._peer_step_s.get(peer) != seconds:
            self._peer_step_s[peer] = seconds
            self._compare()

    def begin_session(self) -> None:
        """Begin a session, whose first exchange is due at once."""
        self._started_s = None
        self._not_before_s = 0.0

    def start(self, at_s: float) -> None:
        """Note the start of an exchange; the next one is due an interval later."""
        self._started_s = at_s

    def draw_again(self, at_s: float) -> None:
        """Note that a request was refused: the start that it was for is still due, but not before ``at_s``."""
        self._started_s = None
        self._not_before_s = at_s

    def next_start_s(self, rate: float) -> float:
        """When to start the next exchange, given the exchanges to start in a step of the neighbourhood."""
        paced_s = 0.0 if self._started_s is None else self._started_s + self._interval_s(rate)
        return max(paced_s, self._not_before_s)

    def _interval_s(self, rate: float) -> float:
        return self.neighbours_step_s / rate if self.neighbours_step_s > 0.0 and rate > 0.0 else math.inf

    def _compare(self) -> None:
        known = [step_s for step_s in (self.own_step_s, *self._peer_step_s.values()) if step_s > 0.0]
        self.neighbours_step_s = statistics.median_low(known) if known else 0.0
