"""What a step boundary costs, and how many exchanges there are a step: two workers, on two devices if there are two."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.loops import PRECISIONS, WARM, Loop, Precision, loop_of, run_steps
from benchmarks.gpu.machine import Setting
from benchmarks.harness import process_group, rank, run
from benchmarks.overhead import new_gossip

TIMEOUT_S = 170.0
SECONDS = 6.0  # of training, for each number; without, a few steps
BATCH, SIZE = 64, 224
_LEAST, _MOST = 20, 300  # steps


def measure(setting: Setting, left_s: float) -> list[dict[str, Any]]:
    """By precision, and with batches in pinned memory and not.

    Args:
        setting: of the run.
        left_s: seconds that it may take.
    """
    kinds = [(precision, pinned) for precision in PRECISIONS for pinned in (True, False)]
    if setting.quick:
        kinds = kinds[:2]
    parameters = {"cuda": setting.cuda, "kinds": kinds, "seconds": 0.0 if setting.quick else SECONDS}
    found: list[dict[str, Any]] = run(boundaries, parameters, hosts=(None, None), timeout_s=min(TIMEOUT_S, left_s))[0]
    return found


@process_group()
def boundaries(cuda: bool, kinds: list[tuple[Precision, bool]], seconds: float) -> list[dict[str, Any]]:
    """In each of two workers."""
    torch.set_num_threads(1)
    gossip = new_gossip()
    results = []
    for number, (precision, pinned) in enumerate(kinds):
        with loop_of(cuda, rank(), precision, pinned=pinned, batch=BATCH, size=SIZE) as loop:
            results.append({"precision": precision, "pinned": pinned, **_boundary(gossip, loop, number + 1, seconds)})
    gossip.close()
    return results


def _boundary(gossip: Any, loop: Loop, session: int, seconds: float) -> dict[str, Any]:
    """The same steps without gossip and with it, by both workers at the same time."""
    copy_s = loop.copy_s()
    dist.barrier()
    steps = _LEAST
    if seconds:
        first = run_steps(loop, lambda: None, _LEAST)["step_s"]
        steps = max(_LEAST, min(_MOST, int(seconds / first)))
        dist.barrier()
    plain = run_steps(loop, lambda: None, steps)

    replica = loop.replica()
    gossip.open(replica, session=session, layout=loop.layout)
    dist.barrier()
    before = gossip.counters.exchanges
    with_gossip = run_steps(loop, lambda: gossip.step(loop.tensors, step_s=plain["step_s"]), steps)
    exchanges = gossip.counters.exchanges - before
    dist.barrier()
    gossip.drain(loop.tensors)
    dist.barrier()
    return {
        "model_mb": replica.numel * replica.dtype.itemsize / 1e6,
        "copy_s": copy_s,
        "steps": steps,
        "plain": plain,
        "gossip": with_gossip,
        "copies": (with_gossip["step_s"] - plain["step_s"]) / copy_s,
        "boundary_copies": with_gossip["boundary_s"] / copy_s,
        "exchanges_per_step": exchanges / (steps + WARM),
    }
