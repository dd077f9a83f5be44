r"""The published model of one worker, and the half-difference rule that keeps the mean.

Lian, Zhang, Zhang, Liu: Asynchronous Decentralized Parallel SGD (ICML 2018, arXiv 1710.06952), Algorithm 1. One worker i
computes a gradient at a stale read of its model while its model is being averaged with other workers' models:

    X_{k+1} = X_k W_k − γ ∂g(X̂_k; ξ_k, i_k)

| letter | here | what it is |
|---|---|---|
| x | ``tensors`` | the parameters that the training thread owns; autograd may hold them, so nobody else touches them |
| y | ``published`` | the model that the others see and change |
| m | ``Merges`` | the sum of the changes made to y since x last took them over: y = (x at the last pull) + m |

At a step boundary, after an optimizer of any kind has moved x:

    x ← x + m ;  y ← x ;  m ← 0                                                      (push and pull)

and in an exchange of i with j, in pieces, any time in between:

    s_i ← y_i ;  (send s_i, receive s_j) ;  d ← ½ (s_j − s_i) ;  y_i += d ;  m_i += d      (merge)

Departure from the paper: there the averaging is atomic with respect to the gradient update. Here both ends apply ± the
same d, computed from the same two snapshots, so Σ_i y_i changes by local updates only, whatever happens between the
snapshot and the merge (``tests/algorithm/adpsgd/test_replica.py::test_sum_is_preserved_whatever_happens_in_between``).

Where the copy y ← x takes a while the same rule is :mod:`lightning_gossip.algorithm.adpsgd.delayed_replica`.

Running statistics (BatchNorm) are exponential averages, not sums of gradients: a layer with momentum a replaces b by
(1 − a)·b + a·batch. Applied to the merged value b + m instead of b this is x + (1 − a)·m, so such a tensor takes over only
``retention`` = 1 − a of m per forward pass. With the whole of m a running variance could turn negative.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.adpsgd.merges import Merges
from lightning_gossip.algorithm.staleness import VersionCounter
from lightning_gossip.algorithm.tensors.flat import common_dtype, copy_all, fading, views_like

_GROUP_BYTES = 1 << 20  # x and m of a group stay in the L2 cache of a core; flat from 256 kB to 2 MB as measured


class Follower(NamedTuple):
    """Tensors that move with x where merges move it.

    Args:
        tensors: shaped like the first tensors of x, as many as there are, on their devices.
        factor: what the merges are multiplied by.
    """

    tensors: Sequence[Tensor]
    factor: float


class PublishedModel(ABC):
    """The model of one worker as the others see it, and the merges that its training thread has not taken over.

    ``step``, ``push_pull``, ``settle`` and ``copy_out`` are the training thread's; ``snapshot``, ``merge``, ``exchange_done``
    and ``replace`` those of the one thread that is in an exchange.

    Args:
        tensors: x, in the same order on every worker.
        dtype: of y; default: the type that all tensors promote to, at least float32.
        push_every: steps between two pushes; between them a step costs nothing, and the others see this model without its
            last updates. For exchanges that are rarer than steps.

    Attributes:
        dtype: of y.
        numel: elements of y.
        replacements: how often x was replaced by a model that was given to :meth:`replace`.
        followers: what else takes over the merges when x does, times a factor; not another model in the place of x.
    """

    def __init__(self, tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None, push_every: int = 1) -> None:
        self.dtype = dtype if dtype is not None else common_dtype(tensors)
        self.numel = sum(tensor.numel() for tensor in tensors)
        self.replacements = 0
        self.followers: Sequence[Follower] = ()
        self._push_every = push_every
        self._steps = 0  # that are not pushed
        self._passes = 0  # forward passes of theirs

    def step(self, tensors: Sequence[Tensor], *, forward_passes: int = 1) -> None:
        """Follow a step of the optimizer: push and pull, or leave both to a later step.

        Args:
            tensors: x, the same tensors in the same order as at construction; changed in place.
            forward_passes: how many forward passes in training mode led to this update (gradient accumulation).
        """
        self.skip(forward_passes=forward_passes)
        if self._steps >= self._push_every:
            self.publish(tensors)

    def skip(self, *, forward_passes: int = 1) -> None:
        """Follow a step of the optimizer, and leave push and pull to a later one."""
        self._steps += 1
        self._passes += forward_passes

    def publish(self, tensors: Sequence[Tensor]) -> None:
        """Push and pull what was not pushed: steps, or a change that was no step. Where that would wait, a later step does it.

        Args:
            tensors: as for :meth:`step`.
        """
        self.push_pull(tensors, forward_passes=0)

    @abstractmethod
    def take_staleness(self) -> list[int]:
        """The staleness of each :meth:`step` that has come into y since the last call: the exchanges that were merged into y
        after the pull that the step's gradient was computed at, and before y had the step."""

    @abstractmethod
    def push_pull(self, tensors: Sequence[Tensor], *, forward_passes: int = 1) -> int:
        """Publish the local updates and take over the merges: x ← x + m; y ← x; m ← 0.

        Args:
            tensors, forward_passes: as for :meth:`step`; forward passes of steps that were not pushed are added.

        Returns:
            The staleness of this update: the number of exchanges merged between the pull of the model that the gradient
            was computed at and this push.
        """

    @abstractmethod
    def snapshot(self, chunk: slice, out: Tensor) -> None:
        """Copy one chunk of y into ``out``, shape ``(chunk.stop - chunk.start,)``."""

    @abstractmethod
    def merge(self, chunk: slice, half_difference: Tensor) -> None:
        """Add d = ½ (s_j − s_i) to one chunk of y and of m."""

    @abstractmethod
    def exchange_done(self) -> None:
        """Count one completed exchange as one change of the published model."""

    @abstractmethod
    def replace(self, model: Tensor) -> None:
        """Begin anew from another model: y ← model, m ← 0; at the next pull x ← y, and the local update until then is lost.

        For a worker whose own model is of no use any more. It can be averaged with at once.

        Args:
            model: shape (d,); not the caller's any more.
        """

    @abstractmethod
    def settle(self) -> Tensor:
        """y as one vector to average in place, after a push and while nobody exchanges."""

    @abstractmethod
    def copy_out(self, tensors: Sequence[Tensor]) -> None:
        """x ← y, in place, while nobody exchanges."""


