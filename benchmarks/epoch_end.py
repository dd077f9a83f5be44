"""What does the end of an epoch cost? From the end of a worker's last batch to the beginning of its next epoch's first.

Four workers train the digits for several epochs, with validation and a checkpoint after each, once under DDP, once under
``adpsgd``, in turn; of each epoch's end, the time outside of validation. Processor time is that of the whole process. One
all-reduce of the model, by all workers at once, is shown beside.

    python -m benchmarks.epoch_end [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import console, print_table, run, trainer, write_results

WORKERS, EPOCHS, BATCHES, BATCH_SIZE = 4, 12, 24, 16
STRATEGIES = ("ddp", "adpsgd")


class Net(LightningModule):
    """A perceptron of 0.1 M parameters that logs as examples do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Ends(Callback):
    """Seconds and processor seconds of each epoch's end, without its validation."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []
        self._last: tuple[float, float] | None = None
        self._validation = (0.0, 0.0)

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.monotonic(), time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self._last = self._now()

    def on_validation_start(self, *_: Any) -> None:
        self._began = self._now()

    def on_validation_end(self, *_: Any) -> None:
        now = self._now()
        self._validation = now[0] - self._began[0], now[1] - self._began[1]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self._last is not None:
            now = self._now()
            wall, cpu = (now[i] - self._last[i] - self._validation[i] for i in (0, 1))
            self.ends.append((wall, cpu))


def train(strategy: str, folder: str) -> dict[str, Any]:
    """The task of one worker."""
    import lightning_gossip  # noqa: F401

    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    count = BATCHES * BATCH_SIZE * WORKERS
    data = TensorDataset(torch.rand(count, 64), torch.randint(10, (count,)))
    loaders = (DataLoader(data, batch_size=BATCH_SIZE, shuffle=True), DataLoader(data, batch_size=BATCH_SIZE * 4))
    ends = Ends()
    callbacks: list[Callback] = [ends, ModelCheckpoint(folder, filename="last", every_n_epochs=1)]
    fitting = trainer(strategy=strategy, max_epochs=EPOCHS, callbacks=callbacks, enable_checkpointing=True)
    fitting.fit(Net(), *loaders)
    vector = torch.zeros(sum(parameter.numel() for parameter in fitting.lightning_module.parameters()))
    all_reduce = [_timed(lambda: dist.all_reduce(vector)) for _ in range(10)]
    wall, cpu = (statistics.median(end[i] for end in ends.ends[2:]) for i in (0, 1))
    return {"wall_s": wall, "cpu_s": cpu, "all_reduce_s": statistics.median(all_reduce)}


def _timed(function: Callable[[], object]) -> float:
    began_s = time.monotonic()
    function()
    return time.monotonic() - began_s


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="An epoch's end under adpsgd beside DDP's.")
    parser.add_argument("--quick", action="store_true", help="once each")
    rounds = 1 if parser.parse_args().quick else 7
    found: dict[str, list[dict[str, float]]] = {name: [] for name in STRATEGIES}
    for _ in range(rounds):
        for name in STRATEGIES:
            with tempfile.TemporaryDirectory() as folder:
                everyones = run(train, {"strategy": name, "folder": folder}, hosts=[None] * WORKERS, timeout_s=300)
            found[name].append({key: statistics.fmean(worker[key] for worker in everyones) for key in everyones[0]})
    medians = {name: {key: statistics.median(each[key] for each in runs) for key in runs[0]} for name, runs in found.items()}
    rows = [
        (name, *(f"{1e3 * median[key]:.1f}" for key in ("wall_s", "cpu_s", "all_reduce_s"))) for name, median in medians.items()
    ]
    print_table("An epoch's end without its validation, ms a worker", ("strategy", "wall", "processor", "one all-reduce"), rows)
    more = medians["adpsgd"]["cpu_s"] - medians["ddp"]["cpu_s"]
    console.print(f"adpsgd takes {1e3 * more:.1f} ms of processor time more than DDP.")
    console.print(f"Written to {write_results('epoch_end', {'medians': medians, 'rounds': found, 'cores': os.cpu_count()})}")


if __name__ == "__main__":
    main()
