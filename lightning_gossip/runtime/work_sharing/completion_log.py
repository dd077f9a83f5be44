"""Completion logs: the batches of an assignment that each worker has finished, in the store, for the others if it fails."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_gossip.runtime.store_client import look_up


class Named(Protocol):
    """A worker, as its log needs to know it."""

    @property
    def me(self) -> object:
        """The worker's identity."""

    @property
    def generation(self) -> int:
        """How often the members have changed."""

    @property
    def outside(self) -> bool:
        """Whether the worker was excluded, and has not joined again."""


class CompletionLog:
    """The batches that one worker has finished, for the others if it fails. One key a worker and assignment.

    Args:
        store: shared by all workers.
        key: prefix of the keys, the same on all.
        members: asked for this worker's identity when an assignment begins.
    """

    def __init__(self, store: Any, key: str, members: Named) -> None:
        self.key = key
        self._store = store
        self._members = members
        self._name = str(members.me)
        self._assignment = ""
        self.generation = members.generation  # of the members, when the assignment began

    def begin(self, assignment: str) -> None:
        """Begin a new assignment of batches, and delete the log of the last one.

        Args:
            assignment: its name, the same on all workers.
        """
        if self._assignment:
            self._store.delete_key(self._at(self._name))
        self._assignment, self._name = assignment, str(self._members.me)
        self.generation = self._members.generation

    @property
    def scope(self) -> str:
        """Who shares the batches: all members together; a worker outside has its own, and takes none of theirs."""
        return f"outside/{self._name}" if self._members.outside else "together"

    def finished(self, position: int) -> None:
        """Note that the batch at this position has been trained on. The caller does not wait for the store."""
        self._store.append(self._at(self._name), f"{position},")

    def read(self, name: str) -> list[int]:
        """The positions that another worker, which was excluded, has finished in this assignment."""
        found = look_up(self._store, self._at(name)) or b""  # an excluded worker that still runs may delete it
        return [int(position) for position in found.decode().split(",")[:-1]]

    def _at(self, name: str) -> str:
        return f"{self.key}/finished/{self._assignment}/{name}"
