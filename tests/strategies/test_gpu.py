"""Fits on CUDA devices: several workers share one over Gloo where there is one only."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import Strategy

from lightning_gossip import ADPSGDStrategy, PeriodicAveragingStrategy
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORKERS = 2


class Reduces(Callback):
    """Collectives of tensors on the device and in host memory, through the strategy."""

    def __init__(self) -> None:
        self.got: list[list[float]] = []

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        mine = torch.tensor(float(trainer.global_rank))
        ours = trainer.strategy
        on_device = mine.to(ours.root_device)
        self.got.append([ours.reduce(on_device).item(), *model.all_gather(on_device).tolist()])
        self.got[-1].append(ours.reduce(mine).item())


def fits(make: type[Strategy], precision: str, accelerator: str = "cuda") -> Any:
    """Of each worker: where it trained, its model at the end, what was reduced, and its exchanges."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # as on a machine of its own, whose devices it chooses
    devices: Any = [rank % torch.cuda.device_count()] if accelerator == "cuda" else 1
    shared = accelerator == "cuda" and torch.cuda.device_count() < WORKERS
    strategy = make(process_group_backend="gloo" if shared else None)  # type: ignore[call-arg]
    reduces, model = Reduces(), Net()
    fit = trainer(
        strategy=strategy, accelerator=accelerator, devices=devices, num_nodes=WORKERS, precision=precision, callbacks=[reduces]
    )
    fit.fit(model, loader(400, 8, pin_memory=accelerator == "cuda"), loader(32, shuffle=False))
    report = strategy.report.workers  # type: ignore[attr-defined]
    return str(strategy.root_device), flat(model).tolist(), reduces.got, [worker.exchanges for worker in report]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_adpsgd_trains_on_a_device_and_all_get_one_model(precision: str) -> None:
    (first, mine, got, exchanges), (second, theirs, got_too, _) = launch(fits, ADPSGDStrategy, precision, timeout_s=60)
    assert first == "cuda:0"
    assert second == f"cuda:{1 % torch.cuda.device_count()}"
    assert mine == theirs
    assert all(value == value for value in mine)
    assert got == got_too == [[0.5, 0.0, 1.0, 0.5]] * 2
    assert sum(exchanges) > 0


def test_periodic_averaging_trains_on_a_device_and_all_get_one_model() -> None:
    (_, mine, got, _), (_, theirs, _, _) = launch(fits, PeriodicAveragingStrategy, "32-true", timeout_s=60)
    assert mine == theirs
    assert got == [[0.5, 0.0, 1.0, 0.5]] * 2
