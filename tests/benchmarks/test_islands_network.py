"""A step of the benchmark of islands on links, without links."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.islands_network import Training
from benchmarks.network.workload import digits


def test_a_step_lasts_as_long_as_it_is_told_to(tmp_path: Path) -> None:
    training = Training("DDP", 0.2, tmp_path)
    samples = digits()[0]
    batch = [torch.stack(column) for column in zip(*(samples[index] for index in range(4)), strict=True)]
    began_s = time.monotonic()
    training.training_step(batch, 0).backward()
    assert time.monotonic() - began_s > 0.1
    assert all(parameter.grad is not None for parameter in training.parameters())
