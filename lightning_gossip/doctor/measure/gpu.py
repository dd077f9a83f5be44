"""How fast a CUDA device's copies are: an exchange copies the model to pinned host memory and back (docs/gpu.md)."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from lightning_gossip.doctor.report import Copies
from lightning_gossip.runtime.clock import Deadline, now_s

_NBYTES = 1 << 26
_TIMES = 20


def copies(device: torch.device, *, seconds: float, nbytes: int = _NBYTES) -> Copies:
    """Measure one device's.

    Args:
        device: with CUDA.
        seconds: that each of the four kinds may take.
        nbytes: of a copy.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    began_s = now_s()
    pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    pin_s = now_s() - began_s
    pageable = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    beside = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)  # both are filled before another stream copies them

    def rate(copy: Callable[[], object]) -> float:
        deadline = Deadline.after(seconds)
        times_s: list[float] = []
        with torch.cuda.stream(stream):
            copy()
            stream.synchronize()
            while len(times_s) < _TIMES and (deadline.left_s or not times_s):
                started_s = now_s()
                copy()
                stream.synchronize()
                times_s.append(now_s() - started_s)
        return nbytes / statistics.median(times_s)

    return Copies(
        nbytes=nbytes,
        pin_s=pin_s,
        to_device=rate(lambda: there.copy_(pinned, non_blocking=True)),
        from_device=rate(lambda: pinned.copy_(there, non_blocking=True)),
        pageable=rate(lambda: there.copy_(pageable)),
        on_device=rate(lambda: beside.copy_(there)),
    )
