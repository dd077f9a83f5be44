"""Graphs that change from round to round: a finite sequence of mixing matrices, which synchronous workers go through in turn.

In round r each worker i sets x_i ← Σ_j W_ij x_j with W the matrix number r modulo the length (row-receives, as in
:mod:`lightning_gossip.algorithm.topology.mixing`). A graph that stays the same is a sequence of length one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_gossip.algorithm.topology.mixing import FloatArray, MixingWeights, check_doubly_stochastic, mixing_matrix
from lightning_gossip.algorithm.topology.networkx_later import nx
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError

Row = tuple[tuple[int, float], ...]
"""W_ij of one worker i as pairs (j, W_ij), j ≠ i, ascending in j; what is missing to 1 is W_ii."""

_EXACT = 1e-12  # of an entry of a product of doubly stochastic matrices, which is at most 1


@clear_arguments
@dataclass(frozen=True, repr=False)
class TopologySequence:
    """Doubly stochastic mixing matrices, one a round, cycled. Immutable, hashable, picklable.

    Args:
        name: what it is called in logs and summaries.
        rounds: by round and by rank i, the pairs (j, W_ij); see :data:`Row`. :meth:`from_matrices` makes them of arrays.

    Raises:
        ConfigurationError: if a matrix is not doubly stochastic, the matrices differ in size, or some worker never hears of
            some other one.

    >>> halves = TopologySequence.from_matrices("two", [[[0.5, 0.5], [0.5, 0.5]]])
    >>> len(halves), halves.n, halves.row(7, 0), halves.is_exact
    (1, 2, ((1, 0.5),), True)
    """

    name: str
    rounds: tuple[tuple[Row, ...], ...]

    def __post_init__(self) -> None:
        if not self.rounds or len({len(rows) for rows in self.rounds}) != 1 or not self.rounds[0]:
            raise ConfigurationError(
                f"topology {self.name!r}: got rounds of {[len(rows) for rows in self.rounds]} workers; there is at least one"
                " round, and all are of the same workers. Leave a worker that rests in a round in it, with W_ii = 1."
            )
        for number in range(len(self.rounds)):
            _check(self.name, number, self.matrix(number))
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(self.n))
        graph.add_edges_from((j, i) for rows in self.rounds for i, row in enumerate(rows) for j, _ in row)
        if not nx.is_strongly_connected(graph):
            parts = sorted(sorted(part) for part in nx.strongly_connected_components(graph))
            raise ConfigurationError(
                f"topology {self.name!r}: the workers fall into {len(parts)} parts that never hear of each other, in no round;"
                f" the first is {parts[0][:8]}. Add a round that joins them."
            )

    def __repr__(self) -> str:
        return f"TopologySequence(name={self.name!r}, n={self.n}, rounds={len(self)})"

    def __len__(self) -> int:
        return len(self.rounds)

    @classmethod
    def from_matrices(cls, name: str, matrices: Iterable[npt.ArrayLike]) -> TopologySequence:
        """A sequence from its matrices.

        Args:
            name: what to call it in logs.
            matrices: W of each round, shape (n, n), row-receives, doubly stochastic.

        Raises:
            ConfigurationError: as the constructor; and for a matrix that is not square.
        """
        rounds = []
        for number, matrix in enumerate(matrices):
            _check(name, number, matrix)
            rounds.append(_rows(np.asarray(matrix, dtype=np.float64)))
        return cls(name, tuple(rounds))

    @classmethod
    def fixed(cls, topology: Topology, weights: MixingWeights = "metropolis") -> TopologySequence:
        """A graph that stays the same: one round, whose matrix is :func:`mixing_matrix`."""
        return cls(topology.name, (_rows(mixing_matrix(topology, weights)),))

    @property
    def n(self) -> int:
        """The number of workers."""
        return len(self.rounds[0])

    def row(self, number: int, rank: int) -> Row:
        """The weights of what a worker receives in a round.

        Args:
            number: of the round, from 0; any.
            rank: of the worker.
        """
        return self.rounds[number % len(self)][rank]

    def receivers(self, number: int, rank: int) -> tuple[int, ...]:
        """The ranks to which a worker sends its model in a round, in ascending order.

        Args:
            number: of the round, from 0; any.
            rank: of the worker.
        """
        return self._receivers[number % len(self)][rank]

    def matrix(self, number: int) -> FloatArray:
        """W of a round, float64, shape (n, n)."""
        rows = self.rounds[number % len(self)]
        w = np.zeros((len(rows), len(rows)))
        for i, row in enumerate(rows):
            for j, weight in row:
                if not 0 <= j < len(rows) or j == i:
                    raise ConfigurationError(
                        f"topology {self.name!r}, round {number}: rank {i} receives from {j!r}; pass another rank in"
                        f" [0, {len(rows)})."
                    )
                w[i, j] = weight
            w[i, i] = 1.0 - sum(weight for _, weight in row)
        return w

    def product(self) -> FloatArray:
        """W_{L−1} … W_1 W_0: what a whole cycle does to the models; float64, shape (n, n)."""
        whole = np.eye(self.n)
        for number in range(len(self)):
            whole = self.matrix(number) @ whole
        return whole

    @cached_property
    def is_exact(self) -> bool:
        """Whether one cycle makes every model the mean of all."""
        return bool(np.abs(self.product() - 1.0 / self.n).max() <= _EXACT)

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether in each round W_ij = W_ji: whoever sends to a worker receives from it."""
        return all(dict(rows[j]).get(i) == weight for rows in self.rounds for i, row in enumerate(rows) for j, weight in row)

    @cached_property
    def degree(self) -> int:
        """The most models that a worker sends in one round."""
        return max(len(receivers) for rows in self._receivers for receivers in rows)

    @cached_property
    def sends_per_round(self) -> float:
        """Models that a worker sends in a round, on average over the cycle and over the workers."""
        return sum(len(row) for rows in self.rounds for row in rows) / (len(self) * self.n)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that a worker ever sends to or receives from, in ascending order."""
        numbers = range(len(self))
        heard = {peer for number in numbers for peer, _ in self.row(number, rank)}
        return tuple(sorted(heard.union(*(self.receivers(number, rank) for number in numbers))))

    @cached_property
    def spread(self) -> int:
        """The rounds after which, whichever comes first, every worker has heard of every other, directly or not."""
        everybody = (1 << self.n) - 1
        longest = 0
        for first in range(len(self)):
            heard, number = [1 << rank for rank in range(self.n)], 0
            while any(of != everybody for of in heard):
                rows = self.rounds[(first + number) % len(self)]
                heard = [_with(heard, of, row) for of, row in zip(heard, rows, strict=True)]
                number += 1
            longest = max(longest, number)
        return longest

    @cached_property
    def _receivers(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        rounds = []
        for rows in self.rounds:
            receivers: list[list[int]] = [[] for _ in rows]
            for i, row in enumerate(rows):
                for j, _ in row:
                    receivers[j].append(i)
            rounds.append(tuple(map(tuple, receivers)))
        return tuple(rounds)


def _check(name: str, number: int, matrix: npt.ArrayLike) -> None:
    try:
        check_doubly_stochastic(matrix)
    except ConfigurationError as error:
        raise ConfigurationError(f"topology {name!r}, round {number}: {error}") from None


def _rows(matrix: FloatArray) -> tuple[Row, ...]:
    return tuple(tuple((int(j), float(row[j])) for j in np.flatnonzero(row > 0.0) if j != i) for i, row in enumerate(matrix))


def _with(heard: Sequence[int], own: int, row: Row) -> int:
    """Who has been heard of, a bit for each, by a worker and those that it receives from."""
    for peer, _ in row:
        own |= heard[peer]
    return own
