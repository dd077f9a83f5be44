r"""A worker of the parameter server, without any I/O: when it pushes, holds back, pulls and leaves.

It holds the model x that it pulled last, and makes local steps to x'; u = x' − x is its update. The server's side, which says
how long a push or a pull waits, is :mod:`lightning_gossip.algorithm.apsgd.server`.

| state | event | effects | next state |
|---|---|---|---|
| out | begin_step | Pull(0), Take | in flight |
| in flight | begin_step | | in flight |
| in flight | a step, without a trigger | Pull(passes), Take | in flight |
| in flight | a step; ‖u‖ lets the trigger fire | Measure, Pull(passes), Take | in flight |
| in flight | a step; ‖u‖ is too small | Measure | in flight, u held back |
| in flight or out | arrive | Leave(passes of what is held back, or 0) | out |

Push and pull are one, so that where it is this worker's turn at once no update of another comes between. Refused follows a
Pull or a Leave whose update was not finite. What is held back is pushed with a later step, or when the worker leaves: no update
is lost.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from lightning_gossip.algorithm.apsgd.options import EventTrigger
from lightning_gossip.algorithm.staleness import StalenessHistogram


@dataclass(frozen=True)
class Measure:
    """Resume with ‖u‖ and ‖x‖, of the parameters: running statistics move without any learning."""


@dataclass(frozen=True)
class Pull:
    """Push u, if there is one; wait for this worker's turn, receive the model, and resume with :class:`Served`.

    Args:
        forward_passes: in training mode that led to u; 0 for no update.
    """

    forward_passes: int


@dataclass(frozen=True)
class Take:
    """x' ← the model received."""


@dataclass(frozen=True)
class Refused:
    """The update just pushed was not finite, and the server has not taken it in: fail, or begin anew from its model."""


@dataclass(frozen=True)
class Leave:
    """Tell the server that this worker comes to a synchronisation point; resume with :class:`Served`.

    Args:
        forward_passes: of the update that goes with it; 0 for none.
    """

    forward_passes: int


@dataclass(frozen=True)
class Served:
    """What a worker learns with a model.

    Args:
        version: updates that the model has seen.
        staleness: of the update that this worker pushed last; None if it was dropped, or if there was none.
        sync_requested: somebody asks for a synchronisation.
        refused: the update that this worker pushed last was not finite, and the server has not taken it in.
    """

    version: int
    staleness: int | None
    sync_requested: bool
    refused: bool = False


Effect = Measure | Pull | Take | Refused | Leave
Effects = Generator[Effect, Any, None]


class WorkerProtocol:
    """One worker's decisions during one fit; the module says which.

    Args:
        trigger: of the sending; None to send after every step.

    Attributes:
        pushes: updates sent.
        dropped: of them, those that were too stale.
        refused: of them, those that were not finite.
        staleness: of the others.
    """

    def __init__(self, trigger: EventTrigger | None) -> None:
        self.pushes = self.dropped = self.refused = 0
        self.staleness = StalenessHistogram()
        self._trigger = trigger
        self._in_flight = False
        self._held = 0  # forward passes of the steps since the pull

    def begin_step(self) -> Effects:
        """Begin a forward pass; pulls the model first where a pull is due."""
        if not self._in_flight:
            yield from self._pull()

    def step(self, forward_passes: int = 1) -> Effects:
        """Take note of an optimizer step; pushes the update where one is due.

        Args:
            forward_passes: in training mode that led to it.
        """
        self._held += forward_passes
        if self._trigger is not None:
            update_norm, model_norm = yield Measure()
            if not self._trigger.fires(update_norm, model_norm):
                return
        yield from self._pull()

    def arrive(self) -> Effects:
        """Come to a synchronisation point."""
        passes = self._push()
        served = yield Leave(passes)
        self._in_flight = False
        yield from self._note(served, passes)

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"staleness": self.staleness.state_dict(), "pushes": self.pushes, "dropped": self.dropped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.staleness.load_state_dict(state["staleness"])
        self.pushes, self.dropped = state["pushes"], state["dropped"]

    def _pull(self) -> Effects:
        passes = self._push()
        served = yield Pull(passes)
        self._in_flight = True
        yield from self._note(served, passes)
        yield Take()

    def _push(self) -> int:
        """The forward passes of what goes to the server; nothing is held any more."""
        passes, self._held = self._held, 0
        self.pushes += passes > 0
        return passes

    def _note(self, served: Served, passes: int) -> Effects:
        """What became of the update, if there was one."""
        if not passes:
            return
        if served.refused:
            self.refused += 1
            yield Refused()
        elif served.staleness is None:
            self.dropped += 1
        else:
            self.staleness.record(served.staleness)
