"""Pairs of jobs, from made-up ones; and the loss of a job's model, of each kind of recipe."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch.nn.functional import cross_entropy

from lightning_gossip import ConfigurationError
from recipes.compare import compare, show, train_loss
from tests.recipes.test_config import composed
from tests.recipes.vision.recipes import generate, small


def job(schedule: str, seed: int, loss: float, lr: str = "0.2") -> dict[str, Any]:
    return {
        "folder": f"{schedule}{seed}",
        "overrides": [f"schedule={schedule}", f"seed={seed}", f"recipe.model.lr={lr}", "experiment=e"],
        "seed": str(seed),
        "averagings": 200.0 if schedule == "constant" else 100.0,
        "train_loss": loss,
    }


def test_jobs_are_paired_by_everything_but_the_option() -> None:
    jobs = [job("constant", 1, 1.0), job("constant", 2, 4.0), job("adaptive", 2, 1.0), job("adaptive", 1, 0.5)]
    (comparison,) = compare(pd.DataFrame(jobs), "schedule").itertuples()
    assert comparison.Index == "lr=0.2"
    assert (comparison.pairs, comparison.lower) == (2, 2)
    assert comparison.mean == pytest.approx(math.log(1 / 8) / 2)
    assert comparison.se == pytest.approx(math.log(2) / 2)
    assert (comparison.first, comparison.second) == (200, 100)


def test_settings_are_compared_apart_and_who_has_no_partner_is_left_out() -> None:
    jobs = [job(schedule, 1, 1.0, lr) for schedule in ("constant", "adaptive") for lr in ("0.2", "0.05")]
    comparisons = compare(pd.DataFrame([*jobs, job("adaptive", 9, 7.0)]), "schedule")
    assert comparisons["mean"].to_dict() == {"lr=0.2": 0.0, "lr=0.05": 0.0}
    assert comparisons.se.isna().all()


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([job("constant", 1, 1.0)], "'schedule' has 1 values"),
        ([job("constant", 1, 1.0), job("adaptive", 2, 1.0)], "No two jobs"),
        ([job("constant", 1, 0.0), job("adaptive", 1, 1.0)], "constant1 is 0.0"),
        ([job("constant", 1, 1.0), job("adaptive", 1, math.nan)], "adaptive1 is nan"),
    ],
)
def test_what_cannot_be_compared_is_said(jobs: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compare(pd.DataFrame(jobs), "schedule")


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    text = io.StringIO()
    jobs = [job(schedule, seed, 1.0 + seed) for schedule in ("constant", "adaptive") for seed in range(5)]
    show(compare(pd.DataFrame(jobs), "schedule"), "constant", "adaptive", Console(file=text, width=80))
    assert "lr=0.2" in text.getvalue()
    assert "200 → 100" in text.getvalue()
    assert "…" not in text.getvalue()


_TEXT = ("recipe.model.layers=1", "recipe.model.width=16", "recipe.model.heads=2")
_TEXT += ("recipe.data.max_characters=2000", "recipe.data.held_out=0.4", "recipe.data.batch_size=4", "logger=none")


def job_of(recipe: str, folder: Path) -> DictConfig:
    """The configuration of a recipe on a little data."""
    if recipe.startswith("char_gpt"):
        return composed(f"recipe={recipe}", *_TEXT, folder=folder)
    if recipe.startswith("digits"):
        return composed(f"recipe={recipe}", folder=folder)
    return small(recipe, generate(recipe, folder), "recipe.model.label_smoothing=0.1")


def left_by(cfg: DictConfig, folder: Path) -> dict[str, torch.Tensor]:
    """What is read of a job's folder; returns the weights of its model, which are large enough that a wrong sum shows."""
    torch.manual_seed(0)
    weights: dict[str, torch.Tensor] = instantiate(cfg.recipe.model).state_dict()
    weights = {name: 3 * value if "head" in name else value for name, value in weights.items()}
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(cfg, folder / ".hydra" / "config.yaml")
    torch.save({"state_dict": weights}, folder / "model.ckpt")
    return weights


@pytest.mark.parametrize("recipe", ["digits", "digits_mlp", "mnist_mlp", "char_gpt", "char_gpt_small"])
def test_the_loss_of_a_job_is_the_mean_over_its_training_samples(recipe: str, tmp_path: Path) -> None:
    """Text of 256 positions was once taken for its classes, of which there are as many: a model that was right had 9.7."""
    cfg = job_of(recipe, tmp_path)
    weights = left_by(cfg, tmp_path / "job")
    model, data = instantiate(cfg.recipe.model).eval(), instantiate(cfg.recipe.data)
    model.load_state_dict(weights)
    data.setup("fit")
    inputs, targets = torch.utils.data.default_collate(list(data.train))
    inputs, targets = data.on_after_batch_transfer((inputs, targets), 0)
    with torch.no_grad():
        outputs = model(inputs)
    expected = cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))
    assert train_loss(tmp_path / "job") == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("recipe", ["fashion_mnist", "cifar10_resnet20", "imagenet_resnet50"])
def test_images_are_moved_at_random_alike_in_all_jobs(recipe: str, tmp_path: Path) -> None:
    cfg = job_of(recipe, tmp_path)
    left_by(cfg, tmp_path / "job")
    before = torch.get_rng_state()
    losses = [train_loss(tmp_path / "job") for _ in range(2)]
    assert losses[0] == losses[1]
    assert 0.0 < losses[0] < 20.0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_job_without_a_model_is_named(tmp_path: Path) -> None:
    left_by(job_of("digits_mlp", tmp_path), tmp_path / "job")
    (tmp_path / "job" / "model.ckpt").unlink()
    with pytest.raises(ConfigurationError, match=r"job has no model\.ckpt"):
        train_loss(tmp_path / "job")
