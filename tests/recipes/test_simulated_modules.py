"""A recipe's own module as a problem of the simulator's: its optimizer, its schedule, its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_gossip import ConfigurationError
from lightning_gossip.simulation import Cluster, Constant, Epochs, Recording, simulate
from lightning_gossip.simulation.problems.modules import ModuleObjective
from recipes.job import plain_errors
from recipes.optimizers import parameter_groups
from recipes.simulated.modules import PlannedRun, loss_of, trained
from recipes.simulated.scenario import scenario_of
from recipes.text.data import TextData
from recipes.text.language_model import LanguageModel
from tests.recipes.test_simulate import composed, simulated

SMALL = ("recipe.model.layers=1", "recipe.model.heads=2", "recipe.model.width=16", "recipe.model.sequence_length=32")
TEXT = ("recipe.data.max_characters=40000", "recipe.data.batch_size=4")


class Line(LightningModule):
    """One weight to fit, whose optimizer a test makes."""

    def __init__(self, configure: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self._configure = configure

    def training_step(self, batch: list[Tensor], _: int) -> dict[str, Tensor]:
        loss = (self.layer(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return self._configure(self, SGD(self.parameters(), lr=1.0))


class Points(LightningDataModule):
    """y = 2x, with inputs that are halved on the device."""

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.linspace(-1, 1, 24).unsqueeze(1)
        return DataLoader(TensorDataset(x, 2 * x), batch_size=4)

    val_dataloader = train_dataloader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] / 2, batch[1]]


def problem_of(configure: Any, steps: int = 6, epochs: int = 3) -> Any:
    return trained(lambda: Line(configure), Points(), PlannedRun(steps, epochs, 2), clip_norm=None, held_out=8)


def test_the_schedules_of_lightning_s_forms_are_followed() -> None:
    half = lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step)  # noqa: E731
    forms: dict[str, tuple[Any, list[float]]] = {
        "alone": (lambda module, optimizer: optimizer, [1.0] * 6),
        "by epochs": (lambda module, optimizer: ([optimizer], [half(optimizer)]), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        "by steps": (
            lambda module, optimizer: {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": half(optimizer), "interval": "step"},
            },
            [1, 0.5, 0.25, 0.125, 0.0625, 0.03125],
        ),
        "every other step": (
            lambda module, optimizer: (
                [optimizer],
                [{"scheduler": StepLR(optimizer, 1, gamma=0.1), "interval": "step", "frequency": 2}],
            ),
            [1, 1, 0.1, 0.1, 0.01, 0.01],
        ),
        "of the run": (
            lambda module, optimizer: [SGD(module.parameters(), lr=module.trainer.estimated_stepping_batches / 10)],
            [0.6] * 6,
        ),
    }
    for name, (configure, expected) in forms.items():
        assert list(problem_of(configure)[1].lrs) == pytest.approx(expected), name


def test_a_frequency_begins_anew_in_each_epoch() -> None:
    """As in Lightning: of three steps it is the second one."""

    def configure(module: Any, optimizer: Any) -> Any:
        tenth = {"scheduler": StepLR(optimizer, 1, gamma=0.1), "interval": "step", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": tenth}

    assert list(problem_of(configure, epochs=2)[1].lrs) == pytest.approx([1, 1, 0.1, 0.1, 0.1, 0.01])


def test_batches_pass_what_the_data_module_does_on_the_device() -> None:
    objective, _ = problem_of(lambda module, optimizer: optimizer)
    model = torch.tensor([4.0, 0.0])  # y = 4 (x/2): no loss is left
    assert objective.loss(model) == pytest.approx(0.0, abs=1e-9)
    assert objective.loss(torch.zeros(2)) > 0.1


@pytest.mark.parametrize(
    ("configure", "words"),
    [
        (lambda module, optimizer: [optimizer, SGD(module.parameters(), lr=0.1)], "not one optimizer"),
        (lambda module, optimizer: None, "not one optimizer"),
        (
            lambda module, optimizer: {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "loss"},
            "follows a metric",
        ),
        (lambda module, optimizer: module.trainer.datamodule, "real run has"),
    ],
)
def test_what_only_a_real_run_can_do_is_said(configure: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as said:
        problem_of(configure)
    assert "objective=none" in str(said.value)


def test_a_module_that_steps_by_itself_is_refused() -> None:
    class Manual(Line):
        automatic_optimization = False

    with pytest.raises(ConfigurationError, match="by itself"):
        trained(Manual, Points(), PlannedRun(1, 1, 1), clip_norm=None, held_out=1)


def test_ddp_of_char_gpt_has_the_losses_of_a_plain_loop() -> None:
    """AdamW in two groups, warm-up and cosine, clipping of the mean gradient."""
    steps, workers = 12, 2
    data = TextData(max_characters=20_000, sequence_length=16, batch_size=3)
    data.setup("fit")

    def build() -> LanguageModel:
        return LanguageModel(layers=1, heads=2, width=16, sequence_length=16, warmup_epochs=0.3)

    objective, optimizer = trained(build, data, PlannedRun(steps, 1, workers), clip_norm=0.5, held_out=30)
    drawn: list[list[int]] = []
    batch_of = objective._batch
    objective._batch = lambda indices: (drawn.append(list(indices)), batch_of(indices))[1]  # type: ignore[func-returns-value]
    result = simulate(
        "ddp",
        Cluster(workers, Constant(1.0)),
        work=Epochs(number=1, batches=steps * workers, batch_size=3),
        objective=objective,
        optimizer=optimizer,
        recording=Recording(evaluate_every=workers),
    )
    objective._batch = batch_of
    module = build()
    start = objective.start(torch.Generator().manual_seed(1))
    named = dict(module.named_parameters())
    for name, part in zip(objective._names, start.split([named[name].numel() for name in objective._names]), strict=True):
        named[name].data.copy_(part.view_as(named[name]))
    groups = parameter_groups(module.net, 0.1)
    reference: Optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    factor = module.factor(1)
    schedule = LambdaLR(reference, lambda step: factor(step / steps, 0.1))
    module.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    losses = [objective_loss(module, objective)]
    for step in range(steps):
        reference.zero_grad()
        for indices in drawn[workers * step : workers * (step + 1)]:
            (loss_of(module, batch_of(indices)) / workers).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        reference.step()
        schedule.step()
        losses.append(objective_loss(module, objective))
    assert [point.loss for point in result.points[: steps + 1]] == pytest.approx(losses, abs=2e-5)
    assert losses[-1] < losses[0] - 0.05


def objective_loss(module: LanguageModel, objective: ModuleObjective) -> float:
    module.eval()
    with torch.no_grad():
        losses = [loss_of(module, batch).item() for batch in objective._held_out]
    module.train()
    return sum(losses) / len(losses)


def test_char_gpt_is_trained_as_a_user_types_it(tmp_path: Path) -> None:
    results, said = simulated(
        tmp_path, "recipe=char_gpt", *SMALL, *TEXT, "steps=12", "links=uniform", "links.bandwidth=1e6", names=("ddp", "adpsgd")
    )
    assert "Trains" in said
    for result in results.values():
        losses = [point.loss for point in result.points]
        assert losses[-1] < losses[0] - 0.05
    assert results["adpsgd"].time_s < results["ddp"].time_s
    assert (tmp_path / "loss.png").exists()


def test_the_recipe_s_schedule_is_as_long_as_its_epochs() -> None:
    scenario = scenario_of(composed("recipe=char_gpt", *SMALL, *TEXT, "recipe.epochs=2", "trainer.devices=3"))
    sequences = scenario.problem.objective.samples  # type: ignore[union-attr]
    assert isinstance(scenario.work, Epochs)
    assert len(scenario.problem.optimizer.lrs) == 2 * -(-scenario.work.batches // 3)  # type: ignore[union-attr, operator]
    assert scenario.work.batches == -(-sequences // 4)  # type: ignore[operator]
    assert scenario.problem.optimizer.clip_norm == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("recipe=char_gpt_gpt2",), "124,439,808 parameters"),
        (("recipe=cifar10_resnet20", "recipe.data.root=/nowhere"), "/nowhere"),
        (("recipe=char_gpt", *SMALL, "objective.largest=100"), "objective.largest=100"),
    ],
)
def test_times_only_where_a_model_cannot_be_trained_here_and_it_is_said(overrides: tuple[str, ...], words: str) -> None:
    problem = scenario_of(composed(*overrides)).problem
    assert problem.objective is None
    assert problem.times_only is not None
    assert words in problem.times_only


def test_a_text_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"recipe\.data\.path=/nowhere"), plain_errors():
        scenario_of(composed("recipe=char_gpt", "recipe.data.path=/nowhere"))
