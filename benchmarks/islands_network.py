"""How long does a step take where two ranks share one slow link?

    python -m benchmarks.islands_network --quick

Four hosts of two ranks each, links of 1 Gb/s and 200 Mb/s between the hosts (network namespaces, so root); inside a host they
are loopback. A perceptron of 4.34 million parameters (17.4 MB); the computing of a step is a sleep, so that eight ranks fit two
cores. All contenders one after the other in one run: read ratios.

DDP and FSDP2 go over all eight ranks; HSDP shards inside a host and reduces between hosts; islands are the two ranks of a host.
The gathers of FSDP2's and HSDP's forward passes are hidden in the sleep, as far as they fit into it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from benchmarks.cluster import network, unavailable
from benchmarks.harness import Recorder, print_table, repeated, trainer, wait, workers, write_results
from benchmarks.harness.record import recorded
from benchmarks.network.scenarios import rate_label
from benchmarks.network.workload import BATCH_SIZE, WORKS, Device, loss_of
from lightning_gossip import ADPSGDStrategy, Outer, PeriodicAveragingStrategy, ShardedADPSGDStrategy
from recipes.digits import DigitsData

HOSTS, SIZE = 4, 2
RANKS = HOSTS * SIZE
RATES_MBIT = (1_000.0, 200.0)
WARM = 3  # steps that do not count
TIMEOUT_S = 300.0
WORK = WORKS["mlp"]

CONTENDERS: dict[str, Callable[[], Strategy]] = {
    "DDP": DDPStrategy,
    "FSDP2": lambda: ModelParallelStrategy(RANKS, 1),
    "HSDP": lambda: ModelParallelStrategy(RANKS, 1),
    "AD-PSGD, all ranks": ADPSGDStrategy,
    "AD-PSGD, islands": lambda: ADPSGDStrategy(island=SIZE),
    "AD-PSGD, islands in shards": lambda: ShardedADPSGDStrategy(data_parallel_size=SIZE),
    "DiLoCo, islands, every 8": lambda: PeriodicAveragingStrategy(period=8, outer=Outer(0.7, 0.9), island=SIZE),
}


class Training(LightningModule):
    """Writes down when each step ended, and what the host's link has sent and received so far."""

    def __init__(self, contender: str, compute_s: float, folder: Path) -> None:
        super().__init__()
        self.net = WORK.build()
        self._contender, self._folder = contender, folder
        self._emulated = Device(WORK, self.net, compute_s)

    def configure_model(self) -> None:
        if self.device_mesh is None or any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            return
        mesh = self.device_mesh["data_parallel"]
        if self._contender == "HSDP":
            mesh = init_device_mesh("cpu", (HOSTS, SIZE), mesh_dim_names=("hosts", "ranks"))
        for layer in [*(layer for layer in self.net.children() if isinstance(layer, nn.Linear)), self.net]:
            fully_shard(layer, mesh=mesh)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        self._emulated.begin()
        loss = loss_of(self.net, batch)
        self._emulated.wait()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        card = psutil.net_io_counters(pernic=True, nowrap=False)[os.environ["GLOO_SOCKET_IFNAME"]]
        Recorder(self._folder).note(sent=card.bytes_sent, received=card.bytes_recv, cpu_s=time.process_time())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def train(contender: str, steps: int, compute_s: float, folder: Path) -> dict[str, Any]:
    """The task of a rank."""
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    training = Training(contender, compute_s, folder)
    data = repeated(DigitsData().train, RANKS * steps * BATCH_SIZE)
    trainer(strategy=CONTENDERS[contender](), max_epochs=1).fit(training, DataLoader(data, BATCH_SIZE, shuffle=True))
    return {}


def measured(contender: str, rate_mbit: float, *, steps: int, compute_s: float) -> dict[str, float]:
    """Seconds a step, and MB that a host's link sends in one, of all ranks from their fourth steps to their last."""
    with tempfile.TemporaryDirectory(prefix="benchmark-islands-") as name, network(HOSTS, rate_mbit=rate_mbit) as net:
        folder = Path(name)
        hosts = [host for host in net.hosts for _ in range(SIZE)]
        options = {"contender": contender, "steps": steps, "compute_s": compute_s}
        with workers(train, options, folder, hosts=hosts) as started:
            if not wait(started, TIMEOUT_S):
                raise TimeoutError(f"{contender} did not end within {TIMEOUT_S:.0f} s.")
        found = recorded(folder)
    step_s, sent, cpu_s = [], [], []
    for _, of_rank in found.groupby("rank"):
        first, last, count = of_rank.iloc[WARM - 1], of_rank.iloc[-1], len(of_rank) - WARM
        step_s.append((last.at_s - first.at_s) / count)
        sent.append((last.sent - first.sent) / count)
        cpu_s.append((last.cpu_s - first.cpu_s) / count)
    return {
        "step_s": sum(step_s) / RANKS,
        "sent_mb": sum(sent) / RANKS / 1e6,
        "cpu_ms": 1e3 * sum(cpu_s) / RANKS,
    }


def main() -> None:
    """Measure, print, and write ``results/islands_network.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a dozen steps, in place of fifty")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), help="default: all")
    parser.add_argument("--compute-s", type=float, default=0.4, help="of a step, emulated (0.4)")
    options = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(f"This machine cannot have a cluster: {reason}.")
    steps = 16 if options.quick else 50
    results: dict[str, dict[str, dict[str, float]]] = {}
    for rate in RATES_MBIT:
        for contender in options.contenders:
            found = measured(contender, rate, steps=steps, compute_s=options.compute_s)
            results.setdefault(rate_label(rate), {})[contender] = found
            print(f"{rate_label(rate)}, {contender}: {found['step_s']:.2f} s a step", flush=True)
    rows = [
        (
            contender,
            *(
                text
                for of_rate in results.values()
                for text in (f"{of_rate[contender]['step_s']:.2f}", f"{of_rate[contender]['sent_mb']:.1f}")
            ),
        )
        for contender in options.contenders
    ]
    columns = ["", *(text for rate in results for text in (f"{rate}: s a step", "MB a host"))]
    print_table(f"Four hosts of two ranks, {options.compute_s:g} s of computing a step, {steps} steps, one run", columns, rows)
    write_results("islands_network", {"steps": steps, "compute_s": options.compute_s, "results": results})


if __name__ == "__main__":
    main()
