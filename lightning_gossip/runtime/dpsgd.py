"""Synchronous averaging with the neighbours of a graph: D-PSGD's x_i ← Σ_j W_ij x_j, in rounds.

A round is one swap of models with every peer of that round; :mod:`lightning_gossip.algorithm.dpsgd` says what it does to x and
when an edge is closed. Where the graph stays the same a worker is at most as many rounds ahead of another as there are edges
between them. A message is the model and two numbers: whether (in a directed graph: since when) the sender has arrived at a
synchronisation point, and whether somebody asked for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_gossip.algorithm.dpsgd import Edges, add_term
from lightning_gossip.algorithm.tensors.flat import Fading, FlatModel, fading
from lightning_gossip.algorithm.topology.sequence import TopologySequence
from lightning_gossip.errors import ProtocolError
from lightning_gossip.runtime.clock import Timeline, now_s
from lightning_gossip.transport.base import Pending, Transport

_STATUS = 2  # numbers after the model: arrived, synchronisation asked for


class NeighbourRounds:
    """One worker's rounds. Memory: as many flat models as it has peers in a round, and two.

    Args:
        transport: to the neighbours; its rank is the worker's.
        sequence: the mixing matrices, one a round.
        timeout_s: deadline of each swap.
        timeline: where waits are recorded.

    Attributes:
        exchanges: models received.
        bytes_sent: by this worker.
        waited_s: seconds that the caller was blocked here.
    """

    def __init__(self, transport: Transport, sequence: TopologySequence, *, timeout_s: float, timeline: Timeline) -> None:
        self.exchanges = 0
        self.bytes_sent = 0
        self.waited_s = 0.0
        self._transport = transport
        self._sequence = sequence
        self._timeout_s = timeout_s
        self._timeline = timeline
        self._edges = Edges(sequence, transport.rank)
        self._pending: dict[int, tuple[Pending, Tensor]] = {}  # by peer, in ascending order
        self._going: list[tuple[int, Pending]] = []  # where no model comes from the same peer
        self._tensors: Sequence[Tensor] = []
        self._fading: list[Fading] = []
        self._own = FlatModel([])
        self._theirs: list[Tensor] = []

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
        most = max(len(self._sequence.row(number, self._transport.rank)) for number in range(len(self._sequence)))
        self._theirs = [torch.empty_like(self._own.flat) for _ in range(most)]
        self._edges = Edges(self._sequence, self._transport.rank)

    @property
    def sync_requested(self) -> bool:
        """Whether a neighbour has said, in this session, that somebody asked for a synchronisation."""
        return self._edges.sync_requested

    def begin(self, *, arrived: bool = False, calling: bool = False) -> None:
        """Send x on its way to every peer of the round whose edge is open; x is free to change."""
        if self._pending or self._going:
            raise ProtocolError("A round begins while another one is under way.")
        edges = self._edges
        edges.begin(arrived=arrived)
        own = self._own.read(self._tensors)
        own[-2], own[-1] = edges.arrived, float(calling or self.sync_requested)
        for peer, theirs in zip(edges.sources, self._theirs, strict=False):
            both = peer in edges.targets
            pending = self._transport.swap(peer, own, theirs) if both else self._transport.receive(peer, theirs)
            self._pending[peer] = pending, theirs
        for peer in edges.targets:
            self.bytes_sent += own.numel() * own.element_size()
            if peer not in edges.sources:
                self._going.append((peer, self._transport.send(peer, own)))

    def complete(self, *, forward_passes: int = 0) -> bool:
        """Wait for the peers' models, and x ← x + Σ_j W_ij (x_j − x_i), over the edges that stay open.

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
        for peer in list(self._pending):
            pending, theirs = self._pending.pop(peer)
            with self._waiting(peer):
                pending.wait(self._timeout_s)
            self.exchanges += 1
            weight = self._edges.sources[peer]
            if self._edges.heard(peer, arrived=int(theirs[-2]), calling=bool(theirs[-1])):
                add_term(correction, own[:numel], theirs[:numel], weight)
        while self._going:
            peer, sending = self._going.pop()
            with self._waiting(peer):
                sending.wait(self._timeout_s)
        for place, share in self._fading:
            correction[place] *= share**forward_passes
        self._correction.add_to(self._tensors)
        return self._edges.end()

    @contextmanager
    def _waiting(self, peer: int) -> Iterator[None]:
        began_s = now_s()
        yield
        ended_s = now_s()
        self.waited_s += ended_s - began_s
        self._timeline.record("wait", began_s, ended_s, peer)
