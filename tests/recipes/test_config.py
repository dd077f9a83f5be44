"""Every combination of the configuration groups composes into objects."""

from __future__ import annotations

import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from omegaconf import DictConfig, OmegaConf

import lightning_gossip.conf
from lightning_gossip import (
    AdaptivePeriod,
    ADPSGDStrategy,
    ConfigurationError,
    ConstantPeriod,
    EventTrigger,
    Outer,
    PiecewisePeriod,
    PostLocal,
)
from lightning_gossip.algorithm.topology.exact_graphs import SEQUENCES
from lightning_gossip.algorithm.topology.generators import TOPOLOGIES
from lightning_gossip.callbacks import ClusterEmulator
from lightning_gossip.strategies import STRATEGIES, WITH_ISLANDS
from lightning_gossip.strategies.registry import IN_SHARDS
from recipes import overrides as of_call
from recipes.commands import WritableFolder
from recipes.job import make_trainer, run
from recipes.ranges import check_checkpoint, check_numbers
from recipes.tracking import environment_kept, make_loggers
from recipes.train import CONF

LIBRARY = Path(lightning_gossip.conf.__file__).parent
FOLDERS = {LIBRARY: ("strategy", "topology", "schedule", "outer", "cluster"), CONF: ("recipe", "trainer", "logger")}


def options(group: Path) -> list[str]:
    return sorted(path.stem for path in group.glob("*.yaml"))


def composed(*overrides: str, folder: Path = Path("unused")) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", [f"run_dir={folder}", *overrides])


def test_there_is_a_configuration_for_every_topology() -> None:
    assert options(LIBRARY / "topology") == sorted((*TOPOLOGIES, *SEQUENCES))


GROUPS = {group: options(folder / group) for folder, names in FOLDERS.items() for group in names}


OPTIONS = [(group, option) for group in GROUPS if group != "strategy" for option in GROUPS[group]]


def check_composed(strategy: str, group: str, option: str) -> None:
    cfg = composed(f"strategy={strategy}", f"{group}={option}")
    if option in SEQUENCES and "topology" in cfg.strategy and strategy != "dpsgd":
        with pytest.raises(InstantiationException, match="only dpsgd makes rounds together: write strategy=dpsgd"):
            instantiate(cfg.strategy)
        return
    assert isinstance(instantiate(cfg.strategy), DDPStrategy | ModelParallelStrategy)
    assert isinstance(instantiate(cfg.cluster) or None, ClusterEmulator | None)


@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=["-".join(option) for option in OPTIONS])
def test_every_option_and_every_strategy_compose(number: int) -> None:
    check_composed(GROUPS["strategy"][number % len(GROUPS["strategy"])], *OPTIONS[number])


@pytest.mark.slow
@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_with_every_strategy(group: str, option: str) -> None:
    """Pairs: options of different groups do not know of each other."""
    for strategy in GROUPS["strategy"]:
        check_composed(strategy, group, option)


def test_there_is_a_configuration_for_every_strategy_and_it_is_the_one_of_that_name() -> None:
    known = {**STRATEGIES, **WITH_ISLANDS, **IN_SHARDS}
    assert options(LIBRARY / "strategy") == sorted([*known, "ddp"])
    for name, registered in known.items():
        strategy = instantiate(composed(f"strategy={name}").strategy)
        assert type(strategy) is registered.cls
        assert strategy.name == name


@pytest.mark.parametrize("name", [*STRATEGIES, *IN_SHARDS])
def test_a_configuration_has_every_option_of_its_strategy_with_the_same_default(name: str) -> None:
    """Processes and checkpoints apart, which Lightning fills in."""
    cfg, registered = composed(f"strategy={name}").strategy, {**STRATEGIES, **IN_SHARDS}[name]
    for parameter in inspect.signature(registered.cls).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in ("topology", "period", "outer"):
            default = registered.options.get(parameter.name, parameter.default)
            if parameter.name == "seed":
                default = composed(f"strategy={name}").seed  # so that seeds of a sweep have partners of their own
            assert cfg[parameter.name] == default, parameter.name


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("strategy", ["adpsgd", "dpsgd"])
def test_the_topology_reaches_the_strategy(strategy: str, name: str) -> None:
    assert instantiate(composed(f"strategy={strategy}", f"topology={name}").strategy).topology == name


