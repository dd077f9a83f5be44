"""A device on the CPU: its memory is ordinary memory, its streams are threads, and what is given to it happens later.

    device = EmulatedDevice()
    x = device.tensor(torch.randn(1000))                    # in the device's memory
    with device:                                            # for this thread
        device.launch(lambda: x.mul_(0.9), seconds=0.04)    # a step of 40 ms
        ...                                                 # the product's code, with device.streams()
    device.close()

While the device is entered, operations of that thread that change a tensor in the device's memory are put into its current
stream and return at once, as CUDA's kernels do; streams run them in order, each in its own thread. What returns a new tensor
waits until the stream is empty, as ``.item()`` does. Copies between the device and pinned memory with ``non_blocking=True`` are
put into the stream; all others wait. Pinned memory is what :meth:`EmulatedStreams.pinned` has made.

Two mistakes are found, which a CUDA device would let pass nearly always:
- until a copy into host memory has ended, that memory is full of NaN;
- host memory that a copy reads must be the same when it is read as when the copy was enqueued; else the next wait, or
  :meth:`EmulatedDevice.check`, raises.

Without threads (``threads=False``) the streams run by :meth:`EmulatedDevice.advance` only: a test chooses the order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_PATIENCE_S = 60.0


@dataclass
class _Work:
    """An item of a stream.

    Args:
        run: what it does.
        ready: whether it may begin; asked by the stream's thread each time that another stream has ended an item.
        seconds: that it lasts.
    """

    run: Callable[[], object]
    ready: Callable[[], bool] = lambda: True
    seconds: float = 0.0


@dataclass
class Stream:
    """Work in order.

    Args:
        name: of its thread.
    """

    name: str
    queue: deque[_Work] = field(default_factory=deque)
    running: bool = False


class EmulatedEvent:
    """A point in a stream's work, as :class:`torch.cuda.Event`."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._mark = [True]  # of the last record: whether it is reached

    def record(self) -> None:
        mark = self._mark = [False]

        def reach() -> None:
            mark[0] = True

        self._device.enqueue(reach)

    def query(self) -> bool:
        return self._mark[0]

    def synchronize(self) -> None:
        mark = self._mark
        self._device.wait_until(lambda: mark[0])

    def wait(self) -> None:
        mark = self._mark
        self._device.enqueue(lambda: None, ready=lambda: mark[0])


