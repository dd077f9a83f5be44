"""One worker of one run, in a host of its own. What it writes, it writes while the emulated device computes, so that it costs
no time of training."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.harness import Recorder, process_group, rank, repeated, trainer
from benchmarks.network.contenders import CONTENDERS, Contender
from benchmarks.network.workload import BATCH_SIZE, WORKS, Device, Work, loss_of, optimizer_for, schedule_for, shared_values
from recipes.digits import DigitsData


@dataclass
class Training:
    """What a plain loop of a contender needs; the loop calls ``batches``, ``forward`` and ``end_step``.

    Args:
        folder: of the run. A line a step goes to steps-<rank>: when it ended, samples, bytes that the host has sent so far,
            processor seconds so far; a line a model to models-<rank>, its values to the file that the line names.
        every: steps between two models.
    """

    work: Work
    net: nn.Module
    device: Device
    loader: DataLoader[Any]
    steps: int
    folder: Path
    every: int

    def __post_init__(self) -> None:
        self._steps, self._models = Recorder(self.folder), Recorder(self.folder, "models")
        self._step = self._model = 0

    def batches(self) -> Iterator[list[Tensor]]:
        yield from self.loader

    def forward(self, net: nn.Module, batch: list[Tensor]) -> Tensor:
        """The loss; the emulated device has done all but its backward pass and the optimizer's step."""
        self.device.begin()
        if self._step % self.every == 0:
            self.write_model()
        loss = loss_of(net, batch)
        self.device.wait()
        return loss

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.SGD:
        return optimizer_for(parameters, self.work.lr)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return schedule_for(optimizer, self.work.lr, self.steps)

    def end_step(self) -> None:
        self._step += 1
        counters = psutil.net_io_counters(pernic=True, nowrap=False)[os.environ["GLOO_SOCKET_IFNAME"]]
        self._steps.note(samples=BATCH_SIZE, sent=counters.bytes_sent, cpu_s=time.process_time())

    def write_model(self) -> None:
        """The model as it is now."""
        name = f"model-{rank()}-{self._model}"
        self._models.note(steps=self._step, file=name)
        torch.cat([value.flatten() for value in shared_values(self.net)]).numpy().tofile(self.folder / name)
        self._model += 1


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
        self._training.write_model()  # all have met, and have one model, or DDP's


def train_with_lightning(contender: Contender, training: Training) -> dict[str, Any]:
    assert contender.strategy is not None
    strategy = contender.strategy()
    trainer(strategy=strategy, max_epochs=1, callbacks=[Record(training)]).fit(Classifier(training), training.loader)
    workers = getattr(getattr(strategy, "report", None), "workers", [])
    own = next((worker for worker in workers if worker.rank == rank()), None)
    return {} if own is None else {"exchanges": own.exchanges, "period_mean": own.period_mean}


@process_group()
def train_in_a_loop(contender: Contender, training: Training) -> dict[str, Any]:
    assert contender.loop is not None
    for value in training.net.state_dict().values():
        dist.broadcast(value, 0)
    data = training.loader.dataset
    training.loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data, drop_last=True))
    contender.loop(training)
    training.write_model()
    return {}


def train(
    contender: str, work: str, seed: int, steps: int, every: int, compute_s: float, slowdown: float, folder: Path
) -> dict[str, Any]:
    """The task; the last worker is the slow one."""
    seed_everything(seed, workers=True, verbose=False)
    workers, chosen = int(os.environ["WORLD_SIZE"]), CONTENDERS[contender]
    slower = slowdown if rank() == workers - 1 else 1.0
    net = WORKS[work].build()
    device = Device(net, compute_s * slower, in_backward=chosen.in_backward)
    data = repeated(DigitsData().train, workers * steps * BATCH_SIZE)  # one epoch: nobody meets in between
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    training = Training(WORKS[work], net, device, loader, steps, folder, max(1, round(every / slower)))
    return (train_with_lightning if chosen.strategy is not None else train_in_a_loop)(chosen, training)
