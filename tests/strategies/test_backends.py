"""Default groups with other backends than Gloo alone, as far as they run without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CPUAccelerator

from lightning_gossip import ADPSGDStrategy, PeriodicAveragingStrategy
from tests.strategies.launch import launch
from tests.strategies.models import Net, loader, trainer


class Reduces(Callback):
    def __init__(self) -> None:
        self.got: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        for value in (torch.tensor(float(trainer.global_rank)), torch.tensor([3 * trainer.global_rank])):
            for how in ("mean", "sum", "max"):
                self.got.append(trainer.strategy.reduce(value, reduce_op=how).tolist())


def _reduces() -> list[Any]:
    reduces = Reduces()
    trainer(strategy=ADPSGDStrategy(process_group_backend="cpu:gloo"), callbacks=[reduces], max_epochs=1).fit(
        Net(), loader(80, 8), loader(32, shuffle=False)
    )
    return reduces.got


@pytest.mark.processes
def test_a_group_with_a_backend_for_each_device_has_a_mean_in_host_memory() -> None:
    assert launch(_reduces) == [[0.5, 1.0, 1.0, [1], [3], [3]]] * 2


@pytest.mark.parametrize("strategy", [ADPSGDStrategy, PeriodicAveragingStrategy])
@pytest.mark.parametrize(("asked", "made"), [(None, "cpu:gloo,cuda:nccl"), ("nccl", "cpu:gloo,cuda:nccl"), ("gloo", "gloo")])
def test_on_a_gpu_the_default_group_works_on_host_memory_too(strategy: Any, asked: str | None, made: str) -> None:
    ours = strategy(
        process_group_backend=asked,
        parallel_devices=[torch.device("cuda", 0)],
        cluster_environment=LightningEnvironment(),
        accelerator=CPUAccelerator(),
    )
    assert ours._get_process_group_backend() == made
