r"""D-PSGD's rounds, without any I/O (Lian et al. 2017, arXiv 1705.09056, algorithm 1): who averages what with whom, and when.

In a round each worker swaps models with its neighbours and adds the correction

    x_i ← x_i + Σ_j W_ij (x_j − x_i)              W symmetric, doubly stochastic

summed neighbour after neighbour in ascending order. The two ends of an edge get exactly opposite terms, so the mean of the
models changes by local updates only.

| | begin_step | step |
|---|---|---|
| overlap: X W − γ G, as in the paper | Begin, with the models of before the step | Complete |
| without: (X − γ G) W | | Begin, Complete |

*arrive*, at a synchronisation point: Complete what was begun for a step that was not made; then Begin(arrived), Complete until
no edge is open. Rounds are counted per edge: a worker that has arrived goes on making rounds with each neighbour that has not,
and its model takes part. An edge is closed by the round in which both ends have arrived; that round does not average.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from lightning_gossip.algorithm.checks import check_choice
from lightning_gossip.algorithm.topology.mixing import MixingWeights, mixing_matrix
from lightning_gossip.algorithm.topology.options import TopologyOptions
from lightning_gossip.algorithm.topology.topology import Topology


@dataclass(frozen=True, kw_only=True)
class NeighbourOptions(TopologyOptions):
    """What D-PSGD is told, in a real run and in a simulated one.

    Args:
        weights: of the mixing matrix, ``"metropolis"`` or ``"uniform"``.
        overlap: average the models of before the step while the gradient is computed.
    """

    weights: MixingWeights = "metropolis"
    overlap: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("weights", self.weights, get_args(MixingWeights))
        check_choice("overlap", self.overlap, (True, False))


@dataclass(frozen=True)
class Begin:
    """Send x on its way to every neighbour whose edge is open; x is free to change.

    Args:
        arrived: at a synchronisation point.
    """

    arrived: bool = False


@dataclass(frozen=True)
class Complete:
    """Wait for the neighbours' models and add the correction; resume with whether an edge is open still.

    Args:
        forward_passes: of this worker since the round began, in which running statistics have forgotten a share of x.
    """

    forward_passes: int = 0


Effects = Generator[Begin | Complete, bool, None]


class RoundsProtocol:
    """When one worker begins and completes its rounds.

    Args:
        overlap: average the models of before the step, while the gradient is computed.
    """

    def __init__(self, *, overlap: bool) -> None:
        self._overlap = overlap
        self._under_way = False

    def begin_step(self) -> Effects:
        """A forward pass of the next step comes; the first of several counts."""
        if self._overlap and not self._under_way:
            yield from self._begin(Begin())

    def step(self, forward_passes: int = 1) -> Effects:
        """The optimizer has stepped.

        Args:
            forward_passes: that led to it.
        """
        if not self._under_way:
            yield from self._begin(Begin())
            forward_passes = 0
        yield from self._complete(Complete(forward_passes))

    def arrive(self) -> Effects:
        """This worker has come to a synchronisation point; its rounds go on until the neighbours have come too."""
        if self._under_way:
            yield from self._complete(Complete())
        is_open = True
        while is_open:
            yield from self._begin(Begin(arrived=True))
            is_open = yield from self._complete(Complete())

    def _begin(self, effect: Begin) -> Effects:
        self._under_way = True
        yield effect

    def _complete(self, effect: Complete) -> Generator[Begin | Complete, bool, bool]:
        self._under_way = False
        return (yield effect)


class Edges:
    """Which of one worker's edges are open in a session, and what it has heard through them.

    Args:
        peers: the neighbours.

    Attributes:
        open: those whose edge is open, in ascending order.
        sync_requested: one of them has said that somebody asks for a synchronisation; passed on with each model.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        self.open = sorted(peers)
        self.sync_requested = False

    def heard(self, peer: int, *, arrived: bool, peer_arrived: bool, calling: bool) -> bool:
        """Note that a neighbour's model has come.

        Args:
            peer: whose.
            arrived, peer_arrived: what either end has said with its model of this round.
            calling: the neighbour knows of somebody who asks for a synchronisation.

        Returns:
            Whether this round averages the two models; otherwise it has closed the edge.
        """
        self.sync_requested = self.sync_requested or calling
        if arrived and peer_arrived:
            self.open.remove(peer)
            return False
        return True


def neighbour_weights(topology: Topology, weights: MixingWeights, rank: int) -> dict[int, float]:
    """W_ij > 0 of worker i = ``rank`` by neighbour j, in ascending order."""
    matrix = mixing_matrix(topology, weights)
    return {peer: float(matrix[rank, peer]) for peer in sorted(topology.neighbours(rank)) if matrix[rank, peer] > 0}


def add_term(correction: Tensor, own: Tensor, theirs: Tensor, weight: float) -> Tensor:
    """correction ← correction + W_ij (x_j − x_i), elementwise; returns it.

    Args:
        correction: of worker i, or of several, row by row.
        own: x_i.
        theirs: x_j; overwritten.
        weight: W_ij.
    """
    return correction.add_(theirs.sub_(own), alpha=weight)


class StackedCorrection:
    """Σ_j W_ij (x_j − x_i) of all workers at once, with the same bits as each would come to by itself.

    Args:
        topology: of n workers.
        weights: of W.

    >>> from lightning_gossip.algorithm.topology.generators import complete
    >>> StackedCorrection(complete(2), "metropolis")(torch.tensor([[0.0], [4.0]])).tolist()
    [[2.0], [-2.0]]
    """

    def __init__(self, topology: Topology, weights: MixingWeights) -> None:
        rows = [list(neighbour_weights(topology, weights, rank).items()) for rank in range(topology.n)]
        # by place in the order of the neighbours and by weight: the workers, and their neighbours at this place
        self._terms: list[tuple[Tensor, Tensor, float]] = []
        for place in range(max(map(len, rows), default=0)):
            pairs = [(rank, *row[place]) for rank, row in enumerate(rows) if place < len(row)]
            for weight in dict.fromkeys(weight for _, _, weight in pairs):
                chosen = np.array([(rank, peer) for rank, peer, of_pair in pairs if of_pair == weight])
                self._terms.append((torch.from_numpy(chosen[:, 0]), torch.from_numpy(chosen[:, 1]), weight))

    def __call__(self, x: Tensor) -> Tensor:
        """Mix the models x, shape (n, d), to the same shape."""
        correction = torch.zeros_like(x)
        for ranks, peers, weight in self._terms:
            if len(ranks) == len(x):
                add_term(correction, x, x[peers], weight)
            else:
                correction[ranks] = add_term(correction[ranks], x[ranks], x[peers], weight)
        return correction
