"""The summary, the table and the pictures, from a made-up record."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console

from lightning_gossip import ADPSGDStrategy, FitReport, WorkerReport
from recipes import plots, summary
from recipes.digits import DigitsData, shifted
from recipes.record import RunRecord, WorkerRecord, _bounded

KEYS = {
    *("strategy", "topology", "world_size", "island", "epochs", "test_acc", "train_s", "samples_per_s", "consensus_distance"),
    *("train_loss", "period_mean", "averagings", "collectives_in_training", "workers"),
}
WORKER_KEYS = {
    *("rank", "steps", "samples", "exchanges", "bytes_sent", "staleness_mean", "staleness_p95", "staleness_max"),
    *("dropped", "busy_s", "wait_s"),
}


def made_up(*, gossip: bool) -> RunRecord:
    reports = [
        WorkerReport(
            rank, steps=2, samples=32, exchanges=3, bytes_sent=10**6, staleness_mean=0.5, staleness_p95=1.0, staleness_max=2
        )
        for rank in range(2)
    ]
    spans: list[Any] = [
        ("compute", 0.0, 0.4, None),
        ("exchange", 0.1, 0.2, 1),
        ("wait", 0.4, 0.5, None),
        ("evaluate", 0.6, 0.9, None),
    ]
    return RunRecord(
        train_s=1.0,
        collectives=0 if gossip else 9,
        epochs=[{"epoch": 0, "time/wall_s": 1.0, "train_loss": 1.0, "val_loss": 1.1, "val_acc": 0.5}],
        workers=[WorkerRecord(rank, 2, 32, 0.4, spans, [(0.2, 2.0), (0.4, 1.5)]) for rank in range(2)],
        report=vars(FitReport([], 0.25, 1)) | {"workers": [worker.as_dict() for worker in reports]} if gossip else None,
    )


@pytest.mark.parametrize("gossip", [True, False])
def test_the_summary_has_the_keys_of_the_design(gossip: bool) -> None:
    strategy = ADPSGDStrategy(topology="star") if gossip else DDPStrategy()
    result = summary.summarize(made_up(gossip=gossip), strategy=strategy, tested={"test_acc": 0.9})
    assert result.keys() == KEYS
    assert all(worker.keys() == WORKER_KEYS for worker in result["workers"])
    assert (result["strategy"], result["topology"]) == (("adpsgd", "star") if gossip else ("ddp", None))
    assert result["samples_per_s"] == 64.0


def test_what_ddp_has_not_is_null() -> None:
    result = summary.summarize(made_up(gossip=False), strategy=DDPStrategy(), tested={"test_acc": 0.9})
    assert result["consensus_distance"] is None
    assert result["workers"][0]["exchanges"] is None
    assert result["workers"][0]["steps"] == 2


@pytest.mark.parametrize("gossip", [True, False])
def test_the_table_fits_a_terminal_of_80_columns(gossip: bool, tmp_path: Path) -> None:
    strategy = ADPSGDStrategy() if gossip else DDPStrategy()
    text = io.StringIO()
    result = summary.summarize(made_up(gossip=gossip), strategy=strategy, tested={"test_acc": 0.9})
    summary.show(result, tmp_path, Console(file=text, width=80))
    assert "exchanges" in text.getvalue()
    assert "0.9000" in text.getvalue()
    assert "…" not in text.getvalue()


def test_the_table_of_a_long_run_fits_too(tmp_path: Path) -> None:
    result = summary.summarize(made_up(gossip=True), strategy=ADPSGDStrategy(), tested={"test_acc": 0.9})
    long = {"steps": 86_100, "samples": 2_755_200, "exchanges": 83_400, "bytes_sent": 96_170_000_000, "busy_s": 13_000.2}
    result["workers"] = [worker | long | {"staleness_mean": 10.97, "staleness_max": 170} for worker in result["workers"]]
    text = io.StringIO()
    summary.show(result, tmp_path, Console(file=text, width=80))
    assert "96170.0 MB" in text.getvalue()
    assert "…" not in text.getvalue()


def test_what_else_was_tested_is_in_the_summary_and_what_is_of_text_in_the_table(tmp_path: Path) -> None:
    tested = {"test_acc": 0.5, "test_loss": 1.4, "test_bpc": 2.0, "test_perplexity": 4.0}
    result = summary.summarize(made_up(gossip=False), strategy=DDPStrategy(), tested=tested)
    assert tested.items() <= result.items()
    text = io.StringIO()
    summary.show(result, tmp_path, Console(file=text, width=80))
    assert re.search(r"bits per character of the test text +2\.000 *\n", text.getvalue())


@pytest.mark.parametrize("gossip", [True, False])
def test_a_record_survives_its_file_and_gives_two_pictures(gossip: bool, tmp_path: Path) -> None:
    made_up(gossip=gossip).save(tmp_path)
    record = RunRecord.load(tmp_path)
    strategy = ADPSGDStrategy() if gossip else DDPStrategy()
    files = plots.draw(record, summary.summarize(record, strategy=strategy, tested={"test_acc": 0.9}), tmp_path)
    assert [path.read_bytes()[:4] for path in files] == [b"\x89PNG"] * 2
    events = json.loads(plots.trace(record, tmp_path).read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == sum(len(worker.spans) for worker in record.workers)


def test_a_long_lane_is_thinned_without_losing_time() -> None:
    spans: list[Any] = [("compute", i * 0.01, i * 0.01 + 0.01, None) for i in range(30_000)]
    thinned = _bounded(spans)
    assert len(thinned) <= 10_000
    assert sum(end_s - start_s for _, start_s, end_s, _ in thinned) == pytest.approx(300.0, rel=1e-6)


def test_the_digits_are_split_the_same_way_every_time_and_without_overlap() -> None:
    first, second = DigitsData(), DigitsData()
    assert torch.equal(first.test.tensors[0], second.test.tensors[0])
    assert (len(first.train), len(first.validation), len(first.test)) == (1277, 160, 360)


def test_shifted_images_keep_their_ink_unless_it_leaves_the_frame() -> None:
    images = torch.zeros(64, 1, 8, 8)
    images[:, 0, 4, 4] = 1.0
    moved = shifted(images, 1)
    assert moved.shape == images.shape
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(64))
    places = {tuple(place) for place in moved[:, 0].nonzero()[:, 1:].tolist()}
    assert places == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}
    assert torch.equal(shifted(images, 0), images)
