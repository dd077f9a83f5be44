"""The command that simulates a training configuration."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from rich.console import Console

from lightning_gossip import AdaptivePeriod, ConfigurationError, ConstantPeriod
from lightning_gossip.simulation import ADPSGD, Constant, Epochs, Exponential, Result, Samples, Steps
from lightning_gossip.strategies import STRATEGIES
from recipes.digits import DigitsMLP
from recipes.job import plain_errors
from recipes.simulate import compose_strategies, run
from recipes.simulated.scenario import scenario_of, strategy_of
from recipes.train import CONF
from tests.recipes.test_config import LIBRARY, options
from tests.recipes.test_outputs import KEYS, WORKER_KEYS
from tests.scripts import run as run_script


def composed(*overrides: str, folder: Path | None = None) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("simulate", [f"run_dir={folder or 'unused'}", *overrides])


def simulated(folder: Path, *overrides: str, names: tuple[str, ...] = ()) -> tuple[dict[str, Result], str]:
    text = io.StringIO()
    with initialize_config_dir(str(CONF), version_base="1.3"), plain_errors():
        cfg = compose("simulate", [f"run_dir={folder}", *overrides])
        results = run(cfg, compose_strategies(cfg, names, [f"run_dir={folder}", *overrides]), Console(file=text, width=80))
    return results, text.getvalue()


@pytest.mark.parametrize("name", [*STRATEGIES, "ddp"])
def test_every_strategys_configuration_is_one_of_the_simulators(name: str) -> None:
    assert strategy_of(composed(f"strategy={name}")).name == name


def test_options_of_a_strategy_its_topology_and_its_schedule_reach_the_simulator() -> None:
    assert strategy_of(composed("topology=star", "strategy.exchanges_per_step=0.5")) == ADPSGD(
        topology="star", exchanges_per_step=0.5, seed=1
    )
    assert [strategy_of(composed("strategy=" + name, "seed=7")).seed for name in ("adpsgd", "noloco", "qsgd")] == [7] * 3  # type: ignore[attr-defined]
    periods = {"schedule=constant": ConstantPeriod(8), "schedule=adaptive": AdaptivePeriod()}
    for schedule, period in periods.items():
        assert strategy_of(composed("strategy=periodic_averaging", schedule)).period == period  # type: ignore[attr-defined]


def test_shares_of_unlike_data_have_the_seed_of_the_training_run() -> None:
    unlike = ("recipe=digits_mlp", "recipe.data.skew=0.1", "seed=3")
    assert scenario_of(composed(*unlike)).work.skew_seed == 3
    assert scenario_of(composed(*unlike, "recipe.data.skew_seed=7")).work.skew_seed == 7
    assert scenario_of(composed(*unlike, "recipe.data.skew_seed=7", "steps=5")).work.skew_seed == 7


@pytest.mark.parametrize("recipe", options(CONF / "recipe"))
def test_every_recipe_has_an_epoch_and_a_model_size(recipe: str) -> None:
    scenario = scenario_of(composed(f"recipe={recipe}", "objective=none"))
    assert isinstance(scenario.work, Epochs)
    expected = {"imagenet_resnet50": (5005, 102_440_608), "cifar10_resnet20": (1407, None), "digits": (80, None)}
    expected |= {"fashion_mnist": (1719, None), "char_gpt_gpt2": (None, 4 * 124_439_808)}
    batches, nbytes = expected.get(recipe, (None, None))
    assert batches in (None, scenario.work.batches)
    assert nbytes in (None, scenario.model_bytes)
    assert scenario.model_bytes > 4_000


def test_the_digits_network_is_trained_with_the_recipes_settings() -> None:
    scenario = scenario_of(composed("recipe.model.hidden=32", "recipe.model.lr=0.3"))
    assert scenario.model_bytes == 4 * sum(p.numel() for p in DigitsMLP(hidden=32).parameters())
    optimizer = scenario.problem.optimizer
    assert optimizer is not None
    assert (optimizer.lr, optimizer.momentum, tuple(optimizer.milestones)) == (0.3, 0.9, (0.3, 0.6))


@pytest.mark.parametrize("cluster", options(LIBRARY / "cluster"))
def test_the_emulated_cluster_of_a_training_run_is_the_simulated_one(cluster: str) -> None:
    made = scenario_of(composed(f"cluster={cluster}", "compute.mean_s=0.7")).cluster
    expected: Any = {
        "none": (Constant(0.7), {}),
        "one_slow": (Constant(0.03), {3: 4.0}),
        "random": (Exponential(0.03, 1.0), {}),
    }[cluster]
    assert (made.compute[0], made.slowdown) == expected  # type: ignore[index]


PAIRS = [("none", "none"), ("none", "one_slow"), ("none", "random")]
PAIRS += [("quadratic", "shared"), ("recipe", "uniform"), ("softmax", "none"), ("none", "nodes")]


@pytest.mark.parametrize(("objective", "links"), PAIRS)
def test_every_objective_and_every_kind_of_links_is_simulated(objective: str, links: str, tmp_path: Path) -> None:
    results, said = simulated(tmp_path, f"links={links}", f"objective={objective}", "steps=12", "timeline=false")
    (result,) = results.values()
    assert (result.ended, result.steps) == ("done", 48)
    assert (result.loss is None) == (objective == "none")
    assert "adpsgd" in said


def test_every_configuration_of_both_groups_is_among_these_pairs() -> None:
    assert sorted({objective for objective, _ in PAIRS}) == options(CONF / "objective")
    assert sorted({links for _, links in PAIRS}) == options(CONF / "links")


def test_several_strategies_leave_a_folder_each_and_one_picture(tmp_path: Path) -> None:
    names = ("ddp", "adpsgd", "adaptive_averaging")
    overrides = (
        "recipe.epochs=2",
        "recipe.data.batch_size=32",
        "cluster=one_slow",
        "slowdowns=[1,4]",
        "strategy.roles=bipartite",
    )
    results, said = simulated(tmp_path, *overrides, names=names)
    assert list(results) == list(names)
    assert results["adpsgd"].time_s < 0.6 * results["ddp"].time_s
    for name in names:
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary.keys() >= KEYS
        assert all(worker.keys() >= WORKER_KEYS for worker in summary["workers"])
        assert len(summary["simulation"]["epoch_times_s"]) == summary["epochs"] == 2
        assert (tmp_path / name / "timeline.png").exists()
        assert json.loads((tmp_path / name / "timeline.json").read_text())["traceEvents"]
    assert {path.name for path in tmp_path.glob("*.png")} == {"loss.png", "slowdown.png"}
    assert all(name in said for name in names)
    assert "…" not in said


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        simulated(tmp_path / folder, "steps=20", "cluster=random", "timeline=false")
    for name in ("summary.json", "record.json", "metrics.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_measured_step_times_of_a_run_are_simulated(tmp_path: Path) -> None:
    first, _ = simulated(tmp_path / "first", "steps=6", "cluster=one_slow", "cluster.factor=3")
    again, _ = simulated(tmp_path / "again", "steps=6", f"compute.record={tmp_path / 'first'}")
    assert again["adpsgd"].time_s == pytest.approx(first["adpsgd"].time_s, rel=1e-6)


def test_a_worker_that_stops_is_survived_by_gossip_and_stalls_an_all_reduce(tmp_path: Path) -> None:
    overrides = ("recipe.epochs=2", "recipe.data.batch_size=32", "failures={1:0.1}")
    results, said = simulated(tmp_path, *overrides, names=("adpsgd", "ddp"))
    assert [result.ended for result in results.values()] == ["done", "stalled"]
    assert "ddp (stalled)" in said


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["compute.law=gamma"], "gamma.*erlang"),
        (["compute.mean_s=-1"], "mean_s=-1"),
        (["compute.options={shape:3}"], "shape"),
        (["trainer.devices=auto"], "trainer.devices"),
        (["trainer.accumulate_grad_batches=2"], "accumulate_grad_batches"),
        (["failures={9:1.0}"], "rank 9"),
        (["links.bandwidth=0"], "bandwidth=0"),
        (["links=one_slow", "links.j=7"], r"\(0, 7\)"),
        (["compute.record=/nowhere"], "compute.record=/nowhere"),
        (["cluster=one_slow", "cluster.rank=7"], r"\[7\]"),
        (["topology=hypercube", "trainer.devices=6"], "hypercube.*6"),
        (["slowdowns=[1,2]", "slow_rank=4"], "slow_rank=4"),
        (["steps=0"], "number"),
        (["compute.law=samples"], "compute.law=samples needs the times"),
        (["compute.law=samples", "compute.options={times_s:[0.1,-1]}"], "times_s holds -1"),
        (["compute.backward_share=2"], "backward_share=2"),
        (["links=uniform", "links.slow={a:10}"], "links.slow names 'a'"),
        (["links=uniform", "links.slow={0-1-2:10}"], "links.slow names '0-1-2'"),
        (["links=uniform", "links.slow=3"], "links.slow=3 is not a mapping"),
        (["links=uniform", "links.slow={0-9:10}"], r"\(0, 9\)"),
        (["samples=0", "objective=none"], "samples"),
        (["model_bytes=-1"], "model_bytes"),
        (["timeline=perhaps"], "timeline"),
    ],
)
def test_wrong_values_are_refused_by_name_before_anything_is_simulated(
    overrides: list[str], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        simulated(tmp_path, *overrides)
    assert list(tmp_path.iterdir()) == []


def test_times_slow_pairs_and_the_backward_share_are_written_on_the_command_line() -> None:
    scenario = scenario_of(
        composed(
            "compute.law=samples",
            "compute.options={times_s:[0.1,0.2]}",
            "compute.backward_share=0.5",
            "links=uniform",
            "links.slow={0-2:10,3:4}",
        )
    )
    assert scenario.cluster.compute == (Samples([0.1, 0.2]),) * 4
    assert scenario.cluster.backward_share == 0.5
    assert scenario.links.slow == {(0, 2): 10.0, 3: 4.0}


@pytest.mark.processes
@pytest.mark.parametrize("module", ["recipes.simulate", "recipes.plan"])
def test_a_key_that_nothing_reads_is_refused(module: str, tmp_path: Path) -> None:
    done = run_script("-m", module, "+backward_share=.5", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 2
    assert "nothing reads 'backward_share'" in done.stderr


def test_a_record_of_another_number_of_workers_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    simulated(tmp_path / "first", "steps=4")
    with pytest.raises(ConfigurationError, match=r"4 workers.*trainer\.devices says 3"):
        simulated(tmp_path / "again", f"compute.record={tmp_path / 'first'}", "trainer.devices=3")
    with pytest.raises(ConfigurationError, match="not the record of a run"):
        simulated(tmp_path / "again", f"compute.record={tmp_path / 'first' / 'summary.json'}")


def test_an_unknown_strategy_among_several_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"'adpsgdd'.*adpsgd"):
        compose_strategies(composed(), ["ddp", "adpsgdd"], [])


def test_steps_take_the_place_of_epochs() -> None:
    assert scenario_of(composed("steps=7")).work == Steps(number=7, batch_size=8)


@pytest.mark.processes
def test_the_command_sweeps_and_the_report_takes_its_folders(tmp_path: Path) -> None:
    sweep = f"hydra.sweep.dir={tmp_path}"
    done = run_script(
        "-m", "recipes.simulate", "--multirun", "strategy=ddp,adpsgd", "failures=null,{7:1.0}", "recipe.epochs=1", sweep
    )
    assert done.returncode == 1
    assert "2 of 4 jobs finished" in done.stdout
    assert "failures names the rank 7" in done.stdout
    reported = run_script("-m", "recipes.report", str(tmp_path), "--out", str(tmp_path / "page"))
    assert reported.returncode == 0, reported.stderr
    assert (tmp_path / "page" / "report.html").exists()
