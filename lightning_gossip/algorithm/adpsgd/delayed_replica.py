r"""The published model of a worker whose copies of x arrive later: the half-difference rule where a push takes a while.

The rule is that of :mod:`lightning_gossip.algorithm.adpsgd.replica` (AD-PSGD, arXiv 1710.06952):

    x ← x + m ;  y ← x ;  m ← 0                                                      (push and pull)

but x is in a device's memory. The training thread hands over both copies, x + m and y ← x, and goes on; they happen in the
order in which they were handed over, when the device has come so far, which may be several steps later. Until then nobody
waits: y is not stored, but is what follows from the last push that has arrived.

| letter | here | what it is |
|---|---|---|
| b | ``_base`` | x as it was at the last push that has arrived |
| c_k | ``_Push.merges`` | what push k has taken over: the merges between the push before and push k |
| m | ``_merges`` | the merges since the last push that took some over |
| y | :meth:`DelayedReplica.snapshot` | b + Σ c_k over the pushes that are under way + m |

| when | who | what |
|---|---|---|
| push k | training thread | c_k ← m, m ← 0: two names change; x ← x + c_k and (a spare buffer) ← x are handed over |
| an exchange | gossip thread | s ← b + Σ c + m, chunk by chunk; m += d |
| push k has arrived | whoever notices, of the two | b ← its buffer, which has c_k; the old b and c_k are spare |

**Invariant.** Let u be the local updates that x has and b does not. At each moment, in each element,

    x + (the c_k that are not yet added to it) + m  =  y + u

A merge adds d to both sides, here by d and at the partner by −d; an update adds to x and u; a push moves m into c_k and changes
neither side; an arrival moves the updates that the push has from u into y and leaves the left side. So the sum over all workers
of the left side changes by local updates only, whatever the order, and when nothing is under way it is the sum of all x + m.

**Nothing is waited for.** At most ``ahead`` pushes are under way. A step that finds no spare buffer leaves its push to the next
one, whose copy of x has its update too; a push that comes while a half-difference is being added takes over nothing, and the
next push does. The lock is held to change names, never for a copy: a buffer that a gossip thread reads is not given away
meanwhile. (A model that was given to take the place of this one may be in memory whose copy waits; that is once.)

**Running statistics** fade by the forward passes since the push that b was when the first of the merges came: they were
differences to that b. In the module named above it is the last push, and so the same.

Copies are :class:`Copies`' business: streams and events in :mod:`lightning_gossip.runtime.adpsgd.cuda_replica`, and in
``tests/algorithm/adpsgd/test_delayed_replica.py`` a list from which a test takes one copy after the other, in every order that
is allowed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.adpsgd.merges import Merges
from lightning_gossip.algorithm.adpsgd.replica import Follower, PublishedModel
from lightning_gossip.algorithm.staleness import VersionCounter
from lightning_gossip.algorithm.tensors.flat import fading
from lightning_gossip.errors import ProtocolError


class Arrival(Protocol):
    """The end of a copy; a :class:`torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether the copy has ended, and with it all that were handed over before."""

    def synchronize(self) -> None:
        """Block until the copy has ended."""


class Copies(Protocol):
    """Copies between x and vectors in host memory. They happen later, in the order of the calls.

    Until a copy has ended its source and target in host memory belong to it.
    """

    def vectors(self, count: int) -> list[Tensor]:
        """Make so many vectors in host memory, each of shape (d,)."""

    def add(
        self,
        tensors: Sequence[Tensor],
        merges: Merges,
        faded: Sequence[tuple[slice, float]],
        followers: Sequence[Follower] = (),
    ) -> None:
        """x ← x + m, where m is multiplied by a factor first in some places; and what follows x does."""

    def write(self, tensors: Sequence[Tensor], model: Tensor) -> Arrival:
        """x ← model."""

    def read(self, tensors: Sequence[Tensor], into: Tensor) -> Arrival:
        """into ← x."""


@dataclass(eq=False)
class _Push:
    """A push that is under way.

    Args:
        into: where x arrives.
        merges: c, that x takes over with it; None for none.
        faded: of them, places and factors.
        replacement: what x is replaced by before; None for nothing.
        steps: that it publishes.
        pulled: changes of y by others that x had taken over when these steps' gradients began.
        passes: forward passes of this worker until here.
        arrival: None until the copies are handed over.
        void: the model was replaced meanwhile, so that what arrives is of no use.
    """

    into: Tensor
    merges: Merges | None
    faded: list[tuple[slice, float]]
    replacement: Tensor | None
    steps: int
    pulled: int
    passes: int
    arrival: Arrival | None = None
    void: bool = False

    @property
    def has_arrived(self) -> bool:
        return self.arrival is not None and self.arrival.query()


class DelayedReplica(PublishedModel):
    """A published model that is behind x by the pushes that are under way.

    Memory: ``2 + 2 * ahead`` flat vectors of the model's size on the host.

    Args:
        tensors, retention, dtype, push_every, lock: as for :class:`~lightning_gossip.algorithm.adpsgd.replica.Replica`. The
            current values are published at once, for which the constructor waits.
        copies: for these tensors.
        ahead: pushes that may be under way. A host that has launched h steps more than the device has done can push
            ``ahead`` of ``h + 1`` steps.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        copies: Copies,
        retention: Sequence[float] | None = None,
        dtype: torch.dtype | None = None,
        push_every: int = 1,
        ahead: int = 2,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__(tensors, dtype=dtype, push_every=push_every)
        self._lock = nullcontext() if lock is None else lock
        self._copies = copies
        self._fading = fading(tensors, retention)
        self._base, *vectors = copies.vectors(2 + 2 * ahead)
        self._base_is_ours = True  # and not a model that was given
        self._spare = vectors[:ahead]
        self._merges, *self._spare_merges = [Merges(vector) for vector in vectors[ahead:]]
        self._under_way: deque[_Push] = deque()
        self._reading = self._merging = False  # a gossip thread is at it
        self._replaced = False  # y is not made of x any more
        self._changes = VersionCounter()  # of y by others: exchanges and replacements
        self._pulled = 0  # of them x has taken over
        self._all_passes = self._base_passes = self._merges_passes = 0
        self._staleness: list[int] = []
        self._written: Arrival = copies.read(tensors, self._base)
        self._written.synchronize()

    @override
    def take_staleness(self) -> list[int]:
        with self._lock:
            taken, self._staleness = self._staleness, []
        return taken

    @property
    def under_way(self) -> int:
        """Pushes that have not arrived, as far as it has been noticed."""
        return len(self._under_way)

    # -- the training thread -------------------------------------------------------------------------------------------------

    @override
    def publish(self, tensors: Sequence[Tensor]) -> None:
        push = self._begin()
        if push is not None:
            self._hand_over(push, tensors)

    @override
    def push_pull(self, tensors: Sequence[Tensor], *, forward_passes: int = 1) -> int:
        """Publish the local updates and take over the merges, while nobody is in an exchange; waits for a spare buffer.

        The staleness that is returned grows until the push has arrived, see :meth:`take_staleness`.
        """
        self._passes += forward_passes
        while (push := self._begin(all_merges=True)) is None:
            self._await_first()
        self._hand_over(push, tensors)
        return self._changes.staleness(push.pulled)

    @override
    def settle(self) -> Tensor:
        """The published model as one vector to average in place; waits for the pushes that are under way.

        Raises:
            ProtocolError: if there are merges that x has not taken over; push first.
        """
        while self._under_way:
            self._await_first()
        self._written.synchronize()
        if self._merges:
            raise ProtocolError("There are merges that x has not taken over. Push before the model is averaged.")
        return self._base

    @override
    def copy_out(self, tensors: Sequence[Tensor]) -> None:
        self._written = self._copies.write(tensors, self._base)

    def _begin(self, *, all_merges: bool = False) -> _Push | None:
        """Name what a push takes; None if there is no buffer for it."""
        with self._lock:
            self._note_arrivals()
            if not self._spare or (all_merges and self._merges and not self._spare_merges):
                return None
            self._all_passes += self._passes
            push = _Push(
                self._spare.pop(),
                merges=None,
                faded=[],
                replacement=self._base if self._replaced else None,
                steps=self._steps,
                pulled=self._pulled,
                passes=self._all_passes,
            )
            self._steps = self._passes = 0
            self._replaced = False
            if not self._merging:
                self._take_merges(push)
            self._under_way.append(push)
            return push

    def _take_merges(self, push: _Push) -> None:
        if self._merges:
            if not self._spare_merges:
                return
            push.merges, self._merges = self._merges, self._spare_merges.pop()
            passes = self._all_passes - self._merges_passes
            push.faded = [(place, share**passes) for place, share in self._fading]
        self._pulled = self._changes.version

    def _hand_over(self, push: _Push, tensors: Sequence[Tensor]) -> None:
        """Without the lock: a device whose queue is full makes its caller wait."""
        tensors = list(tensors)
        if push.replacement is not None:
            self._copies.write(tensors, push.replacement)
            self.replacements += 1
        if push.merges is not None:
            self._copies.add(tensors, push.merges, push.faded, self.followers)
        push.arrival = self._copies.read(tensors, push.into)

    def _await_first(self) -> None:
        """Block until the first push that is under way has arrived, without the lock."""
        arrival = self._under_way[0].arrival
        if arrival is None or self._reading:
            raise ProtocolError("A push that must not be left out was made in the middle of an exchange.")
        arrival.synchronize()
        with self._lock:
            self._note_arrivals()

    # -- the thread that is in an exchange -----------------------------------------------------------------------------------

    @override
    def snapshot(self, chunk: slice, out: Tensor) -> None:
        with self._lock:
            self._note_arrivals()
            self._reading = True
            base = self._base
            added = [push.merges for push in self._under_way if push.merges is not None and not push.void]
            added.append(self._merges)
        try:
            out.copy_(base[chunk])
            for merges in added:
                merges.add_to(chunk, out)
        finally:
            with self._lock:
                self._reading = False

    @override
    def merge(self, chunk: slice, half_difference: Tensor) -> None:
        with self._lock:
            self._merging = True
            merges = self._merges
            if not merges:
                self._merges_passes = self._base_passes
        try:
            merges.add(chunk, half_difference)
        finally:
            with self._lock:
                self._merging = False

    @override
    def exchange_done(self) -> None:
        with self._lock:
            self._changes.changed()

    @override
    def replace(self, model: Tensor) -> None:
        with self._lock:
            for push in self._under_way:
                push.void = True
            self._renew_base(model, ours=False)
            self._base_passes = self._all_passes
            self._merges.clear()
            self._replaced = True
            self._changes.changed()

    # -- whoever has the lock ------------------------------------------------------------------------------------------------

    def _note_arrivals(self) -> None:
        """b ← what has arrived, unless a gossip thread is reading b."""
        while not self._reading and self._under_way and self._under_way[0].has_arrived:
            push = self._under_way.popleft()
            if push.void:
                self._spare.append(push.into)
            else:
                self._renew_base(push.into, ours=True)
                self._base_passes = push.passes
                self._staleness += [self._changes.staleness(push.pulled)] * push.steps
            if push.merges is not None:
                push.merges.clear()
                self._spare_merges.append(push.merges)

    def _renew_base(self, model: Tensor, *, ours: bool) -> None:
        if self._base_is_ours:
            self._spare.append(self._base)
        self._base, self._base_is_ours = model, ours
