"""What a visit learns of the user's optimizer: the peak of its schedule, however many steps the machine makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typing_extensions import override

from lightning_gossip.doctor.measure.training import Trained
from lightning_gossip.doctor.report import Training
from recipes.digits import DigitsClassifier, DigitsData
from recipes.text.language_model import LanguageModel

PEAK, SAMPLES, BATCH = 0.1, 160, 8
Schedule = Callable[[Optimizer, int], Any]


class Model(LightningModule):
    """One layer under a schedule, which is told the optimizer and the steps of the run."""

    def __init__(self, schedule: Schedule, interval: str = "step") -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.schedule, self.interval = schedule, interval

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs: Tensor = batch[0]
        return self.layer(inputs).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), PEAK, momentum=0.9)
        schedule = self.schedule(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


DATA = DataLoader(TensorDataset(torch.randn(SAMPLES, 8)), batch_size=BATCH)


class Stream(IterableDataset[Any]):
    """Without an end, and without a length."""

    @override
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield (torch.ones(8),)


def trained(module: LightningModule, data: Any = DATA, *, seconds: float = 60.0) -> Training:
    training, _, _ = Trained(module, data, seconds).measure(torch.device("cpu"), landscape=False)
    return training


SCHEDULES: dict[str, tuple[Schedule, str]] = {
    "cosine to 0": (lambda optimizer, steps: CosineAnnealingLR(optimizer, steps), "step"),
    "one cycle": (lambda optimizer, steps: OneCycleLR(optimizer, PEAK, total_steps=steps), "step"),
    "a long warm-up": (lambda optimizer, _: LambdaLR(optimizer, lambda step: min(1.0, step / 400)), "step"),
    "a warm-up, then a fall": (lambda optimizer, _: LambdaLR(optimizer, lambda n: min(1.0, n / 99, 99 / max(n, 1))), "step"),
    "a warm-up of epochs": (lambda optimizer, _: LambdaLR(optimizer, lambda epoch: min(1.0, (epoch + 1) / 10)), "epoch"),
    "a fall at each step": (lambda optimizer, _: ExponentialLR(optimizer, 0.9), "step"),
    "a fall after 30 epochs": (lambda optimizer, _: StepLR(optimizer, 30), "epoch"),
    # whoever wrote it trains for 100 steps: what it is later does not count
    "a fall that would rise again": (lambda optimizer, _: LambdaLR(optimizer, lambda step: (1 - step / 100) ** 2), "step"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_is_that_of_the_schedule_s_peak(name: str) -> None:
    """It was that of the 53rd step, for which a schedule of the run's length was made: 557 times too low, or 0."""
    schedule, interval = SCHEDULES[name]
    found = trained(Model(schedule, interval))
    assert found.lr == pytest.approx(PEAK, rel=1e-6)
    assert len(found.step_s) == 50


def test_a_slow_machine_finds_the_same() -> None:
    found = trained(Model(SCHEDULES["one cycle"][0]), seconds=0.0)
    assert found.lr == pytest.approx(PEAK, rel=1e-6)
    assert len(found.step_s) == 5


def test_the_momentum_is_that_of_the_same_step() -> None:
    """A cycle of momentum is lowest where that of the learning rate is highest."""
    assert trained(Model(SCHEDULES["one cycle"][0])).momentum == pytest.approx(0.85, rel=1e-3)
    assert trained(Model(SCHEDULES["cosine to 0"][0])).momentum == 0.9


def test_recipes_have_their_own_learning_rates() -> None:
    assert trained(DigitsClassifier(channels=2, lr=0.07), DigitsData()).lr == pytest.approx(0.07, rel=1e-3)
    tokens = torch.randint(0, 256, (SAMPLES, 8))
    model = LanguageModel(layers=1, width=8, heads=2, sequence_length=8, lr=0.02, warmup_epochs=2)
    assert trained(model, DataLoader(TensorDataset(tokens, tokens), batch_size=BATCH)).lr == pytest.approx(0.02, rel=1e-3)


def test_of_data_without_a_length_too() -> None:
    found = trained(Model(SCHEDULES["one cycle"][0]), DataLoader(Stream(), batch_size=BATCH))
    assert found.lr == pytest.approx(PEAK, rel=1e-6)
    assert math.isclose(len(found.step_s), 50)


class OfItsOwnRate(SGD):
    """As Adafactor, which chooses how far it goes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0]["lr"] = None

    @override
    def step(self, closure: Any = None) -> Any:
        return closure()


def test_an_optimizer_without_a_learning_rate_has_none() -> None:
    model = Model(SCHEDULES["one cycle"][0])
    model.configure_optimizers = lambda: OfItsOwnRate(model.parameters())  # type: ignore[method-assign]
    assert trained(model).lr is None
