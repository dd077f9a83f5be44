"""What a process keeps of its Trainers and Fabrics: nothing, whether they ended well or by an exception."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_gossip import ADPSGDStrategy, FabricStrategy, Outer, PeriodicAveragingStrategy
from lightning_gossip.runtime import process_end
from tests.strategies.launch import launch
from tests.strategies.models import Net, loader, trainer

pytestmark = pytest.mark.processes


class Pruned(Exception):
    """Ends a trial."""


class Prune(Callback):
    """Ends a trial on all ranks, as a search does."""

    def on_train_epoch_end(self, *_: Any) -> None:
        raise Pruned


STRATEGIES: dict[str, Callable[[], Any]] = {
    "adpsgd": lambda: ADPSGDStrategy(),
    "noloco": lambda: ADPSGDStrategy(local_steps=4, outer=Outer()),
    "periodic_averaging": lambda: PeriodicAveragingStrategy(),
    "dpsgd": lambda: "dpsgd",
    "apsgd": lambda: "apsgd",
    "eamsgd": lambda: "eamsgd",
    "qsgd": lambda: "qsgd",
}


MORE = ("noloco", "dpsgd", "apsgd", "eamsgd", "qsgd")


def _fit(name: str, ends: str) -> list[weakref.ref[Any]]:
    model = Net(lambda model: torch.optim.AdamW(model.parameters()))
    t = trainer(strategy=STRATEGIES[name](), max_epochs=1, callbacks=[Prune()] if ends == "pruned" else [])
    data = loader(64)
    kept = [weakref.ref(one) for one in (model, t, t.strategy, data)]
    try:
        t.fit(model, data, loader(32, shuffle=False))
        assert ends == "well"
        kept.append(weakref.ref(t.optimizers[0]))
    except Pruned as error:
        kept.append(weakref.ref(error))
    return kept


def _train(name: str, ends: str) -> list[weakref.ref[Any]]:
    strategy = STRATEGIES[name]()
    fabric = L.Fabric(
        accelerator="cpu", devices=2, strategy=strategy if isinstance(strategy, str) else FabricStrategy(strategy)
    )
    fabric.launch()
    model = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = [weakref.ref(one) for one in (model, optimizer, fabric, fabric.strategy)]
    model, optimizer = fabric.setup(model, optimizer)
    try:
        for x, *_ in fabric.setup_dataloaders(loader(64)):
            fabric.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        kept.append(weakref.ref(fabric.strategy.training.algorithm))
        if ends == "pruned":
            raise Pruned
    except Pruned as error:
        kept.append(weakref.ref(error))
    return kept


def _repeats(use: Callable[[str, str], list[weakref.ref[Any]]], name: str, ends: str, times: int) -> Any:
    """What is left after each use; of Fabrics, which end when the next one begins, what is left of the one before."""
    left, rss, kept = [], [], []
    for _ in range(times):
        before, kept = kept, use(name, ends)
        gc.collect()
        looked_at = before if use is _train else kept
        left.append([type(found).__name__ for found in (ref() for ref in looked_at) if found is not None])
        rss.append(psutil.Process().memory_info().rss)
    return left, rss, len(process_end._Process.ends)


TIMES = 3


@pytest.mark.parametrize("ends", ["well", "pruned"])
@pytest.mark.parametrize(
    "name", ["adpsgd", "periodic_averaging"] + [pytest.param(name, marks=pytest.mark.slow) for name in MORE]
)
def test_a_fit_leaves_nothing_in_memory(name: str, ends: str) -> None:
    for left, _, _ in launch(_repeats, _fit, name, ends, TIMES):
        assert not any(left)


@pytest.mark.parametrize("ends", ["well", pytest.param("pruned", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["adpsgd"] + [pytest.param(name, marks=pytest.mark.slow) for name in ("periodic_averaging", *MORE)]
)
def test_a_fabric_leaves_nothing_in_memory_when_the_next_one_begins(name: str, ends: str) -> None:
    for left, _, at_exit in launch(_repeats, _train, name, ends, TIMES):
        assert not any(left)
        assert at_exit <= 2  # the last training, and the membership
