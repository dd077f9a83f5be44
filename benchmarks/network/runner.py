"""One run: hosts, workers in them, what disturbs them, and then the measures."""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import Network, Process, network, preload
from benchmarks.network.contenders import CONTENDERS
from benchmarks.network.measures import measures
from benchmarks.network.scenarios import Condition, disturbed
from benchmarks.network.workload import COMPUTE_S, WORKS, save_data

_PORT = 29400
_MODELS = 16  # written in a run
_START_S = 60.0
_SILENCE_S = 120.0  # of all workers, before a run is given up
_SHARED_MEMORY = Path("/dev/shm")
START_UP_S = 7.0  # about; of a run, before and after training


@dataclass(frozen=True)
class Run:
    """What a single run is told by; two runs of one key are repetitions."""

    scenario: str
    work: str
    condition: Condition
    contender: str
    seed: int
    steps: int
    workers: int
    compute_s: float = COMPUTE_S

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.scenario, self.work, self.condition.label, self.contender, self.seed, self.steps, self.workers)

    @property
    def every(self) -> int:
        """Steps between two models that are written."""
        return max(1, self.steps // _MODELS)

    def guess_s(self, nbytes: int, scale: float) -> float:
        """How long it takes, before anything was measured."""
        sending_s = CONTENDERS[self.contender].volume * nbytes * 8e-6 / (self.condition.slowest_mbit() * scale)
        lockstep = CONTENDERS[self.contender].volume > 0
        compute_s = self.compute_s * (self.condition.slow_worker if lockstep else 1.0)
        return START_UP_S + min(self.steps * (1.15 * compute_s + sending_s), self.condition.cap_s)


def prepare() -> None:
    """Once, before the first run."""
    preload("benchmarks.network.contenders", "benchmarks.network.recorder", "sklearn.datasets")


def execute(run: Run) -> dict[str, Any]:
    """Make it, from the first host to the last measure; nothing of it is left.

    Raises:
        ConfigurationError: where this machine cannot have hosts.
        RuntimeError: if a worker failed; with its last lines.
    """
    scale = WORKS[run.work].link_scale
    place = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None  # models are written while others compute
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place, prefix="benchmark-network-")))
        hosts = run.workers + run.condition.other_hosts
        net = stack.enter_context(network(hosts, rate_mbit=run.condition.rate_mbit * scale))
        save_data(folder / "digits.pt")
        stack.enter_context(disturbed(net, run.condition, scale, run.seed, folder))
        workers = [stack.enter_context(_closing(_worker(run, net, number, folder))) for number in range(run.workers)]
        stopped = _await(workers, run, folder)
        for worker in workers:
            worker.close()
        model = WORKS[run.work].build()
        slow_worker = run.condition.slow_worker
        found = measures(folder, model, workers=run.workers, slow_worker=slow_worker, compute_s=run.compute_s)
        return {"stopped": stopped, **found}


def _worker(run: Run, net: Network, number: int, folder: Path) -> Process:
    options = {
        "contender": run.contender,
        "work": run.work,
        "seed": run.seed,
        "steps": run.steps,
        "every": run.every,
        "compute_s": run.compute_s,
        "slowdown": run.condition.slow_worker,
    }
    environment = {
        "MASTER_ADDR": net.hosts[0].address,
        "MASTER_PORT": str(_PORT),
        "HOST_ADDR": net.hosts[number].address,
        "WORLD_SIZE": str(run.workers),
        "NODE_RANK": str(number),
        "LOCAL_RANK": "0",
        "GLOO_SOCKET_IFNAME": net.hosts[number].interface,
        "OMP_NUM_THREADS": "1",
    }
    arguments = (str(folder), json.dumps(options))
    log = folder / f"worker-{number}.log"
    return Process(net.hosts[number], "benchmarks.network.worker", arguments, environment=environment, log=log)


class _closing:
    """Starts a process, and kills it at the end."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __enter__(self) -> Process:
        self._process.start()
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.close()


def _await(workers: list[Process], run: Run, folder: Path) -> bool:
    """Until all have ended, or have trained for as long as they may.

    Returns:
        Whether they were stopped.
    """
    began_s: float | None = None
    silent_until_s = time.monotonic() + _SILENCE_S
    size = 0
    waiting = list(workers)
    while waiting:
        multiprocessing.connection.wait([worker.sentinel for worker in waiting], timeout=0.25)
        for worker in [worker for worker in waiting if not worker.runs]:
            if code := worker.wait(5.0):
                time.sleep(0.5)  # the others' words
                raise RuntimeError(f"{run.key}: {worker} ended with {code}:\n{''.join(worker.lines[-30:])}")
            waiting.remove(worker)
        written = sum(path.stat().st_size for path in folder.glob("steps-*"))
        if written > size:
            size, silent_until_s = written, time.monotonic() + _SILENCE_S
            began_s = began_s or time.monotonic()
        if began_s is not None and time.monotonic() - began_s > run.condition.cap_s:
            return True
        if time.monotonic() > silent_until_s:
            lines = "".join(line for worker in workers for line in worker.lines[-10:])
            raise RuntimeError(f"{run.key}: nobody has made a step for {_SILENCE_S:.0f} s.\n{lines}")
    return False
