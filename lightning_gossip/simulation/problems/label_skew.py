"""Unlike data: each worker has samples of its own whose labels are not spread as all workers' together.

The share that each label has of worker i's samples is drawn from a Dirichlet distribution, q_i ~ Dir(α, …, α) (Hsu, Qi, Brown
2019, arXiv 1909.06335, whose α is that of all labels together): of the digits' ten labels the most frequent one has 59 % of a
worker's samples with 16 workers and α = 0.1, 27 % with α = 1, 12 % with α = 100.

All shares are of one size, within one sample, and every sample is in exactly one: a worker's data weigh as much as another's,
and all make as many steps. So the draws q are scaled by rows and columns until both sums are right (iterative proportional
fitting), rounded within each label, and the rows mended by single samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_gossip.algorithm.checks import check_integer, check_positive
from lightning_gossip.errors import ConfigurationError

_SCALINGS = 10_000
_CLOSE = 1e-6  # samples, of a row's sum
_LEAST = 1e-9  # of a drawn share: with none at all the margins might not be reached

IntArray = npt.NDArray[np.int64]


def label_skew(labels: Sequence[int] | IntArray, workers: int, *, alpha: float, seed: int) -> list[IntArray]:
    """Each worker's samples.

    Args:
        labels: of all samples, integers of at least 0, shape (samples,).
        workers: n; at most as many as there are samples.
        alpha: of the Dirichlet distribution, above 0: the smaller, the less alike the workers' labels are.
        seed: of everything that is drawn.

    Returns:
        By worker, indices of samples, in a random order. Sizes differ by one at most; each sample is in one share.

    Raises:
        ConfigurationError: naming what cannot be.

    >>> shares = label_skew([0, 0, 0, 1, 1, 1, 2, 2, 2], 3, alpha=0.01, seed=1)
    >>> sorted(int(index) for share in shares for index in share)
    [0, 1, 2, 3, 4, 5, 6, 7, 8]
    """
    of = np.asarray(labels)
    check_integer("workers", workers, example=4)
    check_positive("skew", alpha)
    if of.ndim != 1 or not np.issubdtype(of.dtype, np.integer) or (len(of) and of.min() < 0):
        raise ConfigurationError(
            f"skew: labels of shape {of.shape} and {of.dtype} are not whole numbers of at least 0, one a sample."
        )
    if len(of) < workers:
        raise ConfigurationError(
            f"skew: {len(of)} samples cannot be shared by {workers} workers. Write at most {len(of)} workers."
        )
    generator = np.random.default_rng(seed)
    kinds, counts = np.unique(of, return_counts=True)
    sizes = np.full(workers, len(of) // workers)
    sizes[: len(of) % workers] += 1
    numbers = _numbers(generator.dirichlet([alpha] * len(kinds), size=workers), sizes, counts)
    shares: list[list[IntArray]] = [[] for _ in range(workers)]
    for kind, of_kind in zip(kinds, numbers.T, strict=True):
        samples = generator.permutation(np.flatnonzero(of == kind))
        for share, part in zip(shares, np.split(samples, np.cumsum(of_kind)[:-1]), strict=True):
            share.append(part)
    return [generator.permutation(np.concatenate(share)) for share in shares]


def label_counts(labels: Sequence[int] | IntArray, shares: Sequence[Sequence[int] | IntArray]) -> IntArray:
    """How many samples of each label each worker has, shape (workers, largest label + 1)."""
    of = np.asarray(labels)
    most = int(of.max()) + 1
    return np.stack([np.bincount(of[np.asarray(share, dtype=np.int64)], minlength=most) for share in shares])


def _numbers(drawn: npt.NDArray[np.float64], sizes: IntArray, counts: IntArray) -> IntArray:
    """How many samples of each label each worker gets: rows sum to the sizes, columns to the counts.

    Args:
        drawn: q, shape (workers, labels).
        sizes, counts: of the shares, and of the labels; equal sums.
    """
    wanted = np.maximum(drawn, _LEAST)
    for _ in range(_SCALINGS):
        wanted *= (counts / wanted.sum(0))[None, :]
        rows = wanted.sum(1)
        if np.abs(rows - sizes).max() < _CLOSE:
            break
        wanted *= (sizes / rows)[:, None]
    wanted *= (counts / wanted.sum(0))[None, :]
    numbers = np.floor(wanted).astype(np.int64)
    for column, left in enumerate(counts - numbers.sum(0)):
        fractions = wanted[:, column] - numbers[:, column]
        numbers[np.argsort(-fractions, kind="stable")[:left], column] += 1
    while True:
        surplus = numbers.sum(1) - sizes
        giver, taker = int(surplus.argmax()), int(surplus.argmin())
        if surplus[giver] == 0:
            return numbers
        too_many = numbers - wanted
        gain = np.where(numbers[giver] > 0, too_many[giver] - too_many[taker], -np.inf)
        label = int(gain.argmax())
        numbers[giver, label] -= 1
        numbers[taker, label] += 1