def test_without_a_word_adpsgd_has_auto_and_dpsgd_a_ring_as_in_code() -> None:
    for name, topology in (("adpsgd", "auto"), ("noloco", "auto"), ("dpsgd", "ring")):
        assert instantiate(composed(f"strategy={name}").strategy).topology == topology
        assert inspect.signature(STRATEGIES[name].cls).parameters["topology"].default == topology


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_topology_that_changes_reaches_dpsgd_only(name: str) -> None:
    assert instantiate(composed("strategy=dpsgd", f"topology={name}").strategy).topology == name
    check_composed("adpsgd", "topology", name)


def test_the_schedule_reaches_the_strategy_and_names_it() -> None:
    periods = {
        ("periodic_averaging",): ConstantPeriod(8),
        ("adaptive_averaging",): AdaptivePeriod(),
        ("periodic_averaging", "schedule=adaptive", "schedule.sample=20"): AdaptivePeriod(sample=20),
        ("adaptive_averaging", "schedule=constant", "schedule.period=3"): ConstantPeriod(3),
        ("periodic_averaging", "schedule=post_local"): PostLocal(after_epochs=1),
        ("periodic_averaging", "schedule=piecewise"): PiecewisePeriod(),
        ("periodic_averaging", "schedule=piecewise", "schedule.milestones=[100]"): PiecewisePeriod(milestones=(100,)),
    }
    for (strategy, *overrides), period in periods.items():
        made = instantiate(composed(f"strategy={strategy}", *overrides).strategy)
        assert made.period == period
        assert made.name == ("adaptive_averaging" if isinstance(period, AdaptivePeriod) else "periodic_averaging")


def test_the_outer_step_reaches_the_strategy_and_names_it() -> None:
    steps: dict[tuple[str, ...], Outer | None] = {
        ("periodic_averaging",): None,
        ("diloco",): Outer(0.7, 0.9),
        ("diloco", "outer=nesterov", "outer.momentum=0.6"): Outer(1.0, 0.6),
        ("periodic_averaging", "outer=heavy_ball"): Outer(0.7, 0.5, nesterov=False),
        ("adpsgd",): None,
        ("adpsgd", "outer=heavy_ball", "outer.momentum_of=all"): Outer(0.7, 0.5, False, "all"),
        ("noloco",): Outer(),
    }
    for (strategy, *overrides), outer in steps.items():
        made = instantiate(composed(f"strategy={strategy}", *overrides).strategy)
        assert made.outer == outer
        kind = "adpsgd" if isinstance(made, ADPSGDStrategy) else "periodic_averaging"
        assert made.name == (kind if outer is None else {"adpsgd": "noloco"}.get(kind, "diloco"))
    assert instantiate(composed("strategy=diloco").strategy).period == ConstantPeriod(50)


