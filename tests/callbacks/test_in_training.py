"""The callbacks in real runs of two worker processes."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from typing_extensions import override

import lightning_gossip
from lightning_gossip import ADPSGDStrategy, FitReport
from lightning_gossip.algorithm import ring
from lightning_gossip.analysis import gossip_limit
from lightning_gossip.callbacks import (
    ClusterEmulator,
    CollectiveCounter,
    CurvatureProbe,
    EpochProgressBar,
    FitReporter,
    GossipMonitor,
)
from tests.strategies.launch import launch
from tests.strategies.models import Net, loader, trainer

WORKERS = 2
EPOCHS = 2


class Rows(Logger):
    """Keeps what it is given."""

    name, version = "rows", 0  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        self.rows.append(dict(metrics))

    @override
    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


class Bar(EpochProgressBar):
    """Notes what is shown."""

    def __init__(self) -> None:
        super().__init__(lines=False)  # standard output is a file here
        self.shown: list[tuple[int, Any]] = []

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if not self.train_progress_bar.disable:
            self.shown.append((self.train_progress_bar.n, self.train_progress_bar.total))


def train(strategy: str, slowdown: dict[int, float]) -> dict[str, Any]:
    counter, logger, bar = CollectiveCounter(), Rows(), Bar()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=WORKERS,
        max_epochs=EPOCHS,
        logger=logger,
        callbacks=[
            *(counter, CurvatureProbe(), GossipMonitor(stability=True), ClusterEmulator(slowdown, period_s=0.02), bar),
            FitReporter(),
        ],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), loader(count=256, batch_size=8), loader(count=64, batch_size=8))
    return {
        "count": counter.count,
        "rows": logger.rows,
        "shown": bar.shown,
        "report": lightning_gossip.report(trainer),
    }


@pytest.fixture(scope="module")
def gossip() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = launch(train, "adpsgd", {1: 4.0}, workers=WORKERS)
    return results


@pytest.fixture(scope="module")
def ddp() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = launch(train, "ddp", {}, workers=WORKERS)
    return results


@pytest.mark.processes
def test_ddp_makes_collectives_in_training_and_they_are_counted(ddp: list[dict[str, Any]]) -> None:
    batches = 256 // 8 // WORKERS
    assert all(rank["count"] >= EPOCHS * (batches - 1) for rank in ddp)


@pytest.mark.processes
def test_adpsgd_makes_none(gossip: list[dict[str, Any]]) -> None:
    assert [rank["count"] for rank in gossip] == [0] * WORKERS


@pytest.mark.processes
def test_the_slowed_worker_takes_fewer_batches(gossip: list[dict[str, Any]]) -> None:
    fast, slow = (worker.steps for worker in gossip[0]["report"].workers)
    assert fast + slow == EPOCHS * 256 // 8
    assert fast / slow > 2.0  # 4 in a long epoch


@pytest.mark.processes
def test_the_monitor_logs_every_metric_of_the_gossip_with_the_time(gossip: list[dict[str, Any]]) -> None:
    rows = [row for row in gossip[0]["rows"] if "gossip/exchanges" in row]
    assert len(rows) == EPOCHS
    of_gossip = {f"gossip/{name}" for name in ("consensus_distance", "staleness_mean", "exchanges", "bytes_sent")}
    assert of_gossip | {"worker/0/steps", "worker/1/steps", "time/wall_s"} <= rows[-1].keys()
    assert rows[1]["gossip/exchanges"] > rows[0]["gossip/exchanges"] > 0
    assert rows[1]["time/wall_s"] > rows[0]["time/wall_s"] > 0


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["gossip", "ddp"])
def test_validation_metrics_are_logged_with_the_time(strategy: str, request: pytest.FixtureRequest) -> None:
    rows = [row for row in request.getfixturevalue(strategy)[0]["rows"] if "val_loss" in row]
    assert len(rows) == EPOCHS
    assert all("time/wall_s" in row for row in rows)


@pytest.mark.processes
def test_under_ddp_the_monitor_logs_steps_and_time(ddp: list[dict[str, Any]]) -> None:
    rows = [row for row in ddp[0]["rows"] if "worker/1/steps" in row]
    assert [row["worker/1/steps"] for row in rows] == [16, 32]
    assert not any(name.startswith("gossip/") for row in rows for name in row)


@pytest.mark.processes
@pytest.mark.parametrize(("strategy", "limit"), [("gossip", None), ("ddp", 2.0 * 1.9)])
def test_the_stability_margin_is_logged(strategy: str, limit: float | None, request: pytest.FixtureRequest) -> None:
    ranks = request.getfixturevalue(strategy)
    curvatures = [row["analysis/curvature_max"] for row in ranks[0]["rows"] if "analysis/curvature_max" in row]
    margins = [row["analysis/stability_margin"] for row in ranks[0]["rows"] if "analysis/stability_margin" in row]
    assert len(curvatures) == len(margins) == EPOCHS
    if limit is None:
        limit = gossip_limit(ring(2), momentum=0.9)
    assert margins == pytest.approx([limit / (0.1 * curvature) for curvature in curvatures])
    assert not any("analysis/stability_margin" in row for row in ranks[1]["rows"])


@pytest.mark.processes
def test_the_progress_bar_shows_the_epoch_of_all_workers(gossip: list[dict[str, Any]]) -> None:
    shown = gossip[0]["shown"]
    assert {total for _, total in shown} == {256 // 8}
    assert max(done for done, _ in shown) > len(shown) / EPOCHS  # more than its own
    assert not gossip[1]["shown"]


@pytest.mark.processes
def test_every_strategy_has_a_report_of_its_workers_ddp_too(gossip: list[dict[str, Any]], ddp: list[dict[str, Any]]) -> None:
    for ranks in (gossip, ddp):
        for report in (rank["report"] for rank in ranks):
            assert [worker.rank for worker in report.workers] == [0, 1]
            assert sum(worker.samples for worker in report.workers) == EPOCHS * 256
            assert sum(worker.steps for worker in report.workers) == EPOCHS * 256 // 8
            assert all(worker.busy_s > 0.0 for worker in report.workers)
    assert gossip[0]["report"].workers[0].exchanges is not None  # the strategy's own
    assert ddp[0]["report"].workers[0].exchanges is None


def test_without_a_callback_another_strategy_has_no_report() -> None:
    assert lightning_gossip.report(Trainer(accelerator="cpu", strategy="ddp", logger=False)) is None
    assert isinstance(lightning_gossip.report(Trainer(accelerator="cpu", strategy="adpsgd", logger=False)), FitReport)


def test_in_a_file_the_progress_bar_is_one_line_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    for options in ({}, {"refresh_rate": 0}):
        Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=EPOCHS,
            logger=False,
            callbacks=[EpochProgressBar(**options)],
            enable_checkpointing=False,
            enable_model_summary=False,
        ).fit(Net(), loader(count=64, batch_size=8))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) == EPOCHS
    for epoch, line in enumerate(lines, start=1):
        assert re.fullmatch(rf"Epoch {epoch} of {EPOCHS}: 8 batches in \d+\.\d s(, \w+=[\d.e-]+)*", line)


class Failing(CSVLogger):
    """As Weights & Biases without a network."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(name.startswith("worker/") for name in metrics):
            raise ConnectionError("no route to the server")
        super().log_metrics(metrics, step)


def _with_a_failing_logger(folder: str) -> Any:
    t = trainer(
        strategy=ADPSGDStrategy(), max_epochs=3, logger=[Failing(folder), CSVLogger(folder)], callbacks=[GossipMonitor()]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.fit(Net(), loader(64, 8))
    return t.current_epoch, [str(warning.message) for warning in caught if "GossipMonitor" in str(warning.message)]


@pytest.mark.processes
def test_a_logger_that_fails_in_the_monitor_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    (epochs, warned), (others, quiet) = launch(_with_a_failing_logger, str(tmp_path), workers=2)
    assert (epochs, others) == (3, 3)
    assert len(warned) == 1
    assert "Failing failed (ConnectionError: no route to the server). Training goes on" in warned[0]
    assert quiet == []
