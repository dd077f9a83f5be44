"""Runs one function in several fresh processes that Lightning takes for the workers of one job.

The processes are forked from a server that has imported torch and Lightning once and computed nothing, so a test costs a
fraction of a second and inherits no thread. Each gets the environment that torchrun would give it.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from recipes.processes import reserved_port

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["lightning.pytorch", "torchmetrics", "lightning_gossip", "tests.strategies.models"])


def launch(scenario: Callable[..., Any], *args: Any, workers: int = 2, timeout_s: float = 90.0, **kwargs: Any) -> list[Any]:
    """What ``scenario(*args, **kwargs)`` returned on each rank; an AssertionError with all tracebacks if one failed."""
    results = outcomes(scenario, *args, workers=workers, timeout_s=timeout_s, **kwargs)
    failures = [f"--- rank {rank}\n{result}" for rank, (ok, result) in enumerate(results) if not ok]
    assert not failures, "\n".join(failures)
    return [result for _, result in results]


def outcomes(
    scenario: Callable[..., Any], *args: Any, workers: int = 2, timeout_s: float = 90.0, **kwargs: Any
) -> list[tuple[bool, Any]]:
    """Per rank: (True, returned value) or (False, traceback)."""
    with reserved_port() as port:
        return _outcomes(port, scenario, args, kwargs, workers, timeout_s)


def _outcomes(
    port: int, scenario: Callable[..., Any], args: Any, kwargs: Any, workers: int, timeout_s: float
) -> list[tuple[bool, Any]]:
    pipes: list[Connection] = []
    processes = []
    for rank in range(workers):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_work, args=(sender, rank, workers, port, scenario, args, kwargs), name=f"rank{rank}", daemon=False
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results: list[tuple[bool, Any]] = [(False, f"no result within {timeout_s} s")] * workers
    deadline = time.monotonic() + timeout_s
    waiting = dict(zip(pipes, range(workers), strict=True))
    while waiting and time.monotonic() < deadline:
        for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            try:
                results[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join(5)
                results[rank] = (False, f"the process ended with {processes[rank].exitcode} and said nothing")
    for process in processes:
        process.join(0 if waiting else 20)
        if process.exitcode not in (0, None) and not waiting:
            results[int(process.name[4:])] = (
                False,
                f"the process ended with {process.exitcode} after its function had returned",
            )
        if process.is_alive():
            process.kill()
            process.join()
            if not waiting:
                results[int(process.name[4:])] = (False, "the process did not end after its function had returned")
        process.close()
    return results


def _work(sender: Connection, rank: int, workers: int, port: int, scenario: Callable[..., Any], args: Any, kwargs: Any) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank % workers),
        GROUP_RANK="0",
        WORLD_SIZE=str(workers),
        LOCAL_WORLD_SIZE=str(workers),
        TORCHELASTIC_RUN_ID="test",
        TORCHELASTIC_USE_AGENT_STORE="False",
        OMP_NUM_THREADS="1",
    )
    import torch

    from lightning_gossip.runtime import process_end

    torch.set_num_threads(1)
    try:
        outcome = (True, scenario(*args, **kwargs))
    except BaseException:  # noqa: BLE001 - told to the test
        outcome = (False, traceback.format_exc())
    sender.send(outcome)
    sender.close()
    process_end._end()  # as a script's end does; multiprocessing's children call no atexit functions
