"""A job of several hosts: one worker a host, and the store in rank 0, or on a host of its own."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits

from benchmarks.cluster import Host, Network, Process, network

_PORT = 29400
_START_S = 60.0
_BY = r"Workers come back by this one's: MASTER_ADDR=(\S+) MASTER_PORT=(\d+)"


class Step(NamedTuple):
    """One step of a worker, by its records."""

    number: int
    at_s: float
    epoch: int
    samples: list[int]


class Job:
    """See :func:`job`.

    Attributes:
        workers: the process of each worker that was started last; its place is its rank.
        store: the process that holds it, if it is none of the workers.
    """

    def __init__(
        self,
        net: Network,
        folder: Path,
        *,
        samples: int,
        epochs: int,
        step_s: float,
        store_apart: bool = True,
        environment: dict[str, str] | None = None,
        **strategy: Any,
    ) -> None:
        self.net = net
        self.folder = folder
        self.samples = samples
        self.epochs = epochs
        *self.hosts, self.store_host = net.hosts
        self.store: Process | None = None
        self._first: Process | None = None  # that has begun the job
        self._store_apart = store_apart
        self._environment = environment or {}
        strategy = {"peer_timeout_s": 6.0, **strategy}
        if store_apart:
            strategy = {"store": f"tcp://{self.store_host.address}:{_PORT}", **strategy}
        self._options = json.dumps({"epochs": epochs, "step_s": step_s, "strategy": strategy})
        self.workers: dict[int, Process] = {}
        self._processes: list[Process] = []

    def open(self) -> None:
        """Start the store and all workers."""
        digits = load_digits()
        x, y = (torch.tensor(array[: self.samples]) for array in (digits.data, digits.target))
        torch.save((x.float() / 16, y, torch.arange(self.samples)), self.folder / "digits.pt")
        if self._store_apart:
            self.store = self._process(self.store_host, "lightning_gossip.store", ("--port", str(_PORT)), log="store.log")
            self.store.await_line("listening", _START_S)
        for number in range(len(self.hosts)):
            self.start(number)

    def start(self, number: int, *, by: tuple[str, str] | None = None) -> Process:
        """Start the worker of a number, for the first time or again; the command is the same.

        Args:
            number: its rank.
            by: MASTER_ADDR and MASTER_PORT, if they are not rank 0's (:meth:`way_back`).
        """
        address, port = by or self._first_address
        environment = {
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "WORLD_SIZE": str(len(self.hosts)),
            "NODE_RANK": str(number),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": self.hosts[number].interface,
            "OMP_NUM_THREADS": "1",
            **self._environment,
        }
        arguments = (str(self.folder), self._options)
        self.workers[number] = self._process(
            self.hosts[number], "tests.cluster.worker", arguments, log=f"worker-{number}.log", **environment
        )
        if self._first is None:
            self._first = self.workers[number]
        return self.workers[number]

    @property
    def _first_address(self) -> tuple[str, str]:
        return self.hosts[0].address, str(_PORT)

    def way_back(self, number: int) -> tuple[str, str] | None:
        """By which MASTER_ADDR and MASTER_PORT a worker comes back; None while nobody has said that who runs."""
        if self._store_apart or self._first is None or self._first.runs:
            return self._first_address
        for other, process in self.workers.items():
            said = (
                [match for line in process.lines if (match := re.search(_BY, line))] if other != number and process.runs else []
            )
            if said:
                return str(said[-1].group(1)), str(said[-1].group(2))
        return None

    def await_epoch(self, epoch: int, timeout_s: float = 60.0, *, workers: int | None = None) -> None:
        """Until every worker that runs has begun an epoch, with so many workers if that matters."""
        count = r"\d+" if workers is None else str(workers)
        for process in self.workers.values():
            if process.runs:
                process.await_line(f"epoch {epoch} begins with {count} workers", timeout_s)

    def await_step(self, step: int, timeout_s: float = 60.0) -> float:
        """Until rank 0 has done so many steps of the first epoch, a multiple of ten; the time of the clock then."""
        return float(self.workers[0].await_line(rf"epoch 0, {step} steps at ([\d.]+)", timeout_s).group(1))

    def result(self, number: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """What a worker says at its end; an AssertionError with its log if that was none."""
        code = self.workers[number].wait(timeout_s)
        assert code == 0, f"worker {number} ended with {code}:\n{''.join(self.workers[number].lines[-40:])}"
        return dict(json.loads((self.folder / f"result-{number}").read_text()))

    def steps(self) -> list[Step]:
        """Of all workers, by time."""
        found = []
        for path in self.folder.glob("steps-*"):
            number = int(path.name.split("-")[1])
            whole = path.read_text().rpartition("\n")[0].splitlines()  # the last line may be half of one
            found += [Step(number, *json.loads(line)) for line in whole]
        return sorted(found, key=lambda step: step.at_s)

    def missing(self) -> dict[int, int]:
        """How many samples nobody has trained on, by epoch; only epochs that miss one."""
        taken = Counter[int]()
        for epoch, _ in {(step.epoch, sample) for step in self.steps() for sample in step.samples}:
            taken[epoch] += 1
        return {epoch: self.samples - taken[epoch] for epoch in range(self.epochs) if taken[epoch] < self.samples}

    def rate(self, numbers: list[int], since_s: float, until_s: float) -> float:
        """Samples a second of some workers, between two times of the clock."""
        count = sum(len(step.samples) for step in self.steps() if step.number in numbers and since_s <= step.at_s < until_s)
        return count / (until_s - since_s)

    def orphans(self) -> list[int]:
        """What runs on the workers' hosts."""
        return [pid for host in self.hosts for pid in host.namespaces.processes()]

    def close(self) -> None:
        """End all."""
        for process in self._processes:
            process.close()

    def _process(self, host: Host, module: str, arguments: tuple[str, ...], *, log: str, **environment: str) -> Process:
        process = Process(host, module, arguments, environment=environment, log=self.folder / log)
        self._processes.append(process)
        process.start()
        return process


@contextmanager
def job(
    folder: Path,
    *,
    workers: int = 3,
    rate_mbit: float = 100.0,
    samples: int = 480,
    epochs: int = 3,
    step_s: float = 0.01,
    **options: Any,
) -> Iterator[Job]:
    """Workers that train together on hosts of a network, with one more host for the store; nothing of it is left afterwards.

    Args:
        folder: of what they write, logs included.
        workers: how many, one a host.
        rate_mbit: of each link.
        samples: of an epoch.
        epochs: how many.
        step_s: length of a step.
        options: ``store_apart``: whether the store is there, and not in rank 0; ``environment``: of each worker, beside the
            usual; and those of ADPSGDStrategy.
    """
    with network(workers + 1, rate_mbit=rate_mbit) as net:
        made = Job(net, folder, samples=samples, epochs=epochs, step_s=step_s, **options)
        try:
            made.open()
            yield made
        finally:
            made.close()
