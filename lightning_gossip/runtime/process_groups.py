"""How the default process group of the present members is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_gossip.transport.gloo_group import GROUP_S, set_timeout


def make_default_group(
    backend: str, timeout_s: float, *, device: torch.device | None = None
) -> Callable[[Store, int, int], None]:
    """Return a function that makes the default process group.

    Args:
        backend: of torch.distributed.
        timeout_s: of its collectives, in seconds.
        device: that the backend works on, if not the CPU.
    """

    excepthook = sys.excepthook

    def make(store: Store, rank: int, world_size: int) -> None:
        sys.excepthook = excepthook  # torch puts the rank before each line, once more each time
        # a group that could not be made has used up a name, on the workers where it could not: all begin with the same one
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=min(GROUP_S, timeout_s)),
            device_id=device,
        )
        set_timeout(timeout_s)

    return make


def default_store() -> Store:
    """The store of the default group, without its prefixes."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def renew(prefix: str, make: Callable[[Store, int, int], None], *, aborted: bool) -> None:
    """Make the default group anew if an exception has ended the last use of a Trainer on some worker; collective.

    That worker may have left a collective in which others wait for it, and the next ones of both would be taken for each other.

    Args:
        prefix: of the keys of the new group, in the store of the present one.
        make: makes the group: ``(store, rank, world_size)``.
        aborted: whether it was so on this worker.
    """
    if not aborted:
        with suppress(RuntimeError):  # a worker that has aborted does not come, and destroys its group
            dist.barrier()
            return
    store, rank, world_size = default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    make(PrefixStore(prefix, store), rank, world_size)
