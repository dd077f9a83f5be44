"""Lost batches: what excluded workers have not finished of an epoch, and how the members make up for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import lightning.pytorch as pl

from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.workers import Workers
from lightning_gossip.strategies.data.batch_samplers import EpochBatches, EpochPosition, StaticBatches
from lightning_gossip.strategies.data.epoch_progress import FitWork
from lightning_gossip.strategies.lightning.loop_progress import align_epoch, resize_epoch
from lightning_gossip.strategies.lightning.worker_processes import processes_of


class HasBatches(Protocol):
    """FitWork and LoopWork, as far as lost batches need them."""

    @property
    def batches(self) -> EpochBatches | None:
        """The worker's batches; None where they are Lightning's own."""


class LostBatches:
    """The lost batches of a training, as one worker handles them. All members call the same methods at the same points.

    Args:
        work: the worker's batches.
        members: asked who is in the job; None where that does not change.
    """

    def __init__(self, work: HasBatches, members: Callable[[], Membership | None]) -> None:
        self._work = work
        self._members = members
        self._lost_in = -1  # the assignment in which the store was lost

    def lose_store(self) -> None:
        """Note, as all do, that a worker has lost the store, and its claims: nobody claims any more in this assignment."""
        batches = self._work.batches
        self._lost_in = -1 if batches is None else batches.assignments

    @property
    def _lost_store(self) -> bool:
        return self._work.batches is not None and self._work.batches.assignments == self._lost_in

    def are_assigned_to(self, generation: int) -> bool:
        """Whether the batches under way were assigned to this generation of members; True where they are Lightning's own."""
        batches = self._work.batches
        completion_log = None if batches is None else batches.completion_log
        return completion_log is None or (completion_log.generation == generation and not self._lost_store)

    def collect(self, members: Membership) -> None:
        """Let rank 0 hold what workers that were excluded since the assignment have not finished. Collective."""
        batches = self._work.batches
        if batches is None or batches.completion_log is None:
            return
        finished = [position for worker in members.excluded for position in batches.completion_log.read(str(worker))]
        self._agree_on_unclaimed(members)
        batches.unassigned = []  # of an earlier synchronisation point in this assignment: they are found again
        # the log of an excluded worker that still runs may grow, and not all may have reached the store that it is in
        everyones = members.gather(
            (batches.stepped() + batches.unstepped(), finished), kind="the unfinished batches of excluded workers"
        )
        unassigned = batches.find_unassigned(
            [theirs for theirs, _ in everyones], {position for _, theirs in everyones for position in theirs}
        )
        batches.unassigned = unassigned if members.rank == 0 else []

    def position(self, workers: Workers) -> EpochPosition:
        """Where the epoch stands. Collective.

        Args:
            workers: of the job.
        """
        batches, members = self._work.batches, self._members()
        assert batches is not None
        if self._agree_on_unclaimed(workers) is None and members is not None and not self._lost_store:
            self.lose_store()
            self.collect(members)
        while True:
            generation = None if members is None else members.generation
            everyones = workers.gather(batches.unstepped(), kind="what is left of the epoch")
            if members is None or members.generation == generation or members.outside:
                return batches.position([position for theirs in everyones for position in theirs])
            self.collect(members)  # one that held something has failed meanwhile

    def _agree_on_unclaimed(self, workers: Workers) -> int | None:
        """The first position that nobody has claimed, the same on all; None if all have lost that. Collective."""
        batches = self._work.batches
        assert batches is not None
        mine = None if self._lost_store else batches.first_unclaimed()
        known = [first for first in workers.gather(mine, kind="what nobody has claimed") if first is not None]
        first = known[0] if known else None
        batches.agree_on_unclaimed(first)
        return first


class LostBatchesOfFit(LostBatches):
    """The lost batches of a Trainer's fit, whose loop goes on with them.

    Args:
        trainer: of the fit.
        work: the worker's batches.
    """

    def __init__(self, trainer: pl.Trainer, work: FitWork) -> None:
        super().__init__(work, lambda: processes_of(trainer).members)
        self._trainer = trainer
        self._loader = work.loader

    def make_up(self, members: Membership) -> bool:
        """Assign what is left of the epoch to the members, although all have ended it. Collective.

        Returns:
            Whether there was anything.
        """
        batches = self._work.batches
        if batches is None or self._trainer.limit_train_batches != 1.0:
            return False  # of an epoch that is cut off, each worker's part is as good as another's
        position = self.position(members)
        if not position.pending and not position.pieces:
            return False
        self.follow_members()
        loop = self._trainer.fit_loop
        fetcher = loop._data_fetcher
        assert fetcher is not None
        batches.resume(position)
        self._loader.begin_again()
        if isinstance(batches, StaticBatches):
            align_epoch(self._trainer, batches.nominal_length - batches.resumed_share(position))
            fetcher.fetched += loop.epoch_loop.batch_progress.current.ready  # so that it knows the last batch
        loop.epoch_loop.batch_progress.is_last_batch = False
        return True

    def follow_members(self) -> None:
        """Make the next assignment one for the present members."""
        batches, fit_loop = self._work.batches, self._trainer.fit_loop
        if batches is None:
            fit_loop._combined_loader = None  # the loader is asked for again, and gets a sampler for these workers
            fit_loop.setup_data()
        else:
            batches.rank, batches.workers = processes_of(self._trainer).share_of_work
            if isinstance(batches, StaticBatches):
                resize_epoch(self._trainer, batches.nominal_length)
        fit_loop.epoch_loop.val_loop._combined_loader = None
