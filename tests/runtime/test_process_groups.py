"""Which backends the default group has, and where our own collectives are made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gossip.runtime.process_groups import lacks_mean, make_default_group, where_collectives_run, with_host_backend
from tests.workers import run_processes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("asked", "device", "made"),
    [
        ("nccl", CUDA, "cpu:gloo,cuda:nccl"),
        ("NCCL", CUDA, "cpu:gloo,cuda:NCCL"),
        ("gloo", CUDA, "gloo"),
        ("gloo", CPU, "gloo"),
        ("cuda:nccl", CUDA, "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:nccl", CUDA, "cpu:gloo,cuda:nccl"),
        ("somebodys", CUDA, "somebodys"),  # for torch it works on all devices
    ],
)
def test_a_backend_that_works_on_the_device_only_gets_gloo_beside_it(asked: str, device: torch.device, made: str) -> None:
    assert with_host_backend(asked, device) == made
    assert set(dist.BackendConfig(made).device_backend_map.values() if "somebodys" not in made else ["gloo"]) & {"gloo"}


def test_without_a_group_tensors_stay_on_the_device() -> None:
    assert where_collectives_run(CUDA) == CUDA
    assert not lacks_mean(CPU)


def test_torchs_rank_stands_once_before_a_line_however_many_groups_there_were(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: print(error, file=sys.stderr))
    for _ in range(3):
        make_default_group("gloo", 10.0)(dist.HashStore(), 0, 1)
        dist.destroy_process_group()
    sys.excepthook(ValueError, ValueError("bad"), None)
    assert capsys.readouterr().err == "[rank0]: bad\n"


@pytest.mark.processes
def test_our_collectives_are_made_in_host_memory_where_the_group_works_on_it(tmp_path: Path) -> None:
    def script(rank: int) -> Any:
        store = dist.FileStore(str(tmp_path / "store2"), 2)
        found = [(where_collectives_run(CUDA), lacks_mean(CPU))]
        dist.barrier()
        for backend in ("cpu:gloo", "cuda:gloo"):
            dist.destroy_process_group()
            dist.init_process_group(backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=2)
            found.append((where_collectives_run(CUDA), lacks_mean(CPU)))
            store.set(f"{backend}/{rank}", "connected")
            store.wait([f"{backend}/0", f"{backend}/1"])  # else the other one may find this one's connection closed
        return found

    assert run_processes(script, tmp_path, world_size=2) == [[(CPU, False), (CPU, True), (CUDA, False)]] * 2
