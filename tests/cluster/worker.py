"""One worker of the clusters' job, as a user would write it: ``python -m tests.cluster.worker FOLDER OPTIONS`` (JSON).

It trains a perceptron on scikit-learn's digits, and writes into the folder, which all share:

    steps-<number>-<process>    a line a step: when, in which epoch, on which samples
    result-<number>             at the end
    last.ckpt                   Lightning's

and says when an epoch begins ("epoch 3 begins with 4 workers").
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gossip import ADPSGDStrategy

BATCH = 8
NUMBER = int(os.environ.get("NODE_RANK", "0"))


class Net(LightningModule):
    """155 kB of model: 12 ms on a link of 100 Mb/s, and 1.2 s on one of 1 Mb/s."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hits = (self.network(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("val_acc", hits, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Record(Callback):
    """Steps of a length, and what they were on; written before anybody is told that the batch is finished."""

    def __init__(self, folder: Path, step_s: float) -> None:
        # processes of several hosts may have one number
        self._path = folder / f"steps-{NUMBER}-{time.time_ns()}"
        self._step_s = step_s
        self._samples: list[int] = []

    def on_train_epoch_start(self, trainer: Trainer, model: Any) -> None:
        print(f"epoch {trainer.current_epoch} begins with {trainer.world_size} workers")

    def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self._step_s)
        self._samples = batch[2].tolist()

    def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % 10 == 0:
            print(f"epoch {trainer.current_epoch}, {batch_idx + 1} steps at {time.time()}")

    def on_before_optimizer_step(self, trainer: Trainer, model: Any, optimizer: Any) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps([time.time(), trainer.current_epoch, self._samples]) + "\n")


def main(folder: Path, options: dict[str, Any]) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # what a hanging one does
    logging.getLogger("lightning_gossip").setLevel(logging.INFO)
    logging.basicConfig(format="%(asctime)s.%(msecs)03d %(name)s: %(message)s", datefmt="%H:%M:%S")
    seed_everything(0)
    torch.set_num_threads(1)
    data = TensorDataset(*torch.load(folder / "digits.pt"))
    trainer = Trainer(
        strategy=ADPSGDStrategy(**options["strategy"]),
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        accelerator="cpu",
        max_epochs=options["epochs"],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[Record(folder, options["step_s"]), ModelCheckpoint(folder, save_last=True)],
    )
    model = Net()
    validation = DataLoader(TensorDataset(*data[: 8 * BATCH]), batch_size=BATCH)
    try:
        trainer.fit(model, DataLoader(data, batch_size=BATCH, shuffle=True), validation)
    except BaseException:
        faulthandler.dump_traceback(all_threads=True)  # what the other threads were doing
        raise
    report = trainer.strategy.report  # type: ignore[attr-defined]
    result = {
        "epochs": trainer.current_epoch,
        "world_size": trainer.world_size,
        "lost": report.lost,
        "accuracy": trainer.callback_metrics["val_acc"].item(),
        "model": sum(parameter.double().sum().item() for parameter in model.parameters()),
        "exchanges": {worker.rank: worker.exchanges for worker in report.workers},
        "failed": {worker.rank: worker.failed for worker in report.workers},
    }
    (folder / f"result-{NUMBER}").write_text(json.dumps(result))
    print("ends")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
