"""What the gossip asks of a device: a side stream, events, memory on it, and host memory that it copies to without waiting."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.errors import ConfigurationError

_ALIGNMENT = 256  # bytes, of each vector: a page would be too much for small models
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process


class Event(Protocol):
    """A point in a stream's work; :class:`torch.cuda.Event` is one."""

    def record(self) -> None:
        """Mark the end of what the current stream has been given."""

    def query(self) -> bool:
        """Whether the marked work is done; waits for nothing."""

    def synchronize(self) -> None:
        """Block the host until the marked work is done."""

    def wait(self) -> None:
        """Let the current stream's further work follow the marked work."""


class Streams(Protocol):
    """A device's side stream, events and memory."""

    def event(self) -> Event:
        """A new event, as if done."""

    def side(self) -> AbstractContextManager[object]:
        """Make the side stream the current one."""

    def vector(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed vector in the device's memory."""

    def pinned(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """So many zeroed host vectors that the device copies to and from without waiting."""


class CudaStreams(Streams):
    """The side stream, events and memory of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @override
    def event(self) -> Event:
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # else a thread that waits spins

    @override
    def side(self) -> AbstractContextManager[object]:
        if torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                "An optimizer step ended while a CUDA graph was being captured, and there models are published. Capture the"
                " graph before trainer.fit, or without the end of the step."
            )
        return torch.cuda.stream(self._stream)

    @override
    def vector(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)

    @override
    def pinned(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        return vectors_of_one_arena(count, numel, dtype, pin=_pin, unpin=partial(_unpin, self._device))


def vectors_of_one_arena(
    count: int,
    numel: int,
    dtype: torch.dtype,
    *,
    pin: Callable[[int, int], None],
    unpin: Callable[[int], None],
) -> list[Tensor]:
    """Zeroed vectors in host memory of just the size that they need, pinned together.

    torch's own pinned memory comes in powers of two: three vectors of 1.1 GB would take 6 GB instead of 3.3.

    Args:
        count: of vectors.
        numel: elements of each.
        dtype: of the elements.
        pin: is called with the address and the number of bytes.
        unpin: is called with the address, when the last of the vectors has gone.
    """
    stride = max(1, -(-numel * dtype.itemsize // _ALIGNMENT)) * _ALIGNMENT
    nbytes = count * stride
    # shared pages of zeros: those of a private one would part from the pinned ones when a data loader's process is forked
    memory = (ctypes.c_uint8 * nbytes).from_buffer(mmap.mmap(-1, nbytes))
    address = ctypes.addressof(memory)
    pin(address, nbytes)
    weakref.finalize(memory, unpin, address).atexit = False  # before the pages go, and those go with the last of the vectors
    arena = torch.frombuffer(memory, dtype=torch.uint8)
    return [arena[place : place + numel * dtype.itemsize].view(dtype) for place in range(0, nbytes, stride)]


def _pin(address: int, nbytes: int) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(address, nbytes, _PORTABLE))


def _unpin(device: torch.device, address: int) -> None:
    torch.cuda.synchronize(device)  # the last copy may be under way
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
