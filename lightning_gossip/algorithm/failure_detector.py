"""Who is alive, told from heartbeats: a small state machine without a clock, a thread or a store.

A worker beats by raising its own counter, about twice a second. Everybody else notes when it last saw the counter change, on
its own clock, so clocks need not agree. Silence has two meanings, and only evidence tells them apart:

    silent              no beat for ``silent_s``: frozen, overloaded, or dead. Not drawn as a partner, still a member.
    dead                silent for ``dead_s``; or silent for ``silent_s`` *and* a connection with it was seen to close; or its
                        end was seen (its launcher, or a new process with its rank).

A closed connection alone is not enough: a neighbour that has lost patience closes it too. A dead worker stays dead.

An observer that was itself stopped has heard nobody, and it is not their fault: silence counts only while it was listening. Nor
is it the fault of one that it did not listen to, since they were not in one job for a while.

Silence is the death of a member, because the others go on without it. One that waits to be taken in is only not taken in while
it is silent.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class Verdict(Enum):
    """About one worker, at one moment."""

    ALIVE = "alive"
    SILENT = "silent"
    DEAD = "dead"


class Liveness(Generic[W]):
    """What one worker knows of the others.

    Args:
        silent_s: seconds without a beat after which a worker is silent; several beats long.
        dead_s: seconds without a beat after which it is dead, whatever else is known.

    >>> liveness = Liveness[int](silent_s=2.0, dead_s=30.0)
    >>> for at_s in (0.0, 1.0, 2.0, 3.0): liveness.heard(1, beat=7, at_s=at_s)
    >>> liveness.verdict(1).value
    'silent'
    >>> liveness.broke(1)
    >>> liveness.verdict(1).value
    'dead'
    """

    def __init__(self, *, silent_s: float, dead_s: float) -> None:
        self.silent_s = silent_s
        self.dead_s = dead_s
        self._beats: dict[W, tuple[int, float]] = {}  # the last counter, and when it was first seen
        self._heard_s: dict[W, float] = {}  # when it was listened to last
        self._broken: dict[W, int] = {}  # beats that a connection's end has outlived so far
        self._dead: set[W] = set()  # of silence
        self._ended: set[W] = set()

    def heard(self, worker: W, *, beat: int, at_s: float, is_member: bool = True) -> None:
        """Its counter stands at ``beat`` now; to be called several times in ``silent_s`` while it is listened to."""
        stopped_s = at_s - self._heard_s.get(worker, at_s)
        self._heard_s[worker] = at_s
        known = self._beats.get(worker)
        if known is not None and known[0] == beat:
            if stopped_s >= self.silent_s:
                self._beats[worker] = (beat, known[1] + stopped_s)
            return
        self._beats[worker] = (beat, at_s)
        if not is_member:
            self._dead.discard(worker)
        if worker in self._broken:
            # the first beat seen after the end of a connection may be from before it, the second is not
            self._broken[worker] += 1
            if self._broken[worker] == 2:
                del self._broken[worker]

    def broke(self, worker: W) -> None:
        """Somebody saw a connection with it close."""
        self._broken[worker] = 0

    @property
    def broken(self) -> set[W]:
        """Workers whose connections were seen to close, and that have not beaten since."""
        return set(self._broken)

    def ended(self, worker: W) -> None:
        """Its end was seen."""
        self._ended.add(worker)

    def verdict(self, worker: W) -> Verdict:
        """What is to be thought of it; one that was never heard is silent and not yet born, so not dead."""
        if worker in self._ended or worker in self._dead:
            return Verdict.DEAD
        if worker not in self._beats:
            return Verdict.SILENT
        silence_s = self._heard_s[worker] - self._beats[worker][1]
        if silence_s >= self.dead_s or (silence_s >= self.silent_s and worker in self._broken):
            self._dead.add(worker)
            return Verdict.DEAD
        return Verdict.SILENT if silence_s >= self.silent_s else Verdict.ALIVE


class Patience:
    """How long to wait for a peer: a deadline that follows the measured times, as TCP's does (RFC 6298).

    With t̄ the smoothed time of an exchange and v̄ its smoothed deviation the deadline is t̄ + 4 v̄, at least ``floor_s`` and at
    most ``ceiling_s``. It doubles after each wait in vain and is reckoned anew after a success, so that a peer that has become
    slow is given more time and never shut out for ever.

    Args:
        floor_s: shortest deadline, in seconds.
        ceiling_s: longest one, and the first, before anything was measured.

    >>> patience = Patience(floor_s=1.0, ceiling_s=60.0)
    >>> patience.deadline_s
    60.0
    >>> for _ in range(20): patience.took(2.0)
    >>> round(patience.deadline_s)
    2
    >>> patience.in_vain(); patience.in_vain(); round(patience.deadline_s)
    8
    """

    def __init__(self, *, floor_s: float, ceiling_s: float) -> None:
        self._floor_s = min(floor_s, ceiling_s)
        self._ceiling_s = ceiling_s
        self._mean_s: float | None = None
        self._deviation_s = 0.0
        self._factor = 1.0

    def took(self, seconds: float) -> None:
        """An exchange ended well after so long."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
        else:
            self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4
            self._mean_s += (seconds - self._mean_s) / 8
        self._factor = 1.0

    def in_vain(self) -> None:
        """The deadline passed."""
        self._factor *= 2.0

    @property
    def deadline_s(self) -> float:
        """Seconds to wait from now."""
        if self._mean_s is None:
            return self._ceiling_s
        reckoned_s = max(self._floor_s, self._mean_s + 4 * self._deviation_s)
        return min(self._ceiling_s, reckoned_s * self._factor)
