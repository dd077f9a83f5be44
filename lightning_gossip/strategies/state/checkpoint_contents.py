"""What goes into checkpoints: the mean of the optimizers' states, and each worker's own state beside the file."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gossip.runtime.workers import Workers
from lightning_gossip.strategies.state.atomic_checkpoint_io import write_checkpoint
from lightning_gossip.strategies.state.optimizer_state import is_averaged

KEY = "lightning_gossip"  # of our part of the checkpoint
Key = tuple[int, str]


def mean_optimizer_state(state_dict: dict[str, Any], device: torch.device, workers: Workers) -> dict[str, Any]:
    """The state of one optimizer, its dense floating-point tensors replaced by their mean over the workers that have them.

    A worker that never used a parameter has no momentum for it, so the tensors present may differ. Collective.

    Args:
        state_dict: ``optimizer.state_dict()``; not changed.
        device: where the collectives of the workers' group run.
        workers: of that group.
    """
    return workers.attempt(lambda: _mean_optimizer_state(state_dict, device, workers))


def _mean_optimizer_state(state_dict: dict[str, Any], device: torch.device, workers: Workers) -> dict[str, Any]:
    # no gather after an all-reduce: a worker for which the latter failed would be a round behind
    mine: dict[Key, Tensor] = {
        (parameter, name): value
        for parameter, state in state_dict["state"].items()
        for name, value in state.items()
        if is_averaged(value)
    }
    everyones = workers.gather(
        {key: (tuple(value.shape), torch.promote_types(value.dtype, torch.float32)) for key, value in mine.items()},
        kind="the state of an optimizer",
    )
    result = {**state_dict, "state": {p: dict(state) for p, state in state_dict["state"].items()}}
    for key in sorted({key for present in everyones for key in present}):
        holders = [present[key] for present in everyones if key in present]
        shape, dtype = holders[0]
        total = torch.zeros(shape, dtype=dtype, device=device)
        own = mine.get(key)
        if own is not None:
            total.copy_(own)
        dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, group=workers.group)
        total /= len(holders)
        parameter, name = key
        result["state"].setdefault(parameter, {})[name] = total if own is None else total.to(own.device, own.dtype)
    return result


def rng_state() -> dict[str, Any]:
    """The state of this process's random generators, as tensors and plain values."""
    version, internal, gauss = random.getstate()
    algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [str(algorithm), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the random generators back to a state of :func:`rng_state`."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    algorithm, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def replica_path(checkpoint: str | os.PathLike[str], rank: int) -> Path:
    """Where a worker's own state lies beside a checkpoint."""
    return Path(f"{os.path.realpath(checkpoint)}.replicas") / f"rank{rank}.pt"


def save_replica(checkpoint: str | os.PathLike[str], rank: int, state: dict[str, Any]) -> None:
    """Write one worker's own state; whole or not at all."""
    write_checkpoint(state, replica_path(checkpoint, rank))


def load_replica(checkpoint: str | os.PathLike[str], rank: int) -> dict[str, Any] | None:
    """The state of one worker in a checkpoint, or None if there is none."""
    path = replica_path(checkpoint, rank)
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def remove_replicas(checkpoint: str | os.PathLike[str]) -> None:
    """Delete the states beside a checkpoint, if there are any."""
    shutil.rmtree(replica_path(checkpoint, 0).parent, ignore_errors=True)


def own_state(trainer: pl.Trainer) -> dict[str, Any]:
    """What one worker has for itself: model, optimizers, gradient scaler."""
    return {
        "model": trainer.lightning_module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "precision": trainer.precision_plugin.state_dict(),
    }


def load_own_state(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Put back a state of :func:`own_state`."""
    trainer.lightning_module.load_state_dict(state["model"])
    for optimizer, optimizer_state in zip(trainer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    if state["precision"]:
        trainer.precision_plugin.load_state_dict(state["precision"])
