"""Which workers are alive, told from heartbeats: a small state machine without a clock, a thread or a store.

A worker sends heartbeats by raising its own counter, about twice a second. Everybody else notes when it last saw the counter
change, on its own clock, so clocks need not agree. A late heartbeat has two causes, and only evidence tells them apart:

    suspected   no heartbeat for ``suspect_after_s``: frozen, overloaded, or ended. Not drawn as a partner, still a member.
    failed      no heartbeat for ``fail_after_s``; or suspected *and* a connection with it was lost; or its process was seen to
                end (by its launcher, by the kernel, or since there is a new process with its rank).

A lost connection alone is not enough: a neighbour whose deadline has passed closes it too. A failed worker stays failed.

An observer that was itself stopped must not count its own pause as other workers' silence: time without a heartbeat counts only
while it was listening. Nor does the time count in which it did not listen to a worker, since they were not in one job.

Members that fail are excluded for good, since the others go on without them. A worker that asks to join is only not admitted
while its heartbeats are late.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)
_NOTHING = -1  # in place of a counter


class Verdict(Enum):
    """The state of one worker, at one moment, as another one sees it."""

    ALIVE = "alive"
    SUSPECTED = "suspected"
    FAILED = "failed"


class FailureDetector(Generic[W]):
    """The states of all workers, as one of them sees them.

    Args:
        suspect_after_s: seconds without a heartbeat after which a worker is suspected; several heartbeats long.
        fail_after_s: seconds without a heartbeat after which it has failed, whatever else is known.

    >>> detector = FailureDetector[int](suspect_after_s=2.0, fail_after_s=30.0)
    >>> for at_s in (0.0, 1.0, 2.0, 3.0): detector.heard(1, count=7, at_s=at_s)
    >>> detector.verdict(1).value
    'suspected'
    >>> detector.connection_lost(1)
    >>> detector.verdict(1).value
    'failed'
    """

    def __init__(self, *, suspect_after_s: float, fail_after_s: float) -> None:
        self.suspect_after_s = suspect_after_s
        self.fail_after_s = fail_after_s
        self._heartbeats: dict[W, tuple[int, float]] = {}  # the last counter, and when it was first seen
        self._heard_s: dict[W, float] = {}  # when it was listened to last
        self._beating: set[W] = set()  # whose counter was seen to change
        self._connections_lost: dict[W, int] = {}  # heartbeats seen since then
        self._failed: set[W] = set()  # by late heartbeats
        self._processes_ended: set[W] = set()

    def heard(self, worker: W, *, count: int, at_s: float, is_member: bool = True) -> None:
        """Note that a worker's counter stands at ``count``; to be called several times in ``suspect_after_s``."""
        stopped_s = at_s - self._heard_s.get(worker, at_s)
        self._heard_s[worker] = at_s
        known = self._heartbeats.get(worker)
        if known is not None and known[0] == count:
            if stopped_s >= self.suspect_after_s:
                self._heartbeats[worker] = (count, known[1] + stopped_s)
            return
        self._heartbeats[worker] = (count, at_s)
        if known is not None and known[0] != _NOTHING:
            self._beating.add(worker)
        if not is_member:
            self._failed.discard(worker)
        if worker in self._connections_lost:
            # the first heartbeat seen after the end of a connection may be from before it, the second is not
            self._connections_lost[worker] += 1
            if self._connections_lost[worker] == 2:
                del self._connections_lost[worker]

    def heard_nothing(self, worker: W, *, at_s: float) -> None:
        """Note that a worker was listened to, and nothing was there: for one that was never heard, time counts from now."""
        self.heard(worker, count=self._heartbeats.get(worker, (_NOTHING, at_s))[0], at_s=at_s)

    def listen_anew(self) -> None:
        """Forget the heartbeats and who was late: from now on they come by another way. Whose process has ended stays so."""
        self._heartbeats.clear()
        self._heard_s.clear()
        self._beating.clear()
        self._failed.clear()

    def forget(self, worker: W) -> None:
        """Forget what a worker has sent: what is read next may be old."""
        self._heartbeats.pop(worker, None)
        self._heard_s.pop(worker, None)
        self._beating.discard(worker)

    def connection_lost(self, worker: W) -> None:
        """Note that somebody saw a connection with a worker close."""
        self._connections_lost[worker] = 0

    @property
    def connections_lost(self) -> set[W]:
        """Workers whose connections were seen to close, and that have sent no heartbeat since."""
        return set(self._connections_lost)

    def process_ended(self, worker: W) -> None:
        """Note that a worker's process was seen to end."""
        self._processes_ended.add(worker)

    def hears(self, worker: W) -> bool:
        """Whether a worker is alive and was seen to send a heartbeat: the first one that is read may be an old one."""
        return worker in self._beating and self.verdict(worker) is Verdict.ALIVE

    def verdict(self, worker: W) -> Verdict:
        """The state of a worker. One that was never heard is suspected and cannot fail: it has not started yet."""
        if worker in self._processes_ended or worker in self._failed:
            return Verdict.FAILED
        if worker not in self._heartbeats:
            return Verdict.SUSPECTED
        late_s = self._heard_s[worker] - self._heartbeats[worker][1]
        if late_s >= self.fail_after_s or (late_s >= self.suspect_after_s and worker in self._connections_lost):
            self._failed.add(worker)
            return Verdict.FAILED
        return Verdict.SUSPECTED if late_s >= self.suspect_after_s else Verdict.ALIVE


class Patience:
    """How long to wait for a peer: a deadline that follows the measured times, as TCP's does (RFC 6298).

    With t̄ the smoothed time of an exchange and v̄ its smoothed deviation the deadline is t̄ + 4 v̄, at least ``floor_s`` and
    at most ``ceiling_s``. It doubles after each wait in vain and is reckoned anew after a success, so that a peer that has
    become slow is given more time and never shut out for ever.

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
        """Note that an exchange took so long and went well."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
        else:
            self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4
            self._mean_s += (seconds - self._mean_s) / 8
        self._factor = 1.0

    def in_vain(self) -> None:
        """Note that a deadline passed."""
        self._factor *= 2.0

    @property
    def deadline_s(self) -> float:
        """Seconds to wait from now."""
        if self._mean_s is None:
            return self._ceiling_s
        reckoned_s = max(self._floor_s, self._mean_s + 4 * self._deviation_s)
        return min(self._ceiling_s, reckoned_s * self._factor)
