"""What each worker tells the others twice a second, in one value of the store.

It carries its counter, the name of its process, whose connections it has seen close, whose end it has seen, which use of a
Trainer it is in (runtime/membership/uses.py), and whether it rests (between two uses nobody needs to be watched), or is
outside: it waits to be taken in, and looks whether there is anybody who could do so. If an exception has ended a use: which
one, on which rank, and what it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from lightning_gossip.runtime.membership.round_store import Worker


class Beats:
    """Seen through one connection; used by one thread.

    Args:
        store: the connection.
        prefix: of the keys.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._seen: set[Worker] = set()  # whose value exists; it is never deleted

    def tell(self, me: Worker, said: str) -> None:
        """Say it, in place of what this worker said before."""
        self._store.set(self._key(me), said)

    def read(self, workers: Sequence[Worker]) -> dict[Worker, tuple[dict[str, Any], int]]:
        """What each of them says, and which life its number has by now; those that have not said anything yet are left out."""
        for worker in workers:
            if worker not in self._seen and self._store.check([self._key(worker)]):
                self._seen.add(worker)
        known = [worker for worker in workers if worker in self._seen]
        if not known:
            return {}
        said = map(json.loads, self._store.multi_get([self._key(worker) for worker in known]))
        lives = map(int, self._store.multi_get([f"{self._prefix}/life/{worker.number}" for worker in known]))
        return dict(zip(known, zip(said, lives, strict=True), strict=True))

    def _key(self, worker: Worker) -> str:
        return f"{self._prefix}/beat/{worker}"
