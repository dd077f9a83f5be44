"""Who takes which batch: one epoch's samples shared by workers of different speed.

An epoch is one seeded permutation of the data cut into batches. Every worker claims the next batch from one shared counter,
so a fast worker takes more of them and each sample is taken exactly once. Lian et al. (2018) §5 measure epochs this way.

The counter alone has a bad end: a worker that is ten times slower and claims one of the last batches makes the others
wait for ten of their steps. So a worker claims only if the others, by the time at which it would be done with the batch, could
not be done with all that is unclaimed:

    (1 + held) · own step time = T,     T · R − A · (h + ½) < remaining                   (claim rule)

A is the number of the other workers that still claim and R = Σ 1/p_j the sum of their rates, p_j the step time of worker j.
These two numbers are all that a worker knows of the others: a claim costs the same however many they are
(``docs/decisions/018-claims-by-the-joint-rate.md``). With one worker left both are 0, so the last one never leaves.

``held`` counts the batches claimed and not yet stepped on, the ones included that a DataLoader prefetches. Each of the others
holds batches too, h on average, and first finishes those. Nobody publishes how many. Between two claims a worker has the
batches that its loader keeps ahead of it (``lookahead``) and a part of the one in training, half of it on average; early in an
epoch it may not have claimed that many yet. So h = min(lookahead + ½, their share of what has been claimed). Without the
minimum, slow workers with a deep prefetch fill it at the start of a short epoch and end it late
(``tests/runtime/work_sharing/test_claim_counter.py``). The other ½: at any moment a worker has done a part of a batch, which
is no batch yet.

A worker that is slower than this one counts for less than nothing where T / p_j < h + ½. So slower workers have to leave first,
and do: the slower a worker, the larger the remainder at which it leaves.

Before its first step a worker knows no time. It then claims up to its fair share of the epoch, ⌈batches / n⌉, as far as its
loader prefetches.

What the rule cannot know: how long a step takes before the first one (a slow worker then takes what its loader prefetches),
and by how much the held steps will differ from the reckoned time.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_gossip.errors import ConfigurationError

Batch = list[int]

_TELL_CHANGE = 0.1  # a step time that has changed by a tenth is told again
_TELL_CHANGE_NEAR = (
    0.02  # and before a look by a fiftieth: many workers that hold ten batches each are a batch apart by a tenth
)
_REFRESH_CLAIMS = 16  # rates change slowly; near the end they are read before each claim
_ROOM = 1.25  # for rates that have grown since they were read
_UNSEEN_STEPS = 3.0  # own steps in which the others may have claimed since the last look
_RATE_UNIT = 2.0**-20  # batches a second: about a millionth
_COUNTER_BITS = 63  # of a store's counter, without the sign


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
            order = torch.randperm(self.samples, generator=generator, device="cpu").tolist()
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


class Others(NamedTuple):
    """The other workers that still claim batches.

    Args:
        claiming: how many they are.
        rate: batches that all of them together do in the unit of time of the own step.
    """

    claiming: int
    rate: float


def may_claim(
    *, held: int, own_step: float | None, remaining: float, claimed: int, workers: int, others: Others, lookahead: int
) -> bool:
    """The claim rule: whether this worker should take one more batch of the epoch.

    Args:
        held: batches this worker has claimed and not yet stepped on.
        own_step: its step time, or None before its first step.
        remaining: batches that nobody has claimed yet.
        claimed: batches that somebody has, the ones included that each worker is sure of.
        workers: that have taken part in the epoch, this one included.
        others: of them, those that still claim.
        lookahead: batches that the data loader keeps ahead of a step.

    Returns:
        True if it should claim; False if it should leave the rest of the epoch to the others.
    """
    if remaining <= 0:
        return False
    if own_step is None:
        # Nothing measured yet: the fair share of the epoch. Not of what is left, which shrinks while all loaders prefetch: all
        # would leave after half of it, and the last one would have the other half for itself.
        return held * workers < remaining + claimed
    holding = min(lookahead + 0.5, (claimed - held) / max(1, workers - 1))
    return (held + 1) * own_step * others.rate - others.claiming * (holding + 0.5) < remaining


class RateSum:
    """How many workers have added their step times, and the sum of their rates: both in one integer.

    A counter in a store holds it, to which all add. So a worker reads one value however many they are, and never the one half
    without the other. The low bits count the workers; the rest is Σ 1/p_j, in units of a millionth of a batch a second.

    Args:
        workers: that add, at most.

    >>> rates = RateSum(workers=3)
    >>> known, rate = rates.read(rates.term(0.5) + rates.term(0.1))
    >>> known, round(rate, 3)
    (2, 12.0)
    """

    def __init__(self, workers: int) -> None:
        self._bits = workers.bit_length()
        self._most = (2 ** (_COUNTER_BITS - self._bits) - 1) // workers  # one worker's, so that the sum of all fits

    def term(self, step_s: float | None) -> int:
        """What a worker with this step time in seconds adds; with an unknown one it is only counted."""
        if step_s is None:
            return 1
        rate = self._most if step_s * self._most * _RATE_UNIT <= 1.0 else max(1, round(1.0 / (step_s * _RATE_UNIT)))
        return (rate << self._bits) + 1

    def read(self, total: int) -> tuple[int, float]:
        """How many workers have added, and how many batches a second they do together."""
        return total & ((1 << self._bits) - 1), (total >> self._bits) * _RATE_UNIT


@dataclass(frozen=True)
class Tell:
    """Let the others know of this worker's step time.

    Args:
        change: to add to the sum of all.
        term: this worker's part of the sum from now on.
    """

    change: int
    term: int


class OwnRate:
    """What the others know of a worker's step time. It stays from epoch to epoch, while the members are the same.

    Args:
        workers: that add to the sum of rates, at most.

    Attributes:
        rates: how that sum is written.
        term: this worker's part of it; 0 if its step time is not known.
    """

    def __init__(self, workers: int) -> None:
        self.rates = RateSum(workers)
        self.term = 0
        self._told_s = 0.0

    def tell(self, step_s: float, change: float = _TELL_CHANGE) -> Tell | None:
        """What to tell of a step time in seconds; None if the others know one that differs by this share of it at most."""
        if abs(step_s - self._told_s) <= change * self._told_s:
            return None
        before, self._told_s, self.term = self.term, step_s, self.rates.term(step_s)
        return Tell(self.term - before, self.term)


class Seen(NamedTuple):
    """What a look at the epoch's counters shows.

    Args:
        remaining: batches that nobody has claimed.
        left: the :class:`RateSum` of the workers that claim no more, the dead included.
        rates: that of all whose step times are known.
    """

    remaining: int
    left: int
    rates: int


@dataclass(frozen=True)
class Consult:
    """Look at the epoch; resume with :class:`Seen`.

    Args:
        dead: look also who has died: it claims no more.
    """

    dead: bool = False


@dataclass(frozen=True)
class Leave:
    """Claim no more; resume with whether all others have left before: then this worker stays.

    Args:
        term: to add to the sum of those that have left.
    """

    term: int


@dataclass(frozen=True)
class Advance:
    """Take the next value of the counter that all share; resume with it, a position of the epoch or one beyond its end."""


class Claims:
    """One worker's claims in one epoch, without any I/O: the position that it is sure of, then the next one of the counter.

    | state | the claim rule | effects | result |
    |---|---|---|---|
    | nothing claimed | | | this worker's own position |
    | claiming, the end is far | | Advance | the next position |
    | claiming | allows it | Consult, Advance | the next position, None beyond the end |
    | claiming | does not; others still claim | Consult, Consult (dead), Leave | None |
    | claiming | does not; all others have left | Consult, Consult (dead), Leave, Advance | the next, and so on unasked |
    | claiming, nothing is left | | Consult | None |
    | None was returned | | | None |

    A Tell comes before, if the own step time is known for the first time or has changed by a tenth, or by a fiftieth where the
    claim looks. The end is far if the rule would allow the claim even if the others have been as busy as they can since the
    last look; each sixteenth claim looks anyway. The counter of those that leave decides between workers that leave at the same
    moment; the last one stays.

    Args:
        place: of this worker, from 0: the position of the epoch that it is sure of.
        workers: that take part; the counter begins after their own positions.
        batches: of the epoch.
        lookahead: batches that the data loader keeps ahead of a step.
        own_rate: what the others know of this worker from the epoch before; None if nothing.

    Attributes:
        stays: it is the only one that claims.
        left_early: it has left batches to others.
        remaining: batches that nobody has claimed, as far as it knows.
    """

    def __init__(self, *, place: int, workers: int, batches: int, lookahead: int, own_rate: OwnRate | None = None) -> None:
        self.stays = workers == 1
        self.left_early = False
        self.done = False
        self.remaining = batches - workers
        self._place = place
        self._workers = workers
        self._batches = batches
        self._lookahead = lookahead
        self._own = OwnRate(workers) if own_rate is None else own_rate
        self._begun = False
        self._others: Others | None = None  # at the last look
        self._unseen = 0  # claims since then

    def next(self, step_s: float | None, held: int) -> Generator[Tell | Consult | Leave | Advance, Any, int | None]:
        """Claim a batch.

        Args:
            step_s: this worker's time a batch in seconds, None if it is not known yet.
            held: batches that it holds.

        Returns:
            Its position in the epoch; None if this worker is done with claiming.
        """
        if self.done:
            return None
        looks = False
        if step_s is not None and not self.stays:
            looks = self._begun and self._is_to_look(step_s, held)
            if (tell := self._own.tell(step_s, _TELL_CHANGE_NEAR if looks else _TELL_CHANGE)) is not None:
                yield tell
        if not self._begun:
            self._begun = True
            return self._place
        if not self.stays:
            if looks:
                self._see((yield Consult()), step_s)
            if self.remaining > 0 and not self._may(step_s, held):
                self._see((yield Consult(dead=True)), step_s)
                if self.remaining > 0 and not self._may(step_s, held):
                    self.stays = yield Leave(self._own.term or self._own.rates.term(None))
                    self.done = self.left_early = not self.stays
            self.done |= self.remaining <= 0
            if self.done:
                return None
        position: int = yield Advance()
        self._unseen += 1
        self.remaining = max(0, self._batches - position - 1)
        self.done = position >= self._batches
        return None if self.done else position

    def _may(self, step_s: float | None, held: int, unseen: float = 0.0) -> bool:
        """The claim rule, if the others have claimed so many batches since this worker last knew."""
        return may_claim(
            held=held,
            own_step=step_s,
            remaining=self.remaining - unseen,
            claimed=self._batches - self.remaining,
            workers=self._workers,
            others=self._others or Others(0, 0.0),
            lookahead=self._lookahead,
        )

    def _is_to_look(self, step_s: float, held: int) -> bool:
        if self._others is None or self._unseen >= _REFRESH_CLAIMS:
            return True
        return not self._may(_ROOM * step_s, held, unseen=_UNSEEN_STEPS * step_s * self._others.rate)

    def _see(self, seen: Seen, step_s: float | None) -> None:
        """The others, of which one whose step time is not known counts as the mean of the rest."""
        self.remaining, self._unseen = seen.remaining, 0
        left, left_rate = self._own.rates.read(seen.left)
        known, rate = self._own.rates.read(seen.rates - self._own.term)
        claiming = max(0, self._workers - 1 - left)
        known, rate = min(max(0, known - left), claiming), max(0.0, rate - left_rate)
        own = 1.0 / step_s if step_s else 0.0
        self._others = Others(claiming, rate + (claiming - known) * (rate / known if known else own))


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
        """Number of batches stepped on."""
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
        """Positions in the epoch of the batches stepped on."""
        return self._claimed[: self._stepped]

    def unstepped(self) -> list[int]:
        """Positions claimed and not stepped on: an interrupted epoch has to hand them out again."""
        return self._claimed[self._stepped :]
