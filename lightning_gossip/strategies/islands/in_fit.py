"""A rank's island during one fit: its ranks leave their steps at the same one, and each averages its own part of the model."""

from __future__ import annotations

from lightning_gossip.runtime.islands.groups import IslandGroups
from lightning_gossip.runtime.islands.words import IslandWords, Word
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
        self._words = IslandWords(lambda: groups.mates)
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

    def after_batch(self, *, stop: bool, asked: bool, meets: bool) -> Word:
        """Say what this rank knows after a batch; returns what any of them knew after the one before.

        Args:
            stop: it was told to stop.
            asked: rank 0 was asked for something.
            meets: another island waits at a synchronisation point.
        """
        word = Word.NOTHING
        for is_said, which in (
            (stop, Word.STOP),
            (asked, Word.ASK),
            (meets, Word.MEET),
            (self.wants_to_leave or self.leaves, Word.LEAVE),
        ):
            word |= which if is_said else Word.NOTHING
        heard = self._words.say(word)
        self.leaves |= Word.LEAVE in heard
        return heard

    def arrive(self) -> None:
        """All ranks of the island leave their steps here."""
        self._words.hear()

    def forget(self) -> None:
        """Wait for no mate any more, after a failure."""
        self._words.forget()
