"""How the epoch's batches reach a worker: shared (each claims the next one) or in equal static shares.

They are batch samplers of the DataLoader that Lightning is given. While the training loop takes shared batches they have no
length, so that Lightning fetches one batch ahead and knows the last one when it comes; everybody else reads the nominal one
(docs/assumptions.md).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch.utils.data import Dataset, DistributedSampler, Sampler
from typing_extensions import override

from lightning_gossip.algorithm.islands.batches import Group, count_groups, groups
from lightning_gossip.algorithm.work_sharing import Batch, EpochPlan, at_least_one_each, check_enough_batches
from lightning_gossip.runtime.work_sharing.claim_counter import EpochQueue, Speeds, Store
from lightning_gossip.runtime.work_sharing.claim_prefetch import Claims
from lightning_gossip.runtime.work_sharing.completion_log import CompletionLog
from lightning_gossip.runtime.work_sharing.island_claims import ClaimList, FollowedClaims, FollowedQueue


@dataclass
class EpochPosition:
    """Where an interrupted epoch stood: the batches of it that nobody has trained on. Plain values, for checkpoints."""

    epoch: int
    pending: list[int]  # indices into the plan's batches of this epoch
    pieces: list[Batch]  # sample indices of batches that an earlier resume had to cut finer


class EpochBatches(Sampler[Batch], ABC):
    """The batches of an epoch that one worker trains on, one epoch after the other.

    Args:
        plan: of the epoch, the same on all workers.
        rank: this worker.
        workers: how many there are.
        epoch: asked for the current epoch when an iteration begins.
        training: asked whether an iteration that begins is the training loop's.
        completion_log: where finished batches are noted, for the others if this worker fails; None if nobody asks.
        island: ranks of an island (:mod:`lightning_gossip.algorithm.islands`); 1 without islands. A worker is an island then,
            what it takes at a position are as many batches, and ``rank`` is the island's place among the islands.
        index: which of them is this process's.
        leads: whether this process claims for its island, or follows its claims; None where it has no mates. Default: the first
            one does. (Tensor-parallel ranks take the same batch, so there may be more mates than batches.)
    """

    def __init__(
        self,
        plan: EpochPlan,
        *,
        rank: int,
        workers: int,
        epoch: Callable[[], int],
        training: Callable[[], bool],
        completion_log: CompletionLog | None = None,
        island: int = 1,
        index: int = 0,
        leads: bool | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.workers = workers
        self.island = island
        self.index = index
        self._leads = (index == 0 if island > 1 else None) if leads is None else leads
        self.completion_log = completion_log
        self._agreed: int | None = None  # the first position that nobody has claimed
        self.unassigned: list[int] = []  # claimed by workers that were excluded: as if this one held them
        self.assignments = 0  # how many iterations of the training loop there have been, the same on all workers
        self.sampler: Sampler[int] | None = None  # what the loader shows as its sampler
        self._epoch = epoch
        self._training = training
        self._resume_at: EpochPosition | None = None
        self._batches: list[Batch] = []  # of the current epoch, by position: this process's part of it
        self._groups: list[Group] | None = None  # by position, with islands
        self._indices: list[int] | None = None  # in the plan, of what positions are made of; None if that was cut finer
        self._epoch_of_batches = -1
        self._before = Fraction(0)  # share of the epoch trained on before the resume in its middle

    def __iter__(self) -> Iterator[Batch]:
        """The training loop's iteration hands batches out; any other one looks at this worker's nominal share."""
        return self._assign() if self._training() else iter(self.nominal_share())

    def __len__(self) -> int:
        """Batches an epoch if all workers were equally fast: :attr:`nominal_length`."""
        return self.nominal_length

    @property
    def batch_size(self) -> int:
        """How many samples a batch has, as the user's batch sampler says it."""
        return self.plan.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a smaller last batch is left out, as the user's batch sampler has it."""
        return self.plan.drop_last

    def read(self, plan: EpochPlan, *, lookahead: int) -> None:
        """Go on with other data from the next epoch on: the loader was made anew.

        Args:
            plan: of the epochs to come, the same on all workers.
            lookahead: batches that the loader keeps ahead of a step.

        Raises:
            ConfigurationError: if there are too few batches for the workers.
        """
        self.plan = plan

    def nominal_share(self) -> list[Batch]:
        """This worker's batches of the current epoch if all were equally fast."""
        batches = self._own_part(self._grouped(self.plan.batches(self._epoch())))
        return [batches[position] for position in equal_share(len(batches), self.rank, self.workers)]

    @abstractmethod
    def _assign(self) -> Iterator[Batch]:
        """This worker's batches of the epoch, for training."""

    @property
    def nominal_length(self) -> int:
        """How many batches each worker would get in an epoch if all were equally fast."""
        return math.ceil(self.positions / self.workers)

    @property
    def positions(self) -> int:
        """How many times in an epoch some worker takes a batch, or, with islands, an island one for each of its ranks."""
        return len(self.plan) if self.island == 1 else count_groups(self.plan, self.island)

    @property
    def batches(self) -> int:
        """How many batches all workers together have in the current epoch; fewer after a resume in its middle."""
        return len(self._batches)

    def share(self, batches: int) -> Fraction:
        """Which share of the whole epoch is done with so many batches of the current one, those before a resume included."""
        return self._whole(Fraction(batches, max(1, len(self._batches))))

    def _whole(self, share: Fraction) -> Fraction:
        """A share of what is left of the epoch after a resume, as a share of the whole epoch that is then done."""
        return self._before + (1 - self._before) * share if self._before else share

    @property
    @abstractmethod
    def progress(self) -> Fraction | None:
        """Which share of the whole epoch is done with the batch at hand; None before the first one."""

    @abstractmethod
    def step(self) -> int:
        """Note that the oldest batch assigned has been trained on; returns its position in the epoch."""

    @abstractmethod
    def unstepped(self) -> list[int]:
        """Positions of the epoch that this worker holds and has not trained on."""

    @abstractmethod
    def stepped(self) -> list[int]:
        """Positions of the epoch that this worker has trained on in this assignment."""

    def move_to(self, key: str) -> None:
        """Take part in the assignments under another prefix of keys."""
        if self.completion_log is not None:
            self.completion_log.key = key

    def find_unassigned(self, everyones: Iterable[Iterable[int]], finished: Iterable[int]) -> list[int]:
        """Positions of the epoch that excluded workers had claimed: no member has trained on them or holds them.

        Args:
            everyones: stepped and unstepped positions of the members.
            finished: those that excluded workers have trained on, by their completion logs.
        """
        known = {position for theirs in everyones for position in theirs}.union(finished, self._unclaimed())
        return [position for position in range(len(self._batches)) if position not in known]

    def _note(self, position: int) -> None:
        if self.completion_log is not None and self._leads is not False:  # what an island has finished its first rank has
            self.completion_log.finished(position)

    def first_unclaimed(self) -> int | None:
        """The first position of the epoch that nobody has claimed; None if that was lost. Meaningful while nobody claims."""
        return len(self._batches)

    def agree_on_unclaimed(self, first: int | None) -> None:
        """Note what all agree is the first position that nobody has claimed; None: nobody knows, since the store was lost."""
        self._agreed = len(self._batches) if first is None else first

    def forget_agreement(self) -> None:
        """Forget what was agreed on: workers claim again."""
        self._agreed = None

    @property
    def lost_store(self) -> bool:
        """Whether this worker can claim no more, since the store was lost."""
        return False

    def _unclaimed(self) -> range:
        first = self.first_unclaimed() if self._agreed is None else self._agreed
        return range(len(self._batches) if first is None else first, len(self._batches))

    def resume(self, position: EpochPosition) -> None:
        """Make the next iteration over this epoch take the batches that are left of it only."""
        self._resume_at = position

    def position(self, unstepped: Iterable[int]) -> EpochPosition:
        """Where the epoch stands, given what all workers together have not trained on; nobody may claim meanwhile."""
        pending = sorted({position for position in [*unstepped, *self._unclaimed()] if position < len(self._batches)})
        if self._indices is None:
            return EpochPosition(self._epoch_of_batches, [], [batch for at in pending for batch in self._batches_at(at)])
        return EpochPosition(
            self._epoch_of_batches, [self._indices[number] for at in pending for number in self._numbers_at(at)], []
        )

    def _batches_at(self, position: int) -> list[Batch]:
        return [self._batches[position]] if self._groups is None else self._groups[position].batches

    def _numbers_at(self, position: int) -> list[int]:
        return [position] if self._groups is None else self._groups[position].numbers

    def _grouped(self, batches: list[Batch]) -> list[Batch] | list[Group]:
        return batches if self.island == 1 else groups(batches, self.island)

    def _own_part(self, taken: list[Batch] | list[Group]) -> list[Batch]:
        """By position what this process trains on."""
        return [group.batches[self.index] if isinstance(group, Group) else group for group in taken]

    def _left(self, position: EpochPosition, batches: list[Batch]) -> list[Batch]:
        """What an epoch of these batches has left at a position, in batches of which each rank gets one at least."""
        left = [batches[index] for index in position.pending] + position.pieces
        return at_least_one_each(left, self.workers * self.island)

    def _begin(self) -> list[Batch]:
        """The batches of the epoch that begins or goes on."""
        epoch = self._epoch_of_batches = self._epoch()
        batches = self.plan.batches(epoch)
        self._indices, self._before = list(range(len(batches))), Fraction(0)
        resume, self._resume_at = self._resume_at, None
        if resume is not None and resume.epoch == epoch and (resume.pending or resume.pieces):
            left = sum(len(batches[index]) for index in resume.pending) + sum(map(len, resume.pieces))
            self._before = 1 - Fraction(left, sum(map(len, batches)))
            batches = self._left(resume, batches)
            whole = not resume.pieces and len(resume.pending) == len(batches)
            self._indices = resume.pending if whole else None
        taken = self._grouped(batches)
        self._groups = taken if self.island > 1 else None  # type: ignore[assignment]
        batches = self._batches = self._own_part(taken)
        self._agreed = None
        self.unassigned = []
        self.assignments += 1
        if self.completion_log is not None:
            self.completion_log.begin(f"{epoch}/{self.assignments}")
        return batches


