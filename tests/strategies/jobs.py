"""A job whose workers a test starts, kills and starts again one by one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore

from tests import warm
from tests.strategies.launch import _context, _work, reserved_port

DIED = "died"
_END_S = 20.0  # of a process whose work has returned


class Job:
    """Workers as processes; each runs ``scenario(*args)`` once.

    Args:
        scenario: what a worker does.
        args: for it.
        workers: how many there are at the start.
        port: where they meet.
    """

    def __init__(self, scenario: Callable[..., Any], *args: Any, workers: int, port: int) -> None:
        self._scenario = scenario
        self._args = args
        self._workers = workers
        self._port = port
        self._processes: list[tuple[int, Any, Connection]] = []

    def start(self, rank: int) -> int:
        """Start the worker of a rank; returns its process id."""
        receiver, sender = _context.Pipe(duplex=False)
        arguments = (sender, rank, self._workers, self._port, self._scenario, self._args, {})
        process = _context.Process(target=_work, args=arguments, name=f"rank{rank}")
        process.start()
        sender.close()
        self._processes.append((rank, process, receiver))
        return int(process.pid or 0)

    def start_all(self) -> list[int]:
        return [self.start(rank) for rank in range(self._workers)]

    def outcomes(self, timeout_s: float = 60.0) -> list[tuple[int, Any]]:
        """(rank, outcome) in the order of the starts: what was returned, DIED, or a traceback as a string."""
        deadline = time.monotonic() + timeout_s
        results: dict[Any, Any] = {}
        waiting = {receiver: process for _, process, receiver in self._processes}
        while waiting and time.monotonic() < deadline:
            for receiver in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                process = waiting.pop(receiver)  # type: ignore[call-overload]
                try:
                    results[process] = receiver.recv()[1]  # type: ignore[union-attr]
                except EOFError:
                    results[process] = DIED
        late = [process.name for process in waiting.values()]
        assert not late, f"no result within {timeout_s} s of {late}; of the others {list(results.values())}"
        end = time.monotonic() + _END_S
        for _, process, _ in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        left = [process.name for _, process, _ in self._processes if process.is_alive()]
        assert not left, f"{left} did not end within {_END_S} s of their results: {list(results.values())}"
        return [(rank, results[process]) for rank, process, _ in self._processes]

    def end(self) -> None:
        for _, process, receiver in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
            receiver.close()
            process.close()
        self._processes.clear()


@contextlib.contextmanager
def job(scenario: Callable[..., Any], *args: Any, workers: int) -> Iterator[Job]:
    """Nothing of it is left afterwards."""
    with reserved_port() as port:
        made = Job(scenario, *args, workers=workers, port=port)
        try:
            yield made
        finally:
            made.end()


def survivors(outcomes: list[tuple[int, Any]]) -> list[Any]:
    """What those returned that were not killed; an AssertionError if one of them failed."""
    left = [(rank, outcome) for rank, outcome in outcomes if outcome != DIED]
    failures = [f"--- rank {rank}\n{outcome}" for rank, outcome in left if isinstance(outcome, str)]
    assert not failures, "\n".join(failures)
    return [outcome for _, outcome in left]


@contextlib.contextmanager
def store() -> Iterator[str]:
    """A store outside of all workers; its address."""
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"tcp://127.0.0.1:{held.port}"
    del held


@contextlib.contextmanager
def store_command() -> Iterator[str]:
    """The same by the command that docs/survival.md tells."""
    command = [warm.python(), "-m", "lightning_gossip.store", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"tcp://127.0.0.1:{process.stdout.readline().split()[-1]}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        process.stdout.close()  # type: ignore[union-attr]


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
