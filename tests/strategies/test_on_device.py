"""Whole fits with parameters on a device, emulated: what Lightning and torch do with them waits for its turn in a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from benchmarks.emulated_device import EmulatedDevice
from lightning_gossip import ADPSGDStrategy
from lightning_gossip.algorithm.adpsgd.replica import PublishedModel
from lightning_gossip.runtime.adpsgd.cuda_replica import StagedCopies, staged_replica
from lightning_gossip.strategies import adpsgd
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, trainer

pytestmark = pytest.mark.processes


class Ill(Callback):
    """The second worker's model is not finite after some steps."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and module.seen and len(module.seen) == 80:
            with torch.no_grad():
                module.network[0].weight.fill_(float("nan"))


def _on_device(callbacks: Sequence[Callback], **options: Any) -> Any:
    device = EmulatedDevice()

    def replica_of(tensors: Sequence[Tensor], **options: Any) -> PublishedModel:
        for tensor in tensors:
            device.tensor(tensor)
        return staged_replica(tensors, StagedCopies(tensors, device.streams()), **options)

    adpsgd.replica_of = replica_of
    model, strategy = Net(), ADPSGDStrategy(exchanges_per_step=5, **options)
    with device:
        fit = trainer(strategy=strategy, max_epochs=3, callbacks=list(callbacks))
        fit.fit(model, loader(240, 4), loader(64, shuffle=False))
        device.synchronize()
    device.close()
    mine = strategy.report.workers[strategy.global_rank]
    return flat(model).tolist(), mine.exchanges, mine.adopted, mine.staleness_mean, fit.callback_metrics["val_acc"].item()


OPTIONS: dict[str, tuple[list[Callback], dict[str, Any]]] = {
    "evaluate, few pushes": ([], {"at_rendezvous": "evaluate", "push_every": 3}),
    "another model in place of an ill one": ([Ill()], {"on_nonfinite": "adopt"}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_fit_on_a_device_leaves_one_model(name: str) -> None:
    callbacks, options = OPTIONS[name]
    a, b = launch(_on_device, callbacks, **options)
    assert a[0] == b[0]
    assert all(value == value for value in a[0])
    assert a[1] > 10
    assert b[2] == ("ill" in name)
    assert a[3] > 0.0
    assert a[4] == b[4] > 0.7
