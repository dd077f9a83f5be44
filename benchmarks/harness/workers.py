"""Workers, each a process: started together, and none of them outlives a benchmark.

A worker is ``python -m benchmarks.harness.task MODULE FUNCTION FOLDER``, forked from a server that has imported the module. The
folder is everybody's: it has the parameters, the logs and the results.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch.distributed as dist

from benchmarks.cluster import Host, Process, preload
from recipes.processes import reserved_port

TASK = "benchmarks.harness.task"
_PORT = 29400  # on a host of its own any is free
_WORDS = 30  # lines of a log that an error shows


def rank() -> int:
    """Of this worker; torchrun tells it in its own way."""
    return int(os.environ.get("RANK") or os.environ.get("NODE_RANK", "0"))


@contextmanager
def process_group() -> Iterator[None]:
    """The default group (Gloo) of all workers; as a decorator, of a task."""
    size, timeout = int(os.environ["WORLD_SIZE"]), timedelta(seconds=120)
    dist.init_process_group("gloo", rank=rank(), world_size=size, timeout=timeout)
    yield
    dist.barrier()
    dist.destroy_process_group()


def run(
    task: Callable[..., Any], parameters: Mapping[str, Any], *, hosts: Sequence[Host | None] = (None,), timeout_s: float
) -> list[Any]:
    """Run a function of a module on every worker.

    Args:
        task: returns what JSON has.
        parameters: its arguments by name, of the same kind.
        hosts: one worker a host; None is this machine.
        timeout_s: for all.

    Returns:
        The results, by rank.

    Raises:
        TimeoutError: if it took longer.
        RuntimeError: if a worker failed.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        with workers(task, parameters, folder, hosts=hosts) as started:
            if not wait(started, timeout_s):
                raise TimeoutError(f"{task.__name__} did not end within {timeout_s:.0f} s.\n{last_words(started)}")
        return results(folder)


def results(folder: Path) -> list[Any]:
    """Of the workers that came to their end, by rank."""
    files = sorted(folder.glob("result-*"), key=lambda path: int(path.name.partition("-")[2]))
    return [json.loads(path.read_text()) for path in files]


@contextmanager
def workers(
    task: Callable[..., Any],
    parameters: Mapping[str, Any],
    folder: Path,
    *,
    hosts: Sequence[Host | None],
    launcher: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[list[Process]]:
    """Start them; at the end of the block they are killed.

    Args:
        task, parameters, hosts: as in :func:`run`.
        folder: shared.
        launcher: module and arguments of a program that starts the workers itself, all on this machine, for example torchrun.
        environment: beside what tells the workers of each other.
    """
    module = task.__module__ if task.__module__ != "__main__" else sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
    preload(module)
    (folder / "parameters.json").write_text(json.dumps(parameters))
    arguments = (module, task.__name__, str(folder))
    with ExitStack() as stack:
        port = _PORT if hosts[0] is not None else stack.enter_context(reserved_port())
        common = {
            "MASTER_ADDR": "127.0.0.1" if hosts[0] is None else hosts[0].address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(len(hosts)),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        started: list[Process] = []
        stack.callback(_end, started, folder)
        if launcher:
            line = (*launcher[1:], sys.executable, "-m", TASK, *arguments)
            started.append(Process(None, launcher[0], line, environment=common, log=folder / "log"))
        for number, host in enumerate(hosts if not launcher else ()):
            own = {
                "NODE_RANK": str(number),
                "LOCAL_RANK": "0",
                "GLOO_SOCKET_IFNAME": "lo" if host is None else host.interface,
                "HOST_ADDR": "127.0.0.1" if host is None else host.address,
            }
            started.append(Process(host, TASK, arguments, environment={**common, **own}, log=folder / f"log-{number}"))
        for process in started:
            process.start()
        yield started


def wait(started: Sequence[Process], timeout_s: float, *, killed: Collection[int] = ()) -> bool:
    """Until all have ended.

    Args:
        started: the workers.
        timeout_s: how long.
        killed: ranks that may have been.

    Returns:
        Whether they have.

    Raises:
        RuntimeError: if one failed; with its last lines.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        for number, process in enumerate(started):
            if not process.runs and (code := process.wait(5.0)) and not (number in killed and code < 0):
                time.sleep(0.5)  # the others' words
                raise RuntimeError(f"{process} ended with {code}.\n{last_words(started)}")
        running = [process.sentinel for process in started if process.runs]
        left_s = until_s - time.monotonic()
        if not running or left_s <= 0:
            return not running
        multiprocessing.connection.wait(running, left_s)


def last_words(started: Sequence[Process]) -> str:
    """The ends of their logs."""
    return "\n".join(f"{process}:\n{''.join(process.lines[-_WORDS:])}" for process in started)


def _end(started: Sequence[Process], folder: Path) -> None:
    """Those too that a launcher has started: each has the folder among its arguments."""
    for process in started:
        process.kill()
    for other in psutil.process_iter(["cmdline"]):
        if str(folder) in (other.info["cmdline"] or ()):
            other.kill()
    for process in started:
        process.close()
