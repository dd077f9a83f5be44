"""What this process uses of its host: cores and memory, as the kernel counts them."""

from __future__ import annotations

import sys
import time

import torch

from lightning_gossip.runtime.clock import now_s

if sys.platform != "win32":
    import resource

_KIB = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


class Usage:
    """What this process has used of the machine, since this object was made or last asked."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = now_s(), time.process_time()

    def cores(self) -> float:
        """Cores that its threads have kept busy since it was asked last, on average; 1.0 is one whole core."""
        wall_s, cpu_s = now_s(), time.process_time()
        passed_s, used_s = wall_s - self._wall_s, cpu_s - self._cpu_s
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return used_s / passed_s if passed_s > 0.0 else 0.0


def peak_memory_bytes() -> int | None:
    """The most of the host's memory that this process has had so far, in bytes; None where the system does not tell."""
    return None if sys.platform == "win32" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def peak_device_memory_bytes() -> int | None:
    """The most of its CUDA device's memory that PyTorch has had so far, in bytes; None without one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
