"""Two processes that run one task together, on the loopback interface or on a link of limited rate.

The task is a function ``task(parameters) -> results`` of a module; both processes run it in a default process group of two
(Gloo), and rank 0's results come back. A process that hangs is killed at the deadline.

The link is a veth pair between two network namespaces, with a token bucket (tc tbf) at both ends. Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.common import ROOT, kill_group

_BURST = "256kb"  # above the largest segment (64 kB) and what the kernel's timer needs at 1 Gb/s
_QUEUE = "50ms"


@dataclass(frozen=True)
class Place:
    """Where one of the two processes runs."""

    interface: str
    prefix: tuple[str, ...] = ()


LOOPBACK = (Place("lo"), Place("lo"))


class LinkUnavailable(RuntimeError):
    """This machine cannot make namespaces or links; the message says why."""


@contextmanager
def limited_link(rate_mbit: int) -> Iterator[tuple[Place, Place]]:
    """Two namespaces connected by a link of the given rate in each direction, removed at the end.

    Raises:
        LinkUnavailable: with the reason why this machine cannot have one.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise LinkUnavailable("network namespaces need root on Linux")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise LinkUnavailable(f"{' and '.join(missing)} (iproute2) not found")
    names = [f"gossip-{os.getpid()}-{end}" for end in "ab"]
    interfaces = [f"lg{os.getpid() % 10**7}{end}" for end in "ab"]  # at most 15 characters
    with ExitStack() as undo:
        for name in names:
            _root("ip", "netns", "add", name)
            undo.callback(_root, "ip", "netns", "delete", name)  # takes the link with it
        _root("ip", "link", "add", interfaces[0], "netns", names[0], "type", "veth", "peer", interfaces[1], "netns", names[1])
        for number, (name, interface) in enumerate(zip(names, interfaces, strict=True), start=1):
            _root("ip", "-n", name, "address", "add", f"10.213.0.{number}/24", "dev", interface)
            for device in (interface, "lo"):
                _root("ip", "-n", name, "link", "set", device, "up")
            limit = ("rate", f"{rate_mbit}mbit", "burst", _BURST, "latency", _QUEUE)
            _root("tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf", *limit)
        first, second = (Place(i, ("ip", "netns", "exec", n)) for n, i in zip(names, interfaces, strict=True))
        yield first, second


def run_pair(
    task: Callable[[dict[str, Any]], dict[str, Any]],
    parameters: dict[str, Any],
    places: tuple[Place, Place],
    *,
    timeout_s: float,
) -> dict[str, Any]:
    """Run a task in two fresh processes.

    Raises:
        TimeoutError: if it took longer.
        RuntimeError: if one of them failed; its traceback has been printed.
    """
    module = task.__module__ if task.__module__ != "__main__" else sys.modules["__main__"].__spec__.name
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "parameters.json").write_text(json.dumps(parameters))
        try:
            for rank, place in enumerate(places):
                command = [*place.prefix, sys.executable, "-m", "benchmarks.pair", module, task.__name__, str(rank), name]
                environment = {**os.environ, "GLOO_SOCKET_IFNAME": place.interface}
                processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True))
            _await(processes, timeout_s)
        finally:
            for process in processes:
                kill_group(process.pid)
                process.wait()
        return dict(json.loads((folder / "results.json").read_text()))


def _await(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = list(processes)
    while waiting:
        if time.monotonic() > deadline:
            raise TimeoutError(f"The pair of processes did not end within {timeout_s:.0f} s.")
        try:
            code = waiting[0].wait(0.2)
        except subprocess.TimeoutExpired:
            waiting.append(waiting.pop(0))
            continue
        if code != 0:
            raise RuntimeError(f"A process of the pair failed with exit code {code}; see its traceback above.")
        waiting.pop(0)


def _root(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise LinkUnavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _main(module: str, task: str, rank: str, folder: str) -> None:
    parameters = json.loads((Path(folder) / "parameters.json").read_text())
    store = f"file://{folder}/store"  # a file is reachable from both namespaces, and no port can be taken
    dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=2, timeout=timedelta(seconds=120))
    results = getattr(import_module(module), task)(parameters)
    dist.barrier()
    dist.destroy_process_group()
    if rank == "0":
        (Path(folder) / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    _main(*sys.argv[1:])
