"""What does a step boundary cost the training thread of a rank whose island has its model in shards?

25.2 million parameters in 12 blocks, each in shards of its own (FSDP2), two islands of two ranks that gossip at every step. CPU
time of the training thread alone, one thread of torch: steps between which exchanges were merged, and steps without any;
against an in-place copy of the same bytes, and against the whole step.

    python -m benchmarks.sharded [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import against, print_table, run, trainer, write_results
from lightning_gossip import ShardedADPSGDStrategy
from recipes.commands import cleaning_up_on_sigterm

WIDTH, BLOCKS, BATCH_SIZE = 512, 12, 4
ISLAND, ISLANDS = 2, 2
AIM_MS = 8.0


class Blocks(LightningModule):
    """Twelve blocks of two layers, 25,196,544 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS))
        )

    def configure_model(self) -> None:
        if not any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            assert self.device_mesh is not None
            for block in (*self.net, self.net):
                fully_shard(block, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Boundaries(Callback):
    """CPU times of boundaries and of whole batches, in milliseconds."""

    def __init__(self) -> None:
        self.merged: list[float] = []
        self.plain: list[float] = []
        self.batches: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        algorithm: Any = trainer.strategy._fit._algorithm  # type: ignore[attr-defined]
        step = algorithm.step

        def timed(*args: Any) -> None:
            replica = algorithm._replica
            before, merges = replica.version, bool(replica._merges)
            begun = time.thread_time()
            step(*args)
            assert replica.version > before
            (self.merged if merges else self.plain).append(1e3 * (time.thread_time() - begun))

        algorithm.step = timed

    def on_train_batch_start(self, *_: Any) -> None:
        self._begun = time.thread_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches.append(1e3 * (time.thread_time() - self._begun))


def train(steps: int) -> dict[str, Any]:
    """One rank."""
    boundaries = Boundaries()
    data = TensorDataset(torch.randn(steps * BATCH_SIZE * ISLAND * ISLANDS, WIDTH))
    strategy = ShardedADPSGDStrategy(data_parallel_size=ISLAND)
    fit = trainer(strategy=strategy, max_epochs=1, callbacks=[boundaries])
    fit.fit(Blocks(), DataLoader(data, BATCH_SIZE))
    own = sum(parameter.to_local().numel() for parameter in fit.lightning_module.parameters())  # type: ignore[attr-defined]
    here, there = torch.ones(own), torch.zeros(own)
    copies = []
    for _ in range(20):
        begun = time.thread_time()
        there.copy_(here)
        copies.append(1e3 * (time.thread_time() - begun))
    skipped = 5  # the first ones make memory
    return {
        "own": own,
        "merged": boundaries.merged[skipped:],
        "plain": boundaries.plain[skipped:],
        "batches": boundaries.batches[skipped:],
        "copy": statistics.median(copies),
        "exchanges": sum(worker.exchanges or 0 for worker in strategy.report.workers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 40 if parser.parse_args().quick else 120
    with cleaning_up_on_sigterm():
        ranks = run(train, {"steps": steps}, hosts=(None,) * (ISLAND * ISLANDS), timeout_s=900)
    rows = []
    for number, rank in enumerate(ranks):
        merged, plain, batch = (statistics.median(rank[name] or [float("nan")]) for name in ("merged", "plain", "batches"))
        rows.append(
            [
                str(number),
                against(merged, AIM_MS, at_most=True, digits=1),
                f"{plain:.1f}",
                f"{rank['copy']:.1f}",
                f"{batch:.0f}",
            ]
        )
    columns = ("rank", "merges, CPU ms", "no merges", "a copy of its shards", "the step without it")
    print_table("The boundary of a sharded island", columns, rows, caption=f"{ranks[0]['exchanges']} exchanges")
    write_results("sharded", {"ranks": ranks})


if __name__ == "__main__":
    main()
