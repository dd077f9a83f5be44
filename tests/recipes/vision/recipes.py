"""The recipes of this folder, composed for generated data."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from tests.recipes.test_config import composed
from tests.recipes.vision import generated

# for each recipe: how its data are generated, and options that make it small
SMALL = {
    "imagenet_resnet50": "imagenet",
    "imagenet_resnet50_18ep": "imagenet",
    "imagenet_alexnet": "imagenet",
    "cifar10_resnet20": "cifar10",
    "cifar10_vgg16": "cifar10",
    "cifar10_googlenet": "cifar10",
    "mnist_mlp": "mnist",
    "fashion_mnist": "fashion_mnist",
    "fashion_mnist_groupnorm": "fashion_mnist",
}
STRATEGIES = ("ddp", "adpsgd", "adaptive_averaging")
_OPTIONS = {
    "imagenet": ("recipe.model.classes=3", "recipe.data.image_size=64", "recipe.data.batch_size=6"),
    "cifar10": ("recipe.data.validation_images=8", "recipe.data.batch_size=8"),
    "mnist": ("recipe.data.validation_images=8", "recipe.data.batch_size=8"),
    "fashion_mnist": ("recipe.data.validation_images=8", "recipe.data.batch_size=8"),
}


def generate(recipe: str, root: Path) -> Path:
    """Data for a recipe, in a folder that is made unless it exists."""
    kind = SMALL[recipe]
    folder = root / kind
    if not folder.exists():
        getattr(generated, kind)(folder)
    return folder


def small(recipe: str, root: Path, *overrides: str) -> DictConfig:
    """The configuration of a recipe for two workers that load their own images."""
    options = (f"recipe.data.root={root}", "recipe.data.num_workers=0", "recipe.epochs=2", "trainer.devices=2", "logger=none")
    return composed(f"recipe={recipe}", *options, *_OPTIONS[SMALL[recipe]], *overrides)
