"""The effects of the protocols of membership, done on a store of torch.distributed."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_gossip.algorithm.membership.store import (
    Append,
    Await,
    Count,
    Decide,
    Delete,
    Encode,
    HaveEnded,
    Pause,
    Read,
    ReadAll,
    Restore,
    Swap,
    Write,
)
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.membership.local_processes import has_ended
from lightning_gossip.runtime.store_client import look_up

log = logging.getLogger(__name__)

_DELETED_S = 2.0  # that a key is waited for which was there a moment ago


class StoreOperations:
    """Does the effects through one connection.

    Args:
        store: the connection; used by one thread at a time.
        others: what does the effects that are not the store's, by their type.
    """

    def __init__(self, store: Store, others: dict[type, Callable[[Any], Any]] | None = None) -> None:
        self._others = others or {}
        self.use(store)

    def use(self, store: Store) -> None:
        """Go on with another connection."""
        self._store = store
        self._by_type: dict[type, Callable[[Any], Any]] = {
            Decide: lambda effect: store.compare_set(effect.key, "", effect.value),
            Swap: lambda effect: store.compare_set(effect.key, effect.expected, effect.value),
            Write: lambda effect: store.set(effect.key, effect.value),
            Append: lambda effect: store.append(effect.key, effect.value),  # type: ignore[attr-defined]
            Count: lambda effect: store.add(effect.key, 1),
            Read: lambda effect: look_up(store, effect.key),
            ReadAll: self._read_all,
            Await: self._await,
            Delete: self._delete,
            Encode: lambda effect: pickle.dumps(effect.value),
            Restore: lambda effect: [pickle.loads(data) for data in effect.data],
            HaveEnded: lambda effect: [has_ended(process) for process in effect.processes],
            Pause: lambda effect: threading.Event().wait(effect.seconds),
            **self._others,
        }

    def __call__(self, effect: Any) -> Any:
        """Do an effect and return its result."""
        return self._by_type[type(effect)](effect)

    def _read_all(self, effect: ReadAll) -> list[bytes] | None:
        if not effect.exist and not self._store.check(list(effect.keys)):
            return None
        if effect.exist:
            found: list[bytes] = self._store.multi_get(list(effect.keys))
            return found
        before: timedelta = self._store.timeout  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_DELETED_S))
        try:
            values: list[bytes] = self._store.multi_get(list(effect.keys))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:  # deleted since, and waited for in vain
            return None
        finally:
            self._store.set_timeout(before)
        return None if b"" in values else values

    def _delete(self, effect: Delete) -> None:
        try:
            self._store.delete_key(effect.key)
        except dist.DistError as error:  # what it belonged to is complete; whoever holds the store may have ended after it
            log.debug("a key was left in the store: %s", error)

    def _await(self, effect: Await) -> bytes | None:
        give_up_s = now_s() + effect.seconds
        while True:
            try:
                self._store.wait([effect.key], timedelta(seconds=max(0.001, give_up_s - now_s())))
            except dist.DistNetworkError:
                raise
            except dist.DistStoreError:
                return None
            if (value := look_up(self._store, effect.key)) is not None:  # else it has been deleted since
                return value
