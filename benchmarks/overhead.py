"""What does the gossip cost a worker? In time of the training thread, in bandwidth, in memory.

The model is ResNet-50 as torchvision builds it, on the CPU: its 161 parameters and the 106 floating-point buffers of its
BatchNorm layers, 267 tensors and 25.6 million float32 values in all.

1. A step boundary (``Gossip.step``) against one in-place copy of the same bytes: without merges to take over, with, and while
   an exchange with another process is going on.
2. An exchange against plain ``isend`` and ``irecv`` of the same bytes, both directions at once, on a link of 1 Gb/s between two
   network namespaces (needs root) and on the loopback interface, where the cores are the limit.
3. The memory that a worker needs beyond plain training, in copies of the model.

    python -m benchmarks.overhead [--quick]
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchvision.models import resnet50

from benchmarks.cluster import Host, network
from benchmarks.codecs import NUMEL, transfers
from benchmarks.harness import against, console, pair_transport, print_table, process_group, run, write_results
from lightning_gossip import ConfigurationError
from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerPicker
from lightning_gossip.algorithm.adpsgd.peer_selection import ChangingPeers
from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.membership.failure_detector import Verdict
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.algorithm.tensors.flat import chunk_slices
from lightning_gossip.algorithm.topology.generators import complete
from lightning_gossip.runtime.adpsgd.cuda_replica import replica_of
from lightning_gossip.runtime.adpsgd.exchange import Exchanger
from lightning_gossip.runtime.adpsgd.gossip import Gossip
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.sync_point import SyncPoint
from lightning_gossip.runtime.workers import FixedWorkers
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from recipes.commands import cleaning_up_on_sigterm

AIM_WITHOUT_MERGES = 1.25
AIM_WITH_MERGES = 3.0
AIM_BANDWIDTH = 0.9
AIM_MEMORY = 2.2

LINK_MBIT = 1000
TIMEOUT_S = 60.0
QUIET_GAP_S = 0.005  # before each measurement, in which the core rests as it does not in training
STEP_S = 0.060  # pace of the training thread during exchanges: longer than a chunk takes at 1 Gb/s
MiB = 1 << 20
Pair = Sequence[Host | None]
LOOPBACK: Pair = (None, None)
DEFAULT_CHUNK = inspect.signature(Exchanger).parameters["chunk_bytes"].default
DEFAULT_DEPTH = inspect.signature(Exchanger).parameters["depth"].default


@dataclass
class Published:
    """A model, its shared tensors and a replica of them."""

    tensors: list[Tensor]
    replica: Replica
    layout: int

    @classmethod
    def of(cls, model: torch.nn.Module) -> Published:
        shared = SharedModel(model).open()
        tensors = list(shared.tensors)
        replica = replica_of(tensors, retention=shared.retention)
        assert isinstance(replica, Replica)  # in the host's memory
        return cls(tensors, replica, shared.layout)

    @property
    def nbytes(self) -> int:
        return self.replica.numel * self.replica.dtype.itemsize


class Healthy:
    """A monitor of workers that stay."""

    version = 0

    def verdict(self, worker: WorkerId) -> Verdict:
        return Verdict.ALIVE

    def connection_lost(self, worker: WorkerId) -> None:
        pass


def new_gossip() -> Gossip:
    """A gossip with the other process as its only neighbour."""
    topology, rank = complete(2), dist.get_rank()
    members = [WorkerId(0, 1), WorkerId(1, 1)]
    picker = PartnerPicker(topology, rank)
    peers = ChangingPeers(
        Healthy(), rank, members, topology, roles="auto", picker=picker, ceiling_s=TIMEOUT_S, now_s=now_s, raises=True
    )
    gossip = Gossip(pair_transport(TIMEOUT_S), peers)
    gossip.start()
    return gossip


def seconds(function: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


# -- 1. the training thread ------------------------------------------------------------------------------------------


@process_group()
def boundary(threads: int, rounds: int) -> dict[str, Any]:
    """Times of a copy and of a step boundary; rank 1 only answers exchanges."""
    torch.set_num_threads(threads)
    published = Published.of(resnet50())
    gossip = new_gossip()
    gossip.open(published.replica, session=1, layout=published.layout, exchanges_per_step=0.0)
    dist.barrier()
    results: dict[str, Any] = {}
    if dist.get_rank() == 0:
        results = _boundary_times(gossip, published, rounds)
    dist.barrier()
    gossip.drain(published.tensors)
    dist.barrier()
    gossip.close()
    return results


def _boundary_times(gossip: Gossip, published: Published, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = defaultdict(list)
    source, target = torch.randn(published.replica.numel), torch.zeros(published.replica.numel)
    nothing = torch.zeros(DEFAULT_CHUNK // published.replica.dtype.itemsize)

    def measure(name: str, gap_s: float, function: Callable[[], object]) -> None:
        time.sleep(gap_s)
        times[name].append(seconds(function))

    def copy() -> None:
        target.copy_(source)

    def step() -> None:
        gossip.step(published.tensors, step_s=None)

    for _ in range(3):
        copy()
        step()
    for _ in range(rounds):
        measure("copy", QUIET_GAP_S, copy)
        measure("without merges", QUIET_GAP_S, step)
        for chunk in chunk_slices(published.replica.numel, nothing.numel()):
            published.replica.merge(chunk, nothing[: chunk.stop - chunk.start])
        measure("with merges", QUIET_GAP_S, step)

    gossip.exchanges_per_step = 1.0
    gossip.step(published.tensors, step_s=1e-4)  # so that the next exchange is always due
    time.sleep(0.5)
    before, start_s = gossip.counters.exchanges, time.perf_counter()
    for _ in range(rounds):
        measure("copy during exchanges", STEP_S, copy)
        measure("during exchanges", STEP_S, step)
    gossip.exchanges_per_step = 0.0
    duration_s = time.perf_counter() - start_s
    sent, sending_s = gossip.counters.bytes_sent, gossip.counters.exchange_s
    return {
        "median_s": {name: statistics.median(values) for name, values in times.items()},
        "exchanges_per_s": (gossip.counters.exchanges - before) / duration_s,
        "bytes_per_s_in_exchanges": sent / sending_s if sending_s else 0.0,
        "nbytes": published.nbytes,
        "tensors": len(published.tensors),
    }


# -- 2. memory -------------------------------------------------------------------------------------------------------


@process_group()
def memory(exchanges: int) -> dict[str, Any]:
    """Resident memory of rank 0 before there is a replica, after some exchanges, at their peak and at a rendezvous's."""
    model = resnet50()
    gossip = new_gossip()
    small = Published.of(torch.nn.Sequential(torch.nn.Linear(1000, 100), torch.nn.BatchNorm1d(100)))
    _train(gossip, small, session=1, exchanges=2)  # code, threads and connections are there already, as in any run
    _meet(small)
    before = _reset_peak()
    published = Published.of(model)
    _train(gossip, published, session=2, exchanges=exchanges)
    steady, peak = _resident(), _peak()
    _reset_peak()
    _meet(published)
    at_rendezvous = _peak()
    dist.barrier()
    gossip.close()
    copies = {"peak during exchanges": peak, "after them": steady, "peak at a rendezvous": at_rendezvous}
    return {name: (value - before) / published.nbytes for name, value in copies.items()}


