"""Every recipe composes with the strategies, and trains on generated data."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import MissingMandatoryValue

from lightning_gossip import ConfigurationError
from recipes.job import run
from recipes.tracking import environment_kept
from recipes.train import CONF
from recipes.vision.classifier import Classifier
from tests.recipes.test_config import composed, options
from tests.recipes.test_train import command
from tests.recipes.vision import generated
from tests.recipes.vision.recipes import SMALL, STRATEGIES, generate, small
from tests.recipes.vision.test_corrupt_images import image, truncated
from tests.strategies.launch import launch


def test_every_recipe_of_this_folder_is_tested_here() -> None:
    ours = {recipe for recipe in options(CONF / "recipe") if not recipe.startswith(("digits", "char_gpt"))}
    assert ours == SMALL.keys()


@pytest.mark.parametrize("recipe", SMALL)
def test_every_recipe_composes_with_every_strategy(recipe: str, tmp_path: Path) -> None:
    root = generate(recipe, tmp_path)
    for strategy in STRATEGIES:
        cfg = small(recipe, root, f"strategy={strategy}")
        assert isinstance(instantiate(cfg.strategy), DDPStrategy)
        assert isinstance(instantiate(cfg.recipe.data), LightningDataModule)
        assert cfg.recipe.model.batch_size == cfg.recipe.data.batch_size
        assert cfg.trainer.max_epochs == 2


@pytest.mark.parametrize("recipe", [recipe for recipe, kind in SMALL.items() if kind != "fashion_mnist"])
def test_every_recipe_asks_for_the_folder_of_its_data(recipe: str) -> None:
    with pytest.raises(MissingMandatoryValue, match=r"recipe\.data\.root"):
        instantiate(composed(f"recipe={recipe}").recipe.data)


@pytest.mark.parametrize("recipe", SMALL)
def test_wherever_an_accuracy_is_named_it_is_a_target(recipe: str) -> None:
    text = (CONF / "recipe" / f"{recipe}.yaml").read_text()
    assert all("target, not reproduced" in line for line in text.splitlines() if " %" in line)


@pytest.mark.parametrize("recipe", ["imagenet_resnet50", "cifar10_vgg16", "mnist_mlp", "fashion_mnist"])
def test_a_missing_folder_ends_the_run_before_any_process_is_started(recipe: str, tmp_path: Path) -> None:
    cfg = composed(f"recipe={recipe}", "logger=none", f"recipe.data.root={tmp_path}/none", folder=tmp_path)
    cfg.recipe.model.model = "mnist_mlp"  # at once
    with environment_kept(), pytest.raises(ConfigurationError, match="is not a folder; expected is"):
        run(cfg)


def _fit(recipe: str, strategy: str, root: Path) -> tuple[int, dict[str, float]]:
    cfg = small(recipe, root, f"strategy={strategy}")
    seed_everything(cfg.seed, workers=True, verbose=False)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False}
    trainer = instantiate(cfg.trainer)(strategy=instantiate(cfg.strategy), **quiet)
    model: Classifier = instantiate(cfg.recipe.model)
    data = instantiate(cfg.recipe.data)
    trainer.fit(model, datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics["test_acc"] = trainer.test(model, datamodule=data, verbose=False)[0]["test_acc"]
    return trainer.current_epoch, metrics


# each strategy and each kind of data, but for ImageNet's, which the command below has; the others take minutes
QUICK = [
    ("cifar10_resnet20", "adaptive_averaging"),
    ("mnist_mlp", "ddp"),
    ("fashion_mnist", "adpsgd"),
]
PAIRS = [pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow) for pair in itertools.product(SMALL, STRATEGIES)]


@pytest.mark.processes
@pytest.mark.parametrize(("recipe", "strategy"), PAIRS)
def test_two_workers_train_two_short_epochs(recipe: str, strategy: str, tmp_path: Path) -> None:
    (epochs, metrics), (_, other) = launch(_fit, recipe, strategy, generate(recipe, tmp_path))
    assert epochs == 2
    assert {"train_loss", "val_loss", "val_acc", "val_acc5", "test_acc"} <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics == pytest.approx(other)
    assert metrics["val_acc"] <= metrics["val_acc5"]


@pytest.mark.processes
def test_the_command_skips_a_corrupt_image_and_leaves_a_checkpoint_that_plain_lightning_loads(tmp_path: Path) -> None:
    bad = truncated(image(generated.imagenet(tmp_path / "data"), 1))
    done = command(*on_folders(tmp_path), "recipe.data.corrupt=skip", "recipe.data.decode=device")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert sum(worker["samples"] for worker in summary["workers"]) == 2 * 12
    assert f"Corrupt image {bad}" in done.stdout + done.stderr
    model = Classifier.load_from_checkpoint(tmp_path / "run" / "model.ckpt", weights_only=True)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


@pytest.mark.processes
@pytest.mark.slow
def test_the_command_ends_at_a_corrupt_image_where_that_is_wished(tmp_path: Path) -> None:
    bad = truncated(image(generated.imagenet(tmp_path / "data"), 1))
    done = command(*on_folders(tmp_path), "recipe.data.corrupt=fatal")
    assert done.returncode != 0
    assert f"corrupt image {bad}" in done.stderr
    assert not (tmp_path / "run" / "summary.json").exists()


def on_folders(folder: Path) -> list[str]:
    """ImageNet's folders, loaded by a process of each worker, and a network that trains in no time."""
    options = {"recipe.model.model": "cifar_resnet20", "recipe.model.classes": 3, "recipe.data.image_size": 32}
    options |= {"recipe.data.root": folder / "data", "recipe.data.num_workers": 1, "recipe.data.batch_size": 3}
    options |= {"recipe": "imagenet_resnet50", "recipe.epochs": 2, "logger": "none", "hydra.run.dir": folder / "run"}
    return [f"{name}={value}" for name, value in options.items()]
