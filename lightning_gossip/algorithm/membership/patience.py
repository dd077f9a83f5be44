"""How long to wait for a store that may only be slow: as long as those that have answered took, with room."""

from __future__ import annotations

from collections import deque

_RECENT = 8  # answers that count
_ROOM = 4.0  # times the slowest of them


class Patience:
    """A deadline of answers that follows those that have come. On a machine where all are quick it stays the least.

    The time of one that came after it was given up counts too: whoever asks again waits longer.

    Args:
        least_s: the deadline while answers are quick, in seconds.
        most_s: the longest one, in seconds.

    >>> patience = Patience(least_s=3.0, most_s=30.0)
    >>> patience.answer_s
    3.0
    >>> patience.answered(2.0)
    >>> patience.answer_s
    8.0
    """

    def __init__(self, *, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = least_s, max(least_s, most_s)
        self._took_s: deque[float] = deque(maxlen=_RECENT)

    @property
    def answer_s(self) -> float:
        """The deadline of the next answer, in seconds."""
        return min(self._most_s, max(self._least_s, _ROOM * max(self._took_s, default=0.0)))

    def answered(self, took_s: float) -> None:
        """Note that an answer has come after so many seconds."""
        self._took_s.append(took_s)
