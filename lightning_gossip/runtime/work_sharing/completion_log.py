"""Completion logs: the batches of an assignment that each worker has finished, in the store, for the others if it fails.

Where the store may be lost each log is written twice: also into the one that the next worker keeps, to which all go then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch.distributed as dist

from lightning_gossip.algorithm.membership.store import StoreLostError
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
        reserve: asked at the same time for a store where the log is written a second time; None if there is none.
    """

    def __init__(self, store: Any, key: str, members: Named, *, reserve: Callable[[], Any | None] = lambda: None) -> None:
        self.key = key
        self._reserve = reserve
        self._second: Any | None = None
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
        for store in self._stores if self._assignment else ():
            with suppress(StoreLostError, dist.DistError):  # with the log
                store.delete_key(self._at(self._name))
        self._second = self._reserve()
        self._assignment, self._name = assignment, str(self._members.me)
        self.generation = self._members.generation

    @property
    def scope(self) -> str:
        """Who shares the batches: all members together; a worker outside has its own, and takes none of theirs."""
        return f"outside/{self._name}" if self._members.outside else "together"

    def finished(self, position: int) -> None:
        """Note that the batch at this position has been trained on. The caller does not wait for the store."""
        note = f"{position},"
        with suppress(StoreLostError):  # the other one has it
            self._store.append(self._at(self._name), note)
        if self._second is not None:
            try:
                self._second.append(self._at(self._name), note)
            except dist.DistError:  # it has ended with its worker; torch would write a stack to the log for each attempt
                self._second = None

    def read(self, name: str) -> list[int]:
        """The positions that another worker, which was excluded, has finished in this assignment."""
        found = set[int]()
        for store in self._stores:
            with suppress(StoreLostError, dist.DistError):  # the other one has it
                noted = look_up(store, self._at(name)) or b""  # an excluded worker that still runs may delete it
                found.update(int(position) for position in noted.decode().split(",")[:-1])
        return sorted(found)

    @property
    def _stores(self) -> list[Any]:
        return [self._store] if self._second is None else [self._store, self._second]

    def _at(self, name: str) -> str:
        return f"{self.key}/finished/{self._assignment}/{name}"