class EmulatedStreams:
    """What the product's code asks a device for: a side stream, events, memory."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._stream = device.stream("side")

    def event(self) -> EmulatedEvent:
        return EmulatedEvent(self._device)

    def side(self) -> AbstractContextManager[object]:
        return self._device.current(self._stream)

    def vector(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed vector in the device's memory."""
        return self._device.tensor(torch.zeros(numel, dtype=dtype, device="cpu"))

    def pinned(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Zeroed host vectors that the device copies to and from without waiting."""
        whole = torch.zeros(count, numel, dtype=dtype, device="cpu")
        self._device.pin(whole)
        return list(whole)


class EmulatedDevice(TorchDispatchMode):
    """See the module.

    Args:
        threads: one for each stream; without them :meth:`advance` runs what is enqueued.
        copy_bytes_per_s: of a copy between the device and the host; None: it takes no time of its own.
        ahead: steps that the host may have launched and the device not ended; None for any number.
        collectives: whether process groups work on the device's memory; otherwise one that is given it raises, as Gloo does.

    Attributes:
        host_waits: how often the host has waited for the device.
    """

    def __init__(
        self, *, threads: bool = True, copy_bytes_per_s: float | None = None, ahead: int | None = None, collectives: bool = True
    ) -> None:
        super().__init__()
        self._collectives = collectives
        self.host_waits = 0
        self._threaded = threads
        self._copy_bytes_per_s = copy_bytes_per_s
        self._slots = None if ahead is None else threading.Semaphore(ahead)
        self._changed = threading.Condition()
        self._closed = False
        self._errors: list[BaseException] = []
        self._memory: dict[int, Tensor] = {}  # the device's, by storage
        self._pinned: dict[int, Tensor] = {}
        self._streams: list[Stream] = []
        self._threads: list[threading.Thread] = []
        self._local = threading.local()
        self._default = self.stream("default")

    # -- memory --------------------------------------------------------------------------------------------------------------

    def tensor(self, tensor: Tensor) -> Tensor:
        """Put a tensor's memory into the device's; returns the tensor."""
        self._memory[_storage(tensor)] = tensor
        return tensor

    def pin(self, tensor: Tensor) -> Tensor:
        """Make a tensor's memory pinned host memory; returns the tensor."""
        self._pinned[_storage(tensor)] = tensor
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the device's memory."""
        return _storage(tensor) in self._memory

    @property
    def held(self) -> Mapping[int, Tensor]:
        """All that has ever been in the device's memory, by storage."""
        return self._memory

    # -- streams -------------------------------------------------------------------------------------------------------------

    def streams(self) -> EmulatedStreams:
        """A side stream of this device and its events."""
        return EmulatedStreams(self)

    def stream(self, name: str) -> Stream:
        """A new stream."""
        stream = Stream(f"device-{name}-{len(self._streams)}")
        self._streams.append(stream)
        if self._threaded:
            thread = threading.Thread(target=self._run, args=(stream,), name=stream.name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return stream

    @contextmanager
    def current(self, stream: Stream) -> Iterator[Stream]:
        """Make a stream the current one of this thread."""
        before = self._current
        self._local.stream = stream
        try:
            yield stream
        finally:
            self._local.stream = before

    @property
    def _current(self) -> Stream:
        return getattr(self._local, "stream", self._default)

    def enqueue(self, run: Callable[[], object], *, ready: Callable[[], bool] = lambda: True, seconds: float = 0.0) -> None:
        """Put work into the current stream."""
        with self._changed:
            self._current.queue.append(_Work(run, ready, seconds))
            self._changed.notify_all()

    def launch(self, work: Callable[[], object] = lambda: None, *, seconds: float = 0.0) -> None:
        """Launch a step: forward, backward and optimizer as one piece of work. Waits if the host is ``ahead`` as far as it may.

        Args:
            work: with tensors of the device's memory.
            seconds: that it lasts.
        """
        if self._slots is not None and not self._slots.acquire(timeout=_PATIENCE_S):
            raise TimeoutError(f"The device has not ended a step in {_PATIENCE_S:g} s.")

        def step() -> None:
            with torch.no_grad():
                work()
            if self._slots is not None:
                self._slots.release()

        self.enqueue(step, seconds=seconds)

    def synchronize(self) -> None:
        """Wait until all streams are empty."""
        self.wait_until(lambda: not any(stream.queue or stream.running for stream in self._streams))

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Block the host until something is over on the device."""
        if is_over():
            return
        self.host_waits += 1
        if not self._threaded:
            while not is_over():
                if not self.advance():
                    raise RuntimeError("The host waits for what the device will never do.")
            return
        with self._changed:
            if not self._changed.wait_for(lambda: is_over() or bool(self._errors), _PATIENCE_S):
                raise TimeoutError(f"The device has not come so far in {_PATIENCE_S:g} s.")
        self.check()

    def waiting(self) -> list[Stream]:
        """The streams whose next piece of work may run."""
        return [stream for stream in self._streams if not stream.running and stream.queue and stream.queue[0].ready()]

    def advance(self, stream: Stream | None = None) -> bool:
        """Run the next piece of work of a stream, or of the first that may; False if none may."""
        waiting = self.waiting()
        if not waiting or (stream is not None and stream not in waiting):
            return False
        self._run_next(waiting[0] if stream is None else stream)
        self.check()
        return True

    def _run(self, stream: Stream) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (bool(stream.queue) and stream.queue[0].ready()))
                if self._closed:
                    return
                stream.running = True
            self._run_next(stream)

    def _run_next(self, stream: Stream) -> None:
        work = stream.queue[0]
        if work.seconds:
            time.sleep(work.seconds)
        try:
            with (
                torch.no_grad(),
                _disable_current_modes(),
            ):  # without threads it is the host's thread, which has entered the device
                work.run()
        except BaseException as error:  # noqa: BLE001 - raised by check
            self._errors.append(error)
        with self._changed:
            stream.queue.popleft()
            stream.running = False
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what went wrong on the device."""
        if self._errors:
            raise self._errors[0]

    def close(self) -> None:
        """End the threads; what is enqueued does not happen any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_PATIENCE_S)

    # -- operations ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.is_view or not any(self.holds(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        if func.namespace == "c10d" and not self._collectives:
            raise RuntimeError(f"{func}: the group works on host memory, and was given a tensor of the device's.")
        if not func._schema.is_mutable:
            self.synchronize()
            result = func(*args, **kwargs)
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.tensor(leaf)
            return result
        self._enqueue_operation(func, args, kwargs, tensors)
        return args[0] if func._schema.returns else None

    def _enqueue_operation(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        host = [tensor for tensor in tensors if not self.holds(tensor) and tensor.dim()]
        if host and "copy_" not in func._schema.name:
            raise RuntimeError(f"{func} mixes tensors of the device and of the host.")
        blocking = not _non_blocking(func, args, kwargs) or any(_storage(tensor) not in self._pinned for tensor in host)
        targets = {id(tensor) for tensor in tree_leaves(args[0])}
        read = [(tensor, tensor.clone()) for tensor in host if id(tensor) not in targets]
        for tensor in host:
            if id(tensor) in targets and tensor.is_floating_point():
                tensor.fill_(float("nan"))

        def run() -> None:
            for tensor, before in read:
                if not torch.equal(tensor.nan_to_num(), before.nan_to_num()):
                    raise RuntimeError("Host memory was changed between a copy's launch and its end.")
            func(*args, **kwargs)

        nbytes = sum(tensor.nbytes for tensor in host)
        seconds = nbytes / self._copy_bytes_per_s if self._copy_bytes_per_s else 0.0
        self.enqueue(run, seconds=seconds)
        if host and blocking:
            self.synchronize()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    if "non_blocking" not in names:
        return False
    place = names.index("non_blocking")
    return bool(args[place] if place < len(args) else kwargs.get("non_blocking", False))
