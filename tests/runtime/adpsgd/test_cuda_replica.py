"""The staged replica's bookkeeping, on the CPU; on a GPU the same with real streams."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.runtime.adpsgd.cuda_replica import Event, StagedReplica, Streams, replica_of


class ImmediateStreams(Streams):
    """Stand-in on the CPU, where a copy is over when it returns."""

    class _Done:
        def record(self) -> None:
            """Nothing is under way."""

        def synchronize(self) -> None:
            """Nothing is under way."""

        def wait(self) -> None:
            """Nothing is under way."""

    @override
    def event(self) -> Event:
        return self._Done()

    @override
    def side(self) -> AbstractContextManager[object]:
        return nullcontext()

    @override
    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    conv = torch.randn(4, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last)
    return [conv, torch.randn(5, generator=generator), torch.rand(4, generator=generator)]


def drive(replica: Replica, model: list[torch.Tensor]) -> list[Any]:
    """Pushes with and without merges in between, as training and gossip interleave them."""
    seen: list[Any] = []
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        for _ in range(step % 3):
            chunk = slice(step, replica.numel - step)
            out = torch.empty(chunk.stop - chunk.start)
            replica.snapshot(chunk, out)
            seen.append(out)
            replica.merge(chunk, torch.randn(out.shape, generator=generator))
            replica.exchange_done()
        for tensor in model:
            tensor.add_(0.1)
        seen.append(replica.push_pull(model, forward_passes=1 + step % 2))
        seen.append(replica.settle().clone())
    replica.settle().mul_(0.5)
    replica.copy_out(model)
    return [*seen, *(tensor.clone() for tensor in model)]


def test_a_staged_replica_does_what_a_replica_does() -> None:
    retention = [1.0, 1.0, 0.9]
    plain_model, staged_model = tensors(), tensors()
    plain = drive(Replica(plain_model, retention=retention), plain_model)
    staged = drive(StagedReplica(staged_model, retention=retention, streams=ImmediateStreams()), staged_model)
    for a, b in zip(plain, staged, strict=True):
        assert a == b if isinstance(a, int) else torch.equal(a, b)


def test_tensors_on_the_cpu_are_not_staged() -> None:
    assert type(replica_of(tensors(), retention=[1.0] * 3)) is Replica


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_staged_replica_on_a_gpu_does_what_a_replica_does() -> None:
    plain_model, gpu_model = tensors(), [tensor.cuda() for tensor in tensors()]
    plain = drive(Replica(plain_model), plain_model)
    staged = drive(replica_of(gpu_model, retention=[1.0] * 3), gpu_model)
    for a, b in zip(plain, staged, strict=True):
        assert a == b if isinstance(a, int) else torch.allclose(a, b.cpu(), atol=1e-6)
