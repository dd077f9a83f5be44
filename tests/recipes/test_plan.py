"""The planner: dynamics against closed forms and the simulator, the command, plan.yaml."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from rich.console import Console

from lightning_gossip.analysis import rms_decay_rate
from recipes.job import plain_errors
from recipes.plan import as_measured, run
from recipes.planning import known
from recipes.planning.choice import Candidate
from recipes.planning.choices import choices_of
from recipes.planning.moments import server_rms_decay
from recipes.simulate import compose_strategies
from recipes.train import CONF

GROUPS = {
    "topology": "ring",
    "schedule": "constant",
    "strategy": "apsgd",
    "cluster": "none",
    "recipe": "digits_mlp",
    "trainer": "cpu",
}


def composed(*overrides: str, folder: Path | None = None) -> DictConfig:
    return compose("planning", [f"run_dir={folder or 'unused'}", *overrides])


def planned(folder: Path, *overrides: str) -> tuple[Candidate, str]:
    text = io.StringIO()
    with initialize_config_dir(str(CONF), version_base="1.3"), plain_errors():
        cfg = composed(*overrides, folder=folder)
        known.check(cfg)
        cfg, together = as_measured(cfg, [f"run_dir={folder}", *overrides])
        chosen = GROUPS | dict(override.split("=", 1) for override in together if "." not in override)
        strategies = compose_strategies(cfg, cfg.strategies, together, config="planning")
        best = run(cfg, strategies, choices_of(cfg, chosen, config="planning"), Console(file=text, width=80))
    return best, text.getvalue()


QUICK = ("curvature.eigenvalues=[3.0,0.1]", "workers=[1,4]")


def test_a_plan_says_what_to_train_and_leaves_a_configuration_of_it(tmp_path: Path) -> None:
    _, said = planned(tmp_path, *QUICK, "strategies=[ddp,adpsgd,apsgd]", "cluster=random")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [(row["strategy"], row["workers"]) for row in plan["candidates"]] == [
        ("ddp", 1),
        *((name, 4) for name in ("ddp", "adpsgd", "apsgd")),
    ]
    assert "Train with" in said
    assert "…" not in said
    assert plan["recommended"]["best_time_s"] <= plan["now"]["time_s"]


def test_without_momentum_the_servers_second_moments_are_those_of_the_analysis() -> None:
    for workers, g in ((1, 0.3), (4, 0.4), (16, 1.0)):
        assert server_rms_decay(g, workers, scale=1 / workers) == pytest.approx(rms_decay_rate(g / workers, workers))
