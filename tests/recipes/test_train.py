"""The command, run as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import warm

ROOT = Path(__file__).resolve().parents[2]


def command(*overrides: str, devices: int = 2, timeout_s: float = 170.0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    arguments = [warm.python(), "-m", "recipes.train", *overrides, f"trainer.devices={devices}"]
    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # each process then says where its threads are
        stdout, stderr = process.communicate(timeout=timeout_s)
        raise AssertionError(f"{arguments} did not end within {timeout_s:g} s.\n{stdout}\n{stderr}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


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
