"""When an exchange may begin: the session's phase, one exchange at a time, and the pace.

Everything here is guarded by one condition, held for a few instructions; a wait on it has a deadline.
"""

from __future__ import annotations

import threading
from enum import Enum

from lightning_gossip.algorithm.adpsgd.pace import Pace
from lightning_gossip.errors import PeerError, ProtocolError
from lightning_gossip.runtime.clock import now_s

_MEETINGS = 8  # at most the sessions that neighbours may be in: this one and the next


class Phase(Enum):
    """Of the gossip of one worker."""

    CLOSED = "closed"  # between sessions: requests are refused
    OPEN = "open"
    CLOSING = "closing"  # no new exchange; the one under way ends
    STOPPED = "stopped"  # for good


class Session:
    """The state that the training thread and the gossip threads of one worker share, apart from the model itself."""

    def __init__(self) -> None:
        self.number = -1  # none yet; the first may be 0
        self.failure: BaseException | None = None
        self._phase = Phase.CLOSED
        self._busy = False
        self._meetings: set[int] = set()  # this session or the next, if a rendezvous was asked for in it
        self._pace = Pace()
        self._condition = threading.Condition()

    # -- the training thread -----------------------------------------------------------------------------------------

    def open(self, number: int) -> None:
        """Exchanges of this session may begin.

        Raises:
            ProtocolError: if another one is open, or the gossip has stopped.
        """
        with self._condition:
            if self._phase is not Phase.CLOSED:
                raise ProtocolError(f"A session cannot open while the gossip is {self._phase.value}.")
            self.number = number
            self._meetings = {meeting for meeting in self._meetings if meeting >= number}
            self._phase = Phase.OPEN
            self._pace.begin_session()
            self._condition.notify_all()

    def drain(self, timeout_s: float) -> None:
        """No new exchange; returns when the one under way has ended.

        Raises:
            PeerError: if it does not end in time.
        """
        with self._condition:
            if self._phase is Phase.OPEN:
                self._phase = Phase.CLOSING
                self._condition.notify_all()
            if not self._condition.wait_for(lambda: not self._busy or self.failure is not None, timeout_s):
                raise PeerError(
                    f"An exchange did not end within {timeout_s:.3g} s of the rendezvous. Look at the logs of the other ranks.",
                    phase="drain",
                    seconds=timeout_s,
                )
            if self._phase is Phase.CLOSING:
                self._phase = Phase.CLOSED

    def stop(self) -> bool:
        """No exchange any more; False if that was so already."""
        with self._condition:
            if self._phase is Phase.STOPPED:
                return False
            self._phase = Phase.STOPPED
            self._condition.notify_all()
            return True

    def note_own_step(self, step_s: float) -> None:
        """This worker has made a step, which took so long."""
        with self._condition:
            self._pace.step(step_s)
            self._condition.notify_all()

    def raise_failure(self) -> None:
        """Raise what ended a gossip thread, if anything did."""
        if self.failure is not None:
            raise self.failure

    @property
    def is_open(self) -> bool:
        """Whether exchanges may begin."""
        return self._phase is Phase.OPEN

    @property
    def is_busy(self) -> bool:
        """Whether an exchange is under way."""
        return self._busy

    @property
    def sync_requested(self) -> bool:
        """Whether somebody has asked for a rendezvous in this session."""
        return self.number in self._meetings

    # -- the gossip threads ------------------------------------------------------------------------------------------

    def begin(self, number: int) -> bool:
        """Become busy, if an exchange of this session may begin."""
        with self._condition:
            may_begin = self._phase is Phase.OPEN and self.failure is None and not self._busy and number == self.number
            self._busy = self._busy or may_begin
            return may_begin

    def await_start(self, rate: float, timeout_s: float) -> bool:
        """Wait until the next exchange is due at this rate, at most that long, and become busy; False if it is not due."""
        with self._condition:
            if self._phase is Phase.OPEN and not self._busy and rate > 0:
                timeout_s = min(timeout_s, self._pace.next_start_s(rate) - now_s())
                if timeout_s <= 0 and self.failure is None:
                    self._busy = True
                    self._pace.start(now_s())
                    return True
            if not self.has_ended:
                self._condition.wait(max(0.0, timeout_s))
            return False

    @property
    def has_ended(self) -> bool:
        """Whether no exchange will begin any more."""
        return self._phase is Phase.STOPPED or self.failure is not None

    def end(self) -> None:
        """The exchange has ended, or did not begin."""
        with self._condition:
            self._busy = False
            self._condition.notify_all()

    def draw_again(self, at_s: float) -> None:
        """The request was refused: end it, and draw again at this time."""
        with self._condition:
            self._busy = False
            self._pace.draw_again(at_s)
            self._condition.notify_all()

    def note_peer_step(self, peer: int, step_s: float) -> None:
        """A peer's step time; 0 if it does not know it yet."""
        if step_s > 0:
            with self._condition:
                self._pace.peer_step_s[peer] = step_s
                self._condition.notify_all()

    def note_meeting(self, number: int) -> None:
        """A rendezvous was asked for in this session, which may not have begun here; one that is over needs none."""
        with self._condition:
            if number >= self.number and len(self._meetings) < _MEETINGS:
                self._meetings.add(number)

    def fail(self, error: BaseException) -> None:
        """A gossip thread has ended by this; the first one is kept."""
        with self._condition:
            if self._phase is not Phase.STOPPED:
                self.failure = self.failure or error
            self._condition.notify_all()

    @property
    def own_step_s(self) -> float:
        """This worker's mean step time, 0 if unknown."""
        return self._pace.own_step_s
