"""Every combination of the configuration groups composes into objects."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf

import lightning_gossip.conf
from lightning_gossip import AdaptivePeriod, ConfigurationError, ConstantPeriod, EventTrigger, PostLocal
from lightning_gossip.algorithm.graphs import TOPOLOGIES
from lightning_gossip.callbacks import ClusterEmulator
from lightning_gossip.strategies import STRATEGIES
from recipes.job import make_trainer, run
from recipes.tracking import environment_kept
from recipes.train import CONF

LIBRARY = Path(lightning_gossip.conf.__file__).parent
FOLDERS = {LIBRARY: ("strategy", "topology", "schedule", "cluster"), CONF: ("recipe", "trainer", "logger")}


def options(group: Path) -> list[str]:
    return sorted(path.stem for path in group.glob("*.yaml"))


def composed(*overrides: str, folder: Path = Path("unused")) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [f"run_dir={folder}", *overrides])


def test_there_is_a_configuration_for_every_topology() -> None:
    assert options(LIBRARY / "topology") == sorted(TOPOLOGIES)


GROUPS = {group: options(folder / group) for folder, names in FOLDERS.items() for group in names}


@pytest.mark.parametrize(
    ("group", "option"), [(group, option) for group in GROUPS if group != "strategy" for option in GROUPS[group]]
)
def test_every_option_composes_with_every_strategy(group: str, option: str) -> None:
    """Pairs: options of different groups do not know of each other."""
    for strategy in GROUPS["strategy"]:
        cfg = composed(f"strategy={strategy}", f"{group}={option}")
        assert isinstance(instantiate(cfg.strategy), DDPStrategy)
        assert isinstance(instantiate(cfg.cluster) or None, ClusterEmulator | None)


def test_there_is_a_configuration_for_every_strategy_and_it_is_the_one_of_that_name() -> None:
    assert options(LIBRARY / "strategy") == sorted([*STRATEGIES, "ddp"])
    for name, registered in STRATEGIES.items():
        strategy = instantiate(composed(f"strategy={name}").strategy)
        assert type(strategy) is registered.cls
        assert strategy.name == name


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_configuration_has_every_option_of_its_strategy_with_the_same_default(name: str) -> None:
    """Processes and checkpoints apart, which Lightning fills in."""
    cfg = composed(f"strategy={name}").strategy
    for parameter in inspect.signature(STRATEGIES[name].cls).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in ("topology", "period"):
            assert cfg[parameter.name] == parameter.default, parameter.name


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("strategy", ["adpsgd", "dpsgd"])
def test_the_topology_reaches_the_strategy(strategy: str, name: str) -> None:
    assert instantiate(composed(f"strategy={strategy}", f"topology={name}").strategy).topology == name


def test_the_schedule_reaches_the_strategy_and_names_it() -> None:
    periods = {
        ("periodic_averaging",): ConstantPeriod(8),
        ("adaptive_averaging",): AdaptivePeriod(),
        ("periodic_averaging", "schedule=adaptive", "schedule.sample=20"): AdaptivePeriod(sample=20),
        ("adaptive_averaging", "schedule=constant", "schedule.period=3"): ConstantPeriod(3),
        ("periodic_averaging", "schedule=post_local"): PostLocal(after_epochs=1),
    }
    for (strategy, *overrides), period in periods.items():
        made = instantiate(composed(f"strategy={strategy}", *overrides).strategy)
        assert made.period == period
        assert made.name == ("adaptive_averaging" if isinstance(period, AdaptivePeriod) else "periodic_averaging")


def test_there_is_a_configuration_for_every_schedule() -> None:
    targets = {OmegaConf.load(path)._target_ for path in (LIBRARY / "schedule").glob("*.yaml")}
    controllers = (ConstantPeriod, AdaptivePeriod, PostLocal)
    assert targets == {f"lightning_gossip.algorithm.{controller.__name__}" for controller in controllers}


def test_the_event_trigger_may_be_written_as_a_mapping() -> None:
    overrides = "+strategy.event_trigger={threshold:0.1,relative:true}".replace("+", "")
    strategy = instantiate(composed("strategy=apsgd", overrides).strategy)
    assert strategy.event_trigger == EventTrigger(threshold=0.1, relative=True)


@pytest.mark.parametrize("name", options(CONF / "experiment"))
def test_every_experiment_composes_and_its_sweep_has_valid_values(name: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [f"experiment={name}", "run_dir=unused"], return_hydra_config=True)
        params = OmegaConf.to_container(cfg.hydra.sweeper.params)
        for option, choices in params.items():
            for value in str(choices).split(","):
                job = compose("config", [f"experiment={name}", "run_dir=unused", f"{option}={value}"])
                make_trainer(job, logger=False, enable_checkpointing=False)


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
        (["strategy=periodic_averaging", "schedule.period=0"], "period=0"),
        (["strategy=adaptive_averaging", "schedule.low=1.4"], "low=1.4"),
        (["strategy=qsgd", "strategy.levels=8"], "levels"),
        (["strategy=apsgd", "strategy.active_workers=5"], "active_workers=5 of 4"),
        (["strategy=dpsgd", "strategy.topology=[[0,1],[2,3]]"], "2 parts"),
    ],
)
def test_wrong_values_are_refused_before_any_process_is_started(overrides: list[str], named: str, tmp_path: Path) -> None:
    with environment_kept(), pytest.raises(ConfigurationError, match=named):
        run(composed(*overrides, "logger=none", folder=tmp_path))


def test_wandb_is_offline_and_asks_nothing_where_there_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    asked: list[Any] = []
    monkeypatch.setattr(wandb, "login", lambda **options: asked.append(options) or False)
    logger = instantiate(composed("logger=wandb", folder=tmp_path).logger)
    assert [options["prompt"] for options in asked] == [False]
    assert logger._offline
    assert logger._wandb_init["mode"] == "offline"


def test_wandb_is_offline_where_its_server_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def login(**_: Any) -> bool:
        raise wandb.errors.CommError("no route")

    monkeypatch.setattr(wandb, "login", login)
    assert instantiate(composed("logger=wandb", folder=tmp_path).logger)._offline
