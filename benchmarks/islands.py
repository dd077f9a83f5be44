"""What does an island cost at a step's boundary?

    python -m benchmarks.islands

Two islands of two ranks, a model of 25 million parameters (101 MB). A boundary is: x ← x + m, y ← x of the rank's part, and
handing the parts round. In turn with it, in the same processes: the boundary of a worker of one rank, which has all of it,
and handing round by an all-gather. CPU milliseconds of the process, all threads; medians. Bytes are what a rank's network
carries in an exchange, and inside the island at a boundary.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from benchmarks.harness import print_table, rank, run, write_results
from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.runtime.adpsgd.cuda_replica import replica_of
from lightning_gossip.runtime.islands.groups import IslandGroups
from lightning_gossip.runtime.process_groups import make_default_group
from lightning_gossip.strategies.islands.flat_parameters import FlatParameters

RANKS, SIZE = 4, 2
LAYERS, WIDTH = 6, 2048  # 25.2 million parameters
TIMEOUT_S = 120.0


def boundaries(rounds: int) -> dict[str, Any]:
    """CPU seconds and seconds of each kind of boundary on this rank, medians."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", _port(), is_master=rank() == 0, timeout=timedelta(seconds=TIMEOUT_S))
    groups = IslandGroups(Islands(SIZE), rank(), TIMEOUT_S)
    groups.members = lambda: range(RANKS)
    groups.make(PrefixStore("between", store), rank(), RANKS)
    groups.make_island(PrefixStore(f"island/{groups.place.island}", store), make_default_group("gloo", TIMEOUT_S))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    flat = FlatParameters(model, SIZE)
    whole, part = [parameter.detach() for parameter in model.parameters()], flat.share(groups.place.index)
    of_all, of_part = replica_of(whole), replica_of(part)
    vector = torch.cat(part * SIZE)

    def merged(replica: Any) -> None:
        for number in range(0, replica.numel, 1 << 20):
            chunk = slice(number, min(replica.numel, number + (1 << 20)))
            replica.merge(chunk, torch.zeros(chunk.stop - chunk.start))

    def boundary() -> None:
        of_part.push_pull(part)
        flat.hand_round()

    def gathering() -> None:
        of_part.push_pull(part)
        dist.all_gather_into_tensor(vector, part[0])

    kinds: dict[str, tuple[Callable[[], Any], Any]] = {
        "a worker of one rank": (lambda: of_all.push_pull(whole), of_all),
        "an island's rank": (boundary, of_part),
        "the same, by an all-gather": (gathering, of_part),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(rounds + 2):
        for name, (call, replica) in kinds.items():
            merged(replica)
            dist.barrier(group=groups.group)
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            call()
            spent = time.process_time() - began_cpu_s, time.perf_counter() - began_s
            if number >= 2:
                times[name].append(spent)
    dist.barrier(group=groups.group)
    dist.destroy_process_group()
    groups.drop_all()
    numel = sum(tensor.numel() for tensor in whole)
    return {
        "parameters": numel,
        "part": sum(tensor.numel() for tensor in part),
        "cpu_s": {name: statistics.median(cpu for cpu, _ in found) for name, found in times.items()},
        "wall_s": {name: statistics.median(wall for _, wall in found) for name, found in times.items()},
    }


def _port() -> int:
    return int(os.environ["MASTER_PORT"])


def main() -> None:
    """Measure, print, and write ``results/islands.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    ranks = run(boundaries, {"rounds": 5 if options.quick else 20}, hosts=[None] * RANKS, timeout_s=600.0)
    first = ranks[0]
    whole, part = 4 * first["parameters"], 4 * first["part"]
    bytes_of = {
        "a worker of one rank": (whole, 0),
        "an island's rank": (part, part),
        "the same, by an all-gather": (part, part),
    }
    rows = [
        (
            name,
            f"{bytes_of[name][0] / 1e6:.1f}",
            f"{bytes_of[name][1] / 1e6:.1f}",
            f"{1e3 * statistics.median(found['cpu_s'][name] for found in ranks):.1f}",
            f"{1e3 * statistics.median(found['wall_s'][name] for found in ranks):.0f}",
        )
        for name in first["cpu_s"]
    ]
    columns = ("boundary of", "MB an exchange", "MB inside the island", "CPU ms a rank", "wall ms")
    print_table(f"{first['parameters'] / 1e6:.1f} million parameters, islands of {SIZE}", columns, rows)
    write_results("islands", {"ranks": ranks})


if __name__ == "__main__":
    main()
