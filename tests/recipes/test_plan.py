"""The planner: what it starts from, bad input, what a plan leaves, and the command."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset
from typing_extensions import override

from lightning_gossip import ConfigurationError
from lightning_gossip.analysis import (
    Problem,
)
from lightning_gossip.analysis.planning.dynamics import synchronous
from lightning_gossip.simulation import ADPSGD, APSGD, AllReduce
from recipes.job import plain_errors
from recipes.plan import as_measured, run
from recipes.planning import curvature, curves, known, outputs
from recipes.planning.choice import MOST_APART, Candidate, Planner
from recipes.planning.choices import Choices, choices_of, save
from recipes.planning.events import trigger
from recipes.planning.refinement import counts, graphs, refined
from recipes.simulate import compose_strategies
from recipes.simulated import modules
from recipes.simulated.modules import PlannedRun
from recipes.train import CONF
from tests.recipes.test_train import command
from tests.recipes.vision.recipes import SMALL, generate
from tests.scripts import run as run_script

GROUPS = {
    "topology": "ring",
    "schedule": "constant",
    "strategy": "apsgd",
    "cluster": "none",
    "recipe": "digits_mlp",
    "trainer": "cpu",
}
TWO = {"ddp": AllReduce(), "adpsgd": ADPSGD()}


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def to_train(folder: Path) -> DictConfig:
    """What ``recipes.train --config-dir FOLDER --config-name plan`` trains."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose("plan", [f"hydra.searchpath=[pkg://lightning_gossip.conf,{CONF}]", "run_dir=unused"])


def planned(folder: Path, *overrides: str) -> tuple[Candidate, str]:
    text = io.StringIO()
    with plain_errors():
        cfg = compose("planning", [f"run_dir={folder}", *overrides])
        known.check(cfg)
        cfg, together = as_measured(cfg, [f"run_dir={folder}", *overrides])
        chosen = GROUPS | dict(override.split("=", 1) for override in together if "." not in override)
        strategies = compose_strategies(cfg, cfg.strategies, together, config="planning")
        best = run(cfg, strategies, choices_of(cfg, chosen, config="planning"), Console(file=text, width=60))
    return best, text.getvalue()


@pytest.fixture
def without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no say in what is recommended, and take most of a plan's time; test_a_plan_of_a_configuration has them."""
    monkeypatch.setattr(curves, "curves_of", lambda *_: {})
    monkeypatch.setattr(curves, "draw", lambda *_: None)


# -- what a plan starts from -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["strategies=[ddp,adpsgdd]"], "'adpsgdd'.*adpsgd"),
        (["strategies=ddp"], "strategies"),
        (["workers=[4,8.5]"], "workers.*8.5"),
        (["workers=[0]"], "workers.*0"),
        (["recipe.model.lr=0"], "recipe.model.lr=0"),
        (["recipe.model.lr=-0.1"], "recipe.model.lr=-0.1"),
        (["recipe.model.momentum=1.0"], "recipe.model.momentum=1.0"),
        (["recipe.model.momentum=-1"], "recipe.model.momentum=-1"),
        (["recipe=imagenet_resnet50"], "recipe.data.root is not given"),
        (["trainer.devices=0"], "trainer.devices=0"),
        (["trainer.devices=auto"], "trainer.devices='auto'"),
        (["workers=[100000]"], "workers holds 100000"),
        (["measured=3"], "measured=3 is not a folder"),
        (["curvature.eigenvalues=5"], "curvature.eigenvalues=5 is not a list"),
        (["curvature.eigenvalues=[1,abc]"], "curvature.eigenvalues holds 'abc'"),
        (["curvature.eigenvalues=[0.0,-1.0]"], "no positive eigenvalue"),
        (["curvature.eigenvalues=[]"], "no positive eigenvalue"),
        (["curvature.largest=-2"], "curvature.largest=-2"),
        (["curvature.ckpt_path=/nowhere.ckpt"], "curvature.ckpt_path=/nowhere.ckpt"),
        (["curvature.condition=0.5"], "curvature.condition=0.5"),
        (["target=1.5"], "target=1.5"),
        (["margin=0.5"], "margin=0.5"),
        (["noise.variance=3"], "noise.variance and noise.loss go together"),
        (["noise.variance=-3", "noise.loss=1"], "noise.variance=-3"),
        (["noise.variance=3", "noise.loss=0"], "noise.loss=0"),
        (["noise.curvature=0"], "noise.curvature=0"),
        (["noise.with_loss=2"], "noise.with_loss=2"),
        (["noise.batches=1"], "noise.batches=1"),
        (["curvature.epochs=-1"], "curvature.epochs=-1"),
        (["measured=/nowhere"], "measured=/nowhere has no summary.json"),
        (["compute.mean_s=-1", "curvature.largest=1"], "mean_s=-1"),
    ],
)
def test_wrong_values_are_refused_by_name_before_any_work(overrides: list[str], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=named):
        planned(tmp_path / "run", *overrides)
    assert not (tmp_path / "run").exists()


