"""Pairs of jobs, from made-up ones; and the command on two short runs."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from lightning_gossip import ConfigurationError
from recipes.compare import Job, compare, show


def job(schedule: str, seed: int, loss: float, lr: str = "0.2") -> Job:
    options = {"schedule": schedule, "seed": str(seed), "recipe.model.lr": lr, "experiment": "e"}
    return Job(Path(f"{schedule}{seed}"), options, {"averagings": 200 if schedule == "constant" else 100}, loss)


def test_jobs_are_paired_by_everything_but_the_option() -> None:
    jobs = [job("constant", 1, 1.0), job("constant", 2, 4.0), job("adaptive", 2, 1.0), job("adaptive", 1, 0.5)]
    (comparison,) = compare(jobs, "schedule")
    assert comparison.names == ("constant", "adaptive")
    assert comparison.setting == "lr=0.2"
    assert sorted(comparison.log_ratios) == pytest.approx([math.log(1 / 4), math.log(1 / 2)])
    assert comparison.mean == pytest.approx(math.log(1 / 8) / 2)
    assert comparison.standard_error == pytest.approx(math.log(2) / 2)
    assert comparison.averagings == [(200, 100)] * 2


def test_settings_are_compared_apart_and_who_has_no_partner_is_left_out() -> None:
    jobs = [job(schedule, 1, 1.0, lr) for schedule in ("constant", "adaptive") for lr in ("0.2", "0.05")]
    comparisons = compare([*jobs, job("adaptive", 9, 7.0)], "schedule")
    assert [(comparison.setting, comparison.log_ratios) for comparison in comparisons] == [
        ("lr=0.2", [0.0]),
        ("lr=0.05", [0.0]),
    ]
    assert math.isnan(comparisons[0].standard_error)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([job("constant", 1, 1.0)], "'schedule' has 1 values"),
        ([job("constant", 1, 1.0), job("adaptive", 2, 1.0)], "No two jobs"),
        ([job("constant", 1, 0.0), job("adaptive", 1, 1.0)], "constant1 is 0.0"),
        ([job("constant", 1, 1.0), job("adaptive", 1, math.nan)], "adaptive1 is nan"),
    ],
)
def test_what_cannot_be_compared_is_said(jobs: list[Job], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compare(jobs, "schedule")


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    text = io.StringIO()
    jobs = [job(schedule, seed, 1.0 + seed) for schedule in ("constant", "adaptive") for seed in range(5)]
    show(compare(jobs, "schedule"), Console(file=text, width=80))
    assert "lr=0.2" in text.getvalue()
    assert "200 → 100" in text.getvalue()
    assert "…" not in text.getvalue()
