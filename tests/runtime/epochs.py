"""An epoch under virtual time: real queues on a real store, workers that claim as Lightning's fetcher and the DataLoader do."""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from lightning_gossip.runtime.work_queue import EpochQueue


@dataclass
class Worker:
    """What one worker did in the epoch."""

    step_s: float
    positions: list[int]
    held_at_leaving: int | None
    own_at_leaving: float
    finished_s: float
    longest_s: float


@dataclass
class Epoch:
    workers: list[Worker]
    batches: int

    @property
    def ends_s(self) -> float:
        return max(worker.finished_s for worker in self.workers)

    @property
    def ideal_s(self) -> float:
        """All together at their rates, or one batch each."""
        rate = sum(1 / worker.step_s for worker in self.workers)
        return max(self.batches / rate, max(worker.step_s for worker in self.workers))

    def waits(self) -> list[tuple[float, Worker]]:
        return [(self.ends_s - worker.finished_s, worker) for worker in self.workers]


class EagerQueue(EpochQueue):
    """Without the rule: whoever asks gets the next batch."""

    def _claim_shared(self, step_s: float | None) -> int | None:
        self._last_left = True
        return super()._claim_shared(step_s)


def run_epoch(
    step_times: Sequence[float],
    *,
    batches: int,
    lookahead: int | Sequence[int] = 1,
    noise: float = 0.0,
    known: bool = True,
    starts: Sequence[float] | None = None,
    seed: int = 0,
    queue: type[EpochQueue] = EpochQueue,
) -> Epoch:
    """One epoch: a worker claims ``lookahead`` batches up front and one more each time it begins one.

    Args:
        noise: each step takes the step time times a lognormal factor of this sigma and of median 1.
        known: the step times are known from an earlier epoch; otherwise the first claims are made blindly.
        starts: when each worker begins the epoch.
    """
    n = len(step_times)
    generator = np.random.default_rng(seed)
    store = dist.HashStore()
    lookaheads = [lookahead] * n if isinstance(lookahead, int) else list(lookahead)
    queues: dict[int, EpochQueue] = {}
    recent = [deque([p] if known else [], maxlen=9) for p in step_times]
    workers = [Worker(p, [], None, p, 0.0, 0.0) for p in step_times]
    running: dict[int, float] = {}  # the length of the step under way

    def claim(rank: int) -> None:
        own = statistics.median(recent[rank]) if recent[rank] else None
        position = queues[rank].claim(own)
        if position is not None:
            workers[rank].positions.append(position)
        elif queues[rank].left_early and workers[rank].held_at_leaving is None:
            workers[rank].held_at_leaving = queues[rank].ledger.held
            workers[rank].own_at_leaving = own or 0.0

    events = [((starts[rank] if starts else 0.0), rank) for rank in range(n)]
    heapq.heapify(events)
    while events:
        now, rank = heapq.heappop(events)
        if rank not in queues:
            queues[rank] = queue(
                store, "e", rank=rank, workers=n, batches=batches, lookahead=lookaheads[rank]
            )
            for _ in range(lookaheads[rank]):
                claim(rank)
        else:
            recent[rank].append(running.pop(rank))
            queues[rank].ledger.step()
            workers[rank].finished_s = now
        if queues[rank].ledger.held:
            claim(rank)
            factor = float(np.exp(noise * generator.standard_normal())) if noise else 1.0
            running[rank] = step_times[rank] * factor
            workers[rank].longest_s = max(workers[rank].longest_s, running[rank])
            heapq.heappush(events, (now + running[rank], rank))
    return Epoch(workers, batches)
