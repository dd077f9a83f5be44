"""One worker's training without Lightning, on a CUDA device or on an emulated one: steps that the host launches."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torchvision.models import resnet50

from benchmarks.emulated_device import EmulatedDevice
from benchmarks.gpu.machine import device_of
from lightning_gossip.algorithm.adpsgd.replica import PublishedModel
from lightning_gossip.runtime.adpsgd.cuda_replica import StagedCopies, replica_of, staged_replica
from lightning_gossip.runtime.adpsgd.streams import Event
from lightning_gossip.strategies.state.shared_tensors import SharedModel

Precision = Literal["float32", "bf16-mixed", "bf16-true"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bf16-mixed", "bf16-true")
BATCHES = 4  # made before, so that no loader is in the way
WARM = 5  # steps that do not count


class Loop(Protocol):
    """Attributes:
    tensors: what the gossip shares.
    layout: their fingerprint.
    """

    tensors: list[Tensor]
    layout: int

    def step(self) -> None:
        """Launch one step of the optimizer on the next batch."""

    def mark(self) -> Event:
        """A point in the device's work, after what has been launched."""

    def synchronize(self) -> None:
        """Wait until the device has done all of it."""

    def replica(self) -> PublishedModel:
        """A published model of the tensors, as the strategy makes one."""

    def copy_s(self) -> float:
        """Seconds of one copy of the model from the device into pinned host memory."""

    def entered(self) -> AbstractContextManager[object]:
        """In it the thread uses the device."""


class CudaLoop:
    """ResNet-50 and SGD with momentum.

    Args:
        rank: of the worker.
        precision: of training, in Lightning's words.
        pinned: whether the batches lie in pinned memory.
        batch: images.
        size: of an image's side.
    """

    def __init__(self, rank: int, precision: Precision, *, pinned: bool, batch: int, size: int) -> None:
        self._device = device_of(rank)
        torch.cuda.set_device(self._device)
        torch.manual_seed(0)
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        self._network = resnet50().to(self._device, dtype, memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.01, momentum=0.9)
        self._cast = precision == "bf16-mixed"
        images = [torch.randn(batch, 3, size, size, dtype=dtype).to(memory_format=torch.channels_last) for _ in range(BATCHES)]
        labels = [torch.randint(1000, (batch,)) for _ in range(BATCHES)]
        if pinned:
            images, labels = [x.pin_memory() for x in images], [y.pin_memory() for y in labels]
        self._batches = cycle(zip(images, labels, strict=True))
        self._shared = SharedModel(self._network).open()
        self.tensors = list(self._shared.tensors)
        self.layout = self._shared.layout

    def step(self) -> None:
        images, labels = (tensor.to(self._device, non_blocking=True) for tensor in next(self._batches))
        self._optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=self._cast):
            loss = nn.functional.cross_entropy(self._network(images), labels)
        loss.backward()
        self._optimizer.step()

    def mark(self) -> Event:
        event: Event = torch.cuda.Event()
        event.record()
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def replica(self) -> PublishedModel:
        return replica_of(self.tensors, retention=self._shared.retention)

    def copy_s(self) -> float:
        numel = sum(tensor.numel() for tensor in self.tensors)
        there = torch.zeros(numel, device=self._device)
        here = torch.zeros(numel, pin_memory=True)
        return _median_s(lambda: here.copy_(there, non_blocking=True), self.synchronize)

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()


class EmulatedLoop:
    """A vector and steps of a fixed time.

    Args:
        rank: of the worker.
        precision: as for CudaLoop; a step in bfloat16 lasts half as long.
        pinned: whether the batches lie in pinned memory.
        device: that is emulated; made here if None.
    """

    NUMEL = 25_000
    STEP_S: ClassVar = {"float32": 0.020, "bf16-mixed": 0.010, "bf16-true": 0.010}
    LAUNCH_S = 0.001  # that the host needs for a step
    AHEAD = 4  # steps that the host may be ahead
    COPY_BYTES_PER_S = 50e6  # 2 ms for the model

    def __init__(self, rank: int, precision: Precision, *, pinned: bool, device: EmulatedDevice | None = None) -> None:
        self.device = device or EmulatedDevice(ahead=self.AHEAD, copy_bytes_per_s=self.COPY_BYTES_PER_S)
        self._step_s = self.STEP_S[precision]
        dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
        self.tensors = [self.device.tensor(torch.full((self.NUMEL,), float(rank), dtype=dtype))]
        self.layout = 1
        self._images = self.device.tensor(torch.zeros(1000))
        host = torch.zeros(1000)
        self._batch = self.device.pin(host) if pinned else host
        self._streams = self.device.streams()

    def step(self) -> None:
        time.sleep(self.LAUNCH_S)
        self._images.copy_(self._batch, non_blocking=True)
        self.device.launch(lambda: self.tensors[0].mul_(0.999), seconds=self._step_s)

    def mark(self) -> Event:
        event: Event = self._streams.event()
        event.record()
        return event

    def synchronize(self) -> None:
        self.device.synchronize()

    def replica(self) -> PublishedModel:
        return staged_replica(self.tensors, StagedCopies(self.tensors, self.device.streams()))

    def copy_s(self) -> float:
        here, there = self.device.pin(torch.zeros(self.NUMEL)), self.device.tensor(torch.zeros(self.NUMEL))
        return _median_s(lambda: here.copy_(there, non_blocking=True), self.synchronize)

    def entered(self) -> AbstractContextManager[object]:
        return self.device


def _median_s(copy: Callable[[], object], synchronize: Callable[[], None]) -> float:
    times = []
    for _ in range(5):
        synchronize()
        began_s = time.perf_counter()
        copy()
        synchronize()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


@contextmanager
def loop_of(cuda: bool, rank: int, precision: Precision, *, pinned: bool, batch: int, size: int) -> Iterator[Loop]:
    """A loop, entered; at the end its device's threads have ended."""
    if cuda:
        yield CudaLoop(rank, precision, pinned=pinned, batch=batch, size=size)
        torch.cuda.empty_cache()
        return
    emulated = EmulatedLoop(rank, precision, pinned=pinned)
    try:
        with emulated.entered():
            yield emulated
            emulated.synchronize()
    finally:
        emulated.device.close()


def run_steps(loop: Loop, boundary: Callable[[], object], steps: int) -> dict[str, Any]:
    """Make so many steps, with what follows each, and some before that do not count.

    Returns:
        Seconds a step, seconds of the host in what follows (mean, 95th percentile), and by how many steps it was ahead of the
        device when it had launched one (median).
    """
    for _ in range(WARM):
        loop.step()
        boundary()
    loop.synchronize()
    under_way: deque[Event] = deque()
    ahead, boundary_s = [], []
    began_s = time.perf_counter()
    for _ in range(steps):
        loop.step()
        at_s = time.perf_counter()
        boundary()
        boundary_s.append(time.perf_counter() - at_s)
        under_way.append(loop.mark())
        while under_way and under_way[0].query():
            under_way.popleft()
        ahead.append(len(under_way))
    loop.synchronize()
    step_s = (time.perf_counter() - began_s) / steps
    return {
        "step_s": step_s,
        "boundary_s": statistics.fmean(boundary_s),
        "boundary_p95_s": sorted(boundary_s)[int(0.95 * (steps - 1))],
        "ahead": statistics.median(ahead),
    }
