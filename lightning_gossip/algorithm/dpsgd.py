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
no edge is open. A worker that has arrived goes on making rounds with those that have not, and its model takes part.

**Graphs that change.** W is that of the round (:mod:`lightning_gossip.algorithm.topology.sequence`). Rounds are counted from
the beginning of the session, and in each a worker has to do with that round's peers only.

**When an edge is closed.** Where W is symmetric, by the round of the edge in which both ends have arrived; that round does not
average over it. Where it is not, as in the one-peer exponential graph, a worker that left alone would change the mean. So
everybody goes on, and averages, until all have arrived and know it. With its model each sends a number: 0 until it has arrived,
then one more than the least that it sent and received in the round before. Who has sent and received at least ``spread``, the
rounds in which everybody hears of everybody, knows; all come to know it in the same round, the ``spread``-th with all arrived.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_choice
from lightning_gossip.algorithm.topology.exact_graphs import SEQUENCES
from lightning_gossip.algorithm.topology.generators import make_sequence
from lightning_gossip.algorithm.topology.mixing import MixingWeights
from lightning_gossip.algorithm.topology.options import TopologyOptions, rounds_of
from lightning_gossip.algorithm.topology.sequence import Row, TopologySequence
from lightning_gossip.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class NeighbourOptions(TopologyOptions):
    """What D-PSGD is told, in a real run and in a simulated one.

    Args:
        topology: a graph, or a sequence of mixing matrices, one a round.
        weights: of the mixing matrix of a graph, ``"metropolis"`` or ``"uniform"``; a sequence has its own.
        overlap: average the models of before the step while the gradient is computed.
    """

    weights: MixingWeights = "metropolis"
    overlap: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("weights", self.weights, get_args(MixingWeights))
        check_choice("overlap", self.overlap, (True, False))
        name = self.topology.name if isinstance(self.topology, TopologySequence) else self.topology
        if self.weights != "metropolis" and (isinstance(self.topology, TopologySequence) or name in SEQUENCES):
            raise ConfigurationError(
                f"weights={self.weights!r}: topology {name!r} comes with its own matrices. Leave weights away."
            )

    @override
    def _check_topology(self) -> None:
        object.__setattr__(self, "topology", rounds_of(self.topology))

    @override
    def graph_name(self, workers: int) -> str:
        return self.sequence(workers).name

    @override
    def check(self, workers: int) -> None:
        self.sequence(workers)

    def sequence(self, workers: int) -> TopologySequence:
        """The mixing matrices for so many workers, one a round.

        Raises:
            ConfigurationError: naming the option.
        """
        return make_sequence(self.topology, workers, weights=self.weights)


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
        """Come to a synchronisation point: rounds go on until the neighbours have come too."""
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
    """One worker's edges in a session: with whom it swaps in which round, which are open, and what it has heard.

    Args:
        sequence: the mixing matrices.
        rank: the worker's.

    Attributes:
        sources: of the round under way: from whom a model comes and its weight W_ij, in ascending order.
        targets: to whom this worker's goes.
        arrived: what goes with it; see the module.
        sync_requested: one of them has said that somebody asks for a synchronisation; passed on with each model.
    """

    def __init__(self, sequence: TopologySequence, rank: int) -> None:
        self.sources: dict[int, float] = {}
        self.targets: tuple[int, ...] = ()
        self.arrived = 0
        self.sync_requested = False
        self._sequence = sequence
        self._rank = rank
        self._number = 0
        self._symmetric = sequence.is_symmetric
        self._open = set(sequence.peers(rank))
        self._least = 0  # of what was sent and received in this round

    @property
    def is_open(self) -> bool:
        """Whether there are more rounds for this worker."""
        return bool(self._open)

    def begin(self, *, arrived: bool) -> None:
        """Begin the next round.

        Args:
            arrived: this worker is at a synchronisation point.
        """
        number, self._number = self._number, self._number + 1
        self.sources = {peer: weight for peer, weight in self._sequence.row(number, self._rank) if peer in self._open}
        self.targets = tuple(peer for peer in self._sequence.receivers(number, self._rank) if peer in self._open)
        self.arrived = 0 if not arrived else 1 if self._symmetric else 1 + self._least
        self._least = self.arrived

    def heard(self, peer: int, *, arrived: int, calling: bool) -> bool:
        """Note that a neighbour's model has come.

        Args:
            peer: whose.
            arrived: what it has sent with it.
            calling: the neighbour knows of somebody who asks for a synchronisation.

        Returns:
            Whether this round averages the two models.
        """
        self.sync_requested = self.sync_requested or calling
        if not self._symmetric:
            self._least = min(self._least, arrived)
            return True
        if self.arrived and arrived:
            self._open.remove(peer)
            return False
        return True

    def end(self) -> bool:
        """All models of the round have come; returns whether there are more rounds."""
        if not self._symmetric and self._least >= self._sequence.spread:
            self._open.clear()
        return self.is_open


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
        sequence: of the mixing matrices.

    >>> import torch
    >>> from lightning_gossip.algorithm.topology.generators import make_sequence
    >>> StackedCorrection(make_sequence("complete", 2))(torch.tensor([[0.0], [4.0]]), number=0).tolist()
    [[2.0], [-2.0]]
    """

    def __init__(self, sequence: TopologySequence) -> None:
        self._rounds = [_terms(rows) for rows in sequence.rounds]

    def __call__(self, x: Tensor, *, number: int) -> Tensor:
        """Mix the models x, shape (n, d), to the same shape.

        Args:
            x: one model a row.
            number: of the round, from 0; any.
        """
        correction = x.new_zeros(x.shape)
        for ranks, peers, weight in self._rounds[number % len(self._rounds)]:
            if len(ranks) == len(x):
                add_term(correction, x, x[peers], weight)
            else:
                correction[ranks] = add_term(correction[ranks], x[ranks], x[peers], weight)
        return correction


def _terms(rows: Sequence[Row]) -> list[tuple[Tensor, Tensor, float]]:
    """By place in the order of the neighbours and by weight: the workers, and their neighbours at this place."""
    import torch  # here alone: commands look at options without it

    terms = []
    for place in range(max(map(len, rows), default=0)):
        pairs = [(rank, *row[place]) for rank, row in enumerate(rows) if place < len(row)]
        for weight in dict.fromkeys(weight for _, _, weight in pairs):
            chosen = np.array([(rank, peer) for rank, peer, of_pair in pairs if of_pair == weight])
            terms.append((torch.from_numpy(chosen[:, 0]), torch.from_numpy(chosen[:, 1]), weight))
    return terms
