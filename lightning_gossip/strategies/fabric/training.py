"""The training of one worker under Fabric: sessions of a user's loop, and the synchronisation points between them."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.utilities.data import _extract_batch_size
from torch import nn
from torch.utils.data import DataLoader

from lightning_gossip.algorithm.work_sharing import EpochPlan
from lightning_gossip.errors import ConfigurationError, PeerError, reason_of
from lightning_gossip.runtime.clock import Timeline, now_s
from lightning_gossip.runtime.process_end import call_at_exit
from lightning_gossip.runtime.sync_point import Agreement, Arrival, Purpose, SyncPoint, agree
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.data.batch_samplers import EpochBatches, SharedBatches
from lightning_gossip.strategies.data.dataloader import assigned_batches, lookahead_of
from lightning_gossip.strategies.data.step_accounting import Account
from lightning_gossip.strategies.elastic.lost_batches import LostBatches
from lightning_gossip.strategies.fit.fit import warn_once
from lightning_gossip.strategies.fit.meeting import meet
from lightning_gossip.strategies.state.shared_tensors import check_averaged_buffers
from lightning_gossip.strategies.worker_algorithm import Algorithm

log = logging.getLogger(__name__)
Places = tuple[int, ...]


class FabricTraining:
    """One worker's training, from ``fabric.launch()`` to the end of its process.

    A session is open from a loader's first batch to its last. In it no worker waits for another, unless the algorithm does. At
    its end all meet, and the model is the exact mean.

    Args:
        strategy: whose processes are connected, and whose algorithm trains.
        take_part: in what rank 0 does together with all workers between two batches, given what it says of it.
    """

    def __init__(self, strategy: DecentralizedStrategy, take_part: Callable[[Places], object]) -> None:
        self._strategy = strategy
        self._take_part = take_part
        self._timeline = strategy.timeline = Timeline()
        self.account = Account(strategy.global_rank, self._timeline)
        self.accumulates = False  # whether the gradients of the backward pass under way are not a whole step's
        self.planned_epochs: int | None = None  # of the whole run
        self.samples = 0
        self.batches: EpochBatches | None = None  # of the epoch under way, where they are assigned by this package
        self._modules = nn.ModuleList()
        self._model = strategy.shared_model(self._modules, strategy.fit_options.averaged_buffers)
        self._sync_point = SyncPoint(strategy.collectives_device, strategy.all_workers)
        self._algorithm: Algorithm | None = None
        self._has_started = self._has_closed = False
        self._in_session = False
        self._in_batch = False  # a batch is under way that is not counted yet
        self._epochs = 0
        self.share_of_epoch = 0.0  # of the epoch, that is done with the batch at hand
        self._loaders = 0
        self._key = ""  # of this training in the store
        self._lost = LostBatches(self, lambda: strategy.members)
        self._members_changed = False
        if strategy.members is not None:
            strategy.members.changed.append(self._note_change)
        call_at_exit(lambda: self.close(getattr(sys, "last_value", None)))

    # -- what is trained -----------------------------------------------------------------------------------------------

    def add(self, module: nn.Module) -> None:
        """A module is set up.

        Raises:
            ConfigurationError: if another one trains already.
        """
        if self._has_started:
            raise ConfigurationError("A module is set up after training has begun. Call fabric.setup for all of them before.")
        self._modules.append(module)

    def next_loader(self) -> int:
        """A number for the next loader, the same on all workers."""
        self._loaders += 1
        return self._loaders

    @property
    def place(self) -> tuple[int, int]:
        """This worker's rank, and how many workers there are."""
        return self._strategy.share_of_work

    @property
    def progress(self) -> float:
        """Epochs that all have trained, with the share of the one under way."""
        return self._epochs + self.share_of_epoch

    @property
    def left_early(self) -> bool:
        """Whether this worker left the last batches of the epoch to faster ones."""
        batches = self.batches
        return isinstance(batches, SharedBatches) and batches.queue is not None and batches.queue.left_early

    def assign(self, plan: EpochPlan, loader: DataLoader[Any], number: int) -> EpochBatches:
        """This worker's batches of the epochs that a loader describes. The first call is collective.

        Args:
            plan: of the epoch.
            loader: that reads them.
            number: of the loader, the same on all workers.
        """
        self._start()
        return assigned_batches(
            self._strategy,
            plan,
            static=self._strategy.fit_options.work_sharing is False,
            key=f"lightning_gossip/{self._key}/work/{number}",
            lookahead=lookahead_of(loader),
            batch_s=lambda: self.account.batch_s,
            epoch=lambda: self._epochs,
            training=lambda: True,
        )

    # -- in the order of a loop ----------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """A loop over a loader begins."""
        self.end_epoch()
        self._start()

    def session(self, loader: DataLoader[Any], batches: EpochBatches | None) -> Iterator[Any]:
        """The batches of one epoch; all workers meet at its end.

        Args:
            loader: reads them.
            batches: which; None where they are the user's own.
        """
        self.batches = batches
        while True:
            for batch in loader:
                self._begin_batch()
                self.samples += next((size for size in _extract_batch_size(batch) if size is not None), 1)
                yield batch
                self._end_batch()
            if not self._meet_at_end():
                return

    def before_backward(self) -> None:
        """A loop that iterates over something else begins its session here."""
        if not self._in_session:
            self._begin_batch()

    def after_backward(self) -> None:
        """A backward pass has ended."""
        if self._algorithm is not None and not self.accumulates:
            self._algorithm.reduce_gradients()

    def step(self, lr: float) -> None:
        """An optimizer has stepped: publish the model, take over merges, and meet the others if one of them asks for it."""
        self._end_batch()
        # a second optimizer's step on the same batch is a step too
        self.account.forward_passes = max(1, self.account.forward_passes)
        step = self.account.count_step(lr=lr, epoch=self._epochs)
        if self.planned_epochs is not None:
            step = replace(step, progress=min(1.0, self.progress / self.planned_epochs))
        if self._algorithm is None:
            return
        self._algorithm.step(step)
        if self._algorithm.sync_requested():
            self._synchronize(Purpose.REQUESTED)

    def end_epoch(self) -> None:
        """All workers meet; nothing where no session is open."""
        while self._in_session:
            self._meet_at_end()

    # -- what needs all workers ------------------------------------------------------------------------------------------

    def is_together(self, what: str, *, warns: bool = True) -> bool:
        """Whether a collective can be made now: not between two batches, where each worker is at a step of its own.

        Args:
            what: is made.
            warns: if it cannot.
        """
        if not self._in_session or (self._algorithm is not None and self._algorithm.in_step):
            return True
        if warns and warn_once(what):
            rank_zero_warn(
                f"Between two batches {what} needs all workers, and each is at a step of its own. Each worker gets its own"
                " value. Make it when the loader has ended, or after fabric.strategy.synchronize()."
            )
        return False

    def do_together(self, do: Callable[[], None], places: Places) -> None:
        """Do something that needs all workers: at once where they are together, else all meet for it, if this is rank 0.

        Args:
            do: what.
            places: says to the others what of it they take part in.
        """
        if not self._in_session:
            do()
        elif self._strategy.global_rank == 0:
            self._synchronize(Purpose.SAVE, asks=(places,), requests=True, do=do)
        elif warn_once("a checkpoint"):
            log.info("Rank %d leaves a checkpoint between two batches to rank 0.", self._strategy.global_rank)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None) -> None:
        """This worker's process ends. May be called twice.

        Args:
            error: by which, if there is one.
        """
        if self._has_closed:
            return
        self._has_closed = True
        members = self._strategy.members
        if members is not None and (error is not None or self._in_session):
            members.abort("It has ended in the middle of an epoch." if error is None else reason_of(error))
        if isinstance(self.batches, SharedBatches):
            self.batches.close()
        if self._algorithm is not None:
            self._algorithm.close(together=error is None and not self._in_session)
        if members is not None:
            members.rest()  # rank 0 may hold the store: it does not leave before the others

    # -- details -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """The first session is near: all workers are here. Collective, once."""
        if self._has_started:
            return
        self._has_started = True
        check_averaged_buffers(self._modules, self._strategy.fit_options.averaged_buffers)
        self._key = self._strategy.all_workers.broadcast(uuid.uuid4().hex[:12])
        self.account.begin(0, None)
        if self._strategy.workers > 1:
            self._algorithm = self._strategy.algorithm(self._timeline)
            self._algorithm.start()

    def _open(self) -> None:
        self._start()
        if self.batches is not None:
            self.batches.forget_agreement()
        self._model.open()
        if self._algorithm is not None:
            self._algorithm.open(self._model)
        self.account.open_session()
        self._in_session = True

    def _begin_batch(self) -> None:
        if not self._in_session:
            self._open()
        self._in_batch = True
        if self.batches is not None and (share := self.batches.progress) is not None:
            self.share_of_epoch = float(share)
        if self._algorithm is not None and self.account.forward_passes == 0:
            self._algorithm.begin_step()

    def _end_batch(self) -> None:
        """Count the batch under way: at its optimizer's step, or, if it has none, when the next batch is asked for."""
        if not self._in_batch:
            return
        self._in_batch = False
        if self._strategy.members is not None:
            self._strategy.members.monitor.raise_failure()
        if self.batches is not None:
            self.batches.step()
        self.account.end_batch(self._algorithm)

    def _meet_at_end(self) -> bool:
        """Meet the others at the end of the epoch; whether it goes on, with batches that a worker has left that has failed."""
        if not self._in_session:
            self._open()
        while not self._synchronize(Purpose.EPOCH_END).over:
            continue
        if self._makes_up():
            return True
        self._epochs, self.share_of_epoch = self._epochs + 1, 0.0
        self.batches = None
        return False

    def _synchronize(
        self,
        purpose: Purpose,
        *,
        asks: tuple[Places, ...] = (),
        requests: bool = False,
        do: Callable[[], None] | None = None,
    ) -> Agreement:
        """Meet once: the model becomes the exact mean. Those in the middle of an epoch go on afterwards."""
        algorithm, batches = self._algorithm, self.batches
        lost = (algorithm is not None and algorithm.lost_store) or (batches is not None and batches.lost_store)
        arrival = Arrival(purpose, self.account.steps, asks=asks, lost_store=lost)
        if algorithm is None:
            agreement = agree([arrival])
        else:
            if requests:
                algorithm.request_sync()
            agreement = self._meet(algorithm, arrival)
        self._in_session = False
        self.account.close_session()
        if agreement.lost_store:
            self._lost.lose_store()
            if algorithm is not None:
                algorithm.follow_members()
        if self._strategy.members is not None and self._strategy.members.outside:
            raise PeerError(
                "This worker sent no heartbeat for so long that the others go on without it (peer_timeout_s). A job of Fabric"
                " takes nobody in again: start all of it from its last checkpoint."
            )
        if agreement.asked:
            if do is not None:
                do()
            else:
                self._take_part(agreement.asked[0])
                self._strategy.barrier()
        if not agreement.over:
            self._open()
        return agreement

    def _meet(self, algorithm: Algorithm, arrival: Arrival) -> Agreement:
        met = meet(
            algorithm,
            self._model,
            self.account,
            self._sync_point,
            arrival,
            arrived_s=now_s(),
            tell=lambda: self.account.described(self, algorithm),
        )
        self.account.publish(met.told, lost=self._sync_point.workers.excluded)
        self._strategy.report = self.account.report
        return met.agreement

    def _makes_up(self) -> bool:
        """Assign what a worker that has failed has left of the epoch; False if there is nothing. All members call it."""
        members, batches = self._strategy.members, self.batches
        if members is None:
            return False
        goes_on = False
        if batches is not None and not self._lost.are_assigned_to(members.generation):
            self._lost.collect(members)
            position = self._lost.position(members)
            goes_on = bool(position.pending or position.pieces)
            batches.rank, batches.workers = self._strategy.share_of_work
            if goes_on:
                batches.resume(position)
        if self._members_changed:
            self._members_changed = False
            if self._algorithm is not None:
                self._algorithm.follow_members()
        return goes_on

    def _note_change(self) -> None:
        self._members_changed = True
