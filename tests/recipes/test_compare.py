"""Pairs of jobs, from made-up ones; and the command on two short runs."""

from __future__ import annotations

import io
import math
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from lightning_gossip import ConfigurationError
from recipes.compare import compare, show


def job(schedule: str, seed: int, loss: float, lr: str = "0.2") -> dict[str, Any]:
    return {
        "folder": f"{schedule}{seed}",
        "overrides": [f"schedule={schedule}", f"seed={seed}", f"recipe.model.lr={lr}", "experiment=e"],
        "seed": str(seed),
        "averagings": 200.0 if schedule == "constant" else 100.0,
        "train_loss": loss,
    }


def test_jobs_are_paired_by_everything_but_the_option() -> None:
    jobs = [job("constant", 1, 1.0), job("constant", 2, 4.0), job("adaptive", 2, 1.0), job("adaptive", 1, 0.5)]
    (comparison,) = compare(pd.DataFrame(jobs), "schedule").itertuples()
    assert comparison.Index == "lr=0.2"
    assert (comparison.pairs, comparison.lower) == (2, 2)
    assert comparison.mean == pytest.approx(math.log(1 / 8) / 2)
    assert comparison.se == pytest.approx(math.log(2) / 2)
    assert (comparison.first, comparison.second) == (200, 100)


def test_settings_are_compared_apart_and_who_has_no_partner_is_left_out() -> None:
    jobs = [job(schedule, 1, 1.0, lr) for schedule in ("constant", "adaptive") for lr in ("0.2", "0.05")]
    comparisons = compare(pd.DataFrame([*jobs, job("adaptive", 9, 7.0)]), "schedule")
    assert comparisons["mean"].to_dict() == {"lr=0.2": 0.0, "lr=0.05": 0.0}
    assert comparisons.se.isna().all()


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([job("constant", 1, 1.0)], "'schedule' has 1 values"),
        ([job("constant", 1, 1.0), job("adaptive", 2, 1.0)], "No two jobs"),
        ([job("constant", 1, 0.0), job("adaptive", 1, 1.0)], "constant1 is 0.0"),
        ([job("constant", 1, 1.0), job("adaptive", 1, math.nan)], "adaptive1 is nan"),
    ],
)
def test_what_cannot_be_compared_is_said(jobs: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compare(pd.DataFrame(jobs), "schedule")


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    text = io.StringIO()
    jobs = [job(schedule, seed, 1.0 + seed) for schedule in ("constant", "adaptive") for seed in range(5)]
    show(compare(pd.DataFrame(jobs), "schedule"), "constant", "adaptive", Console(file=text, width=80))
    assert "lr=0.2" in text.getvalue()
    assert "200 → 100" in text.getvalue()
    assert "…" not in text.getvalue()
