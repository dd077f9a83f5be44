"""Islands: ranks that train together, step by step, and gossip as one member with other islands.

| word | meaning |
|---|---|
| island | k ranks in a row, as all those of a node: synchronous inside, one model |
| index | a rank's place in its island, from 0 |
| mates | the other ranks of an island |
| peers | the ranks of the same index in all islands: they average the same k-th part of the model |

Each element of the model has one owner in an island, which exchanges it with its peers and then hands it round. So per element
the mixing matrices are those of gossip between whole models, and the mean over islands is kept; only the partners of two
elements with different owners are drawn independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_gossip.errors import ConfigurationError


@dataclass(frozen=True)
class Place:
    """Where a rank is: the number of its island, and its index in it."""

    island: int
    index: int


@dataclass(frozen=True)
class Islands:
    """How the ranks of a job are islands: ranks 0 … k − 1 are the first one, and so on.

    Args:
        size: ranks of an island, k.

    >>> islands = Islands(2)
    >>> islands.place(5), islands.rank(2, 1), islands.mates(5)
    (Place(island=2, index=1), 5, [4])
    """

    size: int

    def place(self, rank: int) -> Place:
        """Where a rank is."""
        return Place(*divmod(rank, self.size))

    def island_of(self, rank: int) -> int:
        """The number of a rank's island."""
        return rank // self.size

    def rank(self, island: int, index: int) -> int:
        """The rank at a place."""
        return island * self.size + index

    def mates(self, rank: int) -> list[int]:
        """The other ranks of a rank's island."""
        first = self.rank(self.island_of(rank), 0)
        return [mate for mate in range(first, first + self.size) if mate != rank]

    def count(self, ranks: int) -> int:
        """How many islands so many ranks are.

        Raises:
            ConfigurationError: if they do not come out even.
        """
        if ranks % self.size:
            fitting = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
            raise ConfigurationError(
                f"island={self.size} does not divide the {ranks} ranks of the job. Write a size that does: {fitting}."
            )
        return ranks // self.size

    def incomplete(self, ranks: Iterable[int]) -> list[int]:
        """The numbers of islands of which some of these ranks are missing: such an island trains no more.

        >>> Islands(2).incomplete([0, 1, 3])
        [1]
        """
        present: dict[int, int] = {}
        for rank in ranks:
            island = self.island_of(rank)
            present[island] = present.get(island, 0) + 1
        return sorted(island for island, here in present.items() if here < self.size)


def pull_every(exchanges_per_step: float, push_every: int = 1) -> int:
    """Steps between two pulls of an island, at which its ranks hand round what they have taken over.

    All ranks of an island pull at the same steps without a word, because the schedule depends on options only: about one pull
    an exchange, and never more than one a step.

    Args:
        exchanges_per_step: of a member, per step of its neighbourhood; 0 for none.
        push_every: steps between two pushes that the user asks for.

    >>> pull_every(1.0), pull_every(0.25), pull_every(3.0), pull_every(0.25, push_every=10)
    (1, 4, 1, 10)
    """
    return push_every if exchanges_per_step <= 0.0 else max(push_every, round(1.0 / exchanges_per_step), 1)


def share_numel(numel: int, size: int) -> int:
    """Elements of a vector that each rank of an island owns; the vector is padded to a multiple of them."""
    return -(-numel // size)


def owns(coordinates: Sequence[int], replicated: Iterable[int]) -> bool:
    """Whether a rank owns a tensor that is replicated over some dimensions of a device mesh: the first along each of them does.

    A tensor with several owners in an island would be averaged with different partners and drift apart inside it.

    Args:
        coordinates: the rank's, in the mesh.
        replicated: dimensions over which the tensor is replicated.

    >>> owns((1, 0), replicated=[1]), owns((1, 0), replicated=[0]), owns((1, 0), replicated=[])
    (True, False, True)
    """
    return all(coordinates[dimension] == 0 for dimension in replicated)