def write_run(folder: Path, *, strategy: str, staleness: float | None) -> None:
    """Four workers: steps of 30 ms, of which 10 are spent waiting for the server, on all but its own rank."""
    folder.mkdir()
    spans = [["compute", 0.03 * step, 0.03 * (step + 1), None] for step in range(40)]
    waits = [["wait", 0.03 * step + 0.001, 0.03 * step + 0.011, 0] for step in range(40)]
    workers = [{"rank": rank, "spans": sorted(spans + (waits if rank else []), key=lambda span: span[1])} for rank in range(4)]
    (folder / "record.json").write_text(json.dumps({"workers": workers}))
    summary = [{"rank": rank, "steps": 40, "staleness_mean": staleness} for rank in range(4)]
    (folder / "summary.json").write_text(json.dumps({"strategy": strategy, "samples_per_s": 1000.0, "workers": summary}))


def test_a_measured_runs_step_times_are_without_its_waits(tmp_path: Path) -> None:
    write_run(tmp_path / "run", strategy="apsgd", staleness=3.0)
    measured = known.measured_run(tmp_path / "run")
    assert measured.staleness == 3.0
    assert measured.link_s == pytest.approx(0.005)
    laws = measured.cluster.compute
    assert [float(np.mean(law.times_s)) for law in laws] == pytest.approx([0.03, 0.02, 0.02, 0.02])  # type: ignore[union-attr]


def test_a_run_without_staleness_and_one_without_a_record_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "ddp", strategy="ddp", staleness=None)
    with pytest.raises(ConfigurationError, match=r"no staleness.*strategy=apsgd"):
        planned(tmp_path / "plan", f"measured={tmp_path / 'ddp'}")
    write_run(tmp_path / "half", strategy="apsgd", staleness=3.0)
    (tmp_path / "half" / "record.json").unlink()
    with pytest.raises(ConfigurationError, match=r"has no record\.json"):
        planned(tmp_path / "plan", f"measured={tmp_path / 'half'}")


def test_the_curvature_is_given_or_logged_or_measured(tmp_path: Path) -> None:
    cfg = compose("planning", ["recipe.epochs=2", "curvature.epochs=1", "curvature.leading=2", "curvature.batches=2"])
    (tmp_path / "metrics.csv").write_text("epoch,analysis/curvature_max\n0,\n1,12.5\n")
    logged = curvature.curvature_of(cfg, workers=4, run=tmp_path)
    assert logged.eigenvalues == pytest.approx([12.5, 1.25, 0.125, 0.0125])
    measured = curvature.curvature_of(cfg, workers=4, run=None)
    assert measured.largest > measured.eigenvalues[1] > 0.0
    assert measured.eigenvalues[-1] == pytest.approx(measured.largest / 1000)
    cfg.curvature.eigenvalues = [1.0, 4.0]
    assert curvature.curvature_of(cfg, workers=4, run=tmp_path).eigenvalues == [4.0, 1.0]


