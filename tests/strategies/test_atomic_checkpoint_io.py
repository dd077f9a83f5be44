"""A full disk, and other troubles of the writer: the old checkpoint stays whole."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn

from lightning_gossip import ADPSGDStrategy, DPSGDStrategy, PeerError
from lightning_gossip.strategies.state import atomic_checkpoint_io
from lightning_gossip.strategies.state.atomic_checkpoint_io import WholeFiles, write_whole
from tests.strategies.launch import launch
from tests.strategies.models import Net, loader, trainer


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.ckpt"
    for number in (1, 2):
        WholeFiles().save_checkpoint({"number": number}, path)
        assert torch.load(path, weights_only=True) == {"number": number}
    assert [file.name for file in path.parent.iterdir()] == ["a.ckpt"]


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"old")

    def full(file: BinaryIO) -> None:
        file.write(b"new")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, full)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(atomic_checkpoint_io.os, "fsync", lambda number: (done.append("fsync"), fsync(number))[1])
    monkeypatch.setattr(atomic_checkpoint_io.os, "replace", lambda old, new: (done.append("replace"), replace(old, new))[1])
    write_whole(tmp_path / "a", lambda file: None)
    assert done == ["fsync", "replace", "fsync"]


def test_a_users_own_checkpoint_io_is_kept() -> None:
    class Own(WholeFiles):
        pass

    own = Own()
    assert trainer(strategy=ADPSGDStrategy(checkpoint_io=own, accelerator=None), devices=1).strategy.checkpoint_io is own
    assert trainer(plugins=[own], devices=1).strategy.checkpoint_io is own
    assert type(trainer(devices=1).strategy.checkpoint_io) is WholeFiles


def test_a_checkpoint_that_is_written_beside_the_training_is_whole_too() -> None:
    class Own(WholeFiles):
        pass

    own = Own()
    assert type(trainer(plugins=[AsyncCheckpointIO()], devices=1).strategy.checkpoint_io.checkpoint_io) is WholeFiles
    assert trainer(plugins=[AsyncCheckpointIO(own)], devices=1).strategy.checkpoint_io.checkpoint_io is own


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for a few checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "gossip", disk], check=False).returncode:
        pytest.skip("needs root and tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


class FillsTheDisk(Callback):
    """Before the checkpoint of the second epoch."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk

    def on_validation_epoch_end(self, trainer: Any, model: Any) -> None:
        if trainer.current_epoch == 1 and trainer.is_global_zero:
            with (self.disk / "filler").open("wb", buffering=0) as filler:
                try:
                    while True:
                        filler.write(bytes(4096))
                except OSError:
                    return


def _with_a_full_disk(strategy: Any, disk: Path) -> str:
    model = Net(network=nn.Sequential(nn.Linear(8, 2000), nn.BatchNorm1d(2000), nn.ReLU(), nn.Linear(2000, 2)))
    keep = ModelCheckpoint(disk, filename="kept", enable_version_counter=False)
    t = trainer(strategy=strategy, max_epochs=3, callbacks=[keep, FillsTheDisk(disk)])
    try:
        t.fit(model, loader(160, 8), loader(32, shuffle=False))
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "options"),
    [(ADPSGDStrategy, {}), (ADPSGDStrategy, {"checkpoint": "replicas", "on_peer_failure": "raise"}), (DPSGDStrategy, {})],
    ids=["adpsgd", "replicas", "dpsgd"],
)
def test_a_full_disk_ends_the_job_and_the_old_checkpoint_loads(kind: Any, options: dict[str, Any], small_disk: Path) -> None:
    said = launch(_with_a_full_disk, kind(**options), small_disk, workers=2, timeout_s=60)
    assert any("No space left on device: the checkpoint has 0." in each and "MB are free" in each for each in said), said
    assert any("kept" in each or ".ckpt" in each for each in said), said
    assert all(each.startswith((PeerError.__name__, "OSError")) for each in said), said
    kept = torch.load(small_disk / "kept.ckpt", weights_only=True)
    assert kept["epoch"] == 0
    assert not list(small_disk.rglob("*.partial"))
