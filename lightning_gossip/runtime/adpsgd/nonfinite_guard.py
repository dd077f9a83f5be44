"""Exchanges that keep healthy models healthy: what a worker does with a partner whose model is not finite, and with its own.

| mine | theirs | what happens |
|---|---|---|
| finite | finite | both average |
| finite | not | both ends skip; counted here as ``refused_nonfinite`` |
| not | any | ``"raise"``: this worker ends with a NonFiniteError. ``"adopt"``: it says so in its next request or answer, the \
partner gives its model, and this worker begins anew from that one. ``"meet"``: both ends skip, and :attr:`Health.is_ill` \
tells the training thread, which brings all workers together: this rank has a part of a model only |

The sum of the healthy models is untouched: a giver's model stays as it is, and what an ill one takes replaces a model that no
sum could hold.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

import torch

from lightning_gossip.algorithm.adpsgd.replica import PublishedModel
from lightning_gossip.algorithm.compression.pairwise import Codec
from lightning_gossip.algorithm.staleness import StalenessHistogram
from lightning_gossip.errors import NonFiniteError
from lightning_gossip.runtime.adpsgd.exchange import Exchanger, Outcome

log = logging.getLogger(__name__)

OnNonFinite = Literal["raise", "adopt"]
Reaction = OnNonFinite | Literal["meet"]


@dataclass
class GossipCounters:
    """What a worker's gossip has done so far."""

    exchanges: int = 0
    refused: int = 0
    refused_nonfinite: int = 0  # exchanges with a partner whose model was not finite
    adopted: int = 0  # models of a partner, in place of its own that was not finite
    bytes_sent: int = 0
    exchange_s: float = 0.0
    staleness: StalenessHistogram = field(default_factory=StalenessHistogram)


class Health:
    """Guard of one worker against models that are not finite. Used by the gossip threads, one exchange at a time.

    Args:
        rank: of this worker, for messages.
        exchanger: moves the chunks.
        on_nonfinite: see above.
        counters: to count in.

    Attributes:
        adopts: whether this worker's model is not finite and it asks for a partner's.
        is_ill: whether this worker's model is not finite, under ``"meet"``.
    """

    def __init__(
        self,
        rank: int,
        exchanger: Exchanger,
        *,
        on_nonfinite: Reaction,
        counters: GossipCounters,
    ) -> None:
        self.adopts = False
        self.is_ill = False
        self._rank = rank
        self._exchanger = exchanger
        self._on_nonfinite = on_nonfinite
        self._counters = counters

    def begin_session(self) -> None:
        """Begin a session with another model: whether it is finite, its first exchange tells."""
        self.adopts = self.is_ill = False

    def exchange(self, peer: int, replica: PublishedModel, codec: Codec | None = None, *, gives: bool) -> Outcome:
        """Average with a peer, give it this worker's model, or take its.

        Args:
            peer: the rank.
            replica: of this worker.
            codec: how it is written when both average; a model that is given away is sent as it is.
            gives: the peer has said that it adopts.

        Raises:
            NonFiniteError: if this worker's model is not finite, under ``"raise"``.
            PeerError: if the peer does not answer or its time is over.
        """
        if self.adopts:
            return self._adopt(peer, replica)
        if gives:
            self._counters.refused_nonfinite += 1
            return self._exchanger.give(peer, replica)
        outcome = self._exchanger.run(peer, replica, codec)
        if not outcome.refused:
            replica.exchange_done()
        elif outcome.mine_finite:
            self._counters.refused_nonfinite += 1
            log.warning(
                "rank %d: refused an exchange with rank %d, whose model is not finite (NaN or infinity)", self._rank, peer
            )
        elif self._on_nonfinite == "raise":
            raise NonFiniteError(f"The model of rank {self._rank} is not finite.")
        elif self._on_nonfinite == "meet":
            if not self.is_ill:
                log.warning("rank %d: its part of the model is not finite (NaN or infinity); all meet", self._rank)
            self.is_ill = True
        else:
            log.warning("rank %d: its model is not finite (NaN or infinity); it will take a neighbour's", self._rank)
            self.adopts = True
        return outcome

    def _adopt(self, peer: int, replica: PublishedModel) -> Outcome:
        taken = torch.empty(replica.numel, dtype=replica.dtype, device="cpu")
        outcome = self._exchanger.take(peer, replica, taken)
        if not outcome.refused:
            replica.replace(taken)
            self.adopts = False
            self._counters.adopted += 1
            log.warning("rank %d: it goes on from the model of rank %d", self._rank, peer)
        return outcome
