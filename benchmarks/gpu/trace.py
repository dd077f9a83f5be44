"""A trace of some steps, in the format that chrome://tracing and ui.perfetto.dev read, and what it shows."""

from __future__ import annotations

import gzip
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.emulated_device import EmulatedDevice, Stream
from benchmarks.gpu.loops import CudaLoop, EmulatedLoop, Loop, run_steps
from benchmarks.gpu.machine import Setting
from benchmarks.gpu.overhead import BATCH, SIZE
from benchmarks.harness import process_group, rank, run
from benchmarks.overhead import new_gossip

TIMEOUT_S = 60.0
STEPS = 12
NAME = "gpu_trace.json.gz"
Span = tuple[float, float]
_MODEL = 4  # of a model's copy at least this part is one of the copies that are looked at


def measure(setting: Setting, output: Path, left_s: float) -> dict[str, Any]:
    """Write the trace of one of two workers.

    Args:
        setting: of the run.
        output: folder for it.
        left_s: seconds that it may take.
    """
    parameters = {"cuda": setting.cuda, "output": str(output / NAME)}
    found: dict[str, Any] = run(traced, parameters, hosts=(None, None), timeout_s=min(TIMEOUT_S, left_s))[0]
    return found


@process_group()
def traced(cuda: bool, output: str) -> dict[str, Any]:
    """In each of two workers; the first writes its trace."""
    torch.set_num_threads(1)
    gossip = new_gossip()
    device = None if cuda else RecordedDevice()
    loop: Loop = (
        CudaLoop(rank(), "float32", pinned=True, batch=BATCH, size=SIZE)
        if device is None
        else EmulatedLoop(rank(), "float32", pinned=True, device=device)
    )
    path = Path(output)
    with loop.entered():
        replica = loop.replica()
        gossip.open(replica, session=1, layout=loop.layout)
        dist.barrier()

        def steps() -> None:
            run_steps(loop, lambda: gossip.step(loop.tensors, step_s=0.03), STEPS)

        if rank() != 0:
            steps()
        elif device is None:
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                steps()
            profile.export_chrome_trace(str(path))  # gzipped, by its name
        else:
            steps()
            device.write(path)
        dist.barrier()
        gossip.drain(loop.tensors)
        dist.barrier()
    gossip.close()
    if device is not None:
        device.close()
    nbytes = replica.numel * replica.dtype.itemsize
    return {"trace": path.name, **overlap(events_of(path), nbytes / _MODEL)} if rank() == 0 else {}


class RecordedDevice(EmulatedDevice):
    """An emulated device that writes down what it did and when, as torch's profiler does for a CUDA device."""

    def __init__(self) -> None:
        super().__init__(ahead=EmulatedLoop.AHEAD, copy_bytes_per_s=EmulatedLoop.COPY_BYTES_PER_S)
        self.events: list[dict[str, Any]] = []

    def _run_next(self, stream: Stream) -> None:
        seconds, began_s = stream.queue[0].seconds, time.perf_counter()
        super()._run_next(stream)
        if seconds:  # what lasts: a step, or a copy between the device and the host
            copies = "side" in stream.name
            self.events.append(
                {
                    "ph": "X",
                    "cat": "gpu_memcpy" if copies else "kernel",
                    "name": "Memcpy" if copies else "step",
                    "pid": 0,
                    "tid": stream.name,
                    "ts": began_s * 1e6,
                    "dur": (time.perf_counter() - began_s) * 1e6,
                    "args": {"bytes": seconds * EmulatedLoop.COPY_BYTES_PER_S} if copies else {},
                }
            )

    def write(self, path: Path) -> None:
        """All of it."""
        with gzip.open(path, "wt") as file:
            json.dump({"traceEvents": self.events}, file)


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a trace."""
    with gzip.open(path, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def overlap(events: Iterable[dict[str, Any]], least_bytes: float) -> dict[str, Any]:
    """How much of the time of the gossip's copies the device computed in.

    They are on a stream of their own; batches are copied on the one that computes.

    Args:
        events: of a trace.
        least_bytes: of a copy, to be one of a model.

    Returns:
        How many copies, their seconds, those of kernels, and the share of the first in which there were kernels; None without
        copies.
    """
    kernels: dict[Any, list[Span]] = defaultdict(list)  # by stream
    copied: dict[Any, list[Span]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy"):
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            if event["cat"] == "kernel":
                kernels[event["tid"]].append(span)
            elif float(event.get("args", {}).get("bytes", 0)) >= least_bytes:
                copied[event["tid"]].append(span)
    training = max(kernels, key=lambda stream: length(union(kernels[stream])), default=None)
    copies = [span for stream, spans in copied.items() if stream != training for span in spans]
    computing = union([span for spans in kernels.values() for span in spans])
    both, copying = common(union(copies), computing), length(union(copies))
    return {
        "copies": len(copies),
        "copies_s": copying * 1e-6,
        "kernels_s": length(computing) * 1e-6,
        "overlap": length(both) / copying if copying else None,
    }


def union(spans: Sequence[Span]) -> list[Span]:
    """Their union, without overlaps, in order.

    >>> union([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """What two unions have in common.

    >>> common([(0, 4), (6, 8)], [(3, 7)])
    [(3, 4), (6, 7)]
    """
    return [(max(a[0], b[0]), min(a[1], b[1])) for a in first for b in second if max(a[0], b[0]) < min(a[1], b[1])]


def length(spans: Sequence[Span]) -> float:
    """Of a union."""
    return sum(end - begin for begin, end in spans)
