"""What this package adds to a checkpoint, and how a fit goes on from it."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_warn

from lightning_gossip.strategies.data.epoch_progress import FitWork
from lightning_gossip.strategies.lightning.loop_progress import mean_step, set_global_step
from lightning_gossip.strategies.lightning.worker_processes import processes_of
from lightning_gossip.strategies.state import checkpoint_contents
from lightning_gossip.strategies.worker_algorithm import Algorithm


def describe(
    trainer: pl.Trainer, work: FitWork, algorithm: Algorithm | None, *, steps: int, global_step: int, replicas: bool
) -> dict[str, Any]:
    """Where the fit stands, in plain values, on rank 0, which writes it. All workers call it together.

    Args:
        steps: that this worker has made.
        global_step: Lightning's, with which all workers go on; the file's own is that of the worker that writes it.
        replicas: whether each worker's own state is written beside the checkpoint.
    """
    mine = {
        "steps": steps,
        "unstepped": work.batches.unstepped() if work.batches is not None else [],
        "rng": checkpoint_contents.rng_state(),
        "algorithm": algorithm.state_dict() if algorithm is not None else {},
    }
    everyones = processes_of(trainer).all_workers.gather_for(0, mine, kind="where the fit stands") or [mine]
    return {
        "world_size": trainer.world_size,
        "island": _island_size(trainer),
        "strategy": getattr(trainer.strategy, "name", None),
        "steps": mean_step([theirs["steps"] for theirs in everyones]),
        "global_step": global_step,
        "work": work.state([position for theirs in everyones for position in theirs["unstepped"]]),
        "workers": [{"rng": theirs["rng"], "algorithm": theirs["algorithm"]} for theirs in everyones],
        "replicas": replicas,
    }


def _island_size(trainer: pl.Trainer) -> int:
    islands = processes_of(trainer).islands
    return 1 if islands is None else islands.size


def mark_as_unfinished(checkpoint: dict[str, Any]) -> None:
    """Let a fit that resumes from this go on in the middle of an epoch that all have left early, and whose end Lightning has
    counted already.

    Args:
        checkpoint: Lightning's, with our part in it.
    """
    work = checkpoint[checkpoint_contents.KEY]["work"]
    position = None if work is None else work["position"]
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    if position is None or not (position["pending"] or position["pieces"]):
        return
    if position["epoch"] != progress["current"]["processed"] - 1:
        return  # of the epoch under way
    for one in (progress["total"], progress["current"]):
        one["processed"] -= 1
        one["completed"] = min(one["completed"], one["processed"])


def apply(
    state: dict[str, Any],
    path: str | os.PathLike[str] | None,
    trainer: pl.Trainer,
    work: FitWork,
    algorithm: Algorithm | None,
) -> None:
    """Go on from what :func:`describe` said, as far as it fits the present workers. All workers call it together.

    Args:
        state: our part of the checkpoint.
        path: where the checkpoint lies.
    """
    work.resume(state["work"])
    set_global_step(trainer, state.get("global_step", trainer.global_step))
    name = getattr(trainer.strategy, "name", None)
    if algorithm is not None and state["strategy"] == name:
        algorithm.load_tensors(state.get("tensors", {}))
    rank, world_size = trainer.global_rank, trainer.world_size
    if state["world_size"] != world_size:
        what = "the mean model; each worker's own state" if state["replicas"] else "the mean model; random generators"
        rank_zero_warn(
            f"The checkpoint was written by {state['world_size']} workers and is resumed by {world_size}: all start from"
            f" {what} cannot be put back."
        )
        return
    own = None
    if state["replicas"] and state.get("island", 1) != _island_size(trainer):
        rank_zero_warn(
            f"The checkpoint was written by islands of {state.get('island', 1)} ranks and is resumed by islands of"
            f" {_island_size(trainer)}: all start from the mean model; each island's own state cannot be put back."
        )
    elif state["replicas"] and path is not None:
        own = checkpoint_contents.load_replica(path, processes_of(trainer).own_file[0])
        if not trainer.strategy.reduce_boolean_decision(own is not None):
            own = None
            rank_zero_warn(f"Some worker's own state is missing beside {os.fspath(path)!r}: all start from the mean.")
    if own is not None:
        processes_of(trainer).load_own_state(own)
        if algorithm is not None and state["strategy"] == name and own.get("tensors"):
            algorithm.load_tensors(own["tensors"])
    mine = state["workers"][rank]
    checkpoint_contents.set_rng_state(mine["rng"])
    if state["strategy"] != name:
        rank_zero_warn(
            f"The checkpoint was written by the strategy {state['strategy']!r} and is resumed by {name!r},"
            " whose own state begins anew."
        )
    elif algorithm is not None and mine["algorithm"]:
        algorithm.load_state_dict(mine["algorithm"])
