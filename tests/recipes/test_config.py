"""Every combination of the configuration groups composes into objects."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig

import lightning_gossip.conf
from lightning_gossip import ADPSGDStrategy, ConfigurationError
from lightning_gossip.algorithm.graphs import TOPOLOGIES
from lightning_gossip.callbacks import ClusterEmulator
from recipes.tracking import environment_kept
from recipes.train import CONF, run

LIBRARY = Path(lightning_gossip.conf.__file__).parent


def options(group: Path) -> list[str]:
    return sorted(path.stem for path in group.glob("*.yaml"))


def composed(*overrides: str, folder: Path = Path("unused")) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [f"run_dir={folder}", *overrides])


def test_there_is_a_configuration_for_every_topology() -> None:
    assert options(LIBRARY / "topology") == sorted(TOPOLOGIES)


@pytest.mark.parametrize("logger", options(CONF / "logger"))
@pytest.mark.parametrize("recipe", options(CONF / "recipe"))
@pytest.mark.parametrize("trainer", options(CONF / "trainer"))
def test_every_combination_composes(recipe: str, trainer: str, logger: str) -> None:
    groups = [options(LIBRARY / group) for group in ("strategy", "cluster")]
    for strategy, cluster in itertools.product(*groups):
        cfg = composed(
            f"strategy={strategy}", f"cluster={cluster}", f"recipe={recipe}", f"trainer={trainer}", f"logger={logger}"
        )
        assert isinstance(instantiate(cfg.strategy), DDPStrategy)
        assert isinstance(instantiate(cfg.cluster) or None, ClusterEmulator | None)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_topology_reaches_the_strategy(name: str) -> None:
    strategy = instantiate(composed(f"topology={name}").strategy)
    assert isinstance(strategy, ADPSGDStrategy)
    assert strategy.topology == name


def test_a_topology_may_be_a_list_of_edges() -> None:
    strategy = instantiate(composed("strategy.topology=[[0,1],[1,2],[2,3]]").strategy)
    strategy.check(4)


def test_the_slow_worker_can_be_chosen() -> None:
    cfg = composed("cluster=one_slow", "cluster.rank=1", "cluster.factor=10", "cluster.period_s=0.05")
    emulator = instantiate(cfg.cluster)
    assert (emulator.slowdown, emulator.period_s) == ({1: 10}, 0.05)


def test_an_app_of_the_users_own_finds_the_groups_in_the_package(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [{strategy: adpsgd}, {topology: star}, _self_]\nhydra: {searchpath: ['pkg://lightning_gossip.conf']}\n"
    )
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert instantiate(compose("mine").strategy).topology == "star"


def test_the_default_logger_writes_into_the_folder_of_the_run(tmp_path: Path) -> None:
    logger = instantiate(composed(folder=tmp_path).logger)
    assert isinstance(logger, CSVLogger)
    assert Path(logger.log_dir).parent == tmp_path


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["strategy.topology=rnig"], "rnig.*ring"),
        (["topology=hypercube", "trainer.devices=3"], "hypercube.*3"),
        (["topology=complete", "strategy.roles=bipartite"], "bipartite.*complete"),
        (["strategy.at_rendezvous=evaluat"], "evaluat"),
        (["+strategy.exchanges=2"], "exchanges_per_step"),
        (["cluster=one_slow", "cluster.rank=4"], r"\[4\].*4 workers"),
        (["cluster=one_slow", "cluster.factor=0.5"], "0.5"),
        (["trainer.max_epochs=many"], "many"),
    ],
)
def test_wrong_values_are_refused_before_any_process_is_started(overrides: list[str], named: str, tmp_path: Path) -> None:
    with environment_kept(), pytest.raises((ConfigurationError, InstantiationException), match=named):
        run(composed(*overrides, "logger=none", folder=tmp_path))


def test_wandb_is_offline_and_asks_nothing_where_there_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    asked: list[Any] = []
    monkeypatch.setattr(wandb, "login", lambda **options: asked.append(options) or False)
    logger = instantiate(composed("logger=wandb", folder=tmp_path).logger)
    assert asked == [{"prompt": False}]
    assert logger._offline
    assert logger._wandb_init["mode"] == "offline"
