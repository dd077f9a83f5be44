"""What Lightning and a user reduce or gather over all ranks where the default group is an island's: through host memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gossip.algorithm.tensors.flat import host_copy
from lightning_gossip.runtime.workers import Workers

_MEANS = (None, "mean", "avg", dist.ReduceOp.AVG)


def reduced(tensor: Tensor, workers: Workers, how: Any) -> Tensor:
    """A tensor reduced over all workers, where it was. Collective.

    Args:
        tensor: of the same shape and type on all workers; not changed.
        workers: whose group works on host memory.
        how: ``"mean"`` (or None), ``"sum"`` or another name or value of ``ReduceOp``. Integers have a mean rounded towards 0.
    """
    host = host_copy(tensor)
    takes_mean = how in _MEANS or (isinstance(how, str) and how.lower() in _MEANS)
    if takes_mean:
        operation: Any = dist.ReduceOp.SUM
    else:
        operation = getattr(dist.ReduceOp, how.upper()) if isinstance(how, str) else how
    dist.all_reduce(host, op=operation, group=workers.group)
    if takes_mean:
        count = dist.get_world_size(workers.group)
        host = host / count if host.is_floating_point() or host.is_complex() else host.div(count, rounding_mode="trunc")
    return host.to(tensor.device)


def gathered_from(tensor: Tensor, workers: Workers) -> Tensor:
    """The tensors of all workers, stacked by rank, where this worker's was; shape (workers, ...). Collective.

    Args:
        tensor: of the same shape and type on all workers.
        workers: whose group works on host memory.
    """
    host = host_copy(tensor)
    everyones = [torch.empty_like(host) for _ in range(dist.get_world_size(workers.group))]
    dist.all_gather(everyones, host, group=workers.group)
    return torch.stack(everyones).to(tensor.device)


def gathered_list(tensor: Tensor, workers: Workers) -> list[Tensor]:
    """The tensors of all workers, by rank, where this worker's was; their lengths may differ. Collective.

    Args:
        tensor: of the same type and number of dimensions on all workers.
        workers: whose group works on host memory.
    """
    host = host_copy(tensor)
    shape = torch.tensor(host.shape, dtype=torch.int64, device="cpu")
    shapes = [torch.empty_like(shape) for _ in range(dist.get_world_size(workers.group))]
    dist.all_gather(shapes, shape, group=workers.group)
    widest = torch.stack(shapes).amax(0).tolist()
    padded = torch.zeros(widest, dtype=host.dtype, device="cpu")
    padded[tuple(map(slice, host.shape))] = host
    everyones = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather(everyones, padded, group=workers.group)
    return [theirs[tuple(map(slice, size.tolist()))].to(tensor.device) for theirs, size in zip(everyones, shapes, strict=True)]
