"""What each worker has finished of a hand-out of batches, in the store, for those who outlive it."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_gossip.runtime.store_client import look_up


class Named(Protocol):
    """Who has a name."""

    @property
    def me(self) -> object:
        """The name."""

    @property
    def generation(self) -> int:
        """How often they have changed."""

    @property
    def outside(self) -> bool:
        """Whether this one has been left behind by the others."""


class Journal:
    """What one worker has finished, written down for those who outlive it. One key a worker and hand-out.

    Args:
        store: shared by all workers.
        key: prefix of the keys, the same on all.
        members: asked for this worker's name when a hand-out begins.
    """

    def __init__(self, store: Any, key: str, members: Named) -> None:
        self.key = key
        self._store = store
        self._members = members
        self._name = str(members.me)
        self._hand_out = ""
        self.generation = members.generation  # of the members, when the hand-out began

    def begin(self, hand_out: str) -> None:
        """A new hand-out of batches begins, and the last one is of no interest any more.

        Args:
            hand_out: its name, the same on all workers.
        """
        if self._hand_out:
            self._store.delete_key(self._at(self._name))
        self._hand_out, self._name = hand_out, str(self._members.me)
        self.generation = self._members.generation

    @property
    def whose(self) -> str:
        """Who hands out: all who are together; one that was left behind does so for itself, and takes nothing from them."""
        return f"outside/{self._name}" if self._members.outside else "together"

    def finished(self, position: int) -> None:
        """The batch at this position has been trained on. The caller does not wait for the store."""
        self._store.append(self._at(self._name), f"{position},")

    def read(self, name: str) -> list[int]:
        """What another worker, which is dead, has finished in this hand-out."""
        found = look_up(self._store, self._at(name)) or b""  # a worker that was only taken for dead may delete it
        return [int(position) for position in found.decode().split(",")[:-1]]

    def _at(self, name: str) -> str:
        return f"{self.key}/finished/{self._hand_out}/{name}"
