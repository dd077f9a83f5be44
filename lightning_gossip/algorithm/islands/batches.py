"""An epoch's batches in groups of one for each rank of an island."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_gossip.algorithm.work_sharing import Batch, EpochPlan


class Group(NamedTuple):
    """What an island claims at once: a batch for each of its ranks.

    Args:
        batches: by index.
        numbers: of the epoch's batches that they are made of.
    """

    batches: list[Batch]
    numbers: list[int]


def groups(batches: Sequence[Batch], size: int) -> list[Group]:
    """The batches of an epoch in groups of one for each rank of an island; each sample in one of them.

    Where the last group would lack batches, its samples are cut anew, so that each rank has some; sizes differ by one at most.
    Where they are too few for that, the group before is cut anew together with them. (With one group only some samples are
    repeated, as a DistributedSampler pads.) No batch of one sample is made of larger ones: BatchNorm refuses it.

    Args:
        batches: as lists of sample indices.
        size: ranks of an island.

    >>> [group.batches for group in groups([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12]], 3)]
    [[[0, 1], [2, 3], [4, 5]], [[6, 7, 8], [9, 10], [11, 12]]]
    """
    found = [
        Group([list(batch) for batch in batches[first : first + size]], list(range(first, min(first + size, len(batches)))))
        for first in range(0, len(batches), size)
    ]
    if not found or len(found[-1].batches) == size:
        return found
    least = min(2, max(map(len, batches)))
    left = found.pop()
    if found and sum(map(len, left.batches)) < least * size:
        before = found.pop()
        left = Group(before.batches + left.batches, before.numbers + left.numbers)
    samples = [sample for batch in left.batches for sample in batch]
    samples += [samples[i % len(samples)] for i in range(least * size - len(samples))]
    found.append(Group([part.tolist() for part in np.array_split(np.asarray(samples), size)], left.numbers))
    return found


def count_groups(plan: EpochPlan, size: int) -> int:
    """How many groups :func:`groups` makes of an epoch, without making them.

    >>> [count_groups(EpochPlan(samples, 8, False, False, 0), 2) for samples in (800, 803, 804)]
    [50, 50, 51]
    """
    full, left = divmod(len(plan), size)
    if left == 0 or full == 0:
        return full or min(left, 1)
    samples = left * plan.batch_size if plan.drop_last else plan.samples - full * size * plan.batch_size
    return full + (samples >= min(2, plan.batch_size) * size)
