"""Changes of the membership during a fit: joiners are admitted, ranks change, lost batches are made up."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.workers import Workers
from lightning_gossip.strategies.data.batch_samplers import EpochPosition
from lightning_gossip.strategies.data.epoch_progress import FitWork
from lightning_gossip.strategies.data.step_accounting import Account
from lightning_gossip.strategies.elastic import state_transfer
from lightning_gossip.strategies.elastic.admission import Admission
from lightning_gossip.strategies.elastic.lost_batches import LostBatchesOfFit
from lightning_gossip.strategies.lightning import csv_logger_takeover
from lightning_gossip.strategies.lightning.worker_processes import processes_of
from lightning_gossip.strategies.state.shared_tensors import SharedModel, fingerprint
from lightning_gossip.strategies.worker_algorithm import Algorithm


class MembershipChanges:
    """What one worker does in a fit when members fail or join; nothing where failures are not survived.

    All members call the same methods at the same points.

    Args:
        trainer: of the fit.
        work: the worker's batches.
        account: the worker's steps.
        model: the worker's model.
    """

    def __init__(self, trainer: pl.Trainer, work: FitWork, account: Account, model: SharedModel) -> None:
        self._trainer = trainer
        self._work = work
        self._account = account
        self._lost_batches = LostBatchesOfFit(trainer, work)
        self._due = False  # members have changed since the last assignment of batches
        self._has_just_joined = False
        self._admission = Admission(
            processes_of(trainer),
            model,
            about=lambda: self._about,
            start_equal=lambda: processes_of(trainer).start_equal(),
            optimizers=lambda: trainer.optimizers,
        )

    def note(self) -> None:
        """Note that ranks are others than before; what depends on them follows where nothing is under way."""
        self._due = True
        if self._trainer.is_global_zero:
            csv_logger_takeover.take_over(self._trainer)

    def begin_fit(self) -> None:
        """Begin to look for join requests, or join."""
        members = self._members
        if members is None:
            return
        if members.outside:
            self._join(members, ready=0)
            self._due = False
            self._has_just_joined = True  # the others admit nobody else before this epoch
            self._lost_batches.follow_members()
        else:
            members.open_admission()

    def begin_epoch(self, algorithm: Algorithm | None) -> bool:
        """Admit workers that wait, or join; nobody has taken a batch of the epoch yet.

        Returns:
            Whether this worker has joined.
        """
        members = self._members
        joins = members is not None and members.outside
        if members is not None and joins:
            self._join(members, ready=1)
        elif members is not None and self._work.assigns_anew and not self._has_just_joined:
            self._admission.admit(members, self._take_snapshot)
        self._has_just_joined = False
        while self._due:  # a member may fail meanwhile
            self._due = False
            self._lost_batches.follow_members()
            if algorithm is not None:
                algorithm.follow_members()
        return joins

    def lose_store(self) -> None:
        """Note, as all do, that a worker has lost the store: batches are assigned anew where that can be."""
        self._lost_batches.lose_store()

    def position(self, workers: Workers) -> EpochPosition:
        """Where the epoch stands, where its batches are assigned by this package. Collective."""
        return self._lost_batches.position(workers)

    def collect_lost_batches(self) -> bool:
        """Collect what workers have not finished that were excluded since the assignment; False if there was none."""
        members = self._members
        if members is None or members.outside or self._lost_batches.are_assigned_to(members.generation):
            return False
        self._lost_batches.collect(members)
        return True

    def make_up_lost_batches(self, algorithm: Algorithm | None) -> bool:
        """Add make-up batches to an epoch that all have ended; False if there are none."""
        # if early stopping has ended the loop on any rank, there are no make-up batches anywhere
        members = self._members
        assert members is not None
        at_end = members.gather(bool(self._trainer.is_last_batch), kind="whether the epoch can go on")
        if not all(at_end) or not self._lost_batches.make_up(members):
            return False
        self._due = False
        if algorithm is not None:
            algorithm.follow_members()
        return True

    @property
    def is_excluded(self) -> bool:
        """Whether this worker was excluded, and has not joined again."""
        return self._members is not None and self._members.outside

    def end_fit(self) -> None:
        """Admit nobody any more."""
        if self._members is not None:
            self._members.close_admission()

    def _join(self, members: Membership, *, ready: int) -> None:
        def apply(snapshot: state_transfer.StateSnapshot) -> None:
            state_transfer.apply_snapshot(snapshot, self._trainer, self._work, ready=ready)
            self._account.steps = snapshot.steps
            self._due = True

        self._admission.join(members, apply)

    def _take_snapshot(self) -> state_transfer.StateSnapshot:
        return state_transfer.take_snapshot(self._trainer, self._work, steps=self._account.steps)

    @property
    def _about(self) -> str:
        return f"model {fingerprint(self._trainer.lightning_module):x}, data {self._work.about}"

    @property
    def _members(self) -> Membership | None:
        return processes_of(self._trainer).members
