"""Two processes that run one task together, on the loopback interface or on a link of limited rate.

The task is a function ``task(parameters) -> results`` of a module; both processes run it in a default process group of two
(Gloo), and rank 0's results come back. A process that hangs is killed at the deadline.

The link is that of two hosts of benchmarks/cluster. Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from benchmarks.cluster import network
from benchmarks.common import ROOT, kill_group
from lightning_gossip.runtime.store_client import another
from lightning_gossip.transport.endpoint import endpoint
from lightning_gossip.transport.pairwise_groups import EdgeTransport


@dataclass(frozen=True)
class Place:
    """Where one of the two processes runs."""

    interface: str
    prefix: tuple[str, ...] = ()


LOOPBACK = (Place("lo"), Place("lo"))


@contextmanager
def limited_link(rate_mbit: int) -> Iterator[tuple[Place, Place]]:
    """Two hosts whose links have the given rate in each direction, removed at the end.

    Raises:
        ConfigurationError: with the reason why this machine cannot have them.
    """
    with network(2, rate_mbit=rate_mbit) as net:
        first, second = (Place(host.interface, host.prefix) for host in net.hosts)
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


def pair_transport(timeout_s: float) -> EdgeTransport:
    """One process's end of a transport as AD-PSGD's workers have it; both call this, once."""
    rank, place = dist.get_rank(), [("", 0)]
    if rank == 0:
        host = endpoint().address
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        place = [(host, store.port)]
    dist.broadcast_object_list(place)
    if rank != 0:
        store = TCPStore(*place[0], is_master=False)
    connections = (store, another(store, timeout_s=1e6), another(store), another(store))
    transport = EdgeTransport(*connections, "pair", rank=rank, world_size=2, timeout_s=timeout_s)
    transport.make_edges([1 - rank])
    return transport


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


def _main(module: str, task: str, rank: str, folder: str) -> None:
    parameters = json.loads((Path(folder) / "parameters.json").read_text())
    store = f"file://{folder}/store"  # a file is reachable from both hosts, and no port can be taken
    dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=2, timeout=timedelta(seconds=120))
    results = getattr(import_module(module), task)(parameters)
    dist.barrier()
    dist.destroy_process_group()
    if rank == "0":
        (Path(folder) / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    _main(*sys.argv[1:])
