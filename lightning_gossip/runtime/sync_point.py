"""The synchronisation point: all workers say what they came for, and form the exact mean of their models.

Its collectives are the only ones of the gossip.

Every worker calls the same methods in the same order on one process group, that of all workers where nothing else is said.
:meth:`SyncPoint.agree` is where a fast worker waits for the slow ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gossip.algorithm.tensors.flat import chunk_slices
from lightning_gossip.errors import ConfigurationError, NonFiniteError
from lightning_gossip.runtime.workers import Workers

_CHUNK_NUMEL = 1 << 20  # elements per all-reduce: bounds the extra memory to one chunk


class Purpose(IntEnum):
    """Why a worker has come to a synchronisation point."""

    EPOCH_END = 1
    VALIDATE = 2
    SAVE = 3  # rank 0 was asked for something that all do together before they go on: a checkpoint
    STOP = 4  # somebody was told to stop (SIGTERM)
    REQUESTED = 5  # another worker has requested it
    COLLECTIVE = 6  # one that the user's code makes between two steps


_WAITS = (Purpose.EPOCH_END, Purpose.VALIDATE, Purpose.COLLECTIVE)


@dataclass(frozen=True)
class Arrival:
    """What one worker says when it comes to a synchronisation point.

    Args:
        purpose: why.
        optimizer_steps: that it has made.
        should_stop: whether its trainer wants to end the fit.
        what: the collective, if it came for one.
        asks: what it was asked to do together with all others; any picklable values.
        lost_store: whether it has lost the store since the batches were assigned.
        skips: whether it leaves out what is left of its epoch, validation included.
        share: of the epoch that is done with its last batch, as far as it knows.
    """

    purpose: Purpose
    optimizer_steps: int
    should_stop: bool = False
    what: str = ""
    asks: tuple[Any, ...] = ()
    lost_store: bool = False
    skips: bool = False
    share: Fraction = Fraction(0)


@dataclass(frozen=True)
class Agreement:
    """What all workers know once all have arrived.

    Args:
        stop: somebody came to stop, so all do.
        should_stop: some worker's trainer wants to end the fit.
        optimizer_steps: of each rank.
        asked: what rank 0 was asked for; all do it now.
        over: what workers wait for can begin. Otherwise some are in the middle of the epoch and go on with it, and those that
            wait for its end, a validation or a collective come again.
        lost_store: some worker has lost the store since the batches were assigned.
        skips: some worker leaves out the validation of this epoch, so all do.
        share: of the epoch that is done with the last batch of any worker.
    """

    stop: bool
    should_stop: bool
    optimizer_steps: tuple[int, ...]
    asked: tuple[Any, ...] = ()
    over: bool = True
    lost_store: bool = False
    skips: bool = False
    share: Fraction = Fraction(0)


def agree(arrivals: Sequence[Arrival]) -> Agreement:
    """What follows from what each came for, by rank. Pure: the same on all workers.

    Raises:
        ConfigurationError: if they wait for different things that cannot be done together.
    """
    stop = any(arrival.purpose is Purpose.STOP for arrival in arrivals)
    should_stop = any(arrival.should_stop for arrival in arrivals)
    waits = {(arrival.purpose, arrival.what) for arrival in arrivals if arrival.purpose in _WAITS}
    if should_stop:  # whoever leaves the epoch early validates too
        waits = {((Purpose.EPOCH_END, "") if purpose is Purpose.VALIDATE else (purpose, what)) for purpose, what in waits}
    passing = any(arrival.purpose not in _WAITS for arrival in arrivals)
    if len(waits) > 1 and not passing:
        came = ", ".join(f"rank {rank} for {arrival.what or arrival.purpose.name}" for rank, arrival in enumerate(arrivals))
        raise ConfigurationError(
            f"The workers came to a synchronisation point for different things: {came}. A validation or a collective inside an"
            " epoch needs all workers to come to it equally often: call it on every rank, or at the end of an epoch."
        )
    return Agreement(
        stop,
        should_stop,
        tuple(arrival.optimizer_steps for arrival in arrivals),
        arrivals[0].asks,
        stop or not passing,
        any(arrival.lost_store for arrival in arrivals),
        any(arrival.skips for arrival in arrivals),
        max(arrival.share for arrival in arrivals),
    )


class SyncPoint:
    """The collectives of one worker on a process group.

    Args:
        device: where the group's backend wants its tensors.
        workers: of the job; their group is the group.
        of: tells another group of these workers, of which this one is a member too; None for that of all of them.

    Attributes:
        device: as given.
        workers: as given.
    """

    def __init__(
        self, device: torch.device, workers: Workers, *, of: Callable[[], dist.ProcessGroup | None] | None = None
    ) -> None:
        self.workers = workers
        self.device = device
        self._of: Callable[[], dist.ProcessGroup | None] = (lambda: workers.group) if of is None else of

    def agree(self, mine: Arrival) -> Agreement:
        """Wait for every worker, and learn what each came for.

        Raises:
            PeerError: if a worker has ended.
            ConfigurationError: on all ranks, if they came for different things that cannot be done together.
        """
        return agree(self.workers.gather(mine, kind="a synchronisation point"))

    def average(self, flat: Tensor) -> float:
        """Replace a vector by its mean over all workers, the same bits on all of them.

        Where failures are survived, call it in ``workers.attempt``: it fails if a worker fails, and then the vector is of no
        use.

        Args:
            flat: shape (d,), changed in place.

        Returns:
            This worker's squared distance ‖x_i − x̄‖² to the mean.
        """
        return self._average(flat, dist.get_world_size(self._of()), takes_part=True)

    def average_of(self, flat: Tensor, *, takes_part: bool) -> float:
        """Replace a vector by its mean over the workers that take part; every worker gets it. At least one must.

        Args:
            flat: shape (d,), changed in place.
            takes_part: whether this worker's vector is part of the mean.

        Returns:
            This worker's squared distance to the mean; of no use where it does not take part.

        Raises:
            NonFiniteError: on all, if nobody takes part.
        """
        count = torch.tensor([float(takes_part)], dtype=torch.float64, device=self.device)
        dist.all_reduce(count, group=self._of())
        if not count:
            raise NonFiniteError("No worker is left whose model is finite.")
        return self._average(flat, int(count), takes_part=takes_part)

    def _average(self, flat: Tensor, count: int, *, takes_part: bool) -> float:
        def mean(chunk: slice, buffer: Tensor) -> None:
            if takes_part:
                buffer.copy_(flat[chunk])
            else:
                buffer.zero_()
            dist.all_reduce(buffer, group=self._of())
            buffer.div_(count)

        return self._replace(flat, mean)

    def adopt(self, flat: Tensor, model: Tensor | None, *, source: int) -> float:
        """Replace a vector by that of one rank.

        Args:
            flat: shape (d,), changed in place.
            model: shape (d,), on rank ``source``; None elsewhere.
            source: whose it is.

        Returns:
            This worker's squared distance to it before.
        """

        def theirs(chunk: slice, buffer: Tensor) -> None:
            if model is not None:
                buffer.copy_(model[chunk])
            dist.broadcast(buffer, group=self._of(), group_src=source)

        return self._replace(flat, theirs)

    def _replace(self, flat: Tensor, fill: Callable[[slice, Tensor], None]) -> float:
        """Replace a vector chunk by chunk by what ``fill`` writes; returns ‖old − new‖²."""
        distance = 0.0
        whole = torch.empty(min(flat.numel(), _CHUNK_NUMEL), dtype=flat.dtype, device=self.device)
        with self.workers.answering("averaging"):
            for chunk in chunk_slices(flat.numel(), _CHUNK_NUMEL):
                piece = flat[chunk]
                buffer = whole[: piece.numel()]  # one for all: Gloo lets go of a tensor later than it says
                fill(chunk, buffer)
                here = buffer.to(flat.device)
                distance += float(torch.linalg.vector_norm(piece.sub_(here))) ** 2
                piece.copy_(here)
        return distance

    def mean(self, value: float) -> float:
        """The mean of a number over all workers."""

        def mean() -> float:
            total = torch.tensor([value], dtype=torch.float64, device=self.device)
            dist.all_reduce(total, group=self._of())
            return float(total) / dist.get_world_size(self._of())

        return self.workers.attempt(mean)

    def extremes(self, values: Sequence[int]) -> tuple[list[int], list[int]]:
        """The least and the largest of each of these integers over all workers.

        Args:
            values: as many on every worker, each above -2⁶³.
        """

        def both() -> list[int]:
            mine = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64, device=self.device)
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._of())
            result: list[int] = mine.tolist()
            return result

        found = self.workers.attempt(both) if values else []
        return [-value for value in found[len(values) :]], found[: len(values)]

    def gather_integers(self, mine: Sequence[int]) -> list[list[int]]:
        """The integers of all workers, by rank.

        Where failures are survived, call it in ``workers.attempt``.

        Args:
            mine: of this worker; as many on every worker.
        """
        own = torch.tensor(mine, dtype=torch.int64, device=self.device)
        everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(self._of()))]
        with self.workers.answering("gathering"):
            dist.all_gather(everyones, own, group=self._of())
        return [theirs.tolist() for theirs in everyones]

    def copy(self, make: Callable[[], Tensor], *, source: int) -> Tensor:
        """The bytes of one rank, on all.

        Where failures are survived, call it in ``workers.attempt``.

        Args:
            make: on rank ``source`` its bytes, uint8 of shape (k,) on the host; called there only.
            source: whose.
        """
        is_source = self._rank == source
        mine = make() if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
        with self.workers.answering("copying"):
            count = torch.tensor([mine.numel()], dtype=torch.int64, device=self.device)
            dist.broadcast(count, group=self._of(), group_src=source)
            theirs = mine if is_source else torch.empty(int(count), dtype=torch.uint8, device="cpu")
            for chunk in chunk_slices(theirs.numel(), 4 * _CHUNK_NUMEL):
                buffer = theirs[chunk].to(self.device)
                dist.broadcast(buffer, group=self._of(), group_src=source)
                theirs[chunk] = buffer.to(theirs.device)
        return theirs

    @property
    def _rank(self) -> int:
        group = self._of()
        return dist.get_rank() if group is None else int(group.rank())
