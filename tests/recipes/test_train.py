"""The command, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.scripts import Ended, run


def command(*overrides: str, devices: int = 2) -> Ended:
    return run("-m", "recipes.train", *overrides, f"trainer.devices={devices}")


def summary_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return result


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
