"""The learning rate of a step, where an optimizer has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_gossip.strategies.state.step_watch import largest_lr
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, trainer


class FindsItsRate(SGD):
    """Has no learning rate that others can read, as Adafactor by default."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] = None
        return loss


def _group(**options: Any) -> Optimizer:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=0.5)
    optimizer.param_groups[0].update(options)
    return optimizer


def test_the_largest_rate_of_all_groups_counts_and_groups_without_one_do_not() -> None:
    assert largest_lr([_group(), _group(lr=torch.tensor(0.7)), _group(lr=None)], default=0.0) == pytest.approx(0.7)
    assert largest_lr([_group(lr=None)], default=0.25) == 0.25
    bare = _group()
    del bare.param_groups[0]["lr"]
    assert largest_lr([bare], default=0.25) == 0.25


def _trains(strategy: str) -> Any:
    model = Net(lambda module: FindsItsRate(module.parameters()))
    trainer(strategy=strategy, max_epochs=1).fit(model, loader())
    return flat(model).tolist()


def _trains_under_fabric(strategy: str) -> Any:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = nn.Linear(8, 2)
    model, optimizer = fabric.setup(module, FindsItsRate(module.parameters()))
    for x, y, _ in fabric.setup_dataloaders(loader()):
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    return flat(module).tolist()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("training", "strategy"),
    [
        (_trains, "adpsgd"),
        pytest.param(_trains, "adaptive_averaging", marks=pytest.mark.slow),
        pytest.param(_trains_under_fabric, "adpsgd", marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_without_a_rate_trains(training: Callable[[str], Any], strategy: str) -> None:
    first, second = launch(training, strategy)
    assert first == second
