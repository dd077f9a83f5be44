"""A small version of the benchmark of plans: what is recommended is about the best, and reaches the target."""

from __future__ import annotations

import pytest
import torch
from hydra import initialize_config_dir

from benchmarks.planning import AIM, Situation, judge
from recipes.planning.choice import MOST_APART
from recipes.train import CONF


@pytest.mark.parametrize(
    "situation",
    [
        pytest.param(Situation(8, 1e4), id="slow links", marks=pytest.mark.slow),
        pytest.param(Situation(8, 1.25e8, 10.0), id="a slow worker"),
    ],
)
def test_what_a_plan_recommends_is_about_the_best_of_its_candidates(situation: Situation) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            row = judge(situation, seeds=[0], strategies=["ddp", "adpsgd", "periodic_averaging"])
    finally:
        torch.set_num_threads(threads)
    assert row["over_best"] <= AIM
    assert row["gain"] > 2.0  # over DDP, which is far from the best in both
    assert row["predicted_gain"] == pytest.approx(row["gain"], rel=1.0)
    assert row["share_apart"] <= MOST_APART
