"""The batches of one worker under Fabric: which loop over which loader is under way, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from weakref import WeakValueDictionary

from torch.utils.data import DataLoader

from lightning_gossip.algorithm.work_sharing import EpochPlan
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.data.batch_samplers import EpochBatches, EpochPosition, SharedBatches
from lightning_gossip.strategies.data.dataloader import assigned_batches, lookahead_of
from lightning_gossip.strategies.fabric.checkpoint import Position, Restored


class LoopWork:
    """What one worker has of the data, loop by loop. A loop over a loader is a *pass*; it is an epoch of that loader's data.

    Args:
        strategy: whose workers.
        batch_s: asked for this worker's time a batch in seconds.
        epochs: asked how many the whole run has; None if nobody knows.

    Attributes:
        batches: of the pass under way; None between two, and where they are the user's own.
        passes: that all workers have ended.
        passes_in_epoch: those of them in the epoch of the user's loop that is under way.
        share: of the pass under way, that all have done with the batch at hand.
        samples: that this worker has had.
        key: of the training in the store, the same on all workers.
        restored: of the checkpoint that the next pass goes on from.
    """

    def __init__(
        self, strategy: DecentralizedStrategy, *, batch_s: Callable[[], float | None], epochs: Callable[[], int | None]
    ) -> None:
        self._strategy = strategy
        self._batch_s = batch_s
        self._epochs = epochs
        self.batches: EpochBatches | None = None
        self.passes = 0
        self.passes_in_epoch = 0
        self.share = 0.0
        self.samples = 0
        self.key = ""
        self.restored: Restored | None = None
        self._loaders = 0  # that were set up
        self._plans: list[Callable[[], EpochPlan | None]] = []  # of those that were set up before the first epoch
        self._about: str | None = None
        self._loader = 0  # number of the loader of the pass under way
        self._loops = False  # whether the user's loop over it is between two of its batches
        # by the loader's number; a script that sets loaders up anew each epoch lets go of the old ones
        self._assigned: WeakValueDictionary[int, EpochBatches] = WeakValueDictionary()
        self._assignments: dict[int, int] = {}  # of the others, when they took this worker in

    def next_loader(self, plan: Callable[[], EpochPlan | None]) -> int:
        """A number for the next loader, the same on all workers.

        Args:
            plan: tells the loader's epoch; None where the batches are the user's own.
        """
        if self._about is None:
            self._plans.append(plan)
        self._loaders += 1
        return self._loaders

    @property
    def about(self) -> str:
        """The data of the loaders that were set up before the first epoch: equal on all workers, and on joiners."""
        if self._about is None:
            plans = [plan() for plan in self._plans]
            self._about = str([None if plan is None else asdict(plan) for plan in plans])
            self._plans.clear()
        return self._about

    @property
    def progress(self) -> float:
        """Passes that all have ended, with the share of the one under way."""
        return self.passes + self.share

    @property
    def share_of_run(self) -> float | None:
        """Which share of the whole run is done, in [0, 1]; None if nobody knows how long it is."""
        epochs = self._epochs()
        return None if epochs is None else min(1.0, self.progress / epochs)

    @property
    def left_early(self) -> bool:
        """Whether this worker left the last batches of the pass to faster ones."""
        batches = self.batches
        return isinstance(batches, SharedBatches) and batches.queue is not None and batches.queue.left_early

    @property
    def lost_store(self) -> bool:
        """Whether this worker can claim no more."""
        return self.batches is not None and self.batches.lost_store

    # -- a pass --------------------------------------------------------------------------------------------------------

    def assign(self, plan: EpochPlan, loader: DataLoader[Any], number: int) -> EpochBatches:
        """This worker's batches of a pass that begins.

        Args:
            plan: of the epoch.
            loader: that reads them.
            number: of the loader, the same on all workers.
        """
        batches = self._assigned.get(number)
        if batches is None:
            batches = self._assigned[number] = assigned_batches(
                self._strategy,
                plan,
                static=self._strategy.fit_options.work_sharing is False,
                key=self._key_of(number),
                lookahead=lookahead_of(loader),
                batch_s=self._batch_s,
                epoch=lambda: self.passes,
                training=lambda: True,
            )
            batches.assignments = self._assignments.get(number, 0)
        batches.rank, batches.workers = self._strategy.share_of_work
        batches.read(plan, lookahead=lookahead_of(loader))  # a data set may have grown
        restored, self.restored = self.restored, None
        left = None if restored is None else restored.position_in(number, plan)
        if left is not None:
            batches.resume(left)
        return batches

    @contextmanager
    def looping(self, batches: EpochBatches | None, number: int) -> Iterator[None]:
        """The user's loop over a loader.

        Args:
            batches: of this worker; None where they are the user's own.
            number: of the loader.
        """
        self.batches, self._loader, self._loops = batches, number, True
        try:
            yield
        finally:  # where the loop is left by break too
            self._loops = False

    @property
    def is_in_loop(self) -> bool:
        """Whether the user's loop over a loader has begun and not ended: what is iterated now is inside it."""
        return self._loops

    @property
    def is_shared(self) -> bool:
        """Whether workers claim the batches of the pass under way."""
        return isinstance(self.batches, SharedBatches)

    def begin_batch(self) -> None:
        """Note which share of the pass is done with the batch that has been fetched."""
        if self.batches is not None and (share := self.batches.progress) is not None:
            self.share = float(share)

    def end_batch(self) -> None:
        """Mark the batch under way as trained on."""
        if self.batches is not None:
            self.batches.step()

    def end(self) -> None:
        """End the pass, as all workers do."""
        self.passes, self.passes_in_epoch, self.share = self.passes + 1, self.passes_in_epoch + 1, 0.0
        self.batches = None

    def position(self, left: EpochPosition) -> Position:
        """Where the pass stands.

        Args:
            left: of it, by all workers.
        """
        assert self.batches is not None
        return Position(self._loader, self.batches.plan, left)

    def close(self) -> None:
        """Take no batch any more."""
        for batches in self._assigned.values():
            if isinstance(batches, SharedBatches):
                batches.close()

    # -- joiners -------------------------------------------------------------------------------------------------------

    def assignments(self) -> dict[int, int]:
        """How often the batches of each loader were assigned, by the loader's number."""
        return {number: batches.assignments for number, batches in self._assigned.items()}

    @property
    def loaders(self) -> int:
        """How many were set up."""
        return self._loaders

    def follow(self, key: str, passes: int, loaders: int, assignments: dict[int, int]) -> None:
        """Take batches of the others' passes.

        Args:
            key, passes, loaders: of theirs.
            assignments: what :meth:`assignments` has told them.
        """
        self.key, self.passes, self._loaders, self.restored = key, passes, loaders, None
        self._assignments = assignments
        for number, batches in self._assigned.items():
            batches.assignments = assignments.get(number, 0)
            batches.move_to(self._key_of(number))

    def _key_of(self, loader: int) -> str:
        return f"lightning_gossip/{self.key}/work/{loader}"
