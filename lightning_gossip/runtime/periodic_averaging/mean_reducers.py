"""How an averaging gets the mean of everybody's vectors: by an all-reduce, or in fewer bytes."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

from lightning_gossip.algorithm.compression.error_feedback_mean import CompressedMean
from lightning_gossip.algorithm.compression.wires import MeanWire
from lightning_gossip.runtime.collectives import Collectives, PendingSum


class PendingMean(Protocol):
    """A mean under way."""

    def wait(self) -> None:
        """Block until the vector holds the mean.

        Raises:
            PeerError: if a worker has ended, or the group's time is over.
        """


class ExactMean:
    """The exact mean, by an all-reduce.

    Args:
        collectives: of all workers.

    Attributes:
        keeps_back: whether anything is left to settle.
    """

    keeps_back = False

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def start(self, vector: Tensor) -> PendingMean:
        """Begin to replace a vector by its mean over all workers, the same bits on all; it is not the caller's meanwhile."""
        return _Sum(self._collectives.start_sum(vector), vector, self._collectives.world_size)

    def moved(self, change: Tensor) -> None:
        """Follow a change of the last mean's first elements, on all workers alike."""

    def settle(self, vector: Tensor) -> None:
        """Replace a mean by the exact one, with all that rounding has kept back. Collective."""
        self.start(vector).wait()


class WiredMean:
    """A mean of compressed differences to the last one, see :mod:`lightning_gossip.algorithm.compression.error_feedback_mean`.

    Creating it is collective.

    The first mean is exact, unless all workers begin with equal vectors.

    Args:
        collectives: of all workers.
        vector: that they begin with.
        wire: ``"bfloat16"`` or ``"int8"``.
    """

    def __init__(self, collectives: Collectives, vector: Tensor, wire: MeanWire) -> None:
        self._collectives = collectives
        self._exact = ExactMean(collectives)
        self._wire = wire
        self._code: CompressedMean | None = None
        if len(set(collectives.gather(_fingerprint(vector)))) == 1:
            self._refer_to(vector)

    def start(self, vector: Tensor) -> PendingMean:
        """Begin to replace a vector by its mean over all workers, the same bits on all; it is not the caller's meanwhile."""
        if self._code is None:
            return _First(self, self._exact.start(vector), vector)
        return _Compressed(self._collectives, self._code, vector)

    @property
    def keeps_back(self) -> bool:
        """Whether anything is left to settle."""
        return self._code is not None

    def moved(self, change: Tensor) -> None:
        """Follow a change of the last mean's first elements, on all workers alike."""
        if self._code is not None:
            self._code.moved(change)

    def settle(self, vector: Tensor) -> None:
        """Replace a mean by the exact one, with all that rounding has kept back. Collective."""
        if self._code is not None:
            self._code.settle(vector)
        self._exact.settle(vector)
        self._refer_to(vector)

    def _refer_to(self, mean: Tensor) -> None:
        n = self._collectives.world_size
        self._code = CompressedMean(mean.clone(), workers=n, rank=self._collectives.rank, wire=self._wire)


class _Sum:
    def __init__(self, pending: PendingSum, vector: Tensor, workers: int) -> None:
        self._pending, self._vector, self._workers = pending, vector, workers

    def wait(self) -> None:
        self._pending.wait()
        self._vector.div_(self._workers)


class _First:
    """An exact mean that the next ones are differences to."""

    def __init__(self, mean: WiredMean, pending: PendingMean, vector: Tensor) -> None:
        self._mean, self._pending, self._vector = mean, pending, vector

    def wait(self) -> None:
        self._pending.wait()
        self._mean._refer_to(self._vector)


class _Compressed:
    """The shards are on their way to their owners; the rest happens in the wait."""

    def __init__(self, collectives: Collectives, code: CompressedMean, vector: Tensor) -> None:
        self._collectives, self._code, self._vector = collectives, code, vector
        self._sent = code.begin(vector)
        self._received = torch.empty_like(self._sent)
        self._work = collectives.start_scatter(self._sent, self._received)

    def wait(self) -> None:
        with self._collectives.waiting("all-to-all"):
            self._work.wait()
        everyones = self._collectives.gather_bytes(self._code.reduce(self._received))
        self._vector.copy_(self._code.end(torch.stack(everyones)))


def _fingerprint(vector: Tensor) -> bytes:
    return hashlib.blake2b(vector.cpu().view(torch.uint8).numpy().data, digest_size=16).digest()
