"""Asynchronous SGD with a parameter server: the server's model, who may pull and push when, and how stale updates are.

A worker pulls the model z, makes local steps that change it by u, pushes u, and pulls again:

    z ← z + c·u,    c = 1/n by default

With c = 1/n a round of n updates moves z by their mean, so a worker takes the learning rate of the global batch.

Staleness τ of an update = updates of others that z has seen between its worker's pull and its application: the delay of
asynchronous SGD, x_{k+1} = x_k − η ∇F(x_{k−τ}). Where every worker pulls again right after its push, Σ τ over a worker's
updates is the number of the others' updates between its first pull and its last push, so the mean of τ is N − 1, whatever the
laws of the compute times. (Yu, Chen, Poor, arXiv 2406.11159, schedule the three knobs below; the equations are a
reconstruction.)

- ``active_workers`` = K: at most K workers are *in flight*, that is, hold a model and have not pushed. The others queue.
- ``max_staleness`` = S with ``on_stale="drop"``: an update with τ > S is thrown away.
- ``max_staleness`` = S with ``on_stale="wait"``: nothing is thrown away; an update waits at the server while applying it would
  make an older one exceed S. With version v and the pulled versions of those in flight sorted, v_(0) ≤ v_(1) ≤ …,

      v − v_(k) + k ≤ S   for all k                                                                                  (∗)

  says that applying them oldest first keeps every one within S. A push of the worker at position m raises v by one and moves
  the younger ones up by one, so it keeps (∗) iff v + 1 − v_(k) + k ≤ S for all k < m: that is the rule. The oldest is always
  allowed, so if every worker in flight pushes or leaves in the end, every update is applied. A pull adds the last position,
  K − 1 at most, with v − v_(k) = 0: (∗) needs S ≥ K − 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.apsgd.options import OnStale, ServerOptions
from lightning_gossip.algorithm.tensors.flat import Fading
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ProtocolError


class ServerRule(ABC):
    """What a server does with what workers send it, and what it sends back. Not thread-safe.

    Attributes:
        model: the server's, shape (d,).
        version: how often workers have changed it.
    """

    model: Tensor
    version: int

    @abstractmethod
    def queue(self, rank: int) -> None:
        """Note that a worker asks for the model."""

    @abstractmethod
    def may_pull(self, rank: int) -> bool:
        """Whether a worker that has asked may have the model now."""

    @abstractmethod
    def pull(self, rank: int) -> int:
        """Note that a worker takes the model now. Returns the model's version."""

    @abstractmethod
    def answer(self, rank: int) -> Tensor:
        """What a worker that pulls is sent, shape (d,); not to be changed, and of use until the model changes."""

    @abstractmethod
    def may_push(self, rank: int) -> bool:
        """Whether what this worker has sent may be taken in now."""

    @abstractmethod
    def push(self, rank: int, update: Tensor, *, forward_passes: int = 1) -> int | None:
        """Take in what a worker has sent. Returns its staleness; None if it was thrown away."""

    @abstractmethod
    def refuse(self, rank: int) -> None:
        """Refuse what a worker has sent, which is not finite: the model stays."""

    @abstractmethod
    def leave(self, rank: int) -> None:
        """Note that a worker comes to a synchronisation point."""


