"""What every worker trains, and what it writes down: each step with its process and samples, one line a step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

WORKERS, STEP_S, BATCH_SIZE, TRAINING = 8, 0.03, 8, 1437


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

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        told = json.loads(text)
        told["kills"] = {int(rank): epoch for rank, epoch in told["kills"].items()}
        told["freeze"] = told["freeze"] and tuple(told["freeze"])
        return cls(**told)


@dataclass(frozen=True)
class Step:
    """One line of a record."""

    epoch: int
    at_s: float
    process: int
    samples: list[int]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self.network(batch[0]), batch[1])
        self.log("test_acc", self.accuracy)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def data(plan: Plan) -> tuple[TensorDataset, DataLoader[Any]]:
    """Training samples with their numbers, and the loader of the test."""
    digits = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(1))
    x = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    y = torch.tensor(digits.target)[order]
    number = torch.arange(plan.samples)
    training = TensorDataset(x[number % TRAINING], y[number % TRAINING], number)
    return training, DataLoader(TensorDataset(x[TRAINING:], y[TRAINING:]), batch_size=60)


class Record(Callback):
    """Also what happens to this worker, by the plan."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._number = int(os.environ.get("LOCAL_RANK", "0"))
        self._killed = folder / f"killed-{self._number}"
        self._kill_in = None if self._killed.exists() else plan.kills.get(self._number)

    def begin(self, epoch: int, batch: int) -> None:
        """A step begins: the emulated computing, or the end."""
        time.sleep(STEP_S)
        if epoch == self._kill_in and batch == 6:
            self._killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if (self._number, batch) == self._plan.freeze and epoch == 0:
            subprocess.Popen(["sh", "-c", f"sleep {self._plan.freeze_s}; kill -CONT {os.getpid()}"])
            (self._folder / "frozen").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGSTOP)

    def end(self, epoch: int, samples: Tensor) -> None:
        """It has ended."""
        with open(self._folder / f"steps-{self._number}", "a") as file:
            file.write(json.dumps([epoch, time.time(), os.getpid(), samples.tolist()]) + "\n")

    def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        self.begin(trainer.current_epoch, batch_idx)

    def on_train_batch_end(self, trainer: Trainer, model: Any, output: Any, batch: Any, batch_idx: int) -> None:
        self.end(trainer.current_epoch, batch[2])


def steps_of(folder: Path) -> dict[int, list[Step]]:
    """What the workers have written down, by rank."""
    return {
        int(path.name[6:]): [Step(*json.loads(line)) for line in path.read_text().splitlines()]
        for path in folder.glob("steps-*")
    }
