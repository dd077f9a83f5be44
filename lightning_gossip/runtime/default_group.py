"""How the default process group of the present members is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_gossip.transport.gloo import GROUP_S, set_timeout


def make_default_group(
    backend: str, timeout_s: float, *, device: torch.device | None = None
) -> Callable[[Store, int, int], None]:
    """What makes the default process group.

    Args:
        backend: of torch.distributed.
        timeout_s: of its collectives, in seconds.
        device: that the backend works on, if not the CPU.
    """

    excepthook = sys.excepthook

    def make(store: Store, rank: int, world_size: int) -> None:
        sys.excepthook = excepthook  # torch puts the rank before each line, once more each time
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
