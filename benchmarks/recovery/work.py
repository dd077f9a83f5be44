"""What every worker trains, and what it writes down: each step with its process and samples."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Recorder, rank, repeated, torchft_manager, trainer
from lightning_gossip import ADPSGDStrategy
from recipes.digits import DigitsData, DigitsMLP

WORKERS, STEP_S, BATCH_SIZE, LEARNING_RATE, TRAINING = 8, 0.03, 8, 0.05, 1437
_DEADLINE = timedelta(seconds=60)  # torchft's own


@dataclass(frozen=True)
class Plan:
    """Of a run.

    Args:
        epochs: how many.
        repeats: of the training data in one epoch.
        kills: rank: epoch, in its seventh batch.
        freeze: rank and its batch in the first epoch, counted from 0; None for nobody.
        freeze_s: for how long.
    """

    epochs: int = 12
    repeats: int = 1
    kills: dict[int, int] = field(default_factory=dict)
    freeze: tuple[int, int] | None = None
    freeze_s: float = 0.0

    @property
    def samples(self) -> int:
        """Of one epoch."""
        return self.repeats * TRAINING

    @classmethod
    def told(cls, values: dict[str, Any]) -> Plan:
        """What JSON has made of one."""
        kills = {int(number): epoch for number, epoch in values["kills"].items()}
        return cls(**{**values, "kills": kills, "freeze": values["freeze"] and tuple(values["freeze"])})


class Net(DigitsMLP):
    """On samples with their numbers."""

    def __init__(self) -> None:
        super().__init__(lr=LEARNING_RATE, milestones=())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx)


def data(plan: Plan) -> tuple[TensorDataset, DataLoader[Any]]:
    """Training samples with their numbers, and the loader of the test."""
    digits = DigitsData()
    both = zip(digits.train.tensors, digits.validation.tensors, strict=True)
    training = TensorDataset(*map(torch.cat, both))
    assert len(training) == TRAINING
    return TensorDataset(*repeated(training, plan.samples).tensors, torch.arange(plan.samples)), digits.test_dataloader()


class Record(Callback):
    """Also what happens to this worker, by the plan."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._steps = Recorder(folder)
        self._killed = folder / f"killed-{rank()}.happened"
        self._kill_in = None if self._killed.exists() else plan.kills.get(rank())

    def begin(self, epoch: int, batch: int) -> None:
        """A step begins: the emulated computing, or the end."""
        time.sleep(STEP_S)
        if epoch == self._kill_in and batch == 6:
            self._killed.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        if (rank(), batch) == self._plan.freeze and epoch == 0:
            subprocess.Popen(["sh", "-c", f"sleep {self._plan.freeze_s}; kill -CONT {os.getpid()}"])
            (self._folder / "frozen.happened").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGSTOP)

    def end(self, epoch: int, samples: Tensor) -> None:
        """It has ended."""
        self._steps.note(epoch=epoch, process=os.getpid(), samples=samples.tolist())

    def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        self.begin(trainer.current_epoch, batch_idx)

    def on_train_batch_end(self, trainer: Trainer, model: Any, output: Any, batch: Any, batch_idx: int) -> None:
        self.end(trainer.current_epoch, batch[2])


def train_with_lightning(strategy: str, plan: dict[str, Any], folder: Path) -> float:
    """Returns the test accuracy."""
    seed_everything(0, verbose=False)
    told = Plan.told(plan)
    training, testing = data(told)
    restarts = strategy == "ddp" and bool(told.kills)
    fit = trainer(
        strategy=ADPSGDStrategy() if strategy == "adpsgd" else strategy,
        max_epochs=told.epochs,
        enable_checkpointing=restarts,
        callbacks=[Record(folder, told), *([ModelCheckpoint(folder, save_last=True)] if restarts else [])],
        **({"devices": WORKERS, "num_nodes": 1} if strategy == "ddp" else {}),  # torchrun has started them
    )
    model, last = Net(), folder / "last.ckpt"
    loader = DataLoader(training, batch_size=BATCH_SIZE, shuffle=True)
    fit.fit(model, loader, ckpt_path=str(last) if last.exists() else None)
    return float(fit.test(model, testing, verbose=False)[0]["test_acc"])


def train_with_torchft(strategy: str, plan: dict[str, Any], folder: Path) -> float:
    """Like the example of its documentation: a step whose all-reduce fails is not committed, the batch is lost."""
    from torchft.data import DistributedSampler  # type: ignore[import-not-found]
    from torchft.ddp import DistributedDataParallel  # type: ignore[import-not-found]
    from torchft.optim import OptimizerWrapper  # type: ignore[import-not-found]

    seed_everything(0, verbose=False)
    told = Plan.told(plan)
    training, testing = data(told)
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": sgd.state_dict()}

    with torchft_manager(load, state, min_replica_size=1, timeout=_DEADLINE) as manager:
        network, optimizer = DistributedDataParallel(manager, model.net), OptimizerWrapper(manager, sgd)
        sampler = DistributedSampler(training, rank(), WORKERS, group_rank=0, num_replicas=1, shuffle=True)
        record = Record(folder, told)
        for epoch in range(told.epochs):
            sampler.set_epoch(epoch)
            for number, (x, y, samples) in enumerate(DataLoader(training, batch_size=BATCH_SIZE, sampler=sampler)):
                record.begin(epoch, number)
                committed = manager.current_step()
                optimizer.zero_grad()
                model.loss(network(x), y).backward()
                optimizer.step()
                if manager.current_step() > committed:
                    record.end(epoch, samples)
    with torch.no_grad():
        for x, y in testing:
            model.test_acc(model(x), y)
    return float(model.test_acc.compute())
