"""Collectives of a synchronous algorithm, on a process group of its own.

A group of its own, because Lightning's and a user's collectives on the default group come from the same thread but at other
points, and a worker that has ended its epoch goes on taking part in the algorithm's while it waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gossip.algorithm.tensors.flat import host_copy
from lightning_gossip.errors import ProtocolError
from lightning_gossip.runtime.clock import Timeline, now_s
from lightning_gossip.runtime.workers import FixedWorkers
from lightning_gossip.transport.gloo_group import new_group
from lightning_gossip.transport.peer_errors import peer_errors


class Collectives:
    """Collectives of a synchronous algorithm on one worker. Creating it is collective, as is every method but :meth:`close`.

    Args:
        device: where the tensors are that it is given.
        timeout_s: deadline of each operation, in seconds.
        timeline: where waits are recorded.
        group: of the workers, made for these collectives, and working on host memory; None to make one of those of the default
            group.
        staged: whether vectors on a device are summed through host memory, since the group works on nothing else.

    Attributes:
        bytes_sent: by this worker, reckoned as a ring sends: 2 (n − 1)/n of a summed vector, n − 1 times a gathered one.
        waited_s: seconds that the caller was blocked here.
        made: how many of them.
    """

    def __init__(
        self,
        device: torch.device,
        timeout_s: float,
        timeline: Timeline,
        group: dist.ProcessGroup | None = None,
        *,
        staged: bool = False,
    ) -> None:
        self._staged = staged
        self._is_given = group is not None
        self._group: dist.ProcessGroup | None = group or new_group(timeout_s, backend=None)  # the default group's backend
        self.world_size, self.rank = self._group.size(), self._group.rank()
        self.bytes_sent = 0
        self.waited_s = 0.0
        self.made = 0
        self._device = device
        self._timeline = timeline

    def start_sum(self, vector: Tensor) -> PendingSum:
        """Begin to replace a vector by its sum over all workers; the vector is the group's until the end is awaited."""
        self.bytes_sent += math.ceil(2 * (self.world_size - 1) / self.world_size * vector.numel() * vector.element_size())
        self.made += 1
        summed = host_copy(vector) if self._staged else vector
        with peer_errors("all-reduce"):
            work = dist.all_reduce(summed, group=self._open(), async_op=True)
        assert work is not None
        return PendingSum(self, work, vector, summed)

    def sum(self, vector: Tensor) -> Tensor:
        """Replace a vector by its sum over all workers, the same bits on all of them; returns it."""
        self.start_sum(vector).wait()
        return vector

    def sum_of(self, *numbers: float) -> list[float]:
        """The sums of a few numbers over all workers, in float64."""
        # NCCL works on the device only
        device = torch.device("cpu") if self._staged else self._device
        return [float(value) for value in self.sum(torch.tensor(numbers, dtype=torch.float64, device=device)).tolist()]

    def start_scatter(self, payloads: Tensor, into: Tensor) -> dist.Work:
        """Begin to send each worker its row, and to receive everybody's for this worker.

        Args:
            payloads: uint8, shape (n, bytes).
            into: of the same shape; both are the group's until the end is awaited.
        """
        self.bytes_sent += (self.world_size - 1) * payloads.shape[1]
        self.made += 1
        with peer_errors("all-to-all"):
            work = dist.all_to_all_single(into, payloads, group=self._open(), async_op=True)
        assert work is not None
        return work

    def gather_bytes(self, payload: Tensor) -> list[Tensor]:
        """Everybody's bytes, by rank.

        Args:
            payload: uint8, of the same length on every worker.
        """
        self.bytes_sent += (self.world_size - 1) * payload.numel()
        self.made += 1
        everyones = [torch.empty_like(payload) for _ in range(self.world_size)]
        with self.waiting("all-gather"):
            dist.all_gather(everyones, payload, group=self._open())
        return everyones

    def gather(self, mine: Any) -> list[Any]:
        """Everybody's value, by rank; any picklable value. Not counted in ``bytes_sent``: for what happens once a session."""
        self.made += 1
        with self.waiting("all-gather"):
            return FixedWorkers(self._open()).gather(mine)

    def close(self) -> None:
        """Free the group. May be called twice."""
        if self._group is not None and not self._is_given and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    @contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """What happens inside is waiting for other workers, and fails if one of them has ended."""
        began_s = now_s()
        with peer_errors(phase):
            yield
        ended_s = now_s()
        self.waited_s += ended_s - began_s
        self._timeline.record("wait", began_s, ended_s)

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise ProtocolError("The collectives are used after they were closed.")
        return self._group


class PendingSum:
    """An all-reduce under way.

    Args:
        collectives: whose it is.
        work: torch's.
        vector: that holds the sum at its end.
        summed: that the group sums; another one where it works on host memory only.
    """

    def __init__(self, collectives: Collectives, work: dist.Work, vector: Tensor, summed: Tensor) -> None:
        self._collectives = collectives
        self._work = work
        self._vector = vector
        self._summed = summed

    def wait(self) -> None:
        """Block until the vector holds the sum.

        Raises:
            PeerError: if a worker has ended, or the group's time is over.
        """
        with self._collectives.waiting("all-reduce"):
            self._work.wait()
        if self._summed is not self._vector:
            self._vector.copy_(self._summed)
