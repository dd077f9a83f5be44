"""An epoch under virtual time: real queues on a real store, workers that claim as Lightning's fetcher and the DataLoader do."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist

from lightning_gossip.runtime.work_sharing.claim_counter import EpochQueue, Speeds

FIRST_EPOCHS = [(4, 1), (4, 5), (16, 9), (128, 17)]  # workers, and batches that their loaders keep ahead
BATCHES_EACH = [3, 5, 8, 10, 12, 15, 20, 25, 30]  # that a worker's share of the epoch has


def first_epoch_bound_s(step_times: Sequence[float], *, batches: int, lookahead: int) -> float:
    """How long an epoch may take of which nothing is known when it begins.

    A slow worker makes the steps that its loader has prefetched before the first one, or its share if that is less; the others
    wait for them, if they are done sooner.
    """
    ideal_s = batches / sum(1 / step_s for step_s in step_times)
    share = math.ceil(batches / len(step_times))
    return max(min(lookahead + 1, share) * max(step_times), 1.06 * ideal_s + 1.0)


@dataclass
class Worker:
    """What one worker did in the epoch."""

    step_s: float
    positions: list[int] = field(default_factory=list)
    held_at_leaving: int | None = None  # None if it took batches until none were left
    first_s: float = 0.0  # when it had done the one batch that each worker is sure of
    finished_s: float = 0.0
    surprise_s: float = 0.0  # by how much the steps begun since its last claim took longer than it had reckoned


@dataclass
class Epoch:
    workers: list[Worker]
    batches: int
    started_s: float

    @property
    def ends_s(self) -> float:
        return max(worker.finished_s for worker in self.workers)

    @property
    def length_s(self) -> float:
        return self.ends_s - self.started_s

    @property
    def ideal_s(self) -> float:
        """All together at their rates, or one batch each."""
        rate = sum(1 / worker.step_s for worker in self.workers)
        return max(self.batches / rate, max(worker.step_s for worker in self.workers))

    def wait_s(self, worker: Worker) -> float:
        """For the others, beyond the one batch that each of them must do whatever it takes."""
        return self.ends_s - min(self.ends_s, max(worker.finished_s, *(w.first_s for w in self.workers)))


class EagerQueue(EpochQueue):
    """Without the rule: whoever asks gets the next batch."""

    def draw(self, step_s: float | None, held: int) -> int | None:
        self.protocol.stays = True
        return super().draw(step_s, held)


def run_epochs(
    step_times: Sequence[float],
    *,
    batches: int,
    epochs: int = 2,
    lookahead: int = 1,
    noise: float = 0.0,
    skew_s: float = 0.0,
    seed: int = 0,
    queue: type[EpochQueue] = EpochQueue,
) -> list[Epoch]:
    """Epochs one after the other; in the first one the first claims are made blindly, later the step times are known.

    A worker claims ``lookahead`` batches up front and one more each time it begins one.

    Args:
        noise: each step takes the step time times a lognormal factor of this sigma and of median 1.
        skew_s: the workers begin an epoch at random moments within this many seconds.
    """
    generator = np.random.default_rng(seed)
    store = dist.HashStore()
    recent: list[deque[float]] = [deque(maxlen=9) for _ in step_times]
    speeds = [Speeds(store, "fit", rank=rank, workers=len(step_times)) for rank in range(len(step_times))]
    history: list[Epoch] = []
    now = 0.0
    for number in range(epochs):
        n = len(step_times)
        workers = [Worker(p) for p in step_times]
        queues: dict[int, EpochQueue] = {}
        running: dict[int, float] = {}  # length of the step under way
        events = [(now + skew_s * float(generator.random()), rank) for rank in range(n)]
        history.append(Epoch(workers, batches, min(events)[0]))

        def claim(rank: int, queues: dict[int, EpochQueue] = queues, workers: list[Worker] = workers) -> None:
            own = statistics.median(recent[rank]) if recent[rank] else None
            position = queues[rank].claim(own)
            if position is not None:
                workers[rank].positions.append(position)
                workers[rank].surprise_s = -(queues[rank].ledger.held) * own if own else 0.0
            elif queues[rank].left_early and workers[rank].held_at_leaving is None:
                workers[rank].held_at_leaving = queues[rank].ledger.held

        heapq.heapify(events)
        while events:
            now, rank = heapq.heappop(events)
            worker = workers[rank]
            if rank in queues:
                queues[rank].ledger.step()
                recent[rank].append(running[rank])
                worker.finished_s = now
                worker.first_s = worker.first_s or now
            else:
                queues[rank] = queue(
                    store,
                    f"epoch {number}",
                    rank=rank,
                    workers=n,
                    batches=batches,
                    lookahead=lookahead,
                    speeds=speeds[rank],
                )
                for _ in range(lookahead):
                    claim(rank)
            if queues[rank].ledger.held:
                claim(rank)
                factor = float(np.exp(noise * generator.standard_normal())) if noise else 1.0
                running[rank] = step_times[rank] * factor
                worker.surprise_s += running[rank]
                heapq.heappush(events, (now + running[rank], rank))
        now = history[-1].ends_s
    return history
