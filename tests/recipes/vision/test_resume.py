"""Learning rates of a run that is resumed on another number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import LambdaLR

from recipes.schedules import PerStep
from tests.strategies.launch import launch
from tests.strategies.models import Net, loader, trainer

pytestmark = pytest.mark.processes


class Rates(Callback):
    """The learning rate of each batch of this worker, an epoch each."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self.seen.append([])

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen[-1].append(trainer.optimizers[0].param_groups[0]["lr"])


def _scheduled(kind: str, strategy: str, devices: int, folder: Path, resumed: bool) -> list[list[float]]:
    def optimizer(model: Any) -> Any:
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        total = int(model.trainer.estimated_stepping_batches)
        schedule: Any = torch.optim.lr_scheduler.OneCycleLR(sgd, max_lr=1.0, total_steps=total, cycle_momentum=False)
        if kind == "lambda":
            schedule = LambdaLR(sgd, PerStep(lambda epoch, _: 1.0 - epoch / 4, total / 4, 1.0))
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    rates = Rates()
    callbacks: list[Callback] = [rates]
    if not resumed:
        callbacks.append(ModelCheckpoint(folder, "{epoch}", save_top_k=-1))
    t = trainer(strategy=strategy, devices=devices, max_epochs=4, callbacks=callbacks, enable_checkpointing=not resumed)
    path = folder / "epoch=1.ckpt" if resumed else None
    t.fit(Net(optimizer), loader(42, 2), ckpt_path=path)
    return rates.seen


@pytest.mark.parametrize(
    ("kind", "strategy", "before", "after"),
    [
        pytest.param("one cycle", "adpsgd", 2, 1, marks=pytest.mark.slow),
        ("one cycle", "adpsgd", 1, 2),
        pytest.param("one cycle", "dpsgd", 3, 2, marks=pytest.mark.slow),
        pytest.param("lambda", "adpsgd", 2, 3, marks=pytest.mark.slow),
        pytest.param("lambda", "adpsgd", 2, 1, marks=pytest.mark.slow),
        ("lambda", "dpsgd", 2, 3),
    ],
)
def test_a_schedule_by_step_goes_on_where_it_stood_on_any_number_of_workers(
    kind: str, strategy: str, before: int, after: int, tmp_path: Path
) -> None:
    """First and last rates of the epochs after the resume, against those of the uninterrupted run."""
    whole = launch(_scheduled, kind, strategy, before, tmp_path, False, workers=before)
    resumed = launch(_scheduled, kind, strategy, after, tmp_path, True, workers=after)
    assert {len(epochs) for epochs in resumed} == {2}
    for epoch in (0, 1):
        first = max(worker[2 + epoch][0] for worker in whole)
        last = min(worker[2 + epoch][-1] for worker in whole)  # a worker may leave the last batches to another
        assert max(worker[epoch][0] for worker in resumed) == pytest.approx(first, abs=0.02)
        assert min(worker[epoch][-1] for worker in resumed) == pytest.approx(last, abs=0.1)
    assert min(worker[-1][-1] for worker in resumed) < 0.05
