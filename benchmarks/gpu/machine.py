"""What the machine has, and which device a worker takes."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

MiB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """Of a whole run.

    Args:
        cuda: whether there are CUDA devices; else one is emulated.
        devices: how many there are; 0 without CUDA.
        quick: whether a run of some seconds is wanted.
    """

    cuda: bool
    devices: int
    quick: bool

    @classmethod
    def found(cls, *, quick: bool) -> Setting:
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(devices > 0, devices, quick)

    @property
    def workers(self) -> int:
        """Of the stages that train: one a device, and two where there is none or one."""
        return min(8, max(2, self.devices))

    @property
    def shares_a_device(self) -> bool:
        """Whether several workers have one device: NCCL refuses that, so they talk over Gloo."""
        return self.cuda and self.devices < self.workers

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def device_of(rank: int) -> torch.device:
    """The CUDA device of a worker."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def describe(setting: Setting) -> dict[str, Any]:
    """What a reader of the results needs to know of the devices, and nothing that names the machine."""
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "TORCH_NCCL_"))}
    found: dict[str, Any] = {"cuda": torch.version.cuda, "nccl": None, "devices": [], "environment": variables}
    if not setting.cuda:
        return found
    for number in range(setting.devices):
        properties = torch.cuda.get_device_properties(number)
        found["devices"].append(
            {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / (1 << 30), 1),
                "compute": f"{properties.major}.{properties.minor}",
                "processors": properties.multi_processor_count,
            }
        )
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["copy_gb_per_s"] = copy_rates()
    return found


def copy_rates() -> dict[str, float]:
    """Gigabytes a second between the first device and the host, by direction and kind of host memory."""
    rates = {}
    there = torch.empty(256 * MiB, dtype=torch.uint8, device="cuda:0")
    for kind in ("pinned", "pageable"):
        here = torch.empty(256 * MiB, dtype=torch.uint8, pin_memory=kind == "pinned")
        for direction, target, source in (("to the device", there, here), ("to the host", here, there)):
            target.copy_(source)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            rates[f"{kind}, {direction}"] = round(there.nbytes / begin.elapsed_time(end) * 1e-6, 2)
    return rates
