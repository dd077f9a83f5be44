from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch import Callback, seed_everything

from lightning_gossip import ConfigurationError
from recipes.schedules import cosine, multistep, warmup
from recipes.vision.classifier import Classifier
from tests.recipes.test_config import composed
from tests.recipes.vision import generated
from tests.recipes.vision.recipes import small
from tests.strategies.launch import launch


def of_recipe(name: str) -> Classifier:
    with torch.device("meta"):
        model: Classifier = instantiate(composed(f"recipe={name}").recipe.model)
    return model


def test_imagenets_learning_rate_warms_up_and_falls_at_30_60_and_80_epochs() -> None:
    factor = of_recipe("imagenet_resnet50").factor(epochs=90)
    expected = {0: 1 / 16, 2.5: 17 / 32, 5: 1, 29.9: 1, 30: 0.1, 59.9: 0.1, 60: 0.01, 79.9: 0.01, 80: 0.001, 90: 0.001}
    assert {epoch: factor(epoch, 1 / 16) for epoch in expected} == pytest.approx(expected, rel=1e-12)


def test_the_short_recipe_warms_up_and_follows_a_cosine_to_zero() -> None:
    factor = of_recipe("imagenet_resnet50_18ep").factor(epochs=18)
    expected = {0: 0.25, 1: 0.625, 2: 1, 6: 0.5 + math.sqrt(0.125), 10: 0.5, 18: 0.0, 18.5: 0.0}
    assert {epoch: factor(epoch, 0.25) for epoch in expected} == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_global_batch_of_256_needs_no_warmup() -> None:
    configured = optimizers(of_recipe("imagenet_resnet50"), world_size=1)
    schedule, _ = configured["lr_scheduler"]["scheduler"].lr_lambdas  # of both parameter groups
    assert [schedule(epoch * 313) for epoch in (0, 2, 5)] == [1, 1, 1]


def test_without_warmup_epochs_the_rate_is_whole_from_the_beginning() -> None:
    assert warmup(0.0, epochs=0, start=0.1) == 1
    assert multistep(0.0, warmup_epochs=0, start=0.1, milestones=()) == 1
    assert cosine(0.0, warmup_epochs=0, start=0.1, epochs=3) == 1


def optimizers(model: Classifier, **trainer: Any) -> Any:
    """What the model configures under a Trainer with these attributes."""
    defaults = {"world_size": 4, "accumulate_grad_batches": 1, "max_epochs": 90, "max_steps": -1}
    model._trainer = SimpleNamespace(**{**defaults, "estimated_stepping_batches": 90 * 313, **trainer})  # type: ignore[assignment]
    return model.configure_optimizers()


def test_the_learning_rate_is_that_of_the_global_batch_and_falls_at_the_step_that_begins_epoch_30() -> None:
    configured = optimizers(of_recipe("imagenet_resnet50"), world_size=16)
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    rates = []
    for _ in range(30 * 313):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[5 * 313 - 1] == rates[30 * 313 - 2] == pytest.approx(1.6)
    assert rates[30 * 313 - 1] == pytest.approx(0.16)
    assert optimizer.param_groups[1]["lr"] == rates[-1]
    assert optimizer.defaults["nesterov"]
    assert optimizer.defaults["momentum"] == 0.9


def test_accumulated_batches_count_for_the_global_batch() -> None:
    optimizer = optimizers(of_recipe("cifar10_resnet20"), accumulate_grad_batches=3)["optimizer"]
    assert optimizer.param_groups[0]["initial_lr"] == pytest.approx(0.1 * 3)


@pytest.mark.parametrize("options", [{"max_steps": 100}, {"max_epochs": -1}, {"max_epochs": None}])
def test_a_run_without_a_number_of_epochs_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="max_epochs"):
        optimizers(of_recipe("mnist_mlp"), **options)


@pytest.mark.parametrize(
    "option", ["schedule=linear", "warmup_epochs=-1", "lr_per_256=0", "label_smoothing=1.0", "batch_size=0"]
)
def test_wrong_options_of_the_model_are_refused_by_name(option: str) -> None:
    with pytest.raises(Exception, match=option.split("=")[0]):
        instantiate(composed("recipe=mnist_mlp", f"recipe.model.{option}").recipe.model)


BATCHES, BATCH, EPOCHS = 40, 4, 2


class Rates(Callback):
    """The learning rate of each batch, with its position in the epoch that all workers share."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[int, float]]] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self.seen.append([])

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        position = trainer.strategy._fit.work.shared.queue.ledger.current
        self.seen[-1].append((position, trainer.optimizers[0].param_groups[0]["lr"]))
        time.sleep(0.06 if trainer.global_rank == 1 else 0.005)


def _rates(root: Path) -> list[list[tuple[int, float]]]:
    options = ("recipe.model.schedule=cosine", "recipe.model.warmup_epochs=0", f"recipe.data.batch_size={BATCH}")
    cfg = small("mnist_mlp", root, "strategy=adpsgd", *options)
    seed_everything(0, verbose=False)
    rates = Rates()
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False, "limit_val_batches": 0}
    trainer = instantiate(cfg.trainer)(strategy=instantiate(cfg.strategy), callbacks=[rates], **quiet)
    trainer.fit(instantiate(cfg.recipe.model), datamodule=instantiate(cfg.recipe.data))
    return rates.seen


@pytest.mark.processes
def test_the_learning_rate_is_one_function_of_the_samples_seen_by_all_although_one_worker_is_slow(tmp_path: Path) -> None:
    """Exact: each batch has the rate of the global count at the end of the same worker's batch before it."""
    generated.mnist(tmp_path, train=BATCHES * BATCH + 8)
    fast, slow = launch(_rates, tmp_path)
    peak, steps = 0.1 * 2 * BATCH / 256, BATCHES // 2
    for worker in (fast, slow):
        assert len(worker) == EPOCHS
        for epoch, batches in enumerate(worker):
            done = epoch * BATCHES
            for position, rate in batches:
                assert rate == pytest.approx(peak * cosine(done // 2 / steps, warmup_epochs=0, start=1, epochs=EPOCHS))
                done = epoch * BATCHES + position + 1
    for epoch in range(EPOCHS):
        assert sorted(position for worker in (fast, slow) for position, _ in worker[epoch]) == list(range(BATCHES))
    assert len(fast[1]) > 1.5 * len(slow[1])