def test_curvature_and_noise_are_measured_where_the_learning_rate_is_highest() -> None:
    def epochs(*overrides: str) -> int:
        cfg = compose("planning", list(overrides))
        return curvature._train(instantiate(cfg.recipe.model), instantiate(cfg.recipe.data), cfg.recipe.epochs, None)

    assert epochs("recipe=digits_mlp", "recipe.epochs=3") == 1
    assert epochs("recipe=digits_mlp", "recipe.epochs=5", "recipe.data.batch_size=256") == 4  # 20 steps of 5 an epoch
    assert epochs("recipe=digits", "recipe.epochs=10", "recipe.data.batch_size=64") == 4  # the rate rises for 3


@pytest.mark.parametrize(
    "recipe", ["mnist_mlp", "fashion_mnist", "cifar10_resnet20", "imagenet_resnet50", "digits", "digits_mlp", "char_gpt"]
)
def test_what_is_trained_to_be_measured_has_the_run_s_learning_rate(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a recipe that scales it by the batch of all workers was once n times too low, without a warm-up."""
    workers, epochs = 16, 10
    overrides = [f"recipe={recipe}", f"recipe.epochs={epochs}", f"trainer.devices={workers}"]
    if recipe in SMALL:
        overrides += [f"recipe.data.root={generate(recipe, tmp_path)}", "recipe.data.num_workers=0"]
        overrides.append("recipe.model.classes=3" if recipe.startswith("imagenet") else "recipe.data.validation_images=8")
    made: list[tuple[Any, Any]] = []

    def only_made(model: Any, data: Any, *_: object, clip_norm: float | None) -> int:
        made.append((model, data))
        assert clip_norm == cfg.trainer.gradient_clip_val
        raise InterruptedError

    monkeypatch.setattr(curvature, "_train", only_made)
    cfg = compose("planning", overrides)
    with pytest.raises(InterruptedError):
        curvature.curvature_of(cfg, workers=workers, run=None)
    ((model, data),) = made
    model.trainer = PlannedRun(100 * epochs, epochs, world_size=1)
    lrs = modules._learning_rates(*modules._configured(model), model.trainer)
    assert max(lrs) == pytest.approx(known.learning_rate(cfg).of(workers), rel=1e-3)
    assert data.batch_size == workers * cfg.recipe.data.batch_size


def test_images_are_measured_when_their_warm_up_is_over(tmp_path: Path) -> None:
    overrides = ["recipe=mnist_mlp", f"recipe.data.root={generate('mnist_mlp', tmp_path)}", "recipe.data.validation_images=8"]
    overrides += ["recipe.data.batch_size=8", "trainer.devices=64", "recipe.epochs=40", "recipe.model.warmup_epochs=25"]
    cfg = compose("planning", [*overrides, "recipe.model.milestones=[]", "curvature.batches=1", "curvature.leading=1"])
    source = curvature.curvature_of(cfg, workers=64, run=None).source
    assert source == "measured after 26 epoch(s), when the learning rate is highest"


def test_gradients_are_clipped_there_as_in_the_run() -> None:
    def moved(*overrides: str) -> float:
        cfg = compose("planning", ["recipe.model.weight_decay=0", "recipe.model.milestones=[1.0]", *overrides])
        torch.manual_seed(0)
        model = instantiate(cfg.recipe.model)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        clip_norm = cfg.trainer.gradient_clip_val
        curvature._train(model, instantiate(cfg.recipe.data, batch_size=1277), 1, 1, clip_norm=clip_norm)
        after = [parameter.detach() for parameter in model.parameters()]
        return math.sqrt(sum(float((one - other).square().sum()) for one, other in zip(before, after, strict=True)))

    assert moved("trainer.gradient_clip_val=0.01") == pytest.approx(0.01 * 0.2, rel=1e-3)
    assert moved() > 0.01


class Warming(LightningModule):
    """A learning rate that rises from epoch to epoch, up to the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [LambdaLR(optimizer, lambda epoch: min(epoch + 1, 3))]


def test_schedules_of_epochs_are_followed_too() -> None:
    data = LightningDataModule.from_datasets(TensorDataset(torch.ones(40, 1)))
    assert curvature._train(Warming(), data, 9, None) == 3


def test_noise_is_given_or_measured_or_assumed() -> None:
    def noise_of(*overrides: str) -> tuple[float, str]:
        cfg = compose("planning", ["strategy=ddp", "trainer.devices=8", *overrides])
        start = known.known_from(cfg, None, curvature.curvature_of(cfg, workers=8, run=None))
        return start.noise.relative, start.noise_source

    assert noise_of("curvature.largest=3", "noise.variance=6", "noise.loss=2") == (3.0, "given")
    assumed, source = noise_of("curvature.largest=3")
    assert "assumed" in source
    assert assumed == pytest.approx(4.0)  # a quarter of 4 n (1 − β)/γ
    measured, source = noise_of("recipe.model.lr=0.05")
    assert "measured at a loss of" in source
    assert 0.2 < measured < 16.0


def test_a_setting_that_was_not_seen_to_train_does_not_calm_the_noise() -> None:
    """Two workers of eight samples do not reach the target with the recipe's learning rate. A plan once took for granted that
    they do, and recommended one with which they took 2.4 times as long as it said."""
    cfg = compose("planning", ["strategy=ddp", "trainer.devices=2", "target=0.1"])
    start = known.known_from(cfg, None, curvature.curvature_of(cfg, workers=2, run=None))
    assert start.noise.relative == start.curvature.noise.variance / start.curvature.noise.loss  # type: ignore[union-attr]
    now = Planner(start, cfg.target, cfg.margin).candidate(TWO["ddp"], 2)
    assert math.isinf(now.time_s)
    assert now.best_lr < 0.75 * now.lr


def test_the_loss_is_where_its_slope_says() -> None:
    """Given, or measured: far below the largest curvatures, of which plans once had as much of the loss as of the others."""

    def seen_of(*overrides: str) -> tuple[float, float]:
        cfg = compose("planning", ["strategy=ddp", "trainer.devices=8", *overrides])
        start = known.known_from(cfg, None, curvature.curvature_of(cfg, workers=8, run=None))
        problem = start.problem
        return float(problem.losses @ problem.eigenvalues) / float(problem.losses.sum()), start.curvature.largest

    given, largest = seen_of("curvature.largest=3", "curvature.along_loss=0.1")
    assert given == pytest.approx(0.1)
    alike, _ = seen_of("curvature.largest=3")
    assert alike > 0.25 * largest
    measured, largest = seen_of()
    assert measured < 0.15 * largest
    with pytest.raises(ConfigurationError, match=r"curvature\.along_loss"):
        curvature.check(compose("planning", ["curvature.largest=3", "curvature.along_loss=0"]).curvature)


def test_a_recipe_of_images_is_planned_with_nesterov_s_momentum() -> None:
    for recipe, nesterov in (("digits_mlp", False), ("mnist_mlp", True)):
        cfg = compose("planning", [f"recipe={recipe}", "curvature.largest=4", "samples=1000", "model_bytes=1000"])
        start = known.known_from(cfg, None, curvature.curvature_of(cfg, workers=4, run=None))
        assert start.nesterov == nesterov
        limits = {name: Planner(start, 0.01, 2.0).candidate(strategy, 4).dynamics.limit for name, strategy in TWO.items()}
        assert limits == pytest.approx(
            {"ddp": 3.8 / (2.8 if nesterov else 1.0) / 4, "adpsgd": (1.04 if nesterov else 2.23) / 4}, rel=0.01
        )


def test_the_learning_rate_of_an_adaptive_optimizer_is_not_planned() -> None:
    """Whose stable learning rates are not those of SGD: here far below the recipe's own."""
    cfg = compose("planning", ["recipe=char_gpt", "curvature.largest=1e5", "samples=1000"])
    planner = Planner(known.known_from(cfg, None, curvature.curvature_of(cfg, workers=4, run=None)), 0.01, 2.0)
    best = planner.candidate(TWO["ddp"], 2)
    assert best.best_lr < 3e-3
    assert outputs.setting(best, planner.known)["recipe.model.lr"] == 3e-3
    said = outputs.words(best, planner.candidate(TWO["adpsgd"], 4), planner.known)
    assert "recipe.model.lr stays 0.003, and of what is predicted only samples/s is to be relied on." in said


def test_time_to_a_share_of_the_loss_is_that_of_the_decay() -> None:
    dynamics = synchronous(Problem(eigenvalues=[0.5]), 20.0)
    rounds = math.log(0.01) / (2 * math.log(0.9))
    assert dynamics.time_s(0.2, 0.01) == pytest.approx(rounds / 20, rel=0.01)
    assert dynamics.time_s(4.1, 0.01) == math.inf
    assert dynamics.margin(2.0) == 2.0


def test_knobs_that_are_tried() -> None:
    assert counts(1) == [1]
    assert counts(8) == [1, 2, 3, 4, 6, 8]
    assert graphs(8) == ["ring", "torus", "hypercube", "exponential", "star", "complete"]
    assert "hypercube" not in graphs(6)


def test_a_graph_that_mixes_well_is_recommended_without_a_busy_hub() -> None:
    cfg = compose("planning", ["strategy=adpsgd", "topology=ring", "trainer.devices=8", "curvature.largest=4"])
    planner = Planner(known.known_from(cfg, None, curvature.curvature_of(cfg, workers=8, run=None)), 0.01, 2.0)
    now = planner.candidate(planner.known.strategy, 8)
    best = refined(planner, now, lambda _: lambda _: None)
    assert isinstance(best.strategy, ADPSGD)
    assert best.strategy.topology == "torus"
    text = outputs.words(best, now, planner.known)
    assert "on the graph torus" in text
    assert "present setting" not in text
    assert "That is the present setting" in outputs.words(now, now, planner.known)


SLOW = ("strategy=ddp", "curvature.largest=3", "workers=[8]", "trainer.devices=8", "links=uniform", "links.bandwidth=1e3")


@pytest.mark.usefixtures("without_curves")
def test_no_plan_lets_models_train_apart_where_links_are_slow(tmp_path: Path) -> None:
    """That was recommended as 47.74 times as fast, with an exchange in thirty steps and no word of it."""
    best, said = planned(tmp_path, *SLOW, "strategies=[ddp,adpsgd,periodic_averaging]")
    said = said.replace("\n", " ")
    assert best.share_apart <= MOST_APART
    assert best.best_lr < 0.2
    assert "exchange(s) a step of 1 asked for" in said
    assert "the average at each epoch's end, every 20 steps, is what keeps models together" in said
    gain = re.search(r"(\S+) times as fast \((.*?), if the curvature", said)
    assert gain is not None
    assert len(gain[1].replace(".", "").strip("0")) <= 2
    assert "to" in gain[2] or "at" in gain[2]


def test_a_setting_whose_models_train_apart_has_no_time(tmp_path: Path) -> None:
    cfg = compose("planning", [*SLOW, "run_dir=unused"])
    planner = Planner(known.known_from(cfg, None, curvature.curvature_of(cfg, workers=8, run=None)), 0.01, 2.0)
    apart = planner.candidate(ADPSGD(exchanges_per_step=0.01, at_rendezvous="evaluate"), 8)
    assert apart.trains_apart
    together = planner.candidate(ADPSGD(exchanges_per_step=0.01, at_rendezvous="adopt"), 8)
    assert apart.best_lr < together.best_lr
    alone = replace(apart, target=1e-9, dynamics=apart.dynamics.varied(noise=1e6))
    assert alone.share_apart > MOST_APART
    assert math.isinf(alone.best_time_s)
    assert "train its workers' models apart" in outputs.words(together, apart, planner.known)


@pytest.mark.usefixtures("without_curves")
def test_a_measured_run_that_trained_is_not_said_to_diverge(tmp_path: Path) -> None:
    write_run(tmp_path / "run", strategy="adpsgd", staleness=1.0)
    overrides = (f"measured={tmp_path / 'run'}", "curvature.eigenvalues=[300.0,3.0]", "strategies=[ddp,adpsgd]", "workers=[4]")
    overrides += ("strategy=adpsgd", "noise.variance=1e3", "noise.loss=1")
    _, said = planned(tmp_path / "plan", *overrides)
    assert "is predicted to diverge" in said.replace("\n", " ")
    metrics = tmp_path / "run" / "metrics.csv"
    metrics.write_text("epoch,train_loss\n0,1.5\n1,0.2\n")  # not far enough to say that the noise did not hold it up
    _, said = planned(tmp_path / "not far", *overrides)
    assert "is predicted to diverge" not in said.replace("\n", " ")
    assert "measured run bore" not in json.loads((tmp_path / "not far" / "plan.json").read_text())["noise"]["source"]
    metrics.write_text("epoch,train_loss\n0,1.5\n1,0.05\n")
    _, said = planned(tmp_path / "again", *overrides)
    said = said.replace("\n", " ")
    for wrong in ("is predicted to diverge", "models apart", "never to reach"):
        assert wrong not in said
    plan = json.loads((tmp_path / "again" / "plan.json").read_text())
    assert plan["now"]["margin"] == pytest.approx(1.11, rel=0.01)
    assert "measured run trained with" in plan["curvature"]["source"]
    assert "measured run bore" in plan["noise"]["source"]


def test_of_more_workers_as_few_are_named_as_gain_the_same() -> None:
    cfg = compose("planning", ["curvature.largest=4", "recipe.model.lr=5"])
    planner = Planner(known.known_from(cfg, None, curvature.curvature_of(cfg, workers=4, run=None)), 0.01, 2.0)
    two, four, eight = (planner.candidate(APSGD(active_workers=1), n) for n in (2, 4, 8))
    slow = replace(two, lr=0.1 * two.best_lr)
    assert "apsgd on 4 is" in outputs.more_workers([slow, four, eight], slow)
    assert outputs.more_workers([two, eight], replace(eight, times=two.times)) == ""


def test_sending_seldom_pays_on_a_slow_link_only(tmp_path: Path) -> None:
    overrides = ("recipe.model.momentum=0", "curvature.eigenvalues=[3.0,0.3]", "compute.law=erlang", "links=uniform")
    for bandwidth, pays in ((2e5, True), (1e9, False)):
        cfg = compose("planning", [*overrides, f"links.bandwidth={bandwidth}", "run_dir=unused"])
        start = known.known_from(cfg, None, curvature.curvature_of(cfg, workers=4, run=None))
        found = trigger(start, Planner(start, 0.01, 2.0).candidate(start.strategy, 4))
        assert (found is not None and found.gain > 1.2) == pays


# -- what a plan leaves ----------------------------------------------------------------------------------------------


def test_a_plan_of_a_configuration(tmp_path: Path) -> None:
    overrides = ("curvature.eigenvalues=[3.0,0.1]", "workers=[1,4]", "strategies=[ddp,adpsgd,apsgd]")
    best, said = planned(tmp_path, *overrides, "cluster=random", "links=uniform")
    plan = json.loads((tmp_path / "plan.json").read_text())
    rows = [(row["strategy"], row["workers"]) for row in plan["candidates"]]
    assert rows == [("ddp", 1), ("ddp", 4), ("adpsgd", 4), ("apsgd", 4)]
    assert plan["recommended"]["best_time_s"] <= (plan["now"]["time_s"] or math.inf)
    assert plan["recommended"]["share_apart"] <= MOST_APART
    assert outputs.IDEALISED in said.replace("\n", " ")
    assert len(plan["curves"]) == 4
    assert (tmp_path / "plan.png").exists()
    assert "Train with" in said
    assert "…" not in said
    cfg = to_train(tmp_path)
    assert instantiate(cfg.strategy).name == best.name
    assert (cfg.trainer.devices, cfg.cluster.period_s, cfg.recipe.model._target_) == (4, 0.03, "recipes.digits.DigitsMLP")
    assert cfg.recipe.model.lr == pytest.approx(best.best_lr, rel=1e-3)


def test_a_simulated_run_is_planned_as_what_was_simulated(tmp_path: Path) -> None:
    """Whose configuration names another strategy: ``strategies=[apsgd]`` says what recipes.simulate runs."""
    write_run(tmp_path / "run", strategy="apsgd", staleness=3.0)
    (tmp_path / "run" / ".hydra").mkdir()
    with_adpsgd = compose("simulate", ["recipe.model.lr=0.1", "run_dir=unused"])
    OmegaConf.save(with_adpsgd, tmp_path / "run" / ".hydra" / "config.yaml")
    hydra = {"hydra": {"runtime": {"choices": GROUPS | {"strategy": "adpsgd"}}}}
    OmegaConf.save(OmegaConf.create(hydra), tmp_path / "run" / ".hydra" / "hydra.yaml")
    cfg, together = as_measured(compose("planning", [f"measured={tmp_path / 'run'}", "run_dir=unused"]), [])
    assert instantiate(cfg.strategy).name == "apsgd"
    assert cfg.recipe.model.lr == 0.1
    assert "strategy=apsgd" in together


def test_lines_that_lie_upon_each_other_are_one() -> None:
    lines = {"a": [(1.0, 2.0), (2.0, 3.0)], "b": [(1.0, 2.01), (2.0, 3.0)], "c": [(1.0, 2.0)], "d": []}
    assert curves._together(lines) == {"a = b": lines["a"], "c": lines["c"]}


def test_a_plan_keeps_what_the_configuration_chose(tmp_path: Path) -> None:
    chosen = Choices(
        {**GROUPS, "topology": "star"}, {"strategy.active_workers": 3, "recipe.model.lr": 0.05, "trainer.devices": 4}
    )
    path = save(chosen, tmp_path, CONF, "one\ntwo")
    assert path.read_text().startswith("# one\n# two\n")
    cfg = to_train(tmp_path)
    assert (cfg.topology.name, cfg.strategy.active_workers, cfg.recipe.model.lr, cfg.trainer.devices) == ("star", 3, 0.05, 4)
    assert cfg.recipe.model.hidden == 64


@pytest.mark.slow
@pytest.mark.processes
def test_a_measured_run_is_planned_and_the_plan_is_trained_by_the_command(tmp_path: Path) -> None:
    common = ("recipe=digits_mlp", "recipe.epochs=3", "recipe.model.hidden=32", "logger=none")
    measured = command(*common, "strategy=apsgd", f"hydra.run.dir={tmp_path / 'measured'}")
    assert measured.returncode == 0, measured.stderr
    call = ("-m", "recipes.plan", f"measured={tmp_path / 'measured'}", "workers=[2]", "strategies=[apsgd]")
    done = run_script(*call, f"hydra.run.dir={tmp_path / 'plan'}")
    assert done.returncode == 0, done.stderr
    assert "Measured:" in done.stdout
    assert "hidden: 32" in (tmp_path / "plan" / "plan.yaml").read_text()
    trained = command("--config-dir", str(tmp_path / "plan"), "--config-name", "plan", f"hydra.run.dir={tmp_path / 'run'}")
    assert trained.returncode == 0, trained.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["strategy"] == "apsgd"
    wrong = run_script(*call, "recipe.model.lr=0")
    assert wrong.returncode == 2
    assert "ConfigurationError: recipe.model.lr=0" in wrong.stderr