@clear_arguments
class ParameterServer(ServerRule):
    """The server's model and its rules. Not thread-safe.

    Args:
        model: z, shape (d,); the server's own from now on, changed in place.
        workers: n.
        fading: where z holds running statistics; see :meth:`push`.
        max_staleness, on_stale, active_workers, scale: see :class:`ServerOptions`.

    Attributes:
        model: z.
        version: updates applied.
    """

    def __init__(
        self,
        model: Tensor,
        *,
        workers: int,
        fading: Sequence[Fading] = (),
        max_staleness: int | None = None,
        on_stale: OnStale = "drop",
        active_workers: int | None = None,
        scale: float | None = None,
    ) -> None:
        options = ServerOptions(max_staleness=max_staleness, on_stale=on_stale, active_workers=active_workers, scale=scale)
        options.check(workers)
        self.model = model
        self.version = 0
        self._fading = tuple(fading)
        self._scale = 1.0 / workers if scale is None else scale
        self._max_staleness = max_staleness
        self._waits = on_stale == "wait"
        self._active = workers if active_workers is None else active_workers
        self._in_flight: dict[int, int] = {}  # version pulled, by rank, oldest first
        self._queue: list[int] = []  # ranks that ask for a pull, first come first

    @property
    def in_flight(self) -> Mapping[int, int]:
        """The version that each rank has pulled and not pushed an update to, oldest first."""
        return MappingProxyType(self._in_flight)

    @override
    def queue(self, rank: int) -> None:
        """Note that a worker asks for a pull.

        Raises:
            ProtocolError: if it holds a model, or asks already.
        """
        if rank in self._in_flight or rank in self._queue:
            raise ProtocolError(f"Rank {rank} asks the parameter server for a model twice.")
        self._queue.append(rank)

    @override
    def may_pull(self, rank: int) -> bool:
        """Whether a worker may pull now, under the cap on active workers."""
        return len(self._in_flight) < self._active and self._queue[:1] == [rank]

    @override
    def pull(self, rank: int) -> int:
        """The worker takes the model now, and is in flight.

        Returns:
            The model's version.

        Raises:
            ProtocolError: if it is not its turn.
        """
        if not self.may_pull(rank):
            raise ProtocolError(f"Rank {rank} pulls out of turn.")
        self._queue.pop(0)
        self._in_flight[rank] = self.version
        return self.version

    @override
    def answer(self, rank: int) -> Tensor:
        return self.model

    @override
    def may_push(self, rank: int) -> bool:
        """Whether this worker's update may be applied (or dropped) now; see the rule above."""
        if not self._waits:
            return True
        assert self._max_staleness is not None
        for position, (other, pulled) in enumerate(self._in_flight.items()):
            if other == rank:
                return True
            if self.version + 1 - pulled + position > self._max_staleness:
                return False
        return True

    @override
    @torch.no_grad()
    def push(self, rank: int, update: Tensor, *, forward_passes: int = 1) -> int | None:
        """z ← z + c·u; the worker is in flight no more.

        A running statistic is a weighted mean and not a sum, so there u holds what the worker's batches put in, x' − r·x with
        r = share^passes, and z ← z + c·(u − (1 − r)·z): a weighted mean again, which no staleness makes negative.

        Args:
            rank: the worker's.
            update: u, shape (d,), see :func:`put_in`.
            forward_passes: in training mode that led to it.

        Returns:
            The update's staleness; None if it was too stale and dropped.

        Raises:
            ProtocolError: if the worker holds no model, or must wait.
        """
        if rank not in self._in_flight:
            raise ProtocolError(f"Rank {rank} pushes an update to a model that it has not pulled.")
        if not self.may_push(rank):
            raise ProtocolError(f"Rank {rank} pushes while an older update waits.")
        staleness = self.version - self._in_flight.pop(rank)
        if self._max_staleness is not None and staleness > self._max_staleness:
            return None
        for place, share in self._fading:
            self.model[place] *= 1.0 - self._scale * (1.0 - share**forward_passes)
        self.model.add_(update, alpha=self._scale)
        self.version += 1
        return staleness

    @override
    def refuse(self, rank: int) -> None:
        """Refuse a worker's update, which is not finite: z stays, and the worker is in flight no more.

        Raises:
            ProtocolError: if the worker holds no model.
        """
        if rank not in self._in_flight:
            raise ProtocolError(f"Rank {rank} pushes an update to a model that it has not pulled.")
        del self._in_flight[rank]

    @override
    def leave(self, rank: int) -> None:
        """Note that a worker comes to a synchronisation point: it is neither in flight nor in the queue."""
        self._in_flight.pop(rank, None)
        if rank in self._queue:
            self._queue.remove(rank)


def put_in(update: Tensor, pulled: Tensor, fading: Sequence[Fading], forward_passes: int) -> None:
    """Turn x' − x into what a worker pushes, in place: the same, and x' − r·x for running statistics.

    Args:
        update: x' − x, shape (d,).
        pulled: x, shape (d,).
        fading: where the running statistics are.
        forward_passes: in training mode since the pull.
    """
    for place, share in fading:
        update[place].add_(pulled[place], alpha=1.0 - share**forward_passes)
