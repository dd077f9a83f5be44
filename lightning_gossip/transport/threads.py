"""The threads of this package: daemons with a name, on the CUDA device of whoever makes them.

The current CUDA device is each thread's own, and 0 in a new one. Without it a thread of the worker on device 3 would ask device
0 about an event, and make a context there: some hundred megabytes for each worker of the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


def new_thread(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """A daemon thread that is not started yet.

    Args:
        name: begins with ``gossip-``.
        target: what it runs.
        args: of the target.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)
