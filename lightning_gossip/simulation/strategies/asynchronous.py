"""What the asynchronous strategies have in common: the synchronisation point."""

from __future__ import annotations

from collections.abc import Callable

from simpy.events import Event

from lightning_gossip.simulation.problems.batch_assignment import Session
from lightning_gossip.simulation.record import Distances
from lightning_gossip.simulation.run import Process, Run


class SyncPoint:
    """All living workers together at the end of a session; used by the asynchronous strategies.

    What failed workers have left of an epoch is handed out again before the next epoch, in a session of its own.

    Args:
        run: whose.
        settle: a process that ends what is under way, when all have arrived.
        average: makes the mean, and returns the distances to it; None where there are no models.
        open_session: begins a session.
        cost_s: asked for the seconds that the average takes.
    """

    def __init__(
        self,
        run: Run,
        *,
        settle: Callable[[], Process],
        average: Callable[[], Distances | None],
        open_session: Callable[[Session], None],
        cost_s: Callable[[], float],
    ) -> None:
        self._run = run
        self._settle = settle
        self._average = average
        self._open = open_session
        self._cost_s = cost_s
        self._arrived_s: dict[int, float] = {}  # when, by rank
        self._number = 0
        self._release = run.environment.event()
        self._synchronizing = False
        self._session: Session

    def begin(self) -> None:
        """Begin the first session."""
        self._begin(self._run.plan.open(0, self._run.living_members))

    def _begin(self, session: Session) -> None:
        self._session = session
        self._open(session)

    def arrive(self, rank: int) -> Event:
        """A worker has come; the event is the beginning of the next session."""
        self._arrived_s[rank] = self._run.environment.now
        self._run.record.event(self._run.environment.now, "arrive", rank)
        self.check()
        return self._release

    def check(self) -> None:
        """Meet, if all living workers have come; also to be called when a worker has failed."""
        if not self._synchronizing and self._run.living and self._arrived_s.keys() >= set(self._run.living):
            self._synchronizing = True
            self._run.environment.process(self._synchronize())

    def _synchronize(self) -> Process:
        run = self._run
        yield from self._settle()
        yield run.environment.timeout(self._cost_s())
        for rank in run.living:
            run.record.wait(rank, self._arrived_s[rank], run.environment.now)
        run.end_session(self._average())
        run.evaluate()
        left = self._session.unfinished
        self._number += not left
        if self._number == run.plan.sessions or not run.living:
            run.finish("done")
            return
        self._arrived_s.clear()
        self._synchronizing = False
        release, self._release = self._release, run.environment.event()
        members = list(run.living_members)
        self._begin(run.plan.again(left, members) if left else run.plan.open(self._number, members))
        release.succeed()
