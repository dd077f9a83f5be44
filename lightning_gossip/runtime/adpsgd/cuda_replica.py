"""The published model of a worker whose parameters are on a GPU: vectors in pinned host memory, copies on a side stream.

The training thread enqueues copies and returns. What is published when, and from what, is
:mod:`lightning_gossip.algorithm.adpsgd.delayed_replica`; here is one staging buffer on the device and who may use it when:

| stream | work | follows |
|---|---|---|
| side | staging ← m from the host | its own last copy, and the training stream's last use of the staging buffer |
| training | x += staging ; staging ← x | that copy |
| side | host ← staging | the training stream's copy |

So a host that runs ahead of the device has both copies made while the device computes. Each arrow is one event.

Parameters stay where they are, so a CUDA graph that was captured with them sees each change at its next replay. In the middle
of a capture a step boundary is refused; and since a gossip thread asks for an event meanwhile, a capture inside a fit needs
the mode "thread_local".

Not yet run on a GPU: the tests run it on ``benchmarks/emulated_device.py``, whose streams are threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.adpsgd.delayed_replica import Copies, DelayedReplica
from lightning_gossip.algorithm.adpsgd.merges import Merges
from lightning_gossip.algorithm.adpsgd.replica import Follower, PublishedModel, Replica, follow
from lightning_gossip.algorithm.tensors.flat import common_dtype, views_like
from lightning_gossip.runtime.adpsgd.streams import CudaStreams, Event, Streams

_LARGE_BYTES = 1 << 30


class StagedCopies(Copies):
    """Copies between tensors on a device and pinned host memory.

    Memory: one flat vector of the model's size on the device, beside those on the host.

    Args:
        tensors: x.
        streams: of their device.
        dtype: of the vectors; default: the type that all tensors promote to, at least float32.
    """

    def __init__(self, tensors: Sequence[Tensor], streams: Streams, *, dtype: torch.dtype | None = None) -> None:
        self._streams = streams
        self._dtype = dtype if dtype is not None else common_dtype(tensors)
        self._numel = sum(tensor.numel() for tensor in tensors)
        self._staging = streams.vector(self._numel, self._dtype)
        self._views = views_like(self._staging, tensors)
        self._trained = streams.event()  # the training stream's last use of the staging buffer
        self._copied: Event = streams.event()  # the side stream's

    @override
    def vectors(self, count: int) -> list[Tensor]:
        return self._streams.pinned(count, self._numel, self._dtype)

    @override
    @torch.no_grad()
    def add(
        self,
        tensors: Sequence[Tensor],
        merges: Merges,
        faded: Sequence[tuple[slice, float]],
        followers: Sequence[Follower] = (),
    ) -> None:
        with self._streams.side():
            self._trained.wait()
            if merges.places != [slice(0, self._numel)]:
                self._staging.zero_()
            for place in merges.places:
                self._staging[place].copy_(merges.vector[place], non_blocking=True)
            if faded:
                torch._foreach_mul_([self._staging[place] for place, _ in faded], [factor for _, factor in faded])
            self._copied = self._recorded()
        self._copied.wait()
        torch._foreach_add_(list(tensors), self._views)
        for follower, factor in followers:
            follow(follower, self._views, factor)
        self._trained.record()

    @override
    @torch.no_grad()
    def write(self, tensors: Sequence[Tensor], model: Tensor) -> Event:
        with self._streams.side():
            self._trained.wait()
            self._staging.copy_(model, non_blocking=True)
            self._copied = self._recorded()
        self._copied.wait()
        torch._foreach_copy_(list(tensors), self._views)
        self._trained.record()
        return self._copied

    @override
    @torch.no_grad()
    def read(self, tensors: Sequence[Tensor], into: Tensor) -> Event:
        self._copied.wait()
        torch._foreach_copy_(self._views, list(tensors))
        self._trained.record()
        with self._streams.side():
            self._trained.wait()
            into.copy_(self._staging, non_blocking=True)
            self._copied = self._recorded()
        return self._copied

    def _recorded(self) -> Event:
        event = self._streams.event()
        event.record()
        return event


def replica_of(tensors: Sequence[Tensor], *, retention: Sequence[float] | None = None, push_every: int = 1) -> PublishedModel:
    """A published model of tensors wherever they are, for several threads.

    Args:
        tensors, retention, push_every: as for :class:`~lightning_gossip.algorithm.adpsgd.replica.Replica`.
    """
    if tensors and tensors[0].is_cuda:
        return staged_replica(
            tensors,
            StagedCopies(tensors, CudaStreams(tensors[0].device)),
            retention=retention,
            push_every=push_every,
        )
    return Replica(tensors, retention=retention, push_every=push_every, lock=Lock())


def staged_replica(
    tensors: Sequence[Tensor],
    copies: StagedCopies,
    *,
    retention: Sequence[float] | None = None,
    push_every: int = 1,
) -> DelayedReplica:
    """A published model whose pushes arrive later, for several threads.

    Two pushes may be under way, of a model of more than 1 GiB one: each costs two vectors of its size in pinned memory, and a
    large model has steps so long that the host is hardly ahead.

    Args:
        tensors, retention, push_every: as for :func:`replica_of`.
        copies: for these tensors.
    """
    dtype = common_dtype(tensors)
    nbytes = sum(tensor.numel() for tensor in tensors) * dtype.itemsize
    return DelayedReplica(
        tensors,
        copies=copies,
        retention=retention,
        dtype=dtype,
        push_every=push_every,
        ahead=1 if nbytes > _LARGE_BYTES else 2,
        lock=Lock(),
    )
