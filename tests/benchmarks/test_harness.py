"""benchmarks/harness: workers that end, fail, hang and are stopped, and what they have written down."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness import Recorder, process_group, rank, recorded, run, wait, workers

pytestmark = pytest.mark.processes
HERE = (None, None)  # two workers on this machine


@process_group()
def add(number: int) -> list[float]:
    value = torch.tensor([float(number + rank())])
    dist.all_reduce(value)
    return [rank(), float(value)]


def fail() -> None:
    if rank() == 1:
        raise ValueError("no luck")
    time.sleep(60)


def write(folder: Path) -> None:
    for number in range(3):
        Recorder(folder).note(number=number)
    with open(folder / f"steps-{rank()}", "a") as file:
        file.write('{"half a')
    time.sleep(60)


def test_every_worker_has_a_rank_and_a_result() -> None:
    assert run(add, {"number": 10}, hosts=HERE, timeout_s=60) == [[0, 21.0], [1, 21.0]]


@pytest.mark.parametrize(("task", "error"), [(fail, (RuntimeError, "no luck")), (write, (TimeoutError, "within 1 s"))])
def test_a_worker_that_fails_and_one_that_hangs_are_said_at_once(task: Any, error: tuple[type[Exception], str]) -> None:
    with pytest.raises(error[0], match=error[1]):
        run(task, {}, hosts=HERE, timeout_s=60 if task is fail else 1)


def test_what_a_worker_has_written_counts_but_for_half_a_line(tmp_path: Path) -> None:
    with workers(write, {}, tmp_path, hosts=HERE) as started:
        while len(recorded(tmp_path)) < 6:
            assert not wait(started, 0.1)
    steps = recorded(tmp_path)
    assert steps[["rank", "number"]].to_numpy().tolist() == [[r, n] for r in range(2) for n in range(3)]
    assert not any(process.runs for process in started)
