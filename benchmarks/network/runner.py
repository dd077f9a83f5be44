"""One run: hosts, workers in them, what disturbs them, and then the measures."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import Process, network
from benchmarks.harness import wait, workers
from benchmarks.harness.workers import last_words
from benchmarks.network.measures import measures
from benchmarks.network.scenarios import Condition, disturbed
from benchmarks.network.worker import train
from benchmarks.network.workload import COMPUTE_S, WORKS

_MODELS = 16  # written in a run
_SILENCE_S = 120.0  # of all workers, before a run is given up
_SHARED_MEMORY = Path("/dev/shm")


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


def execute(run: Run) -> dict[str, Any]:
    """Make it, from the first host to the last measure; nothing of it is left.

    Raises:
        ConfigurationError: where this machine cannot have hosts.
        RuntimeError: if a worker failed; with its last lines.
    """
    work, condition = WORKS[run.work], run.condition
    scale = work.link_scale(run.compute_s)
    place = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None  # models are written while others compute
    options = {
        "contender": run.contender,
        "work": run.work,
        "seed": run.seed,
        "steps": run.steps,
        "every": max(1, run.steps // _MODELS),
        "compute_s": run.compute_s,
        "slowdown": condition.slow_worker,
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place, prefix="benchmark-network-")))
        net = stack.enter_context(network(run.workers + condition.other_hosts, rate_mbit=condition.rate_mbit * scale))
        stack.enter_context(disturbed(net, condition, scale, run.seed, folder))
        with workers(train, options, folder, hosts=net.hosts[: run.workers]) as started:
            stopped = _await(started, run, folder)
        return {"stopped": stopped, **measures(folder, work, run.workers, condition.slow_worker, run.compute_s)}


def _await(started: list[Process], run: Run, folder: Path) -> bool:
    """Until all have ended, or have trained for as long as they may.

    Returns:
        Whether they were stopped.
    """
    began_s: float | None = None
    silent_until_s = time.monotonic() + _SILENCE_S
    size = 0
    while not wait(started, 0.25):
        written = sum(path.stat().st_size for path in folder.glob("steps-*"))
        if written > size:
            size, silent_until_s = written, time.monotonic() + _SILENCE_S
            began_s = began_s or time.monotonic()
        if began_s is not None and time.monotonic() - began_s > run.condition.cap_s:
            return True
        if time.monotonic() > silent_until_s:
            raise RuntimeError(f"{run.key}: nobody has made a step for {_SILENCE_S:.0f} s.\n{last_words(started)}")
    return False
