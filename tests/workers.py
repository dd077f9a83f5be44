"""The same script on every rank, as threads or as forked processes with a Gloo group, and never longer than a deadline."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_threads(scripts: Sequence[Callable[[], Any]], deadline_s: float) -> list[Any]:
    """Run all at once; their results, or the first exception."""
    results: list[Any] = [None] * len(scripts)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = scripts[index]()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), name=f"rank-{i}", daemon=True) for i in range(len(scripts))]
    end_s = time.monotonic() + deadline_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    if errors:
        raise errors[0]
    stuck = [thread.name for thread in threads if thread.is_alive()]
    assert not stuck, f"not done within {deadline_s} s: {stuck}"
    return results


def run_processes(script: Callable[[int], Any], folder: Path, *, world_size: int = 3, deadline_s: float = 60.0) -> list[Any]:
    """Fork one process a rank, each with the default Gloo group, and collect what the script returns.

    Returns:
        By rank: the result, ``"died"`` for a process that ended without one, or the traceback as a string that begins
        with ``"Traceback"``.
    """
    context = multiprocessing.get_context("fork")
    readers: dict[Connection, int] = {}
    processes = []
    for rank in range(world_size):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(script, rank, world_size, folder / "store", writer))
        process.start()
        writer.close()
        readers[reader] = rank
        processes.append(process)
    results: list[Any] = ["late"] * world_size
    end_s = time.monotonic() + deadline_s
    try:
        while readers and time.monotonic() < end_s:
            for reader in wait(list(readers), timeout=max(0.0, end_s - time.monotonic())):
                rank = readers.pop(reader)  # type: ignore[arg-type]
                try:
                    results[rank] = reader.recv()  # type: ignore[union-attr]
                except EOFError:
                    results[rank] = "died"
                reader.close()  # type: ignore[union-attr]
        for process in processes:
            process.join(max(0.1, min(10.0, end_s - time.monotonic())))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(10)
            process.close()
    return results


def _main(script: Callable[[int], Any], rank: int, world_size: int, store: Path, writer: Connection) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=30),
        )
        result = script(rank)
    except BaseException:  # noqa: BLE001 - shown by the parent
        result = traceback.format_exc()
    writer.send(result)
    writer.close()
    os._exit(0)  # no clean-up that could wait for a rank that has died
