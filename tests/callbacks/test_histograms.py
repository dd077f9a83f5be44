from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_gossip import FitReport, WorkerReport
from lightning_gossip.callbacks.histograms import log_histogram
from lightning_gossip.callbacks.monitor import staleness

COUNTS = {0: 4, 1: 2, 3: 1}


def test_tensorboard_gets_one_bin_for_each_value(tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    log_histogram(logger, "gossip/staleness", COUNTS, step=5, beside={})
    logger.experiment.flush()
    logger.finalize("success")
    (event,) = EventAccumulator(str(tmp_path)).Reload().Histograms("gossip/staleness")
    assert event.step == 5
    values = event.histogram_value
    assert (values.num, values.min, values.max, values.sum) == (7, 0, 3, 5)
    assert [*zip(values.bucket_limit, values.bucket, strict=True)] == [(1, 4), (2, 2), (3, 0), (4, 1)]


class Run:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def wandb_row(counts: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    run = Run()
    monkeypatch.setattr(WandbLogger, "experiment", run)
    log_histogram(WandbLogger.__new__(WandbLogger), "gossip/staleness", counts, step=5, beside={"time/wall_s": 2.0})
    (row,) = run.rows
    return row


def test_wandb_gets_one_bin_for_each_value_beside_the_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    row = wandb_row(COUNTS, monkeypatch)
    histogram = row.pop("gossip/staleness")
    import wandb  # half a second, which all of pytest-xdist's workers would need while they collect

    assert isinstance(histogram, wandb.Histogram)
    assert (list(histogram.histogram), list(histogram.bins)) == ([4, 2, 0, 1], [0, 1, 2, 3, 4])
    assert row == {"time/wall_s": 2.0, "trainer/global_step": 5}


def test_many_values_share_bins_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    histogram = wandb_row(dict.fromkeys(range(1000), 2), monkeypatch)["gossip/staleness"]
    assert len(histogram.histogram) == 64
    assert sum(histogram.histogram) == 2000


def test_other_loggers_are_left_alone(tmp_path: Path) -> None:
    log_histogram(CSVLogger(tmp_path), "gossip/staleness", COUNTS, step=5, beside={})
    assert list(tmp_path.iterdir()) == []


def test_the_staleness_of_all_workers_is_added_up() -> None:
    workers = [WorkerReport(0, staleness_counts=[(0, 2), (3, 1)]), WorkerReport(1, staleness_counts=[(0, 1)]), WorkerReport(2)]
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(report=FitReport(workers)))
    assert staleness(trainer).counts() == {0: 3, 3: 1}
    assert staleness(SimpleNamespace(strategy=object())).count == 0  # type: ignore[arg-type]