class SharedBatches(EpochBatches):
    """The batches that this worker claims from the epoch shared by all. Nobody knows how many they will be.

    Args:
        plan, rank, workers, epoch, training, completion_log, island, index, leads: see :class:`EpochBatches`. In an island the
            first rank claims, and its mates follow.
        store: holds the shared counter; a connection for nothing else, since a claim may be under way while training goes on.
        listed: where the first rank of an island tells its mates what it has claimed; a connection for nothing else.
        renew: called when an assignment begins: connects with the store of the present members; whether it is another one.
        key: prefix of this fit's keys in the store, the same on all workers and new for each fit.
        lookahead: see :func:`~lightning_gossip.strategies.data.dataloader.lookahead_of`.
        batch_s: asked for this worker's time a batch in seconds.
        failed_ranks: asked at each assignment for a function that tells which of its ranks have failed since.
    """

    def __init__(
        self,
        plan: EpochPlan,
        *,
        rank: int,
        workers: int,
        epoch: Callable[[], int],
        training: Callable[[], bool],
        store: Store,
        key: str,
        lookahead: int,
        batch_s: Callable[[], float | None],
        renew: Callable[[], bool] = lambda: False,
        completion_log: CompletionLog | None = None,
        failed_ranks: Callable[[], Callable[[], frozenset[int]]] = lambda: frozenset,
        listed: Store | None = None,
        island: int = 1,
        index: int = 0,
        leads: bool | None = None,
    ) -> None:
        check_enough_batches(len(plan), workers * island)
        super().__init__(
            plan,
            rank=rank,
            workers=workers,
            epoch=epoch,
            training=training,
            completion_log=completion_log,
            island=island,
            index=index,
            leads=leads,
        )
        self._claims: Claims | FollowedClaims | None = None
        self._list: ClaimList | None = None  # of the first rank of an island
        self._speeds: Speeds | None = None  # of the present members
        self._store = store
        self._listed = store if listed is None else listed
        self._renew = renew
        self._key = key
        self._lookahead = lookahead
        self._batch_s = batch_s
        self._failed_ranks = failed_ranks

    @override
    def read(self, plan: EpochPlan, *, lookahead: int) -> None:
        check_enough_batches(len(plan), self.workers * self.island)
        super().read(plan, lookahead=lookahead)
        self._lookahead = lookahead

    @override
    def __len__(self) -> int:
        if self._training():
            raise TypeError("how many of the epoch's batches this worker will get is not known")  # as without a length
        return self.nominal_length

    @property
    def queue(self) -> EpochQueue | FollowedQueue | None:
        """The claim counter of the current assignment; None before the first."""
        return None if self._claims is None else self._claims.queue

    def close(self) -> None:
        """Claim no more. May be called twice."""
        if self._claims is not None:
            self._claims.close()

    @override
    def _assign(self) -> Iterator[Batch]:
        batches = self._begin()
        if self._renew():
            self._speeds = None  # what is known of them is not in this store
        log = self.completion_log
        scope, generation = ("together", 0) if log is None else (log.scope, log.generation)
        listed = f"{self._key}/{scope}/{self._epoch()}/{self.assignments}/island/{self.rank}"
        if self._claims is not None and self._leads is not None:
            self._claims.close()  # of an assignment that was left early: nobody waits for the rest of its list
        if self._leads is False and scope != "together":
            self._claims = None  # nothing is trained on before the island is taken in, and its first rank tells nobody
            yield from (batches[position] for position in equal_share(len(batches), self.rank, self.workers))
            return
        if self._leads is False:
            self._claims = FollowedClaims(self._listed, listed, len(batches))
            yield from (batches[position] for position in self._claims)
            return
        self._list = ClaimList(self._listed, listed) if self._leads else None
        speeds_key = f"{self._key}/{scope}/{generation}"
        if self._speeds is None or self._speeds.key != speeds_key:
            if self._speeds is not None:
                self._speeds.forget()
            self._speeds = Speeds(self._store, speeds_key, rank=self.rank, workers=self.workers)
        queue = EpochQueue(
            self._store,
            f"{self._key}/{scope}/{self._epoch()}/{self.assignments}",
            rank=self.rank,
            workers=self.workers,
            batches=len(batches),
            lookahead=self._lookahead,
            speeds=self._speeds,
            gone=self._failed_ranks(),
        )
        self._claims = Claims(queue, self._batch_s, tell=self._tell)
        yield from (batches[position] for position in self._claims)

    def _tell(self, position: int | None) -> None:
        if self._list is not None:
            self._list.tell(position)

    @override
    def move_to(self, key: str) -> None:
        super().move_to(key)
        self._key = key

    @property
    @override
    def progress(self) -> Fraction | None:
        return None if self.queue is None else self.share(self.queue.ledger.current + 1)

    @override
    def step(self) -> int:
        assert self.queue is not None
        position = self.queue.ledger.current
        self.queue.ledger.step()
        if self._list is not None:
            self._list.stepped(self.queue.ledger.stepped)
        self._note(position)
        return position

    @override
    def unstepped(self) -> list[int]:
        if self._claims is None:
            return []
        self._claims.settle()
        return self._claims.queue.ledger.unstepped() + self.unassigned

    @override
    def stepped(self) -> list[int]:
        return [] if self.queue is None else self.queue.ledger.stepped_on()

    @override
    def first_unclaimed(self) -> int | None:
        return len(self._batches) if self.queue is None else self.queue.first_unclaimed()

    @property
    @override
    def lost_store(self) -> bool:
        return self.queue is not None and self.queue.is_lost


