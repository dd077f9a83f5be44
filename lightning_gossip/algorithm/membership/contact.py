"""When a worker was last in touch with the job, and so which ends of processes tell it that somebody is absent.

A worker that was silent and is found to have ended may have gone on meanwhile, with others, and have come to the job's end. So
the end of those that might have been enough counts only if it was found in time: before anybody can have excluded the finder.
Nobody excludes one that says in the store that it rests between two uses: then that matters only of those that were enough to
open another one (:mod:`.failover`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from lightning_gossip.algorithm.membership.monitor import Monitor
from lightning_gossip.algorithm.membership.store import Probe, Reached, Steps
from lightning_gossip.algorithm.membership.worker_id import WorkerId


class Contact:
    """What one worker knows of the others' ends, by when it was in touch.

    Args:
        monitor: of this worker.
        now_s: the clock, in seconds.

    Attributes:
        last_s: when this worker was last heard in a store of the job, or heard a member from outside.
        ended: found in time: before the others can have excluded this worker.
        ended_here: found before they can have excluded it in the store of its view, where it may have rested.
    """

    def __init__(self, monitor: Monitor, now_s: Callable[[], float]) -> None:
        self.last_s = now_s()
        self.ended: frozenset[WorkerId] = frozenset()
        self.ended_here: frozenset[WorkerId] = frozenset()
        self._monitor = monitor
        self._now_s = now_s

    def keep(self) -> None:
        """Note what is known by now, in a store of the job: all that was found in time."""
        self.ended = self.ended_here = self._monitor.ended()

    def note_in_time(self) -> None:
        """Note what is known by now, if that is in time."""
        if self._now_s() < self.last_s + self._monitor.suspect_after_s:
            self.ended = self._monitor.ended()
        if self._now_s() < self._monitor.kept_until_s(self.last_s):
            self.ended_here = self._monitor.ended()

    def ended_in_time(self) -> frozenset[WorkerId]:
        """Those whose ends were found in time, as of now."""
        self.note_in_time()
        return self.ended

    def note_ended(self, worker: WorkerId, at_s: float) -> None:
        """Note that a worker's process was found to have ended, at a time in seconds."""
        self._monitor.process_ended(worker)
        if at_s < self.last_s + self._monitor.suspect_after_s:
            self.ended |= {worker}
        if at_s < self._monitor.kept_until_s(self.last_s):
            self.ended_here |= {worker}

    def probe(self, workers: Collection[WorkerId]) -> Steps[list[WorkerId]]:
        """Note which of these workers have ended; the result is those that listen."""
        monitor, ended, began_s = self._monitor, self._monitor.ended(), self._now_s()
        asked = [worker for worker in workers if worker in monitor.hosts and worker not in ended and worker != monitor.me]
        found = yield Probe(tuple(monitor.hosts[worker] for worker in asked))
        for worker, reached in zip(asked, found, strict=True):
            if reached is Reached.REFUSED:
                self.note_ended(worker, began_s)
        return [worker for worker, reached in zip(asked, found, strict=True) if reached is Reached.OPEN]
