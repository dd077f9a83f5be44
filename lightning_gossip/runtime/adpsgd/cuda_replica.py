"""The published model of a worker whose parameters are on a GPU: y and m in pinned host memory, copies on a side stream.

The training thread enqueues copies and returns; it waits for the device only if it is more than one step ahead of it. Three
orders matter, and each is one event:
- the side stream reads the staging buffer after the training stream has filled it (``staged``);
- the host reads or changes y after the copy from the staging buffer has ended (``published``);
- the host clears a buffer of merges after the device has read it (``uploaded``, one for each of the two buffers).

Not yet run on a GPU: the tests drive the bookkeeping on the CPU, where every copy is over when it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.tensors.flat import common_dtype, views_like


class Event(Protocol):
    """A point in a stream's work."""

    def record(self) -> None:
        """Mark the end of what the current stream has been given."""

    def synchronize(self) -> None:
        """Block the host until the marked work is done."""

    def wait(self) -> None:
        """Let the current stream's further work follow the marked work."""


class Streams(Protocol):
    """A device's side stream and events."""

    def event(self) -> Event:
        """A new event, as if done."""

    def side(self) -> AbstractContextManager[object]:
        """Make the side stream the current one."""

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed host vector that the device copies to and from without waiting."""


class CudaStreams(Streams):
    """The side stream and events of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @override
    def event(self) -> Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    @override
    def side(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    @override
    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, pin_memory=True)


class StagedReplica(Replica):
    """A :class:`~lightning_gossip.algorithm.adpsgd.replica.Replica` of tensors on a device.

    Memory: one flat vector of the model's size on the device, three pinned ones on the host.

    Args:
        tensors, retention, lock: as for a replica.
        streams: of the tensors' device.
    """

    def __init__(
        self, tensors: Sequence[Tensor], *, retention: Sequence[float] | None = None, streams: Streams, lock: Lock | None = None
    ) -> None:
        dtype = common_dtype(tensors)
        numel = sum(tensor.numel() for tensor in tensors)
        self._streams = streams
        self._staging = torch.empty(numel, dtype=dtype, device=tensors[0].device)
        self._staging_views = views_like(self._staging, tensors)
        self._staged, self._published_event = streams.event(), streams.event()
        self._uploaded, self._spare_uploaded = streams.event(), streams.event()
        super().__init__(tensors, retention=retention, dtype=dtype, host_vector=streams.pinned, lock=lock)
        self._spare_merges = streams.pinned(numel, dtype)

    @override
    def settle(self) -> Tensor:
        self._published_event.synchronize()
        return self.published

    @override
    @torch.no_grad()
    def copy_out(self, tensors: Sequence[Tensor]) -> None:
        self._published_event.wait()  # the side stream may still read the staging buffer
        self._staging.copy_(self.published, non_blocking=True)
        torch._foreach_copy_(list(tensors), self._staging_views)
        self._published_event.record()  # and the host may change y only when it has been read

    @override
    def _take_over_and_copy_in(self, tensors: Sequence[Tensor]) -> None:
        self._published_event.wait()  # the side stream may still read the staging buffer
        self._staging.copy_(self.merges, non_blocking=True)
        self._uploaded.record()
        torch._foreach_add_(list(tensors), self._staging_views)
        self.merges, self._spare_merges = self._spare_merges, self.merges
        self._uploaded, self._spare_uploaded = self._spare_uploaded, self._uploaded
        self._uploaded.synchronize()  # read by the device a step ago or more
        self.merges.zero_()
        self._copy_in(tensors)

    @override
    @torch.no_grad()
    def _copy_in(self, tensors: Sequence[Tensor]) -> None:
        self._published_event.wait()  # the side stream may still read the staging buffer
        torch._foreach_copy_(self._staging_views, list(tensors))
        self._staged.record()
        with self._streams.side():
            self._staged.wait()
            self.published.copy_(self._staging, non_blocking=True)
            self._published_event.record()


def replica_of(tensors: Sequence[Tensor], *, retention: Sequence[float] | None = None) -> Replica:
    """A replica of tensors wherever they are, for several threads."""
    if tensors and tensors[0].is_cuda:
        return StagedReplica(tensors, retention=retention, streams=CudaStreams(tensors[0].device), lock=Lock())
    return Replica(tensors, retention=retention, lock=Lock())