class Replica(PublishedModel):
    """The published model y of one worker and the merges m that its training thread has not seen yet.

    The lock is held for one copy only: of a chunk, or of the model. Memory: two flat vectors of the model's size.

    Args:
        tensors: the parameters and floating-point buffers to publish, in the same order on every worker. Their current
            values are published at once.
        retention: per tensor, the share of the merges that one forward pass leaves in place; 1 for everything but
            running statistics. Default: all 1.
        dtype: of the published model; default: the type that all tensors promote to, at least float32.
        push_every: see :class:`PublishedModel`.
        host_vector: makes a zeroed vector in host memory of a length and type.
        lock: of a driver with threads; none if None. :meth:`settle` and :meth:`copy_out` are for a caller that has the model to
            itself, and do without.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        retention: Sequence[float] | None = None,
        dtype: torch.dtype | None = None,
        push_every: int = 1,
        host_vector: Callable[[int, torch.dtype], Tensor] | None = None,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__(tensors, dtype=dtype, push_every=push_every)
        self._lock = nullcontext() if lock is None else lock
        make = host_vector if host_vector is not None else _zeros
        self.published = make(self.numel, self.dtype)
        self._merges = Merges(make(self.numel, self.dtype))
        self._published_views = views_like(self.published, tensors)
        self._merge_views = views_like(self._merges.vector, tensors)
        self._groups = _groups(tensors)
        self._fading = fading(tensors, retention)
        self._changes = VersionCounter()
        self._pulled_version = 0
        self._replaced = False  # y is not made of x any more
        self._staleness: list[int] = []
        with torch.no_grad():
            self._copy_in(tensors)

    @property
    def version(self) -> int:
        """Number of changes (merged exchanges and pushes) that the published model has seen."""
        return self._changes.version

    @override
    def take_staleness(self) -> list[int]:
        taken, self._staleness = self._staleness, []
        return taken

    @override
    @torch.no_grad()
    def push_pull(self, tensors: Sequence[Tensor], *, forward_passes: int = 1) -> int:
        tensors = list(tensors)
        passes, self._passes = self._passes + forward_passes, 0
        steps, self._steps = self._steps, 0
        with self._lock:
            if self._replaced:
                self.copy_out(tensors)
                self._merges.clear()
                self._replaced = False
                self.replacements += 1
            elif self._merges:
                merges = self._merges.dense()
                for place, share in self._fading:
                    merges[place] *= share**passes
                self._take_over_and_copy_in(tensors)
                self._merges.clear()
            else:
                self._copy_in(tensors)
            staleness = self._changes.staleness(self._pulled_version)
            self._pulled_version = self._changes.changed()
            self._staleness += [staleness] * steps
            return staleness

    @override
    def snapshot(self, chunk: slice, out: Tensor) -> None:
        with self._lock:
            out.copy_(self.published[chunk])

    @override
    def merge(self, chunk: slice, half_difference: Tensor) -> None:
        with self._lock:
            self.published[chunk] += half_difference
            self._merges.add(chunk, half_difference)

    @override
    def settle(self) -> Tensor:
        return self.published

    @override
    @torch.no_grad()
    def copy_out(self, tensors: Sequence[Tensor]) -> None:
        copy_all(self._published_views, tensors)

    @override
    def replace(self, model: Tensor) -> None:
        with self._lock:
            self.published.copy_(model)
            self._merges.clear()
            self._replaced = True
            self._changes.changed()

    @override
    def exchange_done(self) -> None:
        with self._lock:
            self._changes.changed()

    def _take_over_and_copy_in(self, tensors: Sequence[Tensor]) -> None:
        """x ← x + m ; y ← x, in groups that stay in the cache: 2.1 copies of the model."""
        for group in self._groups:
            torch._foreach_add_(list(tensors[group]), self._merge_views[group])
            for follower, factor in self.followers:
                follow(follower[group], self._merge_views[group], factor)
            torch._foreach_copy_(self._published_views[group], list(tensors[group]))

    def _copy_in(self, tensors: Sequence[Tensor]) -> None:
        """y ← x."""
        copy_all(tensors, self._published_views)


def follow(followers: Sequence[Tensor], merges: Sequence[Tensor], factor: float) -> None:
    """Each follower += factor · m, of the first merges."""
    if followers:  # torch refuses empty lists
        torch._foreach_add_(list(followers), list(merges[: len(followers)]), alpha=factor)


def _groups(tensors: Sequence[Tensor]) -> list[slice]:
    """Cut the list of tensors into groups of about ``_GROUP_BYTES``."""
    groups = []
    first, nbytes = 0, 0
    for number, tensor in enumerate(tensors, start=1):
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= _GROUP_BYTES or number == len(tensors):
            groups.append(slice(first, number))
            first, nbytes = number, 0
    return groups


def _zeros(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device="cpu")
