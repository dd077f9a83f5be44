"""LightningCLI takes the strategies by class path, from a file and from the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_gossip import AdaptivePeriod
from lightning_gossip.strategies import STRATEGIES
from tests.scripts import run

QUIET = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
SCRIPT = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

if __name__ == "__main__":
    cli = LightningCLI(BoringModel, BoringDataModule, save_config_callback=None)
    strategy = cli.trainer.strategy
    if cli.trainer.is_global_zero:
        steps = [worker.steps > 0 for worker in strategy.report.workers]
        print("trained by", type(strategy).__name__, strategy.topology, steps)
"""


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py"])


def strategy_of(*arguments: str) -> Any:
    options = [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items()]
    quiet: Any = {"run": False, "save_config_callback": None, "seed_everything_default": False}
    cli = LightningCLI(BoringModel, BoringDataModule, args=[*options, *arguments], **quiet)
    return cli.trainer.strategy


def config(folder: Path, strategy: Any, **trainer: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {**QUIET, **trainer, "strategy": strategy}}))
    return path


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_taken_from_a_file_by_its_class_path(name: str, tmp_path: Path) -> None:
    cls = STRATEGIES[name].cls
    path = config(tmp_path, {"class_path": f"lightning_gossip.{cls.__name__}"})
    assert type(strategy_of(f"--config={path}")) is cls


def test_options_and_objects_inside_them_reach_the_strategy(tmp_path: Path) -> None:
    period = {"class_path": "lightning_gossip.AdaptivePeriod", "init_args": {"sample": 20}}
    arguments = {"class_path": "lightning_gossip.PeriodicAveragingStrategy", "init_args": {"period": period}}
    strategy = strategy_of(f"--config={config(tmp_path, arguments)}", "--trainer.strategy.init_args.checkpoint=replicas")
    assert strategy.period == AdaptivePeriod(sample=20)
    assert strategy.fit_options.checkpoint == "replicas"


def test_the_command_line_alone_is_enough_where_an_option_follows() -> None:
    strategy = strategy_of("--trainer.strategy=lightning_gossip.ADPSGDStrategy", "--trainer.strategy.topology=star")
    assert strategy.topology == "star"


def test_the_registered_name_is_taken_where_the_package_has_been_imported() -> None:
    assert type(strategy_of("--trainer.strategy=adpsgd")) is STRATEGIES["adpsgd"].cls


def test_an_unknown_option_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        strategy_of("--trainer.strategy=lightning_gossip.ADPSGDStrategy", "--trainer.strategy.exchanges=2")
    assert "exchanges" in capsys.readouterr().err


@pytest.mark.processes
def test_two_workers_train_from_the_command_line(tmp_path: Path) -> None:
    path = config(tmp_path, {"class_path": "lightning_gossip.ADPSGDStrategy"}, max_epochs=1, limit_val_batches=1)
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run("script.py", "fit", f"--config={path}", "--trainer.strategy.topology=complete", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "trained by ADPSGDStrategy complete [True, True]" in ended.stdout
