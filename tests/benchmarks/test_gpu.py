"""benchmarks/gpu: the whole script on the emulated device, and its parts that are pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as script
from benchmarks.gpu.suite import marked, told
from benchmarks.gpu.trace import NAME, events_of, overlap


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="make gpu runs it on the device")
def test_without_cuda_all_of_it_runs_on_an_emulated_device(tmp_path: Path) -> None:
    assert script.main(["--quick", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["failed"] == {}
    assert list(found["left_out"]) == ["suite"]
    assert "nothing here is a measurement of a GPU" in found["limits"][0]

    pinned, pageable = found["overhead"]
    assert pinned["exchanges_per_step"] > 0.3
    assert pinned["gossip"]["ahead"] > pageable["gossip"]["ahead"]  # whose batches make the host wait for the device
    assert found["trace"]["overlap"] > 0.1
    assert events_of(tmp_path / NAME)
    assert list(found["training"]) == ["adpsgd", "periodic_averaging", "ddp"]
    for result in found["training"].values():
        assert result["last_loss"] < result["first_loss"]
        assert result["images_per_s"] > 0
    recovery = found["recovery"]
    assert (recovery["samples_missing"], recovery["workers_at_the_end"], recovery["models_equal"]) == (0, 3, True)
    assert recovery["steps_of_the_returned"] > 0

    page = (tmp_path / "gpu.html").read_text()
    for title in (
        "What a step boundary costs",
        "Training with Lightning",
        "started again",
        "Copies beside computing",
        "left out",
    ):
        assert title in page


def test_a_stage_that_fails_does_not_hold_up_the_others() -> None:
    stages = script.Stages(60.0)

    def fails(left_s: float) -> Any:
        raise RuntimeError("no memory")

    stages.run("suite", fails)
    stages.run("overhead", lambda left_s: left_s > 50)
    stages.run("trace", fails, unless="There is none.")
    assert stages.failed == {"suite": "RuntimeError: no memory"}
    assert stages.found == {"overhead": True}
    assert stages.left_out == {"trace": "There is none."}


def test_a_stage_for_which_no_time_is_left_is_not_begun() -> None:
    stages = script.Stages(5.0)
    stages.run("suite", lambda left_s: None)
    assert stages.found == {}
    assert stages.left_out == {"suite": "5 s of the time were left."}


def event(kind: str, stream: int, begin: float, end: float, nbytes: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "tid": stream, "ts": begin, "dur": end - begin, "args": {"bytes": nbytes}}


def test_the_overlap_is_of_the_gossips_large_copies_with_any_kernel() -> None:
    events = [
        event("kernel", 7, 0, 4),
        event("kernel", 7, 2, 6),
        event("kernel", 20, 9, 10),
        event("gpu_memcpy", 20, 5, 9, 100),
        event("gpu_memcpy", 7, 10, 20, 100),  # a batch
        event("gpu_memcpy", 20, 0, 1, 1),
        event("cpu_op", 7, 0, 10),
        {"ph": "M", "name": "process_name"},
    ]
    found = overlap(events, 50)
    assert found["copies"] == 1
    assert found["copies_s"] == pytest.approx(4e-6)
    assert found["kernels_s"] == pytest.approx(7e-6)
    assert found["overlap"] == pytest.approx(0.25)
    assert overlap([event("kernel", 7, 0, 1)], 50)["overlap"] is None
    assert overlap([], 50)["kernels_s"] == 0.0


def test_the_files_with_tests_for_a_gpu_are_found() -> None:
    names = {path.name for path in marked()}
    assert {"test_group_abort.py", "test_cuda_replica.py", "test_qsgd.py"} <= names
    assert "test_replica.py" not in names


def test_what_pytest_reports_is_told_by_name(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="x"/><testcase classname="a" name="y"><failure message="wrong"/>'
        '</testcase><testcase classname="a" name="z"><skipped message="one device"/></testcase></testsuite></testsuites>'
    )
    assert told(report) == {"passed": ["a.x"], "failed": {"a.y": "wrong"}, "skipped": {"a.z": "one device"}}
