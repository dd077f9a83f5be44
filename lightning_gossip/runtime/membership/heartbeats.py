"""Heartbeats: what each worker tells the others twice a second, in one value of the store.

A heartbeat carries a counter, the name of the worker's process, whose connections it has lost, whose processes it has seen end,
which use of a Trainer it is in (runtime/membership/uses.py), and whether it is resting (between two uses nobody needs to be
monitored) or outside (it has asked to join, and looks whether there is anybody who could admit it). If an exception has
aborted a use: which one, on which rank, and what it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from lightning_gossip.runtime.membership.round_store import WorkerId


class Heartbeats:
    """The heartbeats in the store, through one connection; used by one thread.

    Args:
        store: the connection.
        prefix: of the keys.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._seen: set[WorkerId] = set()  # workers whose value exists; it is never deleted

    def send(self, me: WorkerId, message: str) -> None:
        """Write this worker's heartbeat in place of the one before."""
        self._store.set(self._key(me), message)

    def read(self, workers: Sequence[WorkerId]) -> dict[WorkerId, tuple[dict[str, Any], int]]:
        """The last heartbeat of each worker that has sent one, and the newest incarnation of its initial rank."""
        for worker in workers:
            if worker not in self._seen and self._store.check([self._key(worker)]):
                self._seen.add(worker)
        known = [worker for worker in workers if worker in self._seen]
        if not known:
            return {}
        messages = map(json.loads, self._store.multi_get([self._key(worker) for worker in known]))
        newest = map(int, self._store.multi_get([f"{self._prefix}/incarnation/{worker.initial_rank}" for worker in known]))
        return dict(zip(known, zip(messages, newest, strict=True), strict=True))

    def _key(self, worker: WorkerId) -> str:
        return f"{self._prefix}/heartbeat/{worker}"
