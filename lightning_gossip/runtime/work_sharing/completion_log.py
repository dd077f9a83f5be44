"""Completion logs: the batches of an assignment that each worker has finished, in the store, for the others if it fails.

Where the store may be lost each log is written twice: also into the one that the next worker keeps, to which all go then. They
may have to leave that one, too, which cuts all connections with it: for a reading one is made anew. And what was read once is
known from then on, so that a batch is trained on again only where both stores have ended before the others have met.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch.distributed as dist

from lightning_gossip.algorithm.membership.store import StoreLostError
from lightning_gossip.runtime.store_client import look_up

log = logging.getLogger(__name__)


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


class SecondStore:
    """Where logs are written a second time: the store that one worker keeps. One call after the other.

    A connection that was cut is made anew for a reading, once; nobody waits for that to write. Torch would write a stack to the
    log for each attempt by the old one.

    Args:
        connect: makes a connection with it.

    Raises:
        torch.distributed.DistError: if that cannot be reached.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect: Callable[[], Any] | None = connect
        self._store: Any | None = connect()

    def append(self, key: str, value: str) -> None:
        """Append to a value, as torch's stores do; nothing where the connection is cut."""
        self._try("append", key, value)

    def delete_key(self, key: str) -> None:
        """Delete a log's key, as torch's stores do; nothing where the connection is cut."""
        self._try("delete_key", key)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        """Compare and set a value, as torch's stores do, which tells what is there; the connection is made anew once."""
        found = self._try("compare_set", key, expected, wanted)
        if found is None:
            connect, self._connect = self._connect, None
            if connect is None:
                raise dist.DistNetworkError("The second store of finished batches has ended.")
            self._store = connect()
            self._connect = connect
            found = self._store.compare_set(key, expected, wanted)
        return bytes(found)

    def _try(self, method: str, *args: str) -> Any | None:
        if self._store is None:
            return None
        try:
            return getattr(self._store, method)(*args)
        except dist.DistError:
            self._store = None
            return None


class CompletionLog:
    """The batches that one worker has finished, for the others if it fails. One key a worker and assignment.

    Args:
        store: shared by all workers.
        key: prefix of the keys, the same on all.
        members: asked for this worker's identity when an assignment begins.
        reserve: asked at the same time how to connect with a store where the log is written a second time; None: there is none.
    """

    def __init__(
        self, store: Any, key: str, members: Named, *, reserve: Callable[[], Callable[[], Any] | None] = lambda: None
    ) -> None:
        self.key = key
        self._reserve = reserve
        self._second: SecondStore | None = None
        self._known: dict[str, set[int]] = {}  # what was read of this assignment, by worker
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
        self._second = self._connect()
        self._known.clear()
        self._assignment, self._name = assignment, str(self._members.me)
        self.generation = self._members.generation

    @property
    def scope(self) -> str:
        """Who shares the batches: all members together; a worker outside has its own, and takes none of theirs."""
        return f"outside/{self._name}" if self._members.outside else "together"

    def finished(self, position: int) -> None:
        """Note that the batch at this position has been trained on. The caller does not wait for the store."""
        for store in self._stores:
            with suppress(StoreLostError):  # the other one has it
                store.append(self._at(self._name), f"{position},")

    def read(self, name: str) -> list[int]:
        """The positions that another worker, which was excluded, has finished in this assignment."""
        found = self._known.setdefault(name, set())
        for store in self._stores:
            with suppress(StoreLostError, dist.DistError):  # the other one has it
                noted = look_up(store, self._at(name)) or b""  # an excluded worker that still runs may delete it
                found.update(int(position) for position in noted.decode().split(",")[:-1])
        return sorted(found)

    def _connect(self) -> SecondStore | None:
        connect = self._reserve()
        try:
            return None if connect is None else SecondStore(connect)
        except dist.DistError as error:
            log.info("There is no second log of finished batches: %s", error)
            return None

    @property
    def _stores(self) -> list[Any]:
        return [self._store] if self._second is None else [self._store, self._second]

    def _at(self, name: str) -> str:
        return f"{self.key}/finished/{self._assignment}/{name}"
