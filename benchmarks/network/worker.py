"""One worker of one run, in a host of its own. What it writes, it writes while the emulated device computes, so that it costs
no time of training."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.harness import Recorder, process_group, rank, repeated, trainer
from benchmarks.network.contenders import CONTENDERS, Contender
from benchmarks.network.workload import WORKS, Device, Work, loss_of, shared_values


class Training(LightningModule):
    """What is trained, and what of it is written down. A plain loop of a contender calls ``loader``, ``loss``, ``optimizer``,
    ``schedule`` and ``end_step``.

    A line a step goes to steps-<rank>: when it ended, samples, bytes that the host has sent so far, processor seconds so far;
    a line a model to models-<rank>, its values to the file that the line names.

    Args:
        work: which.
        steps: of this worker.
        loader: of its batches.
        emulated: the device.
        folder: of the run.
        every: steps between two models.
    """

    def __init__(
        self, work: Work, net: nn.Module, steps: int, loader: DataLoader[Any], emulated: Device, folder: Path, every: int
    ) -> None:
        super().__init__()
        self.net, self.loader, self.batch_size = net, loader, work.batch_size
        self._work, self._steps, self._emulated, self._folder, self._every = work, steps, emulated, folder, every
        self._step = self._model = 0

    def loss(self, net: nn.Module, batch: list[Tensor]) -> Tensor:
        """The emulated device has done all but its backward pass and the optimizer's step."""
        self._emulated.begin()
        if self._step % self._every == 0:
            self.write_model()
        loss = loss_of(net, batch)
        self._emulated.wait()
        return loss

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return self._work.optimizer(self.net, parameters, self._work.lr)

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int | None = None) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=self._work.lr, total_steps=steps or self._steps, cycle_momentum=False)

    def end_step(self) -> None:
        self._step += 1
        counters = psutil.net_io_counters(pernic=True, nowrap=False)[os.environ["GLOO_SOCKET_IFNAME"]]
        Recorder(self._folder).note(samples=self.batch_size, sent=counters.bytes_sent, cpu_s=time.process_time())

    def write_model(self) -> None:
        """The model as it is now."""
        name = f"model-{rank()}-{self._model}"
        Recorder(self._folder, "models").note(steps=self._step, file=name)
        torch.cat([value.flatten() for value in shared_values(self.net)]).numpy().tofile(self._folder / name)
        self._model += 1

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(list(self.net.parameters()))
        schedule = self.schedule(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *_: Any) -> None:
        self.end_step()

    def on_train_end(self) -> None:
        self.write_model()  # all have met, and have one model, or DDP's


def train_with_lightning(contender: Contender, training: Training) -> dict[str, Any]:
    assert contender.strategy is not None
    strategy = contender.strategy()
    trainer(strategy=strategy, max_epochs=1).fit(training, training.loader)
    workers = getattr(getattr(strategy, "report", None), "workers", [])
    own = next((worker for worker in workers if worker.rank == rank()), None)
    return {} if own is None else {"exchanges": own.exchanges, "period_mean": own.period_mean}


@process_group()
def train_in_a_loop(contender: Contender, training: Training) -> dict[str, Any]:
    assert contender.loop is not None
    for value in training.net.state_dict().values():
        dist.broadcast(value, 0)
    data = training.loader.dataset
    training.loader = DataLoader(data, batch_size=training.batch_size, sampler=DistributedSampler(data, drop_last=True))
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
    done = WORKS[work]
    net = done.build()
    emulated = Device(done, net, compute_s * slower, in_backward=chosen.in_backward)
    data = repeated(done.data()[0], workers * steps * done.batch_size)  # one epoch: nobody meets in between
    loader = DataLoader(data, batch_size=done.batch_size, shuffle=True)
    training = Training(done, net, steps, loader, emulated, folder, max(1, round(every / slower)))
    return (train_with_lightning if chosen.strategy is not None else train_in_a_loop)(chosen, training)
