"""The command as a user starts it: one visit to two ranks of this machine, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_gossip.doctor.__main__ import main
from tests import scripts

_MODULE = ("-m", "lightning_gossip.doctor")
_MODEL = """
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self):
        x = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)


class Broken(Model):
    def training_step(self, batch, batch_idx):
        raise ValueError("no such batch")


class WithoutData(Model):
    train_dataloader = LightningModule.train_dataloader
"""


@pytest.mark.processes
def test_a_visit_to_two_ranks_leaves_what_it_found(tmp_path: Path) -> None:
    ended = scripts.run(*_MODULE, "--workers", "2", "--seconds", "10", "--json", folder=tmp_path)
    assert ended.returncode == 0, ended.output
    assert ended.left == []
    found = json.loads(ended.stdout)
    assert [one["rank"] for one in found["workers"]] == [0, 1]
    assert found["hosts"] == [[0, 1]]
    assert [one for one in found["findings"] if one["grave"]] == []
    (link,) = found["links"]
    assert link["failed"] is None
    assert link["there"] > 1e6
    assert set(found["store"]) == {"0", "1"}
    assert [one["nbytes"] for one in found["all_reduce"]][:2] == [4096, 65536]
    assert "links" in ended.stderr  # progress, where stderr is no terminal
    assert sorted(path.name for path in (tmp_path / "doctor").iterdir()) == ["cluster.json", "doctor.json", "links.png"]
    assert (tmp_path / "doctor" / "links.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.processes
@pytest.mark.slow
def test_with_a_model_it_measures_steps_and_says_what_the_planner_would_choose(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_MODEL)
    ended = scripts.run(
        *_MODULE, "--workers", "2", "--seconds", "20", "--join", "120", "--model", "mine:Model", folder=tmp_path
    )
    assert ended.returncode == 0, ended.output
    assert "The planner would choose: Train with" in ended.stdout
    assert "python -m recipes.plan cluster_file=doctor/cluster.json" in ended.stdout
    cluster = json.loads((tmp_path / "doctor" / "cluster.json").read_text())
    assert [len(times) >= 5 for times in cluster["step_s"]] == [True, True]
    found = json.loads((tmp_path / "doctor" / "doctor.json").read_text())
    assert found["landscape"]["eigenvalues"][0] > 0.0
    assert found["training"]["0"]["optimizer"] == "SGD"
    assert (found["training"]["0"]["batch_size"], found["training"]["0"]["samples"]) == (8, 160)


@pytest.mark.processes
@pytest.mark.slow
def test_a_model_that_fails_is_a_verdict_and_the_rest_is_measured(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_MODEL)
    ended = scripts.run(*_MODULE, "--workers", "1", "--seconds", "10", "--model", "mine:Broken", folder=tmp_path)
    assert ended.returncode == 1, ended.output
    assert "The model could not be trained on rank 0: ValueError: no such batch" in ended.stdout
    assert "No plan was made" in ended.stdout


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    assert code == 2
    return capsys.readouterr().err


def test_what_cannot_be_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "doctors_model.py").write_text(_MODEL)
    assert "0 is not a whole number" in refused(capsys, "--workers", "0")
    assert "from 1 to 3600" in refused(capsys, "--seconds", "0")
    assert "give --model too" in refused(capsys, "--data", "a:b")
    assert "is not module:name" in refused(capsys, "--model", "doctors_model")
    assert "cannot be found" in refused(capsys, "--model", "doctors_model:Nothing")
    assert "no LightningModule" in refused(capsys, "--model", "doctors_model:TensorDataset.__name__")
    assert "has no train_dataloader: give its data too" in refused(capsys, "--model", "doctors_model:WithoutData")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    assert "--workers=4, and variables has started 2 processes" in refused(capsys, "--workers", "4")
    assert list(tmp_path.iterdir()) == [tmp_path / "doctors_model.py"] or (tmp_path / "__pycache__").exists()


@pytest.mark.processes
def test_a_store_that_cannot_be_reached_is_said_with_its_address(tmp_path: Path) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    ended = scripts.run(*_MODULE, "--join", "1", folder=tmp_path, **variables)
    assert ended.returncode == 2, ended.output
    assert (
        "The doctor could not do its work: The store of the job at 127.0.0.1:9 could not be reached within 1 s" in ended.stderr
    )
    assert "Traceback" not in ended.output
