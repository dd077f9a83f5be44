"""The process groups of the present members: how the default group is made, and what stands for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from typing_extensions import override

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

    def make(store: Store, rank: int, world_size: int) -> None:
        sys.excepthook = _without_rank(sys.excepthook)  # torch puts the rank before each line, once more for each group
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


def _without_rank(hook: Any) -> Any:
    """What torch's hooks, of groups that there were, have wrapped."""
    while getattr(hook, "__name__", "") == "_distributed_excepthook" and "old_hook" in hook.__code__.co_freevars:
        hook = hook.__closure__[hook.__code__.co_freevars.index("old_hook")].cell_contents
    return hook


class MemberGroups(Protocol):
    """The process groups of the present members, made anew when these change."""

    @property
    def made(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups that there are at present; none if they have to be made. Callers do not keep them."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all members, for their collectives; None for the default group."""

    def drop(self) -> None:
        """Destroy them, if there are any."""


class DefaultGroup(MemberGroups):
    """The members' group is the default group."""

    @property
    @override
    def made(self) -> tuple[dist.ProcessGroup, ...]:
        return (dist.group.WORLD,) if dist.is_initialized() and dist.group.WORLD is not None else ()

    @property
    @override
    def group(self) -> dist.ProcessGroup | None:
        return None

    @override
    def drop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def with_host_backend(backend: str, device: torch.device) -> str:
    """The backends of a default group that works on host memory too, whatever the device's is: what we average is there.

    Gloo tells a worker that another one has ended, and it needs no device. NCCL connects at the first collective of device
    tensors, which only Lightning or the user's code makes; if none is made it never starts.

    Args:
        backend: of torch.distributed, as a user or Lightning has chosen it for the device.
        device: of this worker.

    >>> with_host_backend("nccl", torch.device("cuda", 1))
    'cpu:gloo,cuda:nccl'
    >>> with_host_backend("gloo", torch.device("cuda", 1))
    'gloo'
    """
    if ":" in backend:
        return backend if "cpu:" in backend.lower() else f"cpu:gloo,{backend}"
    capability = dist.Backend.backend_capability.get(backend.lower(), ["cpu"])
    return backend if "cpu" in capability else f"cpu:gloo,{device.type}:{backend}"


def where_collectives_run(device: torch.device) -> torch.device:
    """Where tensors have to be for our own collectives on the default group: in host memory, if the group works there.

    Args:
        device: of this worker; where they are if the group works on that alone.
    """
    if not dist.is_initialized() or dist.group.WORLD is None:
        return device
    return torch.device("cpu") if any(kind.type == "cpu" for kind in dist.group.WORLD._device_types) else device


def lacks_mean(device: torch.device) -> bool:
    """Whether tensors of a device go over Gloo in a default group with several backends.

    Gloo has no mean of integers, and in older releases of torch none at all. Of a group that is Gloo only Lightning knows it,
    and sums.
    """
    if not dist.is_initialized() or dist.group.WORLD is None or dist.get_backend() == "gloo":
        return False
    group = dist.group.WORLD
    return any(kind.type == device.type and group._get_backend(kind).name() == "gloo" for kind in group._device_types)


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
