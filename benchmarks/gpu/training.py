"""ResNet-50 on generated images with Lightning: AD-PSGD, periodic averaging and DDP, for the same time each."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.gpu.machine import Setting
from benchmarks.gpu.network import Classifier, Images, trainer_options
from benchmarks.harness import rank, run, trainer
from lightning_gossip import ADPSGDStrategy, PeriodicAveragingStrategy

STRATEGIES = ("adpsgd", "periodic_averaging", "ddp")
SECONDS = 20.0  # of training for each, if the loaders keep up
TIMEOUT_S = 75.0
EPOCHS = 3  # the first warms up
_STEP_S = 0.25  # a guess, where nothing was measured before


def measure(strategy: str, setting: Setting, step_s: float | None, left_s: float) -> dict[str, Any]:
    """Train with one strategy.

    Args:
        strategy: its name.
        setting: of the run.
        step_s: seconds that a step was seen to last; None if it was not.
        left_s: seconds that it may take.
    """
    batches = 12 if setting.quick or not setting.cuda else max(20, int(SECONDS / EPOCHS / (step_s or _STEP_S)))
    parameters = {
        "strategy": strategy,
        "cuda": setting.cuda,
        "gloo": setting.shares_a_device or not setting.cuda,
        "batches": batches * setting.workers,
        "batch": 64 if setting.cuda else 8,
        "size": 224 if setting.cuda else 16,
    }
    return _together(run(train, parameters, hosts=(None,) * setting.workers, timeout_s=min(TIMEOUT_S, left_s)))


def _together(workers: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all workers: an epoch lasts from the first one's begin to the last one's end."""
    seconds = [
        max(worker["epochs"][number][1] for worker in workers) - min(worker["epochs"][number][0] for worker in workers)
        for number in range(1, EPOCHS)
    ]
    images = [sum(worker["epochs"][number][2] for worker in workers) for number in range(1, EPOCHS)]
    return {
        "images_per_s": sum(images) / sum(seconds),
        "first_loss": workers[0]["first_loss"],
        "last_loss": sum(worker["last_loss"] for worker in workers) / len(workers),
        "reports": workers[0]["reports"],
        "memory_gib": max(worker["memory_gib"] for worker in workers),
    }


class Clock(Callback):
    """Begin, end and images of each epoch of this worker, on the machine's clock."""

    def __init__(self) -> None:
        self.epochs: list[list[float]] = []

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.epochs.append([time.monotonic(), 0.0, 0])

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.epochs[-1][2] += len(batch[1])

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.epochs[-1][1] = time.monotonic()


def train(strategy: str, cuda: bool, gloo: bool, batches: int, batch: int, size: int) -> dict[str, Any]:
    """In each worker."""
    seed_everything(0, verbose=False)
    backend = "gloo" if gloo else None
    made = {
        "adpsgd": lambda: ADPSGDStrategy(process_group_backend=backend),
        "periodic_averaging": lambda: PeriodicAveragingStrategy(process_group_backend=backend),
        "ddp": lambda: DDPStrategy(process_group_backend=backend),
    }[strategy]()
    clock, model = Clock(), Classifier(cuda=cuda)
    fit = trainer(strategy=made, max_epochs=EPOCHS, callbacks=[clock], **trainer_options(cuda=cuda, rank=rank()))
    loader = DataLoader(
        Images(batches * batch, size), batch_size=batch, shuffle=True, pin_memory=cuda, num_workers=2 if cuda else 0
    )
    fit.fit(model, loader)
    losses = [float(loss) for loss in model.losses]
    few = max(1, len(losses) // 10)
    names = ("rank", "steps", "samples", "exchanges", "bytes_sent", "staleness_mean", "averagings", "busy_s", "wait_s")
    report = getattr(fit.strategy, "report", None)
    return {
        "epochs": clock.epochs,
        "first_loss": sum(losses[:few]) / few,
        "last_loss": sum(losses[-few:]) / few,
        "reports": [] if report is None else [{name: getattr(worker, name) for name in names} for worker in report.workers],
        "memory_gib": torch.cuda.max_memory_allocated() / (1 << 30) if cuda else 0.0,
    }
