"""One worker's model becomes NaN: under each strategy, inside an epoch and at the rendezvous."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gossip import (
    ADPSGDStrategy,
    APSGDStrategy,
    ConfigurationError,
    DPSGDStrategy,
    EAMSGDStrategy,
    NonFiniteError,
    Outer,
    PeerError,
)
from lightning_gossip.callbacks.monitor import metrics
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from tests.strategies.launch import launch
from tests.strategies.models import Net, flat, loader, trainer

NONE_INSIDE: dict[str, Any] = {"exchanges_per_step": 0}  # so that it is found at the rendezvous


class Ill(Net):
    """Rank 1's weights become NaN in one step of the first epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        ill = (
            self.trainer.strategy.cluster_environment.global_rank() == 1 and self.trainer.current_epoch == 0 and batch_idx == 3
        )
        return loss * float("nan") if ill else loss


def _fit(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    # equal shares, so that rank 1 surely comes to that step
    model, t = Ill(), trainer(strategy=kind(work_sharing=False, **options), max_epochs=2)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            t.fit(model, loader(480, 8), loader(32, shuffle=False))
        except (NonFiniteError, PeerError) as stopped:
            error = f"{type(stopped).__name__}: {stopped}"
    return {
        "error": error,
        "finite": bool(torch.isfinite(flat(model)).all()),
        "sum": float(flat(model).sum()),
        "adopted": [worker.adopted for worker in t.strategy.report.workers],
        "metrics": metrics(t),
        "distance": t.strategy.report.consensus_distance,
        "warnings": [str(warning.message) for warning in caught],
    }


RAISING = {
    "adpsgd": (ADPSGDStrategy, {"topology": "complete"}),
    "adpsgd, peers are fixed": (ADPSGDStrategy, {"topology": "complete", "on_peer_failure": "raise"}),
    "adpsgd at the rendezvous": (ADPSGDStrategy, dict(**NONE_INSIDE)),
    "apsgd": (APSGDStrategy, {}),
    "apsgd, on the server": (APSGDStrategy, {"server_rank": 1}),
    "eamsgd": (EAMSGDStrategy, {"period": 2}),
    "eamsgd at the rendezvous": (EAMSGDStrategy, {"period": 1000}),
}


QUICK = {"adpsgd", "adpsgd at the rendezvous", "apsgd, on the server"}


def names(cases: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in cases]


@pytest.mark.processes
@pytest.mark.parametrize("name", names(RAISING))
def test_the_worker_that_produced_it_ends_the_job_and_says_which_tensor(name: str) -> None:
    results = launch(_fit, *RAISING[name], workers=3, timeout_s=60)
    assert results[1]["error"].startswith("NonFiniteError: The model of rank 1 is not finite: ")
    assert "elements of network.0.weight are NaN" in results[1]["error"]
    assert "on_nonfinite='adopt'" in results[1]["error"]
    for rank in (0, 2):
        assert results[rank]["error"].startswith("PeerError")
        assert results[rank]["finite"]


ADOPTING = {
    "adpsgd": (ADPSGDStrategy, {"topology": "complete", "on_nonfinite": "adopt"}),
    "adpsgd at the rendezvous": (ADPSGDStrategy, dict(on_nonfinite="adopt", **NONE_INSIDE)),
    "adpsgd, evaluating": (ADPSGDStrategy, dict(on_nonfinite="adopt", at_rendezvous="evaluate", **NONE_INSIDE)),
    # the step that goes wrong, rank 1's fourth, ends a round
    "adpsgd, outer": (
        ADPSGDStrategy,
        {"topology": "complete", "on_nonfinite": "adopt", "local_steps": 2, "outer": Outer(), "exchanges_per_step": 1.0},
    ),
    "adpsgd, outer, at the rendezvous": (
        ADPSGDStrategy,
        dict(on_nonfinite="adopt", outer=Outer(), local_steps=2, **NONE_INSIDE),
    ),
    "apsgd": (APSGDStrategy, {"on_nonfinite": "adopt"}),
    "apsgd, on the server": (APSGDStrategy, {"server_rank": 1, "on_nonfinite": "adopt"}),
    "eamsgd": (EAMSGDStrategy, {"period": 2, "on_nonfinite": "adopt"}),
    "eamsgd, on the server": (EAMSGDStrategy, {"period": 2, "server_rank": 1, "on_nonfinite": "adopt"}),
    "eamsgd at the rendezvous": (EAMSGDStrategy, {"period": 1000, "on_nonfinite": "adopt"}),
    "eamsgd, evaluating": (EAMSGDStrategy, {"period": 2, "on_nonfinite": "adopt", "at_rendezvous": "evaluate"}),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", names(ADOPTING))
def test_or_it_goes_on_from_a_healthy_model(name: str) -> None:
    results = launch(_fit, *ADOPTING[name], workers=3, timeout_s=60)
    assert [result["error"] for result in results] == [""] * 3
    assert all(result["finite"] for result in results)
    assert results[0]["sum"] == results[1]["sum"] == results[2]["sum"]
    assert results[0]["adopted"] == [0, 1, 0]
    assert "gossip/refused_nonfinite" in results[0]["metrics"]
    assert results[0]["distance"] == results[0]["distance"]  # not NaN


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "options"), [(DPSGDStrategy, {}), (ADPSGDStrategy, {"refuse_nonfinite": False})], ids=["dpsgd", "switched off"]
)
def test_where_nothing_is_refused_the_mean_that_is_lost_is_told(kind: Any, options: dict[str, Any]) -> None:
    results = launch(_fit, kind, options, workers=3, timeout_s=60)
    assert not any(result["finite"] for result in results)
    assert any("mean of all workers' models is not finite" in warning for warning in results[0]["warnings"])


class Masked(Net):
    """A float buffer of infinities, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))


def _masked() -> Any:
    model, t = Masked(), trainer(strategy=ADPSGDStrategy())
    t.fit(model, loader(160, 8))
    return model.mask.tolist(), t.strategy.report.workers[0].exchanges, t.strategy.report.workers[0].refused_nonfinite


@pytest.mark.processes
def test_an_attention_mask_of_infinities_is_no_trouble() -> None:
    for mask, exchanges, refused in launch(_masked, workers=2):
        assert mask == torch.full((4, 4), float("-inf")).triu(1).tolist()
        assert exchanges > 0
        assert refused == 0


def test_a_running_statistic_that_is_infinite_stays_in_sight() -> None:
    layer = nn.BatchNorm1d(3)
    layer.running_var.fill_(float("inf"))
    assert SharedModel(layer).open().names == ["weight", "bias", "running_mean", "running_var"]


@pytest.mark.parametrize("strategy", [ADPSGDStrategy, APSGDStrategy])
def test_options_that_cannot_work_are_refused(strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match="on_nonfinite='ignore' is not one of 'raise', 'adopt'"):
        strategy(on_nonfinite="ignore")
    with pytest.raises(ConfigurationError, match="needs refuse_nonfinite=True"):
        strategy(on_nonfinite="adopt", refuse_nonfinite=False)
    with pytest.raises(ConfigurationError, match="refuse_nonfinite='yes'"):
        strategy(refuse_nonfinite="yes")
