"""The stability margin of runs whose curvature is known, in one process."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_gossip.algorithm import AdaptivePeriod, Outer
from lightning_gossip.algorithm.staleness import StalenessHistogram
from lightning_gossip.analysis.delays.delays import histogram
from lightning_gossip.analysis.second_moments.mean_square import random_staleness_limit
from lightning_gossip.callbacks import CurvatureProbe, GossipMonitor
from lightning_gossip.callbacks.stability import stability_margin
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.strategies import ADPSGDStrategy, APSGDStrategy, DPSGDStrategy, PeriodicAveragingStrategy

CURVATURE = 4.0


class Parabola(LightningModule):
    """½ h w², whatever the data."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([1.0]))
        self._optimizer, self._options = optimizer, options

    @override
    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return 0.5 * CURVATURE * self.w.square().sum() + 0.0 * batch.sum()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer(self.parameters(), **self._options)


def fit(model: Parabola, callbacks: list[Any], epochs: int = 1) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*|.*log_every_n_steps.*|.*treespec.*")
        trainer.fit(model, DataLoader(torch.zeros(4, 1), batch_size=2))
    return trainer


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"lr": 0.1}, 2.0),
        ({"lr": 0.1, "momentum": 0.9}, 3.8),
        ({"lr": 0.1, "momentum": 0.9, "nesterov": True}, 3.8 / 2.8),
    ],
)
def test_the_margin_of_one_process_is_that_of_gradient_descent(options: dict[str, Any], limit: float) -> None:
    probe, monitor = CurvatureProbe(), GossipMonitor(stability=True)
    trainer = fit(Parabola(**options), [probe, monitor])
    assert probe.last is not None
    margin = stability_margin(trainer, probe.last.largest, StalenessHistogram())
    assert margin == pytest.approx(limit / (CURVATURE * 0.1), rel=1e-3)


def test_weight_decay_is_curvature() -> None:
    trainer = fit(Parabola(lr=0.1, weight_decay=1.0), [CurvatureProbe()])
    assert stability_margin(trainer, CURVATURE, StalenessHistogram()) == pytest.approx(2.0 / (5.0 * 0.1))


def test_a_server_s_margin_follows_the_measured_staleness() -> None:
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)]
    trainer: Any = SimpleNamespace(strategy=APSGDStrategy(), world_size=4, optimizers=optimizers)
    seen = StalenessHistogram()
    assert stability_margin(trainer, CURVATURE, seen) is None, "nothing was measured yet"
    for staleness in (3, 3, 3, 7):
        seen.record(staleness)
    expected = 4.0 * random_staleness_limit(histogram({3: 3, 7: 1})) / (CURVATURE * 0.1)
    assert stability_margin(trainer, CURVATURE, seen) == pytest.approx(expected)


@pytest.mark.parametrize(("strategy", "times"), [(APSGDStrategy(), 3.3), (ADPSGDStrategy(), 0.467)], ids=["apsgd", "adpsgd"])
def test_nesterov_s_momentum_has_a_margin_of_its_own(strategy: Any, times: float) -> None:
    """It is less of a delay, and a larger first step."""
    seen = StalenessHistogram()
    for staleness in (2, 3, 3, 4):
        seen.record(staleness)

    def margin(nesterov: bool) -> float | None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=nesterov)
        trainer: Any = SimpleNamespace(strategy=strategy, world_size=4, optimizers=[optimizer])
        return stability_margin(trainer, CURVATURE, seen)

    heavy_ball, nesterov = margin(False), margin(True)
    assert heavy_ball is not None
    assert nesterov is not None
    assert nesterov / heavy_ball == pytest.approx(times, rel=0.05)


@pytest.mark.parametrize(
    ("strategy", "momentum", "limit"),
    [
        (DPSGDStrategy(), 0.0, 2.0 / 3.0),  # a ring of four: models of before the step are averaged, and w_min is -1/3
        (DPSGDStrategy(), 0.9, 3.8 / 3.0),
        (DPSGDStrategy(overlap=False), 0.0, 2.0),
        (DPSGDStrategy(topology="one_peer_exponential"), 0.0, None),
        (PeriodicAveragingStrategy(period=10), 0.9, 3.8),
        (PeriodicAveragingStrategy(period=10, outer=Outer()), 0.9, 0.081),  # directions of a band below the limit swing on
        (PeriodicAveragingStrategy(period=AdaptivePeriod(), outer=Outer()), 0.9, None),
    ],
)
def test_old_models_and_outer_steps_have_limits_of_their_own(strategy: Any, momentum: float, limit: float | None) -> None:
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=momentum)]
    trainer: Any = SimpleNamespace(strategy=strategy, world_size=4, optimizers=optimizers)
    margin = stability_margin(trainer, CURVATURE, StalenessHistogram())
    assert margin == (None if limit is None else pytest.approx(limit / (CURVATURE * 0.1), rel=0.02))


def test_a_learning_rate_near_the_limit_is_warned_of_once() -> None:
    with pytest.warns(UserWarning, match="near the largest stable one: analysis/stability_margin=1.11") as caught:
        fit(Parabola(lr=0.45), [CurvatureProbe(), GossipMonitor(stability=True)], epochs=3)
    assert sum("largest stable" in str(warning.message) for warning in caught) == 1


def test_of_other_optimizers_it_says_that_nothing_is_known() -> None:
    with pytest.warns(UserWarning, match=r"known for torch\.optim\.SGD only"):
        trainer = fit(Parabola(torch.optim.Adam, lr=0.1), [CurvatureProbe(), GossipMonitor(stability=True)])
    assert stability_margin(trainer, CURVATURE, StalenessHistogram()) is None


def test_no_positive_curvature_has_no_margin() -> None:
    trainer = fit(Parabola(lr=0.1), [])
    assert stability_margin(trainer, -1.0, StalenessHistogram()) is None


@pytest.mark.parametrize("callbacks", [[GossipMonitor(stability=True)], [GossipMonitor(stability=True), CurvatureProbe()]])
def test_without_a_probe_before_it_the_monitor_says_what_to_write(callbacks: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"put a CurvatureProbe\(\) before it"):
        fit(Parabola(lr=0.1), callbacks)
