"""What goes into checkpoints: the mean of the optimizers' states, and each worker's own state beside the file."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from lightning_gossip.runtime.workers import Workers
from lightning_gossip.strategies.state.atomic_checkpoint_io import write_checkpoint
from lightning_gossip.strategies.state.optimizer_means import described, means

KEY = "lightning_gossip"  # of our part of the checkpoint


def mean_optimizer_state(
    state_dict: dict[str, Any], device: torch.device, workers: Workers, *, keeps: Callable[[], bool]
) -> dict[str, Any]:
    """The state of one optimizer, averaged over the workers (:mod:`~lightning_gossip.strategies.state.optimizer_means`).

    The means are in host memory, of those only that write them: beside a worker's own state a device holds no other. A worker
    that never used a parameter has no momentum for it, so the tensors present may differ. Collective.

    Args:
        state_dict: ``optimizer.state_dict()``; not changed.
        device: where the collectives of the workers' group run.
        workers: of that group.
        keeps: whether this worker wants it, which rank 0 may only: the others get it with an empty ``"state"``. Asked anew when
            a worker has failed meanwhile.
    """

    def make() -> dict[str, Any]:
        # no gather after an all-reduce: a worker for which the latter failed would be a round behind
        kept: dict[int, dict[str, Any]] = {}
        states, keep = state_dict["state"], keeps()
        everyones = workers.gather(described(states, part=_itself), kind="the state of an optimizer")
        for parameter, name, value in means(states, everyones, group=workers.group, device=device, part=_itself):
            if keep:
                kept.setdefault(parameter, {})[name] = value
        return {**state_dict, "state": kept}

    return workers.attempt(make)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


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
