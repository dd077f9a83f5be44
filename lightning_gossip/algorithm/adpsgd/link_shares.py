"""How much of its time a worker spends on slow links.

Where links differ, uniform draws give each link the same number of exchanges, and nearly all of the time to the slowest: one at
a fiftieth of the others' rate leaves the workers at its ends a twenty-fifth of their exchanges. So what is shared is *time*. A
link is slow for a worker if an exchange over it takes more than twice the median of its links; a worker spends at most

    ¼ of its exchange time     on slow links

waits for an answer included, exchanges that it started or answered alike. It keeps a credit in seconds: each second on another
link earns ⅓, and a second on a slow one costs 1. A slow link is drawn, and a request over it accepted, when the credit covers
the exchange; more than one cannot be saved up. What is slow shows beside others only, so links that were never measured are
drawn first, and what was spent meanwhile is owed afterwards.

A credit that only exchanges earn would never grow where the other neighbours are away, and the graph would fall apart. So time
without an exchange earns too, 1/16 a second: whatever happens, each link is used again after sixteen times as long as it
takes, and the graph of those that average is connected over time. An exchange mixes a pair by a symmetric doubly stochastic
matrix, whichever pair it is and whenever: the mean of all models stays.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

_SLOW = 2.0  # times the median
_SHARE = 0.25
_EARNED = _SHARE / (1.0 - _SHARE)  # by a second on a link that is not slow
_EARNED_IDLE = 1.0 / 16.0  # by a second without an exchange
_MOST_UNSETTLED = 100  # a neighbour may never exchange anything
_NEW_SHARE = 0.2  # of the last exchange in the average time of a link


class LinkShares:
    """What one worker has measured of its links, and may spend on the slow ones. Reads no clock and takes no lock.

    Args:
        neighbours: the peers at the other ends.

    Attributes:
        neighbours: the present ones, whose median counts.
        times_s: mean seconds of an exchange, by peer.

    >>> links = LinkShares([1, 2, 3])
    >>> for peer, seconds in ((1, 1.0), (2, 1.0), (3, 9.0)):
    ...     links.took(peer, seconds, at_s=0.0)
    >>> links.is_slow(3), links.missing_s(3, at_s=0.0) > 0.0, links.missing_s(1, at_s=0.0)
    (True, True, 0.0)
    >>> links.missing_s(3, at_s=1000.0)
    0.0
    """

    def __init__(self, neighbours: Iterable[int]) -> None:
        self.neighbours = tuple(neighbours)
        self.times_s: dict[int, float] = {}
        self._credit_s = 0.0
        self._unsettled: list[tuple[int, float]] = []  # peers and seconds, while there are links that were never measured
        self._known_s: float | None = None  # until when the credit is reckoned

    def took(self, peer: int, seconds: float, *, at_s: float, waited_s: float = 0.0) -> None:
        """Note how long an exchange took that has come to its end.

        Args:
            peer: the neighbour.
            seconds: of the exchange.
            at_s: its end.
            waited_s: for the answer, before it.
        """
        before_s = self.times_s.get(peer, seconds)
        self.times_s[peer] = before_s + _NEW_SHARE * (seconds - before_s)
        spent_s = seconds + waited_s
        since_s = 0.0 if self._known_s is None else at_s - self._known_s
        self._earn(_EARNED_IDLE * max(0.0, since_s - spent_s), at_s)
        self._unsettled.append((peer, spent_s))
        if self.unmeasured and len(self._unsettled) < _MOST_UNSETTLED:
            return
        for other, other_s in self._unsettled:
            if self.is_slow(other):
                self._credit_s -= other_s
            else:
                self._earn(_EARNED * other_s, at_s)
        self._unsettled = []

    def broke(self, peer: int, seconds: float, *, at_s: float) -> None:
        """Note that an exchange was given up after so many seconds: it takes that long at least."""
        self.took(peer, max(seconds, self.times_s.get(peer, 0.0)), at_s=at_s)

    @property
    def unmeasured(self) -> bool:
        """Whether there is a neighbour that nothing is known of; such ones are to be drawn first."""
        return any(neighbour not in self.times_s for neighbour in self.neighbours)

    def is_slow(self, peer: int) -> bool:
        """Whether an exchange with a peer takes more than twice the median; one that was never measured does not."""
        known = [self.times_s[neighbour] for neighbour in self.neighbours if neighbour in self.times_s]
        return bool(known) and self.times_s.get(peer, 0.0) > _SLOW * statistics.median_low(known)

    def missing_s(self, peer: int, *, at_s: float) -> float:
        """How long until an exchange with a peer may begin, if this worker is in others until then; 0 if it may."""
        if not self.is_slow(peer):
            return 0.0
        if self._known_s is not None:
            self._earn(_EARNED_IDLE * (at_s - self._known_s), at_s)
        return max(0.0, self.times_s[peer] - self._credit_s) / _EARNED

    def _earn(self, seconds: float, at_s: float) -> None:
        dearest_s = max((self.times_s[peer] for peer in self.neighbours if peer in self.times_s), default=math.inf)
        self._credit_s = min(self._credit_s + seconds, dearest_s)
        self._known_s = at_s
