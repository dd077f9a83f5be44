"""All workers' models in one stacked tensor, and their gradients a batch of workers at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gossip.simulation.cluster.compute_times import generator_of
from lightning_gossip.simulation.problems.objectives import Batch, Objective
from lightning_gossip.simulation.problems.optimizers import BesideStatistics, InnerOptimizer, StackedOptimizer

_START, _NOISE = 1, 2  # streams of the run's seed, beside the compute times' 0


class Models:
    """The workers' x, one row a worker, and their inner optimizers.

    A worker's x changes only when its step ends, so its gradient may be computed at any time between the step's beginning and
    its end. The first one that is needed is computed together with those of all other steps under way: asynchronous workers
    so need about one batched computation a step of theirs.

    Args:
        objective: to minimise; None for models of no element.
        optimizer: of each worker.
        workers: n.
        seed: of the run.

    Attributes:
        x: shape (n, d).
        rows: its rows.
        numel: d.
    """

    def __init__(self, objective: Objective | None, optimizer: InnerOptimizer, *, workers: int, seed: int) -> None:
        self._objective = objective
        if objective is None:
            self.x = torch.empty(workers, 0, device="cpu")
        else:
            objective.check(workers)
            start = objective.start(torch.Generator().manual_seed((seed * 1_000_003 + _START) % 2**63))
            self.x = start.to(objective.dtype).repeat(workers, 1)
        self.rows = list(self.x.unbind())
        self.numel = self.x.shape[1]
        self.optimizer = self._stacked(optimizer)
        self._gradients = torch.empty_like(self.x)
        self._generators = [generator_of(seed, _NOISE, rank) for rank in range(workers)]
        self._waiting: dict[int, Batch] = {}  # steps under way whose gradient has not been computed
        self._ready: set[int] = set()

    def change_optimizer(self, options: InnerOptimizer) -> None:
        """Begin with another optimizer than the one that was given; before the first step."""
        self.optimizer = self._stacked(options)

    def _stacked(self, options: InnerOptimizer) -> StackedOptimizer:
        statistics = 0 if self._objective is None else self._objective.statistics
        if not statistics:
            return options.stacked(self.x)
        return BesideStatistics(options.stacked(self.x[:, :-statistics]), self.x, statistics)

    def begin(self, rank: int, batch: Batch) -> None:
        """Begin a step of a worker on a batch, at its x of now."""
        if self._objective is not None:
            self._waiting[rank] = batch

    def forget(self, rank: int) -> None:
        """Forget a step that a worker began and will not end."""
        self._waiting.pop(rank, None)
        self._ready.discard(rank)

    def step(self, rank: int, lr: float) -> None:
        """End a step of a worker: x ← x − lr · g, or as the optimizer has it."""
        if self._objective is None:
            return
        if rank not in self._ready:
            self._compute()
        self._ready.remove(rank)
        self.optimizer.step(rank, self._gradients[rank], lr)

    def step_together(self, ranks: Sequence[int], lr: float) -> None:
        """End the steps of workers of consecutive ranks, which have one x: each takes that of their mean gradient."""
        if len(ranks) == 1:
            self.step(ranks[0], lr)
            return
        if self._objective is None:
            return
        if not self._ready.issuperset(ranks):
            self._compute()
        self._ready.difference_update(ranks)
        rows = slice(ranks[0], ranks[-1] + 1)
        self.optimizer.step(rows, self._gradients[rows].mean(0).repeat(len(ranks), 1), lr)

    def gradients(self) -> Tensor:
        """The gradients of all workers, each of which has begun a step and now ends it; shape (n, d), the caller's own."""
        if self._objective is not None:
            self._compute()
            self._ready.clear()
        return self._gradients

    def _compute(self) -> None:
        assert self._objective is not None
        ranks: Sequence[int] = sorted(self._waiting)
        batches = [self._waiting[rank] for rank in ranks]
        generators = [self._generators[rank] for rank in ranks]
        if len(ranks) == len(self.rows):
            self._gradients.copy_(self._objective.gradients(self.x, ranks, batches, generators))
        else:
            index = torch.tensor(ranks, device="cpu")
            self._gradients[index] = self._objective.gradients(self.x[index], ranks, batches, generators)
        self._ready.update(ranks)
        self._waiting.clear()
