"""How many exchanges are there when the host runs ahead of its device?

Two workers, each a process with a Gloo connection on loopback, each with an emulated device (benchmarks/emulated_device.py).
Its steps last a fixed time; the host launches one in a fraction of that and is ahead by as many steps as it may. After each
comes the product's step boundary, ``Gossip.step``. What an exchange a step needs is that nobody waits for the device: a
gossip thread that did got one chunk a step.

Chunks are small here, so that a step has time for 1,000 of them on a CPU; what is measured is waiting, not bandwidth.

    python -m benchmarks.running_ahead [--quick]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.emulated_device import EmulatedDevice
from benchmarks.harness import against, console, pair_transport, print_table, process_group, rank, run, write_results
from benchmarks.overhead import Healthy
from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerPicker
from lightning_gossip.algorithm.adpsgd.peer_selection import ChangingPeers
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.algorithm.topology.generators import complete
from lightning_gossip.runtime.adpsgd.cuda_replica import StagedCopies, replica_of, staged_replica
from lightning_gossip.runtime.adpsgd.gossip import Gossip
from lightning_gossip.runtime.clock import now_s

CHUNK = 1000  # elements
ITEMSIZE = 8  # float64: the sum is to be kept to the last digit
LAUNCH_S = 0.003  # that the host needs for a step
TIMEOUT_S = 60.0
AIMS = {25: 0.95, 1000: 0.9}  # exchanges a step, by chunks


@dataclass
class Trained:
    """What came of a worker's steps.

    Args:
        exchanges_per_step: once the host is as far ahead as it may.
        exchange_s: seconds of an exchange, the mean.
        staleness: mean, and the largest.
        step_s: seconds a step of the host.
        boundary_s: seconds of the training thread in a step boundary, the mean.
        waits: of the host for the device in step boundaries.
    """

    exchanges_per_step: float
    exchange_s: float
    staleness: tuple[float, int]
    step_s: float
    boundary_s: float
    waits: int


class Worker:
    """A model of so many chunks on a device or, without one, on the CPU.

    Args:
        gossip: that averages it, started.
        rank: of this worker.
        chunks: of the model.
        ahead: steps that the host may be ahead of the device; 0: no device, the host does the steps itself.
        step_s: seconds that a step lasts.
    """

    def __init__(self, gossip: Gossip, *, rank: int, chunks: int, ahead: int, step_s: float) -> None:
        self.gossip = gossip
        self.device = EmulatedDevice(ahead=ahead) if ahead else None
        self._step_s, self._ahead = step_s, ahead
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(chunks * CHUNK, generator=generator, dtype=torch.float64)
        self._update = torch.randn(chunks * CHUNK, generator=generator, dtype=torch.float64) / 100
        self.expected = x.clone()  # without averaging
        self.x = [x if self.device is None else self.device.tensor(x)]

    def train(self, steps: int) -> Trained:
        """Make so many steps."""
        if self.device is None:
            return self._train(steps)
        with self.device:
            return self._train(steps)

    def drain(self) -> Tensor:
        """Take over the last merges when all have made their steps; returns the model."""
        if self.device is None:
            self.gossip.drain(self.x)
        else:
            with self.device:
                self.gossip.drain(self.x)
            self.device.close()
        return self.x[0]

    def _train(self, steps: int) -> Trained:
        device = self.device
        replica = replica_of(self.x) if device is None else staged_replica(self.x, StagedCopies(self.x, device.streams()))
        self.gossip.open(replica, session=1, layout=1)
        waits = device.host_waits if device is not None else 0
        counters, warm, boundary_s = self.gossip.counters, steps // 10 + 1 + self._ahead, 0.0
        exchanges, began_s = 0, time.monotonic()
        for number in range(steps):
            if number == warm:
                exchanges, began_s = counters.exchanges, time.monotonic()
            if device is None:
                time.sleep(self._step_s)
                self.x[0] += self._update
            else:
                time.sleep(LAUNCH_S)
                device.launch(lambda: self.x[0].add_(self._update), seconds=self._step_s)
            self.expected += self._update
            start_s = time.perf_counter()
            self.gossip.step(self.x, step_s=self._step_s)
            boundary_s += time.perf_counter() - start_s
        made = steps - warm
        return Trained(
            (counters.exchanges - exchanges) / made,
            counters.exchange_s / max(1, counters.exchanges),
            (counters.staleness.mean, counters.staleness.max),
            (time.monotonic() - began_s) / made,
            boundary_s / steps,
            device.host_waits - waits if device is not None else 0,
        )


@process_group()
def train(chunks: int, ahead: int, step_s: float, steps: int) -> dict[str, Any]:
    """One of the two processes; the second returns nothing."""
    torch.set_num_threads(1)
    topology, members = complete(2), [WorkerId(0, 1), WorkerId(1, 1)]
    picker = PartnerPicker(topology, rank())
    peers = ChangingPeers(
        Healthy(), rank(), members, topology, roles="auto", picker=picker, ceiling_s=TIMEOUT_S, now_s=now_s, raises=True
    )
    gossip = Gossip(pair_transport(TIMEOUT_S), peers, chunk_bytes=CHUNK * ITEMSIZE)
    gossip.start()
    worker = Worker(gossip, rank=rank(), chunks=chunks, ahead=ahead, step_s=step_s)
    dist.barrier()
    trained = worker.train(steps)
    dist.barrier()
    model = worker.drain()
    total, expected = model.clone(), worker.expected.clone()
    dist.all_reduce(total)
    dist.all_reduce(expected)
    dist.barrier()
    gossip.close()
    return {**asdict(trained), "sum_error": float((total - expected).abs().max())}


def main() -> None:
    parser = argparse.ArgumentParser(description="Exchanges a step when the host runs ahead of its device.")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    arguments = parser.parse_args()
    rows, results = [], []
    for chunks, step_s in ((25, 0.1), (1000, 2.0)):
        for ahead in (0, 1, 2, 8):
            steps = (60 if chunks == 25 else 20) if arguments.quick else (200 if chunks == 25 else 40)
            setting = {"chunks": chunks, "ahead": ahead, "step_s": step_s, "steps": steps}
            result = run(train, setting, hosts=(None, None), timeout_s=240)[0]
            results.append({**setting, "result": result})
            rows.append(
                [
                    f"{chunks} chunks, " + (f"ahead by {ahead}" if ahead else "CPU"),
                    against(result["exchanges_per_step"], AIMS[chunks], digits=3),
                    f"{result['exchange_s'] * 1e3:.0f}",
                    f"{result['staleness'][0]:.2f}",
                    f"{result['staleness'][1]}",
                    f"{result['step_s'] * 1e3:.1f}",
                    f"{result['boundary_s'] * 1e3:.2f}",
                    f"{result['waits']}",
                    f"{result['sum_error']:.0e}",
                ]
            )
    columns = (
        "",
        "exchanges a step",
        "one, ms",
        "staleness",
        "largest",
        "step, ms",
        "boundary, ms",
        "waits",
        "error of the sum",
    )
    caption = f"Aims: {AIMS[25]:g} at 25 chunks, {AIMS[1000]:g} at 1,000. Steps last 0.1 and 2 s. ✓ reached, ✗ missed."
    print_table("Exchanges when the host runs ahead of an emulated device", columns, rows, caption=caption)
    path = write_results("running_ahead", {"quick": arguments.quick, "settings": results})
    console.print(f"Written: {path.relative_to(path.parents[2])}")


if __name__ == "__main__":
    main()
