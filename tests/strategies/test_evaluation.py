"""Metrics of validation, test and prediction sets that do not divide by the workers, against those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from tests.strategies.launch import launch
from tests.strategies.models import loader, samples, trainer

WORKERS, SAMPLES, BATCH = 3, 101, 8


class Loader(DataLoader[Any]):
    """A user's own class."""


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(8, 2)
        self.accuracy, self.auroc = MulticlassAccuracy(2, average="micro"), BinaryAUROC()
        self.seen: list[int] = []
        self.batches = 0
        self.rows = 0

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1], reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch).mean()

    def on_validation_epoch_start(self) -> None:
        self.seen, self.batches, self.rows = [], 0, 0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y, index = batch
        out = self.network(x)
        self.seen += index.tolist()
        self.batches += 1
        self.rows += self.all_gather(out).flatten(0, 1).shape[0]  # of batches of different sizes
        self.log("every", float(self.batches), on_step=True, on_epoch=False, sync_dist=True)
        self.log("loss", self.loss(batch).mean())
        self.log("hardest", self.loss(batch).max(), reduce_fx="max")
        self.log("count", float(len(x)), reduce_fx="sum")
        self.accuracy.update(out, y)
        self.auroc.update(out.softmax(1)[:, 1], y)
        self.log("accuracy", self.accuracy)
        self.log("auroc", self.auroc)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[2]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Numbers(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.right = True

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *_: Any) -> None:
        self.right &= prediction.tolist() == list(batch_indices)


def truth(model: Net) -> dict[str, float]:
    """In one process."""
    x, y, _ = samples(SAMPLES).tensors
    with torch.no_grad():
        out, losses = model.network(x), model.loss((x, y))
    values = {"loss": losses.mean(), "hardest": losses.max(), "count": float(SAMPLES)}
    values["accuracy"] = (out.argmax(1) == y).double().mean()
    auroc = BinaryAUROC(sync_on_compute=False)
    auroc.update(out.softmax(1)[:, 1], y)
    return {name: float(value) for name, value in {**values, "auroc": auroc.compute()}.items()}


def report(t: Any, model: Net) -> Any:
    logged = {name: float(value) for name, value in t.callback_metrics.items()}
    return logged, truth(model), model.seen, model.batches, model.rows


def _everything(strategy: str) -> dict[str, Any]:
    model, writer = Net(), Numbers()
    t = trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=2, callbacks=[writer])
    combined = CombinedLoader(Loader(samples(SAMPLES), BATCH), "sequential")  # passed again and again
    t.fit(model, loader(48, BATCH), combined)
    reports = {"fit": report(t, model)}
    shown = t.val_dataloaders
    reading = type(shown).__name__, shown.batch_size, len(shown), len(shown.sampler), t.num_val_batches
    for what, data in (("validate", combined), ("shuffled", loader(SAMPLES, 7))):
        t.validate(model, data, verbose=False)
        reports[what] = report(t, model)
    model.on_validation_epoch_start()
    t.test(model, loader(SAMPLES, BATCH, shuffle=False), verbose=False)
    reports["test"] = report(t, model)
    predicted = t.predict(model, loader(SAMPLES, BATCH, shuffle=False))
    limited = trainer(strategy=strategy, limit_val_batches=2)
    limited.validate(model, loader(SAMPLES, BATCH, shuffle=False), verbose=False)
    few = list(model.seen)
    t.validate(model, loader(WORKERS - 1, 4, shuffle=False), verbose=False)
    padded = list(model.seen)
    own = DistributedSampler(samples(SAMPLES), WORKERS, dist.get_rank(), shuffle=False)
    t.validate(model, DataLoader(samples(SAMPLES), BATCH, sampler=own), verbose=False)
    return {
        "reports": reports,
        "reading": reading,
        "predicted": torch.cat(predicted).tolist(),
        "numbers": writer.right,
        "limited": few,
        "padded": padded,
        "own": list(model.seen),
    }


# "periodic_averaging" evaluates as the others do; tests/strategies/test_conformance.py has its values in every kind of run
@pytest.fixture(scope="module", params=["adpsgd", "qsgd", pytest.param("periodic_averaging", marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(_everything, request.param, workers=WORKERS, timeout_s=180.0)


@pytest.mark.processes
def test_metrics_are_those_of_one_process_and_each_sample_is_evaluated_once(ranks: Any) -> None:
    for what in ("fit", "validate", "shuffled", "test"):
        reports = [rank["reports"][what] for rank in ranks]
        for metrics, wanted, *_ in reports:
            assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, abs=1e-6), what
        assert sorted(sample for _, _, seen, *_ in reports for sample in seen) == list(range(SAMPLES)), what
        assert len({batches for *_, batches, _ in reports}) == 1, what
        assert all(rows >= SAMPLES for *_, rows in reports)


@pytest.mark.processes
def test_each_sample_is_predicted_once_under_its_own_number(ranks: Any) -> None:
    assert sorted(sample for rank in ranks for sample in rank["predicted"]) == list(range(SAMPLES))
    assert all(rank["numbers"] for rank in ranks)


@pytest.mark.processes
def test_limits_and_samplers_of_the_users_and_sets_that_are_too_small_are_as_under_ddp(ranks: Any) -> None:
    assert sorted(sample for rank in ranks for sample in rank["limited"]) == list(range(2 * BATCH * WORKERS))
    assert [len(rank["padded"]) for rank in ranks] == [1] * WORKERS
    assert [len(rank["own"]) for rank in ranks] == [34] * WORKERS


@pytest.mark.processes
def test_a_validation_loader_reads_as_the_users(ranks: Any) -> None:
    for rank, told in enumerate(ranks):
        assert told["reading"] == ("Loader", BATCH, 5, 34 if rank < 2 else 33, [5])
