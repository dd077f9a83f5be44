"""How the epoch's batches reach a worker: shared (each claims the next one) or in equal static shares.

Lightning is given a DataLoader over the user's data set with a batch sampler of ours. Without ``__len__`` (shared work)
Lightning fetches one batch ahead and so knows the last one when it comes; see docs/assumptions.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from lightning_gossip.algorithm.work import Batch, EpochPlan, at_least_one_each, check_enough_batches
from lightning_gossip.runtime.work_queue import EpochQueue, Store


def plan_of(loader: object, seed: int) -> EpochPlan | str:
    """The epoch that a DataLoader describes, or the reason why its batches cannot be handed out by us."""
    if type(loader) is not DataLoader:
        return f"the training loader is a {type(loader).__name__}, not a plain DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "the data set is iterable: it has no index to share"
    if type(loader.batch_sampler) is not BatchSampler:
        return "the DataLoader has a batch_sampler of its own, or no automatic batching"
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler) and not (sampler.replacement or sampler._num_samples):
        shuffle = True
    elif isinstance(sampler, SequentialSampler):
        shuffle = False
    else:
        return f"the DataLoader has a sampler of its own ({type(sampler).__name__})"
    return EpochPlan(len(loader.dataset), loader.batch_sampler.batch_size, shuffle, loader.drop_last, seed)  # type: ignore[arg-type]


def with_batch_sampler(loader: DataLoader[Any], batch_sampler: Sampler[Batch]) -> DataLoader[Any]:
    """The same loader, its batches drawn from another sampler."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
    )


def lookahead_of(loader: DataLoader[Any]) -> int:
    """Batches claimed ahead of the one in training: Lightning's own, and what the loader's processes prefetch."""
    return 1 + loader.num_workers * (loader.prefetch_factor or 0)


@dataclass
class EpochPosition:
    """Where an interrupted epoch stood: the batches of it that nobody has trained on. Plain values, for checkpoints."""

    epoch: int
    pending: list[int]  # indices into the plan's batches of this epoch
    pieces: list[Batch]  # sample indices of batches that an earlier resume had to cut finer


class SharedBatches(Sampler[Batch]):
    """The batches that this worker claims from the epoch shared by all. Has no length: nobody knows how many they will be.

    Args:
        plan: of the epoch, the same on all workers.
        store: holds the shared counter.
        key: prefix of this fit's keys in the store, the same on all workers and new for each fit.
        rank: this worker.
        workers: how many there are.
        lookahead: see :func:`lookahead_of`.
        epoch: asked for the current epoch when an iteration begins.
        batch_s: asked for this worker's time a batch in seconds.
    """

    def __init__(
        self,
        plan: EpochPlan,
        store: Store,
        key: str,
        *,
        rank: int,
        workers: int,
        lookahead: int,
        epoch: Callable[[], int],
        batch_s: Callable[[], float | None],
    ) -> None:
        check_enough_batches(len(plan), workers)
        self.plan = plan
        self.queue: EpochQueue | None = None
        self._store = store
        self._key = key
        self._rank = rank
        self._workers = workers
        self._lookahead = lookahead
        self._epoch = epoch
        self._batch_s = batch_s
        self._iterations = 0
        self._batches: list[Batch] = []  # of the current epoch, by position
        self._indices: list[int] | None = None  # of these batches in the plan; None if they were cut finer
        self._resume_at: EpochPosition | None = None

    @property
    def nominal_length(self) -> int:
        """Batches an epoch a worker if all were equally fast."""
        return math.ceil(len(self.plan) / self._workers)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._begin()
        queue = self.queue
        assert queue is not None
        while (position := queue.claim(self._batch_s())) is not None:
            yield batches[position]

    def resume(self, position: EpochPosition) -> None:
        """The next iteration over this epoch takes its pending batches only."""
        self._resume_at = position

    def unstepped(self) -> list[int]:
        """Positions that this worker has claimed in the current epoch and not trained on."""
        return [] if self.queue is None else self.queue.ledger.unstepped()

    def position(self, unstepped: list[int]) -> EpochPosition:
        """Where the epoch stands, given what all workers together hold; nobody may claim meanwhile."""
        queue = self.queue
        assert queue is not None
        pending = sorted([*unstepped, *queue.unclaimed()])
        if self._indices is None:
            return EpochPosition(self._epoch(), [], [self._batches[position] for position in pending])
        return EpochPosition(self._epoch(), [self._indices[position] for position in pending], [])

    def _begin(self) -> list[Batch]:
        epoch = self._epoch()
        batches = self.plan.batches(epoch)
        self._indices = list(range(len(batches)))
        resume, self._resume_at = self._resume_at, None
        if resume is not None and resume.epoch == epoch and (resume.pending or resume.pieces):
            left = [batches[index] for index in resume.pending] + resume.pieces
            batches = at_least_one_each(left, self._workers)
            self._indices = resume.pending if not resume.pieces and len(left) == len(batches) else None
        self._batches = batches
        self._iterations += 1
        self.queue = EpochQueue(
            self._store,
            f"{self._key}/{epoch}/{self._iterations}",
            rank=self._rank,
            workers=self._workers,
            batches=len(batches),
            lookahead=self._lookahead,
        )
        return batches


class StaticBatches(Sampler[Batch]):
    """Every n-th batch of the epoch, the same number for each worker; the last ones are repeated where it does not come out even.

    Args:
        plan: of the epoch, the same on all workers.
        rank: this worker.
        workers: how many there are.
        epoch: asked for the current epoch when an iteration begins.
    """

    def __init__(self, plan: EpochPlan, *, rank: int, workers: int, epoch: Callable[[], int]) -> None:
        check_enough_batches(len(plan), workers)
        self.plan = plan
        self._rank = rank
        self._workers = workers
        self._epoch = epoch
        self._skip: tuple[int, int] | None = None

    def __len__(self) -> int:
        return math.ceil(len(self.plan) / self._workers)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._epoch()
        batches = self.plan.batches(epoch)
        batches += batches[: len(self) * self._workers - len(batches)]
        skip, self._skip = self._skip, None
        done = skip[1] if skip is not None and skip[0] == epoch else 0
        yield from batches[self._rank :: self._workers][done:]

    def resume(self, epoch: int, done: int) -> None:
        """The next iteration over this epoch leaves out the first ``done`` batches, which were trained on before the stop."""
        self._skip = (epoch, done)
