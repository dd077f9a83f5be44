from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.recipes.test_train import command


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Three jobs of AD-PSGD, each going on from its own models: gossiping, not, and one that fails."""
    folder = tmp_path_factory.mktemp("swept")
    done = command(
        *("--multirun", "strategy.at_rendezvous=evaluate", "strategy.exchanges_per_step=1,0,-1", "logger=wandb"),
        f"hydra.sweep.dir={folder}",
        devices=4,  # two models trained apart may have a useful mean
    )
    return folder, done


@pytest.fixture(scope="session")
def sweep(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    """The folder of its jobs."""
    return swept[0]
