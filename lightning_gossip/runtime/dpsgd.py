"""Synchronous averaging with the neighbours of a graph: D-PSGD's x_i ← Σ_j W_ij x_j, in rounds.

A round is one swap of models with every neighbour; :mod:`lightning_gossip.algorithm.dpsgd` says what it does to x and when an
edge is closed. Rounds are counted per edge, so a worker is at most as many rounds ahead of another as there are edges between
them. A message is the model and two numbers: whether the sender has arrived at a synchronisation point, and whether somebody
asked for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_gossip.algorithm.dpsgd import Edges, add_term
from lightning_gossip.algorithm.tensors.flat import Fading, FlatModel, fading
from lightning_gossip.errors import ProtocolError
from lightning_gossip.runtime.clock import Timeline, now_s
from lightning_gossip.transport.base import Pending, Transport

_STATUS = 2  # numbers after the model: arrived, synchronisation asked for


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
    """

    def __init__(self, transport: Transport, weights: Mapping[int, float], *, timeout_s: float, timeline: Timeline) -> None:
        self.exchanges = 0
        self.bytes_sent = 0
        self.waited_s = 0.0
        self._transport = transport
        self._weights = dict(sorted(weights.items()))
        self._timeout_s = timeout_s
        self._timeline = timeline
        self._edges = Edges(())
        self._pending: dict[int, Pending] = {}
        self._tensors: Sequence[Tensor] = []
        self._fading: list[Fading] = []
        self._own = FlatModel([])
        self._theirs: dict[int, Tensor] = {}

    def open(self, tensors: Sequence[Tensor], *, retention: Sequence[float] | None = None) -> None:
        """Begin a session of rounds.

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
        self._edges = Edges(self._weights)

    @property
    def sync_requested(self) -> bool:
        """Whether a neighbour has said, in this session, that somebody asked for a synchronisation."""
        return self._edges.sync_requested

    def begin(self, *, arrived: bool = False, calling: bool = False) -> None:
        """Send x on its way to every neighbour whose edge is open; x is free to change."""
        if self._pending:
            raise ProtocolError("A round begins while another one is under way.")
        own = self._own.read(self._tensors)
        own[-2], own[-1] = float(arrived), float(calling or self.sync_requested)
        for peer in self._edges.open:
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
            arrived, peer_arrived, calling = bool(own[-2]), bool(theirs[-2]), bool(theirs[-1])
            if self._edges.heard(peer, arrived=arrived, peer_arrived=peer_arrived, calling=calling):
                add_term(correction, own[:numel], theirs[:numel], weight)
        for place, share in self._fading:
            correction[place] *= share**forward_passes
        self._correction.add_to(self._tensors)
        return bool(self._edges.open)

    @contextmanager
    def _waiting(self, peer: int) -> Iterator[None]:
        began_s = now_s()
        yield
        ended_s = now_s()
        self.waited_s += ended_s - began_s
        self._timeline.record("wait", began_s, ended_s, peer)
