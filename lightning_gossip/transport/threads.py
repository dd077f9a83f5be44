"""The threads of this package: daemons with a name, on the CUDA device of whoever makes them.

The current CUDA device is each thread's own, and 0 in a new one. Without it a thread of the worker on device 3 would ask device
0 about an event, and make a context there: some hundred megabytes for each worker of the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


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


def in_background(name: str, target: Callable[..., Result], *args: Any) -> Future[Result]:
    """Run something on a thread of its own, from now on.

    No executor: the interpreter joins the threads of those before it ends, however long they wait.

    Args:
        name: of the thread; begins with ``gossip-``.
        target: what it runs.
        args: of the target.

    Returns:
        What it will have returned, or raised. The thread ends a moment after that is known.
    """
    future = Future[Result]()

    def run() -> None:
        try:
            result = target(*args)
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
            future.set_exception(error)
        else:
            future.set_result(result)

    new_thread(name, run).start()
    return future
