"""A rank's island during one fit: its ranks leave their steps at the same one, and each averages its own part of the model."""

from __future__ import annotations

from lightning_gossip.runtime.islands.flags import IslandFlags, StepFlag
from lightning_gossip.runtime.islands.groups import IslandGroups
from lightning_gossip.runtime.sync_point import SyncPoint


class FitIsland:
    """What one fit needs of the island of its rank.

    Args:
        groups: of this rank.

    Attributes:
        leaves: whether all ranks of the island know that one of them wants to end the fit.
        wants_to_leave: whether this one does, and they do not know yet.
    """

    def __init__(self, groups: IslandGroups) -> None:
        self._groups = groups
        self._flags = IslandFlags(lambda: groups.mates)
        self.leaves = False
        self.wants_to_leave = False

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the island, which speaks for it."""
        return self._groups.place.index == 0

    @property
    def size(self) -> int:
        """Ranks of the island."""
        return self._groups.islands.size

    def between_peers(self, sync_point: SyncPoint) -> SyncPoint:
        """The collectives of the ranks that have the same part of the model, one an island."""
        return SyncPoint(sync_point.device, sync_point.workers, of=lambda: self._groups.peers)

    def after_batch(self, *, stop: bool, asked: bool, meets: bool) -> StepFlag:
        """Say what this rank knows after a batch; returns what any of them knew after the one before.

        Args:
            stop: it was told to stop.
            asked: rank 0 was asked for something.
            meets: another island waits at a synchronisation point.
        """
        leaves = self.wants_to_leave or self.leaves
        flags = StepFlag.STOP * stop | StepFlag.ASK * asked | StepFlag.MEET * meets | StepFlag.LEAVE * leaves
        of_all = self._flags.reduce(StepFlag(flags))
        self.leaves |= StepFlag.LEAVE in of_all
        return of_all

    def arrive(self) -> None:
        """All ranks of the island leave their steps here."""
        self._flags.take_last()

    def forget(self) -> None:
        """Wait for no mate any more, after a failure."""
        self._flags.forget()
