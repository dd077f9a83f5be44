"""The planner's command that a visit leads to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lightning_gossip.doctor.cluster_file import FILE
from lightning_gossip.doctor.plan import command
from lightning_gossip.doctor.report import Landscape, Training
from recipes.train import CONF
from tests.doctor.reports import healthy

LANDSCAPE = Landscape(eigenvalues=(8.0, 2.0), noise_variance=3.0, loss=0.5, noise_curvature=1.5, along_loss=0.25)


def options(folder: Path, landscape: Landscape) -> dict[str, str]:
    (folder / FILE).touch()
    report = healthy()
    report.landscape = landscape
    report.training = {
        0: Training(
            step_s=[0.1],
            parameters_bytes=1000,
            batch_size=8,
            samples=160,
            optimizer="SGD",
            lr=0.1,
            momentum=0.9,
            backward_share=0.6,
        )
    }
    arguments = command(report, folder)
    assert isinstance(arguments, list)
    return dict(argument.split("=", 1) for argument in arguments[2:])


def test_all_that_was_measured_of_the_loss_is_given(tmp_path: Path) -> None:
    """Without the curvature along the loss predicted seconds are up to four times too short."""
    given = options(tmp_path, LANDSCAPE)
    assert (given["curvature.largest"], given["curvature.along_loss"]) == ("8", "0.25")
    assert (given["noise.variance"], given["noise.loss"], given["noise.curvature"]) == ("3", "0.5", "1.5")
    assert given["recipe.model.momentum"] == "0.9"


@pytest.mark.parametrize("noise_curvature", [-0.5, None])
def test_what_noise_hides_is_left_to_the_planner(tmp_path: Path, noise_curvature: float | None) -> None:
    given = options(tmp_path, replace(LANDSCAPE, along_loss=None, noise_curvature=noise_curvature))
    assert not {"curvature.along_loss", "noise.curvature"} & given.keys()


def test_the_planner_knows_the_options(tmp_path: Path) -> None:
    given = options(tmp_path, LANDSCAPE)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        compose("planning", [f"{key}={value}" for key, value in given.items()])
