"""What all workers measure together: calls to the store while everybody calls, and all-reduces over Gloo."""

from __future__ import annotations

import statistics
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_gossip.doctor.report import AllReduce
from lightning_gossip.doctor.report import Store as StoreCalls
from lightning_gossip.runtime.clock import Deadline, now_s
from lightning_gossip.transport.peer_errors import peer_errors

_CALLS = 200  # at most
_SIZES = tuple(1 << exponent for exponent in (12, 16, 20, 22, 24, 26))  # bytes
_TIMES = 3  # of each
_ANSWER_S = 10.0  # at least, before a worker counts as one that does not answer: on a busy machine it may come late


def store_calls(store: Store, rank: int, *, seconds: float) -> StoreCalls:
    """How long a call to the store takes; as claims of batches are, an addition.

    Args:
        store: of the job.
        rank: of this worker, whose key it is.
        seconds: to measure for.
    """
    took_s: list[float] = []
    deadline = Deadline.after(seconds)
    while len(took_s) < _CALLS and (deadline.left_s or not took_s):
        began_s = now_s()
        store.add(f"calls/{rank}", 1)
        took_s.append(now_s() - began_s)
    took_s.sort()
    return StoreCalls(median_s=statistics.median(took_s), p95_s=took_s[int(0.95 * len(took_s))], calls=len(took_s))


def all_reduces(store: Store, rank: int, world_size: int, *, seconds: float) -> list[AllReduce]:
    """Time all-reduces of growing sizes in host memory, as many as there is time for; collective.

    Args:
        store: of the job.
        rank, world_size: of this worker.
        seconds: that they may take.

    Raises:
        PeerError: if a worker does not answer.
    """
    deadline, found = Deadline.after(seconds), []
    timeout = timedelta(seconds=max(_ANSWER_S, seconds))
    with peer_errors("all-reduce"):
        group: Any = dist.ProcessGroupGloo(PrefixStore("all-reduce", store), rank, world_size, timeout)
        for size, following in zip(_SIZES, (*_SIZES[1:], None), strict=True):
            vector = torch.zeros(size // 4, device="cpu")
            group.allreduce([vector]).wait()  # connects
            times_s = []
            for _ in range(_TIMES):
                began_s = now_s()
                group.allreduce([vector]).wait()
                times_s.append(now_s() - began_s)
            median_s = _largest(group, statistics.median(times_s))
            found.append(AllReduce(nbytes=size, seconds=median_s))
            left_s = -_largest(group, -deadline.left_s)
            if following is None or (1 + _TIMES) * median_s * following / size > left_s:
                return found
    return found


def _largest(group: Any, mine: float) -> float:
    """Of all workers, so that all decide alike."""
    value = torch.tensor([mine], dtype=torch.float64, device="cpu")
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([value], options).wait()
    return float(value)
