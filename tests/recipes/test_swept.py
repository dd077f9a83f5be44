"""One sweep of three jobs, and what all of them leave: results, a message, W&B's files, a comparison."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.digits import DigitsClassifier, DigitsData
from recipes.sweep import FAILED
from tests.recipes.test_train import command, summary_of
from tests.recipes.wandb_files import records
from tests.scripts import Ended, run

pytestmark = pytest.mark.processes

EPOCHS = 5  # models trained apart for less may still have a useful mean


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Three jobs of AD-PSGD, each going on from its own models: gossiping, not, and one whose value the job alone looks up."""
    folder = tmp_path_factory.mktemp("swept")
    done = command(
        *("--multirun", "strategy.at_rendezvous=evaluate", "strategy.exchanges_per_step=1,0,${oc.env:NOWHERE}", "logger=wandb"),
        f"recipe.epochs={EPOCHS}",
        f"hydra.sweep.dir={folder}",
        devices=4,  # two models trained apart may have a useful mean
    )
    return folder, done


@pytest.fixture(scope="module")
def sweep(swept: tuple[Path, Ended]) -> Path:
    """The folder of its jobs."""
    return swept[0]


def test_a_run_leaves_everything_behind(sweep: Path) -> None:
    names = {path.name for path in (sweep / "0").iterdir()}
    assert {
        "summary.json",
        "metrics.csv",
        "record.json",
        "model.ckpt",
        "learning.png",
        "timeline.png",
        "timeline.json",
    } <= names
    with (sweep / "0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == [str(epoch) for epoch in range(EPOCHS)]
    assert {"time/wall_s", "train_loss", "val_loss", "val_acc", "gossip/consensus_distance"} <= rows[0].keys()
    assert all(row["train_loss"] and row["val_acc"] for row in rows)


def test_training_makes_no_collective_and_takes_every_sample_once_an_epoch(sweep: Path) -> None:
    result = summary_of(sweep / "0")
    assert result["collectives_in_training"] == 0
    assert sum(worker["samples"] for worker in result["workers"]) == EPOCHS * len(DigitsData().train)


def test_without_exchanges_the_mean_model_is_worse(sweep: Path) -> None:
    gossip, apart = (summary_of(sweep / job) for job in "01")
    assert gossip["test_acc"] >= 0.94
    assert apart["test_acc"] <= gossip["test_acc"] - 0.1
    assert apart["consensus_distance"] > 100 * gossip["consensus_distance"]


def test_plain_lightning_loads_the_checkpoint_and_gets_the_reported_accuracy(sweep: Path) -> None:
    model = DigitsClassifier.load_from_checkpoint(sweep / "0" / "model.ckpt").eval()
    images, digits = DigitsData().test.tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == digits).float().mean().item()
    assert accuracy == pytest.approx(summary_of(sweep / "0")["test_acc"], abs=1e-6)


def test_a_job_that_fails_leaves_the_others_and_the_sweep_says_so_at_its_end(swept: tuple[Path, Any]) -> None:
    folder, done = swept
    assert sorted(path.parent.name for path in folder.glob("*/summary.json")) == ["0", "1"]
    assert done.returncode == 1
    end = done.stdout[done.stdout.index("2 of 3 jobs finished") :]
    assert "job 2 failed: InterpolationResolutionError: " in end
    note = (folder / "2" / FAILED).read_text()
    assert note.startswith("InterpolationResolutionError: ")
    assert "'NOWHERE' not found" in note
    assert "Traceback" in note


def test_each_job_is_one_finished_offline_wandb_run_and_all_are_one_group(swept: tuple[Path, Any]) -> None:
    folder, _ = swept
    for job, exchanges in (("0", 1), ("1", 0)):
        found = records(folder / job)
        run = next(record.run for record in found if record.WhichOneof("record_type") == "run")
        assert (run.run_group, run.job_type) == (folder.name, "train")
        assert list(run.tags) == ["ADPSGD", "DigitsClassifier", "4 workers", "sweep"]
        assert (folder / job / "wandb_run_id.txt").read_text().strip() == run.run_id
        assert f"strategy.exchanges_per_step={exchanges}" in run.display_name
        assert "logger" not in run.display_name
        assert [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"] == [0]


def test_wandb_gets_the_configuration_the_histogram_the_pictures_and_the_summary(swept: tuple[Path, Any]) -> None:
    found = records(swept[0] / "0")
    config = {item.key: json.loads(item.value_json) for record in found for item in record.config.update}
    assert config["recipe"]["data"]["batch_size"] == 16
    assert config["trainer"]["max_epochs"] == EPOCHS  # resolved
    rows = [{tuple(item.nested_key): item.value_json for item in record.history.item} for record in found]
    logged = {key[0] for row in rows for key in row}
    assert {"run/learning", "run/timeline", "run/workers", "gossip/consensus_distance", "train_loss", "test_acc"} <= logged
    assert any(row.get(("gossip/staleness", "_type")) == '"histogram"' for row in rows)
    assert all(("time/wall_s",) in row for row in rows if ("val_acc",) in row)
    assert {"strategy", "train_s", "test_acc"} <= {item.key for record in found for item in record.summary.update}
    assert "run" in {record.artifact.type for record in found}
    assert {f"worker/{rank}/{name}" for rank in range(4) for name in ("steps", "cores", "memory_gb")} <= logged
    assert {"against_time/gossip/consensus_distance_table", "against_time/val_acc_table"} <= logged


def test_wandb_gets_the_last_and_the_best_checkpoint_as_versions_of_one_model(swept: tuple[Path, Any]) -> None:
    folder = swept[0] / "0"
    models = [record.artifact for record in records(folder) if record.artifact.type == "model"]
    assert len({model.name for model in models}) == 1
    assert [alias for model in models for alias in model.aliases].count("best") == 1
    assert "latest" in models[-1].aliases  # W&B gives it to each version, and so takes it from the one before
    with (folder / "metrics.csv").open() as file:
        losses = [float(row["val_loss"]) for row in csv.DictReader(file)]
    told = {alias: json.loads(model.metadata) for model in models for alias in model.aliases}
    assert told["best"]["val_loss"] == pytest.approx(min(losses))
    assert told["latest"]["val_loss"] == pytest.approx(losses[-1])
    best = torch.load(folder / "best.ckpt", map_location="cpu", weights_only=False)
    assert best["epoch"] == losses.index(min(losses))


def test_the_command_compares_the_jobs_of_a_sweep(sweep: Path) -> None:
    compared = run("-m", "recipes.compare", str(sweep), "--of", "strategy.exchanges_per_step")
    assert compared.returncode == 0, compared.stderr
    assert "0 ÷ 1" in compared.stdout
    assert (sweep / "comparison.png").stat().st_size > 10_000
