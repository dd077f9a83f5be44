"""Who takes which batch: one epoch's samples shared by workers of different speed.

An epoch is one seeded permutation of the data cut into batches. Every worker claims the next batch from one shared counter,
so a fast worker takes more of them and each sample is taken exactly once. Lian et al. (2018) §5 measure epochs this way.

The counter alone has a bad end: a worker that is ten times slower and claims one of the last batches makes the others
wait for ten of their steps. So a worker claims only if it would be done with the batch no later than the others could be:

    (held + 1) · own step time  ≤  T*                                                     (claim rule)

with T* the time after which the workers that still claim, this one included, could have finished everything that is
unclaimed, if each first finishes the batches that it holds:

    T* = min { T : Σ_j max(0, ⌊T / p_j − held_j⌋) ≥ remaining }

p_j is the step time of worker j. ``held`` counts the batches claimed and not yet stepped on, the ones that a DataLoader
prefetches included. Nobody publishes it. Between two claims a worker has the batches that its loader keeps ahead of it
(``lookahead``) and a part of the one in training, half of it on average; early in an epoch it may not have claimed that many
yet. So the others are taken to hold min(lookahead + ½, their share of what has been claimed). Without the ½, workers of
nearly the same speed leave up to four steps too early; without the minimum, slow workers with a deep prefetch fill it at the
start of a short epoch and end it late (``tests/runtime/work_sharing/test_claim_counter.py``).

With one worker left T* is its own time for all that remains, so the last one never leaves.

Before its first step a worker knows no time. It then claims up to its fair share of the epoch, ⌈batches / n⌉, as far as its
loader prefetches.

What the rule cannot know: how long a step takes before the first one (a slow worker then takes what its loader prefetches),
and by how much the held steps will differ from the reckoned time.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_gossip.algorithm.laws import FloatArray
from lightning_gossip.errors import ConfigurationError

Batch = list[int]

_TIE = 1e-9  # relative: ends that are no further apart are the same
_CLEAR = 1e-10  # relative: far beyond the rounding of T*, and far within a tie


@dataclass(frozen=True)
class EpochPlan:
    """What one epoch consists of, the same on every worker.

    Args:
        samples: number of samples in the data set.
        batch_size: samples a batch.
        shuffle: a new permutation each epoch, or the order of the data set.
        drop_last: leave out a last batch that is smaller than the rest.
        seed: of the permutations; the same on every worker.
    """

    samples: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int

    def __len__(self) -> int:
        return self.samples // self.batch_size if self.drop_last else math.ceil(self.samples / self.batch_size)

    def batches(self, epoch: int) -> list[Batch]:
        """The batches of one epoch as lists of sample indices; together they hold each index exactly once."""
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            order = torch.randperm(self.samples, generator=generator).tolist()
        else:
            order = list(range(self.samples))
        return [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(len(self))]


def check_enough_batches(batches: int, workers: int) -> None:
    """Each worker is sure of one batch an epoch, so that all of them reach its end; fewer batches are refused.

    Raises:
        ConfigurationError: if there are fewer batches than workers.
    """
    if batches < workers:
        raise ConfigurationError(
            f"The epoch has {batches} batches for {workers} workers, and each worker needs at least one."
            f" Use a smaller batch_size or at most {batches} workers."
        )


def at_least_one_each(pending: Sequence[Batch], workers: int) -> list[Batch]:
    """The batches left over by an interrupted epoch, cut finer if there are fewer of them than workers.

    If there are too few samples for all some are repeated, as a DistributedSampler pads. No batch of one sample is made of
    larger ones: BatchNorm refuses it.

    >>> at_least_one_each([[7, 8, 9]], 2)
    [[7, 8], [9, 7]]
    """
    if len(pending) >= workers:
        return [list(batch) for batch in pending]
    left = [sample for batch in pending for sample in batch]
    if not left:
        return []
    least = min(2, max(map(len, pending)))
    left += [left[i % len(left)] for i in range(least * workers - len(left))]
    return [part.tolist() for part in np.array_split(np.asarray(left), workers)]


def joint_finish_time(remaining: int, step_times: Sequence[float] | FloatArray, held: Sequence[float] | FloatArray) -> float:
    """T*: when the given workers could have finished ``remaining`` more batches, in the unit of ``step_times``.

    Args:
        remaining: batches that nobody has claimed.
        step_times: p_j > 0 of the workers that still claim; infinite for one that has left.
        held: held_j ≥ 0, batches each of them finishes first; parts of a batch count.

    Returns:
        min {T : Σ_j max(0, ⌊T/p_j − held_j⌋) ≥ remaining}; infinity if nobody is left to take them.
    """
    times, holding = np.asarray(step_times, float), np.asarray(held, float)
    if remaining <= 0:
        return 0.0
    # The k-th further batch of worker j is done at (held_j + k) p_j. T* is the remaining-th smallest of these times over all
    # j, and it is at most what any one worker would need alone: bisect on T between 0 and that.
    low, high = 0.0, float(((holding + remaining) * times).min(initial=math.inf))
    if not math.isfinite(high):
        return math.inf
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _done_by(middle, times, holding) >= remaining else (middle, high)
    return high


def _done_by(time: float, times: FloatArray, holding: FloatArray) -> float:
    """Σ_j max(0, ⌊T/p_j − held_j⌋); never falls as T grows, in floating point either."""
    return float(np.maximum(np.floor(time / times * (1 + 1e-12) - holding), 0.0).sum())


def may_claim(
    *,
    held: int,
    own_step: float | None,
    remaining: int,
    claimed: int,
    step_times: Sequence[float] | FloatArray,
    rank: int,
    lookahead: int,
) -> bool:
    """The claim rule: whether this worker should take one more batch of the epoch.

    A few passes over the workers: T* is at least remaining / Σ 1/p_j, which alone allows most claims of an epoch; after that,
    whether T* is above or below a time is seen from how many batches could be done by then. T* itself is reckoned only where
    rounding would decide.

    Args:
        held: batches this worker has claimed and not yet stepped on.
        own_step: its step time, or None before its first step.
        remaining: batches that nobody has claimed yet.
        claimed: batches that somebody has, the ones included that each worker is sure of.
        step_times: of all workers by rank, infinite for those that have left, NaN where nothing is known yet.
        rank: this worker's place in ``step_times``.
        lookahead: batches that the data loader keeps ahead of a step.

    Returns:
        True if it should claim; False if it should leave the rest of the epoch to the others.
    """
    if remaining <= 0:
        return False
    workers = len(step_times)
    if own_step is None:
        # Nothing measured yet: the fair share of the epoch. Not of what is left, which shrinks while all loaders prefetch: all
        # would leave after half of it, and the last one would have the other half for itself.
        return held * workers < remaining + claimed
    times = np.array(step_times, float)
    unknown = np.isnan(times)
    if unknown.any():
        times[unknown] = _typical(times[~unknown], own_step)
    times[rank] = own_step
    own_end = (held + 1) * own_step
    if own_end * float((1.0 / times).sum()) <= remaining:
        return True
    holding = np.full(workers, min(lookahead + 0.5, (claimed - held) / max(1, workers - 1)))
    holding[rank] = held
    latest = own_end / (1 + _TIE)  # equal workers end at the same time but for rounding, and one of them has to claim
    if _done_by(latest * (1 - _CLEAR), times, holding) >= remaining:
        return False
    if _done_by(latest * (1 + _CLEAR), times, holding) < remaining:
        return True
    return own_end <= joint_finish_time(remaining, times, holding) * (1 + _TIE)


def _typical(known: FloatArray, otherwise: float) -> float:
    """The lower median of the step times that are known; another one's if it is that of workers that have left."""
    if not known.size:
        return otherwise
    typical = float(np.sort(known)[(known.size - 1) // 2])
    return typical if math.isfinite(typical) else otherwise


@dataclass(frozen=True)
class Consult:
    """Look at the epoch; resume with the batches that nobody has claimed, and everybody's step time, as :func:`may_claim`."""


@dataclass(frozen=True)
class Leave:
    """Claim no more; resume with whether all others have left before: then this worker stays."""


@dataclass(frozen=True)
class Advance:
    """Take the next value of the counter that all share; resume with it, a position of the epoch or one beyond its end."""


class Claims:
    """One worker's claims in one epoch, without any I/O: the position that it is sure of, then the next one of the counter.

    | state | the claim rule | effects | result |
    |---|---|---|---|
    | nothing claimed | | | this worker's own position |
    | claiming | allows it | Consult, Advance | the next position, None beyond the end |
    | claiming | does not; others still claim | Consult, Leave | None |
    | claiming | does not; all others have left | Consult, Leave, Advance | as there, and from now on without asking |
    | None was returned | | | None |

    The counter of those that leave decides between workers that leave at the same moment; the last one stays.

    Args:
        place: of this worker, from 0: the position of the epoch that it is sure of.
        workers: that take part; the counter begins after their own positions.
        batches: of the epoch.
        lookahead: batches that the data loader keeps ahead of a step.

    Attributes:
        stays: it is the only one that claims.
        left_early: it has left batches to others.
    """

    def __init__(self, *, place: int, workers: int, batches: int, lookahead: int) -> None:
        self.stays = workers == 1
        self.left_early = False
        self.done = False
        self._place = place
        self._batches = batches
        self._lookahead = lookahead
        self._begun = False

    def next(self, step_s: float | None, held: int) -> Generator[Consult | Leave | Advance, Any, int | None]:
        """Claim a batch.

        Args:
            step_s: this worker's time a batch in seconds, None if it is not known yet.
            held: batches that it holds.

        Returns:
            Its position in the epoch; None if this worker is done with claiming.
        """
        if self.done:
            return None
        if not self._begun:
            self._begun = True
            return self._place
        if not self.stays:
            remaining, step_times = yield Consult()
            if not may_claim(
                held=held,
                own_step=step_s,
                remaining=remaining,
                claimed=self._batches - remaining,
                step_times=step_times,
                rank=self._place,
                lookahead=self._lookahead,
            ):
                self.stays = yield Leave()
                if not self.stays:
                    self.done, self.left_early = True, remaining > 0
                    return None
        position: int = yield Advance()
        self.done = position >= self._batches
        return None if self.done else position


class Ledger:
    """What one worker has claimed and stepped on in the current epoch, in the order of claiming.

    A data loader hands batches over in the order in which their indices were drawn, so the batch of a step is the oldest
    claim that has not been stepped on.
    """

    def __init__(self) -> None:
        self._claimed: list[int] = []
        self._stepped = 0

    @property
    def held(self) -> int:
        """Batches claimed and not yet stepped on."""
        return len(self._claimed) - self._stepped

    @property
    def stepped(self) -> int:
        """Batches stepped on."""
        return self._stepped

    @property
    def current(self) -> int:
        """Position, in the epoch, of the batch that the next step is about."""
        return self._claimed[self._stepped]

    def claim(self, position: int) -> None:
        """Note a claim of the batch at this position of the epoch."""
        self._claimed.append(position)

    def step(self) -> None:
        """Note that the oldest held batch has been trained on."""
        self._stepped += 1

    def stepped_on(self) -> list[int]:
        """Their positions."""
        return self._claimed[: self._stepped]

    def unstepped(self) -> list[int]:
        """Positions claimed and not stepped on: an interrupted epoch has to hand them out again."""
        return self._claimed[self._stepped :]
