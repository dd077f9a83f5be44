"""No checkpoint of islands is a mixture: all of its tensors are means after the same round, whoever dies while it is written.

Islands go on from models of their own (``at_rendezvous="evaluate"``), so a tensor from another island, another epoch or from
another set of islands would be another tensor.
"""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_checkpoint
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_gossip import ADPSGDStrategy
from lightning_gossip.strategies.islands import sharded_checkpoint
from lightning_gossip.strategies.state import atomic_checkpoint_io
from tests.strategies.jobs import job, kill_myself, store, survivors
from tests.strategies.launch import launch
from tests.strategies.models import Net, loader, trainer
from tests.strategies.test_sharded import ShardedNet, sharded, vector

pytestmark = pytest.mark.processes
SAMPLES, EPOCHS, DEADLY = 203, 3, 1  # island 0 dies while the checkpoint of epoch 1 is written


def _momenta(fit: Trainer, model: Any) -> Any:
    return vector(fit.optimizers[0].state[parameter]["momentum_buffer"] for parameter in model.parameters())


class Notes(Callback):
    """What each rank has when a checkpoint is put together; and who is to die in writing which one."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._dies = folder, os.environ["RANK"] == str(rank)
        self._epoch = -1

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        self._epoch = trainer.current_epoch
        name = f"{os.environ['RANK']}-{self._epoch}.npz"
        np.savez(self._folder / name, model=vector(pl_module.parameters()), momentum=_momenta(trainer, pl_module))

    def die(self) -> None:
        if self._dies and self._epoch == DEADLY:
            kill_myself()

    def before(self, module: Any, function: str) -> None:
        """Die before a function is called."""
        original = getattr(module, function)
        setattr(module, function, lambda *args, **kwargs: (self.die(), original(*args, **kwargs))[1])

    def after(self, module: Any, function: str) -> None:
        """Die after a function has returned."""
        original = getattr(module, function)
        setattr(module, function, lambda *args, **kwargs: (original(*args, **kwargs), self.die())[0])


def _tensor(path: Path) -> float:
    """What the folder of :func:`_written` holds."""
    found = {"state_dict": {"weight": torch.zeros(2)}}
    dist_checkpoint.load(found, checkpoint_id=path)
    assert torch.load(path / _METADATA_FILENAME, weights_only=True) == {"epoch": int(found["state_dict"]["weight"][0])}
    return float(found["state_dict"]["weight"][0])


def _write(path: Path, number: int) -> None:
    checkpoint = {"state_dict": {"weight": torch.full((2,), float(number))}, "epoch": number}
    sharded_checkpoint.write_shards(checkpoint, path, is_first=dist.get_rank() == 0)


def _killed_while_it_deletes(path: str) -> Any:
    """Two checkpoints of one name; the first rank ends while it deletes the first of them, and writes a third one."""
    rank, folder = int(os.environ["RANK"]), Path(path)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    _write(folder, 1)
    rmtree = shutil.rmtree

    def killed(target: Path, **_: Any) -> None:
        if target.exists():
            (target / _METADATA_FILENAME).unlink()
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) if rank == 0 else nullcontext():
        patch.setattr(sharded_checkpoint.shutil, "rmtree", killed)
        _write(folder, 2)
    assert sharded_checkpoint.shutil.rmtree is rmtree
    dist.barrier()
    found = [_tensor(folder)]
    dist.barrier()
    _write(folder, 3)
    dist.barrier()
    found.append(_tensor(folder))
    dist.destroy_process_group()
    return found


def test_while_an_old_folder_is_deleted_the_new_one_has_its_name(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    assert launch(_killed_while_it_deletes, str(path)) == [[2.0, 3.0]] * 2
    assert list(tmp_path.iterdir()) == [path]


def _beside_what_cannot_be_removed(path: str) -> float:
    """As a network file system keeps a file that a process has open."""
    rank, folder = int(os.environ["RANK"]), Path(path)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint.shutil, "rmtree", lambda target, **_: None)
        _write(folder, 1)
    dist.barrier()
    found = _tensor(folder)
    dist.destroy_process_group()
    return found


def test_a_partial_folder_that_is_there_is_written_to(tmp_path: Path) -> None:
    path, partial = tmp_path / "last.ckpt", tmp_path / ".last.ckpt.partial"
    partial.mkdir()
    (partial / ".nfs0001").touch()
    assert launch(_beside_what_cannot_be_removed, str(path)) == [1.0, 1.0]


def test_a_checkpoint_is_put_back_if_the_next_one_is_not_written(tmp_path: Path) -> None:
    path, link = tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    path.mkdir()
    (path / _METADATA_FILENAME).write_bytes(b"old")
    link.symlink_to(path)
    with pytest.raises(FileNotFoundError), sharded_checkpoint.set_aside(path):
        path.read_bytes()  # which is not there meanwhile
    with sharded_checkpoint.set_aside(link):
        link.write_bytes(b"new")
    assert sorted(tmp_path.iterdir()) == [path, link]
    assert ((path / _METADATA_FILENAME).read_bytes(), link.read_bytes()) == (b"old", b"new")
    (tmp_path / "folder" / "data").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match="is a folder, and no checkpoint"), sharded_checkpoint.set_aside(path.parent):
        raise AssertionError


def _fit(address: str, folder: str, in_shards: bool, rank: int, when: str) -> Any:
    seed_everything(1)
    options: dict[str, Any] = {"store": address, "peer_timeout_s": 5.0, "at_rendezvous": "evaluate", "exchanges_per_step": 0.1}
    notes = Notes(Path(folder), rank)
    if in_shards:  # before this rank's shards are written, or when all are and the folder is not yet in its place
        (notes.after if when == "written" else notes.before)(sharded_checkpoint, "_distributed_checkpoint_save")
    else:  # before the file is written, or when it is and not yet in its place
        notes.before(*((atomic_checkpoint_io.os, "replace") if when == "written" else (atomic_checkpoint_io, "_save")))
    strategy = sharded(**options) if in_shards else ADPSGDStrategy(island=2, timeout=60.0, **options)
    saver = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
    model = ShardedNet() if in_shards else Net()
    fit = trainer(strategy=strategy, max_epochs=EPOCHS, callbacks=[saver, notes])
    fit.fit(model, loader(SAMPLES), loader(50, shuffle=False))
    return strategy.report.lost


def _loaded(path: Path, scratch: Path) -> tuple[Any, Any]:
    """Parameters and momenta of a checkpoint, each in one vector."""
    if path.is_dir():
        assert (path / _METADATA_FILENAME).is_file()
        dcp_to_torch_save(path, scratch)
        path = scratch
    found = torch.load(path, weights_only=False)
    weights = {name: tensor for name, tensor in found["state_dict"].items() if name.endswith(("weight", "bias"))}
    state = found["optimizer_0"] if "optimizer_0" in found else found["optimizer_states"][0]
    names = list(weights) if "optimizer_0" in found else sorted(state["state"])
    return vector(weights.values()), vector(state["state"][name]["momentum_buffer"] for name in names)


@pytest.mark.parametrize(
    ("in_shards", "rank", "when"),
    [
        pytest.param(True, 1, "begun", id="shards, one rank has not written its own"),
        pytest.param(True, 0, "written", id="shards, all written", marks=pytest.mark.slow),
        pytest.param(False, 0, "begun", id="one file, not begun", marks=pytest.mark.slow),
        pytest.param(False, 0, "written", id="one file, written", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_is_of_one_round_also_where_its_writers_die(tmp_path: Path, in_shards: bool, rank: int, when: str) -> None:
    with store() as address, job(_fit, address, str(tmp_path), in_shards, rank, when, workers=4) as running:
        running.start_all()
        assert survivors(running.outcomes(timeout_s=240.0)) == [[0], [0]]
    written = sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".ckpt")
    assert written == [f"epoch={epoch}.ckpt" for epoch in range(EPOCHS)]
    models = []
    for epoch in range(EPOCHS):
        noted = {of: np.load(tmp_path / f"{of}-{epoch}.npz") for of in range(4 if epoch <= DEADLY else 0)}
        noted |= {of: np.load(tmp_path / f"{of}-{epoch}.npz") for of in (2, 3)}
        model, momentum = _loaded(tmp_path / f"epoch={epoch}.ckpt", tmp_path / "whole.pt")
        for of in noted:  # the mean, which all had when it was put together
            assert np.array_equal(noted[of]["model"], model)
        islands = [noted[of]["momentum"] for of in (0, 2) if of in noted]
        assert len(islands) == (2 if epoch <= DEADLY else 1)
        assert np.allclose(momentum, sum(islands) / len(islands), atol=1e-7)
        if len(islands) == 2:
            assert not np.allclose(islands[0], islands[1])
        models.append(model)
    assert not np.array_equal(models[0], models[1])
    assert not np.array_equal(models[1], models[2])
