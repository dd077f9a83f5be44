"""The curvature of LightningModules: outside of a fit, and by the probe in real ones."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

from lightning_gossip.analysis.curvature.spectrum import Curvature, curvature
from lightning_gossip.callbacks import CurvatureProbe
from lightning_gossip.callbacks.curvature import measure_curvature
from lightning_gossip.callbacks.training_step import Step, loss_of
from lightning_gossip.errors import ConfigurationError
from tests.callbacks.test_in_training import Rows
from tests.strategies.launch import launch
from tests.strategies.models import flat, loader, samples, trainer


class Net(LightningModule):
    """BatchNorm, dropout, metrics with and without a list state, and all ways to log."""

    def __init__(self, output: str = "dict") -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))
        self.accuracy = MulticlassAccuracy(2, average="micro")
        self.shared = MetricCollection([MulticlassPrecision(2), MulticlassRecall(2)])
        self.output = output

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.network(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.log_dict(self.shared(logits, batch[1]))
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self._trainer is not None and self.logger is not None:
            self.logger.log_metrics({"by_hand": batch_idx})
        return {"dict": {"loss": loss}, "none": None, "nan": loss * torch.nan, "tensor": loss}[self.output]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([samples(64)[i] for i in range(64)])


def everything(module: LightningModule) -> list[Any]:
    metrics = [module.accuracy, *module.shared.values()]
    return [
        {name: value.tolist() for name, value in module.state_dict().items()},
        [part.training for part in module.modules()],
        [(metric._update_count, {name: getattr(metric, name).tolist() for name in metric._defaults}) for metric in metrics],
        str(module.shared._groups),
        sorted(vars(module)),
        torch.get_rng_state().tolist(),
        str(np.random.get_state()),
        random.getstate(),
    ]


# -- outside of a fit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_module_is_measured_on_its_own_data_and_stays_as_it_is(mode: Any) -> None:
    module = Net().train(mode == "eval")
    module.shared(torch.randn(4, 2), torch.tensor([0, 1, 1, 0]))
    generator = torch.Generator().manual_seed(1)
    data = loader(generator=generator)
    before = everything(module), generator.get_state().tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # logging outside of a loop
        found = measure_curvature(module, data, batches=3, mode=mode)
    assert (everything(module), generator.get_state().tolist()) == before
    assert found.converged
    assert (found.batches, found.samples) == (3, 24)
    module.train(mode == "train")
    drawn = [batch for batch, _ in zip(data, range(3), strict=False)]
    expected = curvature(module.loss, module.parameters(), drawn, module=module)
    assert found.largest == pytest.approx(expected.largest, rel=1e-6)


def test_it_is_measured_in_training_mode_unless_told_otherwise() -> None:
    module = Net()
    found = measure_curvature(module.eval(), loader(shuffle=False))
    assert found == measure_curvature(module.train(), loader(shuffle=False))
    assert found != measure_curvature(module, loader(shuffle=False), mode="eval")


def test_batches_come_through_the_hooks_of_a_datamodule() -> None:
    class Data(LightningDataModule):
        def setup(self, stage: str) -> None:
            self.stage = stage

        def train_dataloader(self) -> Any:
            return loader(shuffle=False)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [3.0 * batch[0], *batch[1:]]

    module, data = Net(), Data()
    batches = [[3.0 * x, y] for (x, y, _), _ in zip(loader(shuffle=False), range(4), strict=False)]
    assert measure_curvature(module, data).largest == pytest.approx(
        curvature(module.loss, module.parameters(), batches, module=module).largest, rel=1e-6
    )
    assert data.stage == "fit"


def test_a_few_batches_and_a_stream_will_do() -> None:
    assert measure_curvature(Net(), loader(count=24), batches=10).batches == 3
    assert measure_curvature(Net(), DataLoader(Stream(), batch_size=8), batches=2).batches == 2


def test_metrics_that_share_their_state_still_do_after_a_loss() -> None:
    module = Net()
    logits, y = torch.randn(16, 2), torch.randint(0, 2, (16,))
    for _ in range(2):
        module.shared.update(logits, y)
    loss_of(module)(Step([torch.randn(4, 8), torch.zeros(4).long()], 0))
    module.shared.update(logits, y)
    fresh = MetricCollection([MulticlassPrecision(2), MulticlassRecall(2)])
    fresh.update(logits, y)
    assert module.shared.compute() == fresh.compute()


def test_synchronized_batch_norm_uses_this_worker_s_statistics() -> None:
    module = Net()
    step = Step([torch.randn(16, 8), torch.randint(0, 2, (16,))], 0)
    torch.manual_seed(0)
    expected = loss_of(module)(step)
    module.network = nn.SyncBatchNorm.convert_sync_batchnorm(module.network)
    torch.manual_seed(0)
    assert loss_of(module)(step) == expected  # on a CPU it could not even run otherwise
    assert "forward" not in vars(module.network[1])


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Iterating(Net):
    def training_step(self, dataloader_iter: Any) -> Any: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Manual(), "automatic_optimization=False"),
        (Iterating(), "dataloader_iter"),
        (Net("none"), "no loss for batch 0"),
        (Net("nan"), "nan"),
        (Net().bfloat16(), "bfloat16"),
        (Net().requires_grad_(False), "No parameter"),
    ],
)
def test_modules_that_cannot_be_measured_are_refused(module: LightningModule, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        measure_curvature(module, loader())


@pytest.mark.parametrize("options", [{"batches": 0}, {"mode": "test"}, {"leading": 0}, {"tolerance": -1.0}])
def test_bad_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        measure_curvature(Net(), loader(), **options)
    if "mode" not in options:
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            CurvatureProbe(**options)


def test_a_loader_without_a_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no batch"):
        measure_curvature(Net(), [[]])


# -- in a fit --------------------------------------------------------------------------------------------------------------


def fit(*callbacks: Any, module: LightningModule | None = None, data: Any = None, **options: Any) -> tuple[Any, Rows, Trainer]:
    torch.manual_seed(0)
    module = module or Net()
    rows = Rows()
    runner = trainer(strategy="auto", logger=rows, callbacks=list(callbacks), log_every_n_steps=4, **options)
    runner.fit(module, loader() if data is None else data)
    return module, rows, runner


def measured(rows: Rows) -> list[dict[str, float]]:
    return [row for row in rows.rows if "analysis/curvature_max" in row]


def test_training_with_the_probe_is_training_without_it() -> None:
    plain, plain_rows, plain_trainer = fit()
    probe = CurvatureProbe(leading=2, before_training=True)
    probed, rows, probed_trainer = fit(probe)
    assert torch.equal(flat(plain), flat(probed))
    assert everything(plain) == everything(probed)
    assert plain_trainer.callback_metrics == probed_trainer.callback_metrics
    logged = measured(rows)
    assert [row for row in rows.rows if row not in logged] == plain_rows.rows
    assert [row["epoch"] for row in logged] == [0, 0, 1]
    assert probe.last is not None
    assert (logged[-1]["analysis/curvature_max"], logged[-1]["analysis/curvature_2"]) == probe.last.eigenvalues
    assert (probe.last.batches, probe.last.samples) == (2, 16)


def test_the_probe_measures_the_batches_that_were_trained_on() -> None:
    probe = CurvatureProbe(batches=3)
    module, _, _ = fit(probe, data=loader(shuffle=False), max_epochs=1)
    assert probe.last == measure_curvature(module, loader(shuffle=False), batches=3)


def test_the_probe_measures_every_k_epochs_and_remembers_no_batch() -> None:
    probe = CurvatureProbe(every_n_epochs=2)
    _, rows, _ = fit(probe, max_epochs=4)
    assert [row["epoch"] for row in measured(rows)] == [1, 3]
    assert probe._steps == []


def test_the_probe_measures_a_stream_under_mixed_precision() -> None:
    probe = CurvatureProbe()
    module, _, _ = fit(
        probe, data=DataLoader(Stream(), batch_size=8), max_epochs=1, precision="bf16-mixed", module=Net("tensor")
    )
    assert probe.last == measure_curvature(module, DataLoader(Stream(), batch_size=8), batches=2)


def test_a_loss_that_is_not_finite_is_said_and_training_goes_on() -> None:
    probe = CurvatureProbe()
    with pytest.warns(UserWarning, match="measured nothing in epoch 0"):
        _, rows, _ = fit(probe, module=Net("nan"), max_epochs=1)
    assert probe.last is None
    assert measured(rows) == []


def test_the_last_measurement_is_in_a_checkpoint(tmp_path: Any) -> None:
    probe = CurvatureProbe()
    _, _, runner = fit(probe, max_epochs=1)
    runner.save_checkpoint(tmp_path / "checkpoint")
    restored = CurvatureProbe()
    restored.load_state_dict(torch.load(tmp_path / "checkpoint", weights_only=True)["callbacks"][probe.state_key])
    assert isinstance(restored.last, Curvature)
    assert restored.last == probe.last
    fresh = CurvatureProbe()
    fresh.load_state_dict(CurvatureProbe().state_dict())
    assert fresh.last is None


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [(Manual(), {}, "automatic_optimization"), (Net("tensor"), {"precision": "bf16-true"}, "bfloat16")],
)
def test_the_probe_refuses_before_training(module: LightningModule, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fit(CurvatureProbe(), module=module, **options)


# -- with several workers --------------------------------------------------------------------------------------------------


class Gathering(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(torch.zeros(1))
        return super().training_step(batch, batch_idx)


def train(strategy: str, probed: bool, module: str = "net") -> dict[str, Any]:
    probe, rows = CurvatureProbe(), Rows()
    torch.manual_seed(0)
    net = {"net": Net, "gathering": Gathering}[module]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(strategy=strategy, logger=rows, callbacks=[probe] * probed).fit(net, loader(shuffle=False))
    return {"last": probe.last, "rows": measured(rows), "weights": flat(net).numpy()}


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "adpsgd"])
def test_rank_0_measures_alone(strategy: str) -> None:
    first, second = launch(train, strategy, True)
    assert len(first["rows"]) == 2
    assert first["last"].converged
    assert second["last"] is None
    if strategy == "adpsgd":  # the mean of both workers' models, statistics included
        assert np.array_equal(first["weights"], second["weights"])


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "dpsgd", "periodic_averaging", "qsgd"])
def test_synchronous_workers_train_as_without_the_probe(strategy: str) -> None:
    plain, probed = (launch(train, strategy, on) for on in (False, True))
    for one, other in zip(plain, probed, strict=True):
        assert np.array_equal(one["weights"], other["weights"])


@pytest.mark.processes
@pytest.mark.slow
def test_a_step_that_needs_the_others_is_refused() -> None:
    with pytest.raises(AssertionError, match="training_step calls all_gather"):
        launch(train, "ddp", True, "gathering")
