"""How long to wait for a store that may only be slow: as long as those that have answered took, with room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_RECENT = 8  # answers that count
_ROOM = 4.0  # times the slowest of them


class Patience:
    """A deadline of answers that follows those that have come. On a machine where all are quick it stays the least.

    The time of one that came after it was given up counts too: whoever asks again waits longer.

    Args:
        now_s: the clock, in seconds.
        least_s: the deadline while answers are quick, in seconds.
        most_s: the longest one, in seconds.

    >>> clock = iter([0.0, 0.01, 10.0, 12.0])
    >>> patience = Patience(lambda: next(clock), least_s=3.0, most_s=30.0)
    >>> with patience.measured():
    ...     pass
    >>> patience.answer_s
    3.0
    >>> with patience.measured():
    ...     pass
    >>> patience.answer_s
    8.0
    """

    def __init__(self, now_s: Callable[[], float], *, least_s: float, most_s: float) -> None:
        self._now_s = now_s
        self._least_s, self._most_s = least_s, max(least_s, most_s)
        self._took_s: deque[float] = deque(maxlen=_RECENT)

    @property
    def answer_s(self) -> float:
        """The deadline of the next answer, in seconds."""
        return min(self._most_s, max(self._least_s, _ROOM * max(self._took_s, default=0.0)))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Note how long an answer has taken, unless what is inside raises."""
        began_s = self._now_s()
        yield
        self._took_s.append(self._now_s() - began_s)
