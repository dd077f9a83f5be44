"""What does a killed worker cost the others?

Eight workers train on scikit-learn's digits, every batch padded to 30 ms, for 12 epochs: undisturbed, and with rank 3 killed
(SIGKILL) in the middle of epoch 4 and rank 6 in epoch 7. For each kill: the time to the next step of each survivor, and how
much longer the epoch took than the ones before it. Test accuracy beside the undisturbed run's; how often each sample was taken.

    python -m benchmarks.recovery
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_gossip import ADPSGDStrategy

WORKERS, EPOCHS, STEP_S, TRAINING = 8, 12, 0.03, 1437
KILLS = {3: 4, 6: 7}  # rank: epoch, in its seventh batch
DEADLINE_S = 240


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


class Record(Callback):
    """Each step with its samples, one line a step; and the kill."""

    def __init__(self, folder: Path, kills: dict[int, int]) -> None:
        self.folder = folder
        self.number = int(os.environ.get("LOCAL_RANK", "0"))
        self.kill_in = kills.get(self.number)

    def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(STEP_S)
        if trainer.current_epoch == self.kill_in and batch_idx == 6:
            (self.folder / f"killed-{self.number}").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Trainer, model: Any, output: Any, batch: Any, batch_idx: int) -> None:
        with open(self.folder / f"steps-{self.number}", "a") as file:
            file.write(json.dumps([trainer.current_epoch, time.time(), batch[2].tolist()]) + "\n")


def train(folder: Path, kills: dict[int, int]) -> None:
    """Runs in every worker."""
    seed_everything(0)
    torch.set_num_threads(1)
    digits = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(1))
    x = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    y = torch.tensor(digits.target)[order]
    training = TensorDataset(x[:TRAINING], y[:TRAINING], torch.arange(TRAINING))
    trainer = Trainer(
        strategy=ADPSGDStrategy(),
        devices=WORKERS,
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Record(folder, kills)],
    )
    model = Net()
    trainer.fit(model, DataLoader(training, batch_size=8, shuffle=True))
    testing = DataLoader(TensorDataset(x[TRAINING:], y[TRAINING:]), batch_size=60)
    accuracy = trainer.test(model, testing, verbose=False)[0]["test_acc"]
    if trainer.is_global_zero:
        lost = trainer.strategy.report.lost  # type: ignore[attr-defined]
        (folder / "result").write_text(json.dumps({"test_acc": accuracy, "world_size": trainer.world_size, "lost": lost}))


def run(kills: dict[int, int]) -> dict[str, Any]:
    """One run, and what its records say."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "benchmarks.recovery", name, json.dumps(kills)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, env=environment, timeout=DEADLINE_S, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        steps = {path.name[6:]: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("steps-*")}
        taken = [
            Counter(i for own in steps.values() for epoch, _, samples in own if epoch == e for i in samples)
            for e in range(EPOCHS)
        ]
        lengths = []
        for e in range(EPOCHS):
            at_s = [at for own in steps.values() for epoch, at, _ in own if epoch == e]
            lengths.append(max(at_s) - min(at_s))
        costs = []
        for rank, epoch in kills.items():
            killed_s = float((folder / f"killed-{rank}").read_text())
            next_s = [
                min(at for _, at, _ in own if at > killed_s) - killed_s for own in steps.values() if own[-1][1] > killed_s
            ]
            costs.append(
                {
                    "rank": rank,
                    "next_step_s": round(max(next_s), 3),
                    "epoch_longer_s": round(lengths[epoch] - statistics.median(lengths[1:epoch]), 3),
                }
            )
        return {
            **json.loads((folder / "result").read_text()),
            "samples_missing": sum(TRAINING - len(counts) for counts in taken),
            "samples_twice": sum(count > 1 for counts in taken for count in counts.values()),
            "epoch_s": round(statistics.median(lengths), 3),
            "kills": costs,
        }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), {int(rank): epoch for rank, epoch in json.loads(sys.argv[2]).items()})
    else:
        print(json.dumps({"undisturbed": run({}), "two killed": run(KILLS)}, indent=2))
