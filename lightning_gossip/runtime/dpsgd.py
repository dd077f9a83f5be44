"""Synchronous averaging with the neighbours of a graph: D-PSGD's x_i ← Σ_j W_ij x_j, in rounds.

A round is one swap of models with every neighbour. Rounds are counted per edge, so a worker is at most as many rounds ahead of
another as there are edges between them. A message is the model and two numbers: whether the sender has arrived at a rendezvous,
and whether somebody asked for one. A worker that has arrived goes on making rounds with each neighbour that has not, and its
model takes part; an edge is closed by the round in which both ends have arrived.

The correction Σ_j W_ij (x_j − x_i) is computed edge by edge from the two models that were swapped. The two ends of an edge get
exactly opposite terms (W is symmetric), so the mean of the models changes by local updates only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_gossip.algorithm.tensors.flat import Fading, FlatModel, fading
from lightning_gossip.errors import ProtocolError
from lightning_gossip.runtime.clock import Timeline, now_s
from lightning_gossip.transport.base import Pending, Transport

_STATUS = 2  # numbers after the model: arrived, meeting asked for


class NeighbourRounds:
    """One worker's rounds. Memory: as many flat models as it has neighbours, and two.

    Args:
        transport: to the neighbours.
        weights: W_ij > 0 by neighbour j.
        timeout_s: deadline of each swap.
        timeline: where waits are recorded.

    Attributes:
        exchanges: swaps completed.
        bytes_sent: by this worker.
        waited_s: seconds that the caller was blocked here.
        sync_requested: a neighbour has said, in this session, that somebody asked for a rendezvous.
    """

    def __init__(self, transport: Transport, weights: Mapping[int, float], *, timeout_s: float, timeline: Timeline) -> None:
        self.exchanges = 0
        self.bytes_sent = 0
        self.waited_s = 0.0
        self.sync_requested = False
        self._transport = transport
        self._weights = dict(sorted(weights.items()))
        self._timeout_s = timeout_s
        self._timeline = timeline
        self._open: list[int] = []  # neighbours whose edge is open
        self._pending: dict[int, Pending] = {}
        self._tensors: Sequence[Tensor] = []
        self._fading: list[Fading] = []
        self._own = FlatModel([])
        self._theirs: dict[int, Tensor] = {}

    def open(self, tensors: Sequence[Tensor], *, retention: Sequence[float] | None = None) -> None:
        """Begin a session.

        Args:
            tensors: x, changed by :meth:`complete`; read anew at each use
                (:class:`~lightning_gossip.algorithm.tensors.flat.LiveTensors`).
            retention: per tensor; see :func:`~lightning_gossip.algorithm.tensors.flat.fading`.
        """
        self._tensors = tensors
        self._fading = fading(self._tensors, retention)
        self._own = FlatModel(self._tensors, room=_STATUS)
        self._correction = FlatModel(self._tensors, dtype=self._own.flat.dtype)
        self._theirs = {peer: torch.empty_like(self._own.flat) for peer in self._weights}
        self._open = list(self._weights)
        self.sync_requested = False

    @property
    def under_way(self) -> bool:
        """Whether a round has begun and not been completed."""
        return bool(self._pending)

    def begin(self, *, arrived: bool = False, calling: bool = False) -> None:
        """Send x on its way to every neighbour whose edge is open; x is free to change."""
        if self._pending:
            raise ProtocolError("A round begins while another one is under way.")
        own = self._own.read(self._tensors)
        own[-2], own[-1] = float(arrived), float(calling or self.sync_requested)
        for peer in self._open:
            self._pending[peer] = self._transport.swap(peer, own, self._theirs[peer])

    def complete(self, *, forward_passes: int = 0) -> bool:
        """Wait for the neighbours' models, and x ← x + Σ_j W_ij (x_j − x_i), over the edges that stay open.

        Args:
            forward_passes: in training mode since the round began.

        Returns:
            Whether an edge is open still.

        Raises:
            PeerError: if a neighbour has ended or does not answer in time.
        """
        own, correction = self._own.flat, self._correction.flat
        numel = correction.numel()
        correction.zero_()
        for peer, weight in self._weights.items():
            if peer not in self._pending:
                continue
            with self._waiting(peer):
                self._pending.pop(peer).wait(self._timeout_s)
            theirs = self._theirs[peer]
            self.exchanges += 1
            self.bytes_sent += own.numel() * own.element_size()
            if own[-2] and theirs[-2]:
                self._open.remove(peer)  # both have arrived
            else:
                correction.add_(theirs[:numel].sub_(own[:numel]), alpha=weight)
            self.sync_requested = self.sync_requested or bool(theirs[-1])
        for place, share in self._fading:
            correction[place] *= share**forward_passes
        self._correction.add_to(self._tensors)
        return bool(self._open)

    @contextmanager
    def _waiting(self, peer: int) -> Iterator[None]:
        began_s = now_s()
        yield
        ended_s = now_s()
        self.waited_s += ended_s - began_s
        self._timeline.record("wait", began_s, ended_s, peer)