def test_there_is_a_configuration_for_every_schedule() -> None:
    targets = {OmegaConf.load(path)._target_ for path in (LIBRARY / "schedule").glob("*.yaml")}
    controllers = (ConstantPeriod, AdaptivePeriod, PiecewisePeriod, PostLocal)
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
        (["strategy.topology=3"], "topology=3 is neither a name"),
        (["strategy.topology=[[0,9]]"], "9"),
        (["strategy.min_workers=9"], "min_workers=9"),
        (["strategy=apsgd", "strategy.server_rank=4"], "server_rank=4"),
        (["strategy.seed=abc"], "strategy.seed='abc'"),
        (["cluster=random", "cluster.seed=-1"], "cluster.seed=-1"),
        (["seed=abc"], "seed='abc' is not a whole number from 0 to 4294967295"),
        (["seed=-1"], "seed=-1 is not a whole number"),
        (["seed=null"], "seed=null is not a whole number"),
        (["recipe.epochs=0"], "recipe.epochs=0 is not a whole number of at least 1"),
        (["recipe.epochs=true"], "recipe.epochs=True"),
        (["recipe.data.batch_size=0"], "recipe.data.batch_size=0 is not a whole number of at least 1"),
        (["recipe.data.batch_size=abc"], "recipe.data.batch_size='abc'"),
        (["recipe.data.batch_size=1000"], "fewer batches of 1277 samples.*at most recipe.data.batch_size=425,"),
        (["recipe.model.lr=-1"], "recipe.model.lr=-1 is not a number above 0"),
        (["recipe.model.lr=nan"], "recipe.model.lr=nan is not a number above 0"),
        (["recipe.model.lr=fast"], "recipe.model.lr='fast'"),
        (["recipe.model.momentum=2"], "recipe.model.momentum=2 is not a number of at least 0 and below 1"),
        (["recipe.model.weight_decay=-1"], "recipe.model.weight_decay=-1 is not a number of at least 0"),
        (["recipe.model.channels=x"], "recipe.model.channels='x'"),
        (["recipe.model.shift=-1"], "recipe.model.shift=-1"),
        (["recipe=digits_mlp", "recipe.model.hidden=0"], "recipe.model.hidden=0"),
        (["recipe=digits_mlp", "recipe.model.milestones=[a]"], r"recipe.model.milestones=\['a'\] is not a list of numbers"),
        (["+recipe.data.num_workers=-1"], "recipe.data.num_workers=-1 is not a whole number of at least 0"),
        (["+recipe.model.width=1"], "recipe.model.width: DigitsClassifier has no such option"),
        (["recipe=imagenet_resnet50"], "recipe.data.root is not given"),
        (["trainer.devices=0"], "trainer.devices=0 is not auto or a whole number of at least 1"),
        (["trainer.devices=-1"], "trainer.devices=-1"),
        (["trainer.devices=four"], "trainer.devices='four'"),
        (["trainer.num_nodes=0"], "trainer.num_nodes=0"),
        (["trainer.accumulate_grad_batches=0"], "trainer.accumulate_grad_batches=0"),
        (["trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val=-1 is not null or a number of at least 0"),
        (["trainer.log_every_n_steps=x"], "trainer.log_every_n_steps='x'"),
        (["trainer.precision=99"], "trainer has a value that cannot be: Precision 99"),
        (["+trainer.epochs=3"], "trainer.epochs: Trainer has no such option"),
        (["strategy=ddp", "strategy.start_method=x"], "start method 'x'"),
        (["strategy=ddp", "+strategy.period=3"], "strategy.period: neither"),
        (["ckpt_path=/nope.ckpt"], "ckpt_path=/nope.ckpt: there is no such file"),
        (["ckpt_path=/etc/hostname"], "ckpt_path=/etc/hostname is not a checkpoint"),
        (["ckpt_path=3"], "ckpt_path=3 is not a path"),
        (["run_dir=/dev/null/run"], "run_dir=/dev/null/run cannot be written to: not a directory"),
        (["logger=csv", "logger.save_dir=/dev/null/run"], "logger.save_dir=/dev/null/run cannot be written to"),
    ],
)
def test_wrong_values_are_refused_before_any_process_is_started(
    overrides: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a process was to be started")

    monkeypatch.setattr(subprocess, "Popen", started)
    with environment_kept(), pytest.raises(ConfigurationError, match=named) as refusal:
        run(composed(f"run_dir={tmp_path}", "logger=none", *overrides))
    assert "\n" not in str(refusal.value)


def test_a_checkpoint_is_accepted_by_its_first_bytes(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "model.ckpt")
    check_checkpoint("ckpt_path", str(tmp_path / "model.ckpt"))
    check_checkpoint("ckpt_path", "last")
    (tmp_path / "half.ckpt").write_bytes((tmp_path / "model.ckpt").read_bytes()[:100])
    with pytest.raises(ConfigurationError, match="not to its end"):
        check_checkpoint("ckpt_path", str(tmp_path / "half.ckpt"))


def test_other_peoples_recipes_know_their_own_ranges() -> None:
    cfg = composed("recipe.model._target_=mine.Model", "recipe.model.lr=-1", "recipe.data.batch_size=0")
    with pytest.raises(ConfigurationError, match=r"recipe\.data"):
        check_numbers(cfg)
    cfg.recipe.data._target_ = "mine.Data"
    check_numbers(cfg)


@pytest.mark.parametrize(
    ("strategy", "given", "said"),
    [
        ("ddp", ["topology=star"], ["topology=star has no effect: strategy=ddp does not read it."]),
        ("adpsgd", ["topology=star"], []),
        ("adpsgd", ["schedule=adaptive"], ["schedule=adaptive has no effect: strategy=adpsgd does not read it."]),
        ("apsgd", ["schedule.period=3"], ["schedule.period=3 has no effect: strategy=apsgd does not read it."]),
        ("adaptive_averaging", ["schedule.sample=20"], []),
        ("qsgd", ["seed=3", "recipe.epochs=2"], []),
        (
            "ddp",
            ["recipe.epochs=2", "trainer.max_epochs=3"],
            ["recipe.epochs=2 has no effect: trainer.max_epochs is given too."],
        ),
    ],
)
def test_a_choice_that_nobody_reads_gets_a_word(
    strategy: str, given: list[str], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cfg = composed(f"strategy={strategy}", *given)
    assert of_call.warn(cfg, [f"strategy={strategy}", *given], strategy) == said
    assert [record.getMessage() for record in caplog.records] == said


def test_a_key_that_nobody_reads_is_refused() -> None:
    cfg = composed("+backward_share=0.5")
    with pytest.raises(ConfigurationError, match=r"\+backward_share=0.5: nothing reads 'backward_share'"):
        of_call.check(cfg, ["+backward_share=0.5"], CONF / "config.yaml")
    with pytest.raises(ConfigurationError, match="Did you mean 'strategy'"):
        of_call.check(composed("+stratgy=ddp"), ["+stratgy=ddp"], CONF / "config.yaml")
    given = ["+width=32", "recipe.model.channels=${width}", "logger=none", "experiment=slow_worker", "strategy=ddp"]
    of_call.check(composed(*given), given, CONF / "config.yaml")


def test_a_folder_that_cannot_be_written_to_ends_the_command_before_hydra_makes_it(capsys: pytest.CaptureFixture[str]) -> None:
    config = OmegaConf.create({"hydra": {"run": {"dir": "/dev/null/run"}, "sweep": {"dir": "/dev/null/sweep"}}})
    for hook, key in (
        (WritableFolder().on_run_start, "hydra.run.dir"),
        (WritableFolder().on_multirun_start, "hydra.sweep.dir"),
    ):
        with pytest.raises(SystemExit, match="2"):
            hook(config)
        assert f"{key}=/dev/null/" in capsys.readouterr().err
    for name in ("config", "simulate", "planning"):
        targets = [callback._target_ for callback in OmegaConf.load(CONF / f"{name}.yaml").hydra.callbacks.values()]
        assert "recipes.commands.WritableFolder" in targets


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


def test_a_wandb_run_goes_on_under_its_id_has_tags_and_begins_anew_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setattr(wandb, "login", lambda **_: False)
    folder = tmp_path / "before"
    folder.mkdir()
    (folder / "wandb_run_id.txt").write_text("abc123\n")

    def init_of(*overrides: str) -> dict[str, Any]:
        logger = make_loggers(composed("logger=wandb", *overrides, folder=tmp_path))
        options: dict[str, Any] = logger._wandb_init  # type: ignore[union-attr]
        return options

    resumed = init_of(f"ckpt_path={folder}/model.ckpt", "strategy=dpsgd", "trainer.devices=3")
    assert (resumed["id"], resumed["resume"]) == ("abc123", "allow")
    assert resumed["tags"] == ["DPSGD", "DigitsClassifier", "3 workers"]
    assert init_of("logger.tags=[mine]")["id"] is None
    assert init_of("logger.tags=[mine]")["tags"] == ["mine"]
    assert init_of(f"ckpt_path={folder}/model.ckpt", "+logger.id=other")["id"] == "other"
    assert init_of(f"ckpt_path={tmp_path}/elsewhere.ckpt")["id"] is None
    assert make_loggers(composed("logger=none", folder=tmp_path)) is False
