"""The recipes of text compose with the strategies, and train."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy

from lightning_gossip import ConfigurationError
from recipes.job import run
from recipes.ranges import check_numbers
from recipes.text.data import TextData
from recipes.text.language_model import LanguageModel
from recipes.text.samples import SAMPLES, TextSamples
from recipes.tracking import environment_kept
from recipes.train import CONF
from tests.recipes.test_config import composed, options
from tests.recipes.test_train import command, summary_of
from tests.strategies.launch import launch

RECIPES = ["char_gpt", "char_gpt_gpt2", "char_gpt_small"]
TINY = (
    *("recipe.model.layers=1", "recipe.model.width=16", "recipe.model.heads=2", "recipe.model.sequence_length=16"),
    *("recipe.data.max_characters=6000", "recipe.epochs=2", "recipe.model.lr=0.01", "logger=none"),
)


def test_every_recipe_of_text_is_tested_here() -> None:
    assert [recipe for recipe in options(CONF / "recipe") if recipe.startswith("char_gpt")] == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_with_the_strategies_and_clips_its_gradients(recipe: str) -> None:
    for strategy in ("ddp", "adpsgd", "adaptive_averaging"):
        cfg = composed(f"recipe={recipe}", f"strategy={strategy}")
        assert isinstance(instantiate(cfg.strategy), DDPStrategy)
        assert (cfg.trainer.gradient_clip_val, cfg.trainer.max_epochs) == (1.0, cfg.recipe.epochs)
        assert cfg.recipe.data.sequence_length == cfg.recipe.model.sequence_length
        check_numbers(cfg)
    assert composed(f"recipe={recipe}", "trainer.gradient_clip_val=0.5").trainer.gradient_clip_val == 0.5
    assert composed("recipe=digits").trainer.gradient_clip_val is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe.data.path=/nowhere.txt"], "recipe.data.path=/nowhere.txt does not exist; expected is .*apt-get install"),
        (["recipe.model.sequence_length=301"], r"a part of it 300 bytes: too short.*Write recipe.model.sequence_length=299,"),
        (["recipe.data.max_characters=0"], "recipe.data.max_characters=0 is not null or a whole number of at least 1"),
        (["recipe.data.held_out=1"], "recipe.data.held_out=1 is not a number above 0 and below 1"),
        (["recipe.model.vocabulary=100"], "recipe.model.vocabulary=100 is not a whole number of at least 256"),
        (["recipe.model.tie_weights=yess"], "recipe.model.tie_weights='yess' is not true or false"),
        (["recipe.model.heads=3"], "width=16 is not a multiple of heads=3"),
        (["recipe.gradient_clip_val=-1"], "recipe.gradient_clip_val=-1 is not null or a number of at least 0"),
        (["recipe.data.batch_size=400"], "fewer batches of 337 samples than there are workers"),
        (["recipe.callbacks.samples.length=0"], "recipe.callbacks.samples.length"),
    ],
)
def test_wrong_values_are_refused_by_name_before_any_process_is_started(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    with environment_kept(), pytest.raises(ConfigurationError, match=message):
        run(composed("recipe=char_gpt", *TINY, *overrides, folder=tmp_path))


def _fit(strategy: str, folder: Path) -> dict[str, float]:
    cfg = composed("recipe=char_gpt", f"strategy={strategy}", "trainer.devices=2", "trainer.precision=bf16-mixed", *TINY)
    seed_everything(cfg.seed, workers=True, verbose=False)
    quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False}
    trainer = instantiate(cfg.trainer)(strategy=instantiate(cfg.strategy), callbacks=[TextSamples(folder, length=10)], **quiet)
    model: LanguageModel = instantiate(cfg.recipe.model)
    data: TextData = instantiate(cfg.recipe.data)
    trainer.fit(model, datamodule=data)
    assert model.net.head.weight is model.net.tokens.weight
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics | trainer.test(model, datamodule=data, verbose=False)[0]


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["adpsgd", pytest.param("ddp", marks=pytest.mark.slow)])
def test_two_workers_train_two_short_epochs(strategy: str, tmp_path: Path) -> None:
    one, other = launch(_fit, strategy, tmp_path)
    of_text = {f"{part}_{name}" for part in ("val", "test") for name in ("loss", "acc", "bpc", "perplexity")}
    assert {"train_loss"} | of_text <= one.keys()
    assert all(math.isfinite(value) for value in one.values())
    assert one == pytest.approx(other)
    assert one["test_bpc"] < 7.0  # of 8, at the beginning
    assert len((tmp_path / SAMPLES).read_text().split("-" * 72)) == 3


@pytest.mark.processes
@pytest.mark.slow
def test_the_command_leaves_samples_and_a_checkpoint_that_plain_lightning_loads(tmp_path: Path) -> None:
    done = command("recipe=char_gpt", *TINY, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "The model writes:" in done.stdout
    assert "bits per character of the test text" in done.stdout
    assert summary_of(tmp_path)["test_bpc"] > 0.0
    assert (tmp_path / SAMPLES).is_file()
    model = LanguageModel.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert len(model.sample("import ", length=5)) == 1


@pytest.mark.slow
@pytest.mark.processes
def test_the_recipe_trains_in_shards_by_one_word(tmp_path: Path) -> None:
    """Two islands of two, each with one model in shards; all ranks of an island gather it to write samples."""
    done = command("recipe=char_gpt", "strategy=adpsgd_sharded", *TINY, f"hydra.run.dir={tmp_path}", devices=4)
    assert done.returncode == 0, done.stderr
    assert "4 workers in islands of 2" in done.stdout
    summary = summary_of(tmp_path)
    assert (summary["strategy"], summary["world_size"], summary["island"]) == ("adpsgd_sharded", 4, 2)
    assert [worker["rank"] for worker in summary["workers"]] == [0, 1]
    assert sum(worker["samples"] for worker in summary["workers"]) == 2 * 337  # each sequence once an epoch
    assert all(worker["exchanges"] for worker in summary["workers"])
    assert summary["test_bpc"] < 8.0
    assert len((tmp_path / SAMPLES).read_text(encoding="utf-8").split("-" * 72)) == 3