class StaticBatches(EpochBatches):
    """Equal static shares of the epoch: every n-th batch for each worker; the first ones again where that is not even."""

    _own: Sequence[int] = ()  # positions of the assignment under way
    _stepped = 0  # how many of them have been trained on

    @override
    def _assign(self) -> Iterator[Batch]:
        batches = self._begin()
        self._own = equal_share(len(batches), self.rank, self.workers)
        self._stepped = 0
        for position in self._own:
            yield batches[position]

    def resumed_share(self, position: EpochPosition) -> int:
        """How many batches this worker gets of an epoch that goes on from a position."""
        left = len(self._grouped(self._left(position, self.plan.batches(position.epoch))))
        return math.ceil(left / self.workers)

    @property
    @override
    def progress(self) -> Fraction | None:
        return self._whole(Fraction(self._stepped + 1, len(self._own))) if self._own else None

    @override
    def step(self) -> int:
        self._stepped += 1
        self._note(self._own[self._stepped - 1])
        return self._own[self._stepped - 1]

    @override
    def unstepped(self) -> list[int]:
        return [*self._own[self._stepped :], *self.unassigned]

    @override
    def stepped(self) -> list[int]:
        return list(self._own[: self._stepped])


def equal_share(batches: int, rank: int, workers: int) -> list[int]:
    """Positions of every n-th batch, equally many for each worker: the first ones again where it does not come out even.

    >>> [equal_share(5, rank, 2) for rank in (0, 1)]
    [[0, 2, 4], [1, 3, 0]]
    """
    share = math.ceil(batches / workers)
    return [i % batches for i in range(rank, share * workers, workers)]


class NominalSampler(DistributedSampler[Any]):
    """What users read as the training loader's sampler: this worker's samples of the epoch if all were equally fast.

    Training does not draw from it, so ``set_epoch`` changes nothing: the epoch is the trainer's.

    Args:
        dataset: of the loader.
        batches: of this worker.
    """

    def __init__(self, dataset: Dataset[Any], batches: EpochBatches) -> None:
        plan = batches.plan
        super().__init__(
            dataset,
            num_replicas=batches.workers * batches.island,
            rank=batches.rank * batches.island + batches.index,
            shuffle=plan.shuffle,
            seed=plan.seed,
            drop_last=plan.drop_last,
        )
        self._batches = batches

    @override
    def __iter__(self) -> Iterator[int]:
        return (sample for batch in self._batches.nominal_share() for sample in batch)