def _train(gossip: Gossip, published: Published, *, session: int, exchanges: int) -> None:
    gossip.open(published.replica, session=session, layout=published.layout, exchanges_per_step=0.0)
    dist.barrier()
    wanted = gossip.counters.exchanges + exchanges
    gossip.exchanges_per_step = 1.0
    deadline = time.monotonic() + TIMEOUT_S
    while gossip.counters.exchanges < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{exchanges} exchanges took more than {TIMEOUT_S:.0f} s.")
        gossip.step(published.tensors, step_s=1e-3)
        time.sleep(0.01)
    dist.barrier()
    gossip.drain(published.tensors)
    dist.barrier()


def _meet(published: Published) -> None:
    SyncPoint(torch.device("cpu"), FixedWorkers()).average(published.replica.published)
    published.replica.copy_out(published.tensors)


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _reset_peak() -> int:
    """Make the peak what is resident now; returns it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident()


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}.")


# -- tables ----------------------------------------------------------------------------------------------------------


def report_boundary(places: dict[str, Pair], rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    rows = []
    for threads in (1, 2):
        for where, pair in places.items():
            result, _ = run(boundary, {"threads": threads, "rounds": rounds}, hosts=pair, timeout_s=120)
            results[f"{threads} threads, {where}"] = result
            median = result["median_s"]
            copy_s = median["copy"]
            rows.append(
                [
                    f"{threads} thread{'s' * (threads > 1)}, {where}",
                    against(median["without merges"] / copy_s, AIM_WITHOUT_MERGES, at_most=True),
                    against(median["with merges"] / copy_s, AIM_WITH_MERGES, at_most=True),
                    f"{median['during exchanges'] / copy_s:.2f}",
                    f"{median['copy during exchanges'] / copy_s:.2f}",
                    f"{result['bytes_per_s_in_exchanges'] * 8e-9:.2f}",
                    f"{copy_s * 1e3:.1f}",
                ]
            )
    columns = ("", "no merges", "merges", "during exchanges", "a copy then", "Gb/s then", "quiet copy, ms")
    caption = (
        "In quiet in-place copies of the model, but for the last two columns."
        f" Aims: no merges about 1 (≤ {AIM_WITHOUT_MERGES:g}), merges ≤ {AIM_WITH_MERGES:g}. ✓ reached, ✗ missed."
    )
    print_table("What a step boundary costs the training thread", columns, rows, caption=caption)
    return results


def report_bandwidth(places: dict[str, Pair], quick: bool, rounds: int) -> dict[str, Any]:
    settings = {(DEFAULT_CHUNK, DEFAULT_DEPTH)}
    if not quick:
        settings |= {(chunk * MiB, depth) for chunk in (1, 4, 16) for depth in (1, 2, 3)}
    labels = {f"{chunk / MiB:g} MiB × {depth}": (chunk, depth) for chunk, depth in sorted(settings)}
    exchanges = {label: {"chunk_bytes": chunk, "depth": depth} for label, (chunk, depth) in labels.items()}
    results: dict[str, Any] = {}
    for where, pair in places.items():
        found = run(transfers, {"exchanges": exchanges, "rounds": rounds}, hosts=pair, timeout_s=240)[0]["seconds"]
        results[where] = {"nbytes": 4 * NUMEL, "raw_s": found["raw"]}
        results[where]["exchanges"] = [
            {**options, "seconds": found[label], "over_raw": found["raw"] / found[label]}
            for label, options in exchanges.items()
        ]
    rows = []
    for number, (label, setting) in enumerate(labels.items()):
        row = [label]
        for where, result in results.items():
            ratio = result["exchanges"][number]["over_raw"]
            is_aimed_at = where != "loopback" and setting == (DEFAULT_CHUNK, DEFAULT_DEPTH)
            row.append(against(ratio, AIM_BANDWIDTH) if is_aimed_at else f"{ratio:.2f}")
        rows.append(row)
    rates = ", ".join(f"{where} {r['nbytes'] * 8e-9 / r['raw_s']:.2f} Gb/s each way" for where, r in results.items())
    caption = f"Default: {DEFAULT_CHUNK / MiB:g} MiB × {DEFAULT_DEPTH}; its aim on the link: ≥ {AIM_BANDWIDTH:g}. Raw: {rates}."
    columns = ("chunk × in flight", *results)
    print_table("Bandwidth of an exchange over raw isend / irecv of the same bytes", columns, rows, caption=caption)
    return results


def report_memory() -> dict[str, Any]:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        console.print("Memory: skipped, it needs Linux's /proc/self/clear_refs.")
        return {}
    copies = run(memory, {"exchanges": 5}, hosts=LOOPBACK, timeout_s=120)[0]
    rows = [[name, against(value, AIM_MEMORY, at_most=True, digits=3)] for name, value in copies.items()]
    caption = f"Resident memory beyond plain training, in copies of the model. Aim: ≤ {AIM_MEMORY:g}."
    print_table("Memory of a worker after 5 exchanges", ("when", "copies"), rows, caption=caption)
    return copies


def main() -> None:
    parser = argparse.ArgumentParser(description="What the gossip costs a worker, with the tensors of ResNet-50.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and one chunk size")
    arguments = parser.parse_args()
    link = f"{LINK_MBIT / 1000:g} Gb/s link"
    results: dict[str, Any] = {"quick": arguments.quick, "link_skipped": None}
    with cleaning_up_on_sigterm(), ExitStack() as stack:
        places: dict[str, Pair] = {}
        try:
            places[link] = stack.enter_context(network(2, rate_mbit=LINK_MBIT)).hosts
        except ConfigurationError as reason:
            console.print(f"The {link} is left out: {reason}")
            results["link_skipped"] = str(reason)
        places["loopback"] = LOOPBACK
        results["boundary"] = report_boundary(places, rounds=10 if arguments.quick else 60)
        results["bandwidth"] = report_bandwidth(places, arguments.quick, rounds=3 if arguments.quick else 5)
        results["memory"] = report_memory()
    path = write_results("overhead", results)
    console.print(f"Written: {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
