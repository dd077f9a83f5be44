"""Who evaluates which samples: each sample once, and equally many batches for each worker.

A DistributedSampler repeats samples until each worker has equally many, and a metric over 101 samples on 4 workers is one over
104. Here worker r has the samples r, r + n, r + 2n, … of the order, as there, and nobody has one again. Numbers of samples then
differ by one, and so may numbers of batches. What users synchronise in a step needs equally many batches, so a worker that
would have one batch fewer cuts its last one in two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_gossip.algorithm.work_sharing import Batch


def batches_each(samples: int, batch_size: int, workers: int, *, drop_last: bool = False) -> int:
    """How many batches each worker has.

    Args:
        samples: of the data set.
        batch_size: the largest batch.
        workers: how many there are.
        drop_last: full batches only, equally many for each.
    """
    return samples // workers // batch_size if drop_last else math.ceil(math.ceil(samples / workers) / batch_size)


def why_repeated(samples: int, batch_size: int, workers: int, *, drop_last: bool = False) -> str | None:
    """The reason, if any, why samples cannot be dealt out once in equally many batches for each worker."""
    batches = batches_each(samples, batch_size, workers, drop_last=drop_last)
    if samples < workers:
        return f"there are {samples} samples for {workers} workers"
    if drop_last and not batches:
        return f"of {samples} samples {workers} workers have less than a batch of {batch_size} each"
    if samples // workers < batches:
        return f"{samples} batches of one sample cannot be dealt out to {workers} workers equally"
    return None


def deal(order: Sequence[int], batch_size: int, *, rank: int, workers: int, drop_last: bool = False) -> list[Batch]:
    """Deal the samples of an evaluation: the batches of one worker.

    Args:
        order: of the samples, the same on all workers.
        batch_size: the largest batch.
        rank: this worker.
        workers: how many there are.
        drop_last: full batches only, so that some samples are left out.

    Returns:
        :func:`batches_each` lists of samples, if :func:`why_repeated` knows no reason.

    >>> [deal(range(5), 2, rank=rank, workers=2) for rank in (0, 1)]
    [[[0, 2], [4]], [[1], [3]]]
    """
    own = list(order[rank::workers])
    batches = batches_each(len(order), batch_size, workers, drop_last=drop_last)
    cut = [own[i * batch_size : (i + 1) * batch_size] for i in range(min(batches, math.ceil(len(own) / batch_size)))]
    if len(cut) < batches and cut and len(cut[-1]) > 1:
        last = cut.pop()
        half = math.ceil(len(last) / 2)
        cut += [last[:half], last[half:]]
    return cut
