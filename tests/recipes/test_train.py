"""The command, run as a user runs it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.digits import DigitsClassifier, DigitsData

ROOT = Path(__file__).resolve().parents[2]


def command(*overrides: str, devices: int = 2, timeout_s: float = 170.0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    return subprocess.run(
        [sys.executable, "-m", "recipes.train", *overrides, f"trainer.devices={devices}"],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


EPOCHS = 20  # the recipe's own: models trained apart for less may still have a useful mean


def summary_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return result


@pytest.mark.processes
def test_a_run_leaves_everything_behind(sweep: Path) -> None:
    names = {path.name for path in (sweep / "0").iterdir()}
    assert {"summary.json", "metrics.csv", "record.json", "model.ckpt", "learning.png", "timeline.png"} <= names
    with (sweep / "0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == [str(epoch) for epoch in range(EPOCHS)]
    assert {"time/wall_s", "train_loss", "val_loss", "val_acc", "gossip/consensus_distance"} <= rows[0].keys()
    assert all(row["train_loss"] and row["val_acc"] for row in rows)


@pytest.mark.processes
def test_training_makes_no_collective_and_takes_every_sample_once_an_epoch(sweep: Path) -> None:
    result = summary_of(sweep / "0")
    assert result["collectives_in_training"] == 0
    assert sum(worker["samples"] for worker in result["workers"]) == EPOCHS * len(DigitsData().train)


@pytest.mark.processes
def test_without_exchanges_the_mean_model_is_worse(sweep: Path) -> None:
    gossip, apart = (summary_of(sweep / job) for job in "01")
    assert gossip["test_acc"] >= 0.96
    assert apart["test_acc"] <= gossip["test_acc"] - 0.05
    assert apart["consensus_distance"] > 100 * gossip["consensus_distance"]


@pytest.mark.processes
def test_plain_lightning_loads_the_checkpoint_and_gets_the_reported_accuracy(sweep: Path) -> None:
    model = DigitsClassifier.load_from_checkpoint(sweep / "0" / "model.ckpt").eval()
    images, digits = DigitsData().test.tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == digits).float().mean().item()
    assert accuracy == pytest.approx(summary_of(sweep / "0")["test_acc"], abs=1e-6)


@pytest.mark.processes
def test_ddp_runs_with_the_same_command_by_popen_and_tensorboard_gets_the_pictures(tmp_path: Path) -> None:
    done = command("strategy=ddp", "recipe.epochs=2", "logger=tensorboard", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    result = summary_of(tmp_path)
    assert result["collectives_in_training"] > 0
    assert result["consensus_distance"] is None
    assert "test accuracy of the mean model" in done.stdout
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"run/learning", "run/timeline"} == set(events.Tags()["images"])
    assert {"train_loss", "val_acc", "time/wall_s"} <= set(events.Tags()["scalars"])


@pytest.mark.processes
def test_a_wrong_value_gets_one_clear_message(tmp_path: Path) -> None:
    done = command("strategy.topology=rnig", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 2
    assert "ConfigurationError: unknown topology 'rnig'" in done.stderr
    assert "Traceback" not in done.stderr
