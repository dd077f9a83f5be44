"""One worker of one run: ``python -m benchmarks.network.worker FOLDER OPTIONS`` (JSON), in a host of its own."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.network.contenders import CONTENDERS, Contender
from benchmarks.network.recorder import Recorder
from benchmarks.network.workload import (
    BATCH_SIZE,
    WORKS,
    Device,
    Work,
    loss_of,
    optimizer_for,
    schedule_for,
    training_data,
)

RANK, WORKERS = int(os.environ.get("NODE_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass
class Training:
    """What a plain loop of a contender needs; the loop calls ``batches``, ``forward`` and ``end_step``."""

    work: Work
    net: nn.Module
    device: Device
    recorder: Recorder
    loader: DataLoader[Any]
    steps: int
    address: str  # of this host

    def batches(self) -> Iterator[list[Tensor]]:
        yield from self.loader

    def forward(self, net: nn.Module, batch: list[Tensor]) -> Tensor:
        """The loss; the emulated device has done all but its backward pass and the optimizer's step."""
        self.device.begin()
        self.recorder.begin_step()
        loss = loss_of(net, batch)
        self.device.wait()
        return loss

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.SGD:
        return optimizer_for(parameters, self.work.lr)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return schedule_for(optimizer, self.work.lr, self.steps)

    def end_step(self) -> None:
        self.recorder.end_step(BATCH_SIZE)


class Classifier(LightningModule):
    """The same as a LightningModule."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.net = training.net
        self._training = training

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self._training.forward(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizer = self._training.optimizer(list(self.net.parameters()))
        scheduler = schedule_for(optimizer, self._training.work.lr, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Record(Callback):
    def __init__(self, training: Training) -> None:
        self._training = training

    def on_train_batch_end(self, *_: Any) -> None:
        self._training.end_step()

    def on_train_end(self, *_: Any) -> None:
        self._training.recorder.write_model()  # all have met, and have one model, or DDP's


def train_with_lightning(contender: Contender, training: Training) -> dict[str, Any]:
    assert contender.strategy is not None
    strategy = contender.strategy()
    trainer = Trainer(
        strategy=strategy,
        devices=1,
        num_nodes=WORKERS,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Record(training)],
    )
    trainer.fit(Classifier(training), training.loader)
    workers = getattr(getattr(strategy, "report", None), "workers", [])
    own = next((worker for worker in workers if worker.rank == RANK), None)
    return {} if own is None else {"exchanges": own.exchanges, "period_mean": own.period_mean, "payload": own.bytes_sent}


def train_in_a_loop(contender: Contender, training: Training) -> dict[str, Any]:
    assert contender.loop is not None
    dist.init_process_group("gloo", rank=RANK, world_size=WORKERS)
    for value in training.net.state_dict().values():
        dist.broadcast(value, 0)
    data = training.loader.dataset
    training.loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data, drop_last=True))
    contender.loop(training)
    training.recorder.write_model()
    dist.barrier()
    dist.destroy_process_group()
    return {}


def main(folder: Path, options: dict[str, Any]) -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    seed_everything(options["seed"], workers=True, verbose=False)
    torch.set_num_threads(1)
    contender, work, steps = CONTENDERS[options["contender"]], WORKS[options["work"]], options["steps"]
    net = work.build()
    slowdown = options["slowdown"] if RANK == WORKERS - 1 else 1.0
    every = max(1, round(options["every"] / slowdown))
    recorder = Recorder(folder, RANK, net, every=every, interface=os.environ["GLOO_SOCKET_IFNAME"])
    device = Device(net, options["compute_s"] * slowdown, in_backward=contender.in_backward)
    loader = DataLoader(training_data(folder / "digits.pt", WORKERS * steps), batch_size=BATCH_SIZE, shuffle=True)
    training = Training(work, net, device, recorder, loader, steps, os.environ["HOST_ADDR"])
    train = train_with_lightning if contender.strategy is not None else train_in_a_loop
    result = train(contender, training)
    (folder / f"result-{RANK}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
