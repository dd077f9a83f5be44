"""A job whose workers a test starts, kills and starts again one by one.

They are forked from a server that has imported torch and Lightning once and computed nothing (under pytest that of tests/warm),
so a test costs a fraction of a second and inherits no thread. Each gets the environment that torchrun would give it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore

from recipes.processes import reserved_port

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["lightning.pytorch", "torchmetrics", "lightning_gossip", "tests.strategies.models", __name__])

DIED = "died"
_END_S = 20.0  # of a process whose work has returned


@dataclass(frozen=True)
class End:
    """Of one worker."""

    rank: int
    ok: bool  # its function has returned
    value: Any  # what it returned, or why there is nothing
    status: int | None  # of the process; None if it still ran
    how: str  # "told", "died" (without a word) or "late"


class Job:
    """Workers as processes; each runs ``scenario(*args, **kwargs)`` once.

    Args:
        scenario: what a worker does.
        args: for it.
        kwargs: for it.
        workers: how many there are at the start.
        port: where they meet.
    """

    def __init__(self, scenario: Callable[..., Any], *args: Any, workers: int, port: int, **kwargs: Any) -> None:
        self._work = scenario, args, kwargs
        self._workers = workers
        self._port = port
        self._processes: list[tuple[int, Any, Connection]] = []

    def start(self, rank: int, *, port: int | None = None) -> int:
        """Start the worker of a rank, by another address if it comes back by another member's; returns its process id."""
        receiver, sender = _context.Pipe(duplex=False)
        arguments = (sender, rank, self._workers, self._port if port is None else port, *self._work)
        process = _context.Process(target=_work, args=arguments, name=f"rank{rank}", daemon=False)
        process.start()
        sender.close()
        self._processes.append((rank, process, receiver))
        return int(process.pid or 0)

    def start_all(self) -> list[int]:
        return [self.start(rank) for rank in range(self._workers)]

    def ends(self, timeout_s: float = 60.0, *, frozen: Collection[int] = ()) -> list[End]:
        """In the order of the starts; what is frozen is not waited for."""
        deadline = time.monotonic() + timeout_s
        told: dict[Any, tuple[bool, Any, str]] = {}
        waiting = {receiver: process for rank, process, receiver in self._processes if rank not in frozen}
        while waiting and time.monotonic() < deadline:
            for receiver in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                process = waiting.pop(receiver)  # type: ignore[call-overload]
                try:
                    told[process] = (*receiver.recv(), "told")  # type: ignore[union-attr]
                except EOFError:
                    process.join(_END_S)
                    told[process] = (False, f"the process ended with {process.exitcode} and said nothing", DIED)
        late = (False, f"no result within {timeout_s} s", "late")
        deadline = time.monotonic() + (0.0 if waiting else _END_S)
        for rank, process, _ in self._processes:
            process.join(0.0 if rank in frozen else max(0.0, deadline - time.monotonic()))
        ends = [(rank, process.exitcode, *told.get(process, late)) for rank, process, _ in self._processes]
        return [End(rank, ok, value, status, how) for rank, status, ok, value, how in ends]

    def outcomes(self, timeout_s: float = 60.0) -> list[tuple[int, Any]]:
        """(rank, outcome) in the order of the starts: what was returned, DIED, or a traceback as a string."""
        ends = self.ends(timeout_s)
        said = [end.value for end in ends if end.how != "late"]
        late = [end.rank for end in ends if end.how == "late"]
        assert not late, f"no result within {timeout_s} s of ranks {late}; of the others {said}"
        left = [end.rank for end in ends if end.status is None]
        assert not left, f"ranks {left} did not end within {_END_S} s of their results: {said}"
        return [(end.rank, DIED if end.how == DIED else end.value) for end in ends]

    def end(self) -> None:
        for _, process, receiver in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
            receiver.close()
            process.close()
        self._processes.clear()


@contextlib.contextmanager
def job(scenario: Callable[..., Any], *args: Any, workers: int, **kwargs: Any) -> Iterator[Job]:
    """Nothing of it is left afterwards."""
    with reserved_port() as port:
        made = Job(scenario, *args, workers=workers, port=port, **kwargs)
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


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


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
