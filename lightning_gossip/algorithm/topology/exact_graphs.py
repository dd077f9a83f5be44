r"""Graphs of few peers a round whose rounds make the exact mean: one-peer hypercube and exponential graph, Base-(k+1).

A fixed graph comes closer to the mean by a factor a round and never reaches it. These go through a few matrices whose product
is 11ᵀ/n, and in each a worker has at most k peers:

| name | workers | peers a round | rounds to the exact mean |
|---|---|---|---|
| ``one_peer_hypercube`` | 2^p | 1 | p |
| ``one_peer_exponential`` | any; exact for 2^p | 1, directed: sends to one and receives from another | ⌈log₂ n⌉ |
| ``base_2``, ``base_3`` | any | k = 1, 2 | at most 2 log_{k+1} n + 2 |

- One-peer exponential: Ying, Yuan, Chen, Hu, Pan, Yin: *Exponential Graph is Provably Efficient for Decentralized Deep
  Training*, NeurIPS 2021, arXiv 2110.13363.
- Base-(k+1): Takezawa, Sato, Bao, Niwa, Yamada: *Beyond Exponential Graph*, NeurIPS 2023, arXiv 2305.11420, algorithms 1 to 3.

letter → name: n → workers, k → ``peers``; a hyper-hypercube averages n = n_1 ⋯ n_L workers, each n_l ≤ k + 1, along one axis of
an L-dimensional grid a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from lightning_gossip.algorithm.checks import check_integer
from lightning_gossip.algorithm.topology.sequence import TopologySequence
from lightning_gossip.errors import ConfigurationError

Round = dict[tuple[int, int], float]
"""W_ij = W_ji of one round by the pair i < j."""


def one_peer_hypercube(n: int) -> TopologySequence:
    """In round r each worker averages with the one whose rank differs in bit r; exact after log₂ n rounds.

    Raises:
        ConfigurationError: if n is not a power of two.

    >>> [one_peer_hypercube(8).row(number, 0) for number in range(3)]
    [((1, 0.5),), ((2, 0.5),), ((4, 0.5),)]
    """
    _check("one_peer_hypercube", n)
    if n & (n - 1):
        raise ConfigurationError(
            f"topology 'one_peer_hypercube': got n={n}; it needs a power of two. Use {1 << (n.bit_length() - 1)} or"
            f" {1 << n.bit_length()} workers, or 'base_2', which takes any number."
        )
    return _symmetric("one_peer_hypercube", n, _hyper_hypercube(range(n), 1))


def one_peer_exponential(n: int) -> TopologySequence:
    """In round r each worker sends to the one 2^r ranks on, and takes half of what it receives; exact if n is a power of two.

    For another n the models only come closer to their mean, as on a fixed graph.

    >>> one_peer_exponential(8).row(1, 0), one_peer_exponential(8).receivers(1, 0)
    (((6, 0.5),), (2,))
    """
    _check("one_peer_exponential", n)
    hops = [1 << number for number in range((n - 1).bit_length())]
    rounds = [tuple((((rank - hop) % n, 0.5),) for rank in range(n)) for hop in hops]
    return TopologySequence("one_peer_exponential", tuple(rounds) or (((),),))


def base(n: int, peers: int = 1) -> TopologySequence:
    """The Base-(k+1) graph: any number of workers, at most k peers a round, exact after one cycle.

    With p the largest divisor of n whose prime factors are at most k + 1: p groups of n/p workers average by the simple graph,
    then one worker of each group with those of the others. The simple graph of all n where that is shorter.

    Args:
        n: workers, >= 1.
        peers: k, >= 1.

    Raises:
        ConfigurationError: if one of them is not.

    >>> len(base(6)), len(base(12)), len(base(25)), len(base(25, peers=2))
    (4, 5, 9, 6)
    """
    name = f"base_{peers + 1}" if isinstance(peers, int) else "base"
    _check(name, n, peers)
    smooth = _smooth_part(n, peers)
    size = n // smooth
    groups = [range(first, first + size) for first in range(0, n, size)]
    within = _beside(_simple_base(group, peers) for group in groups)
    between = _beside(_hyper_hypercube([group[place] for group in groups], peers) for place in range(size))
    simple = _simple_base(range(n), peers)
    return _symmetric(name, n, simple if len(simple) < len(within) + len(between) else [*within, *between])


def simple_base(n: int, peers: int = 1) -> TopologySequence:
    """The Simple Base-(k+1) graph, of which :func:`base` is made; never shorter than that.

    Args:
        n, peers: as for :func:`base`.

    >>> len(simple_base(6)), len(simple_base(12)), len(simple_base(25))
    (5, 7, 9)
    """
    _check("simple_base", n, peers)
    return _symmetric(f"simple_base_{peers + 1}", n, _simple_base(range(n), peers))


def _simple_base(ranks: Sequence[int], peers: int) -> list[Round]:
    """Algorithm 2. With n = Σ_l a_l (k+1)^{p_l}, part l has a_l groups of (k+1)^{p_l} workers, the largest first.

    | rounds | part l |
    |---|---|
    | the first | averages among its own workers |
    | then one, number l | each worker of the later parts mixes with one of each group, whose mean is then that of all |
    | the rest | each group averages |
    """
    if _smooth_part(len(ranks), peers) == len(ranks):
        return _hyper_hypercube(ranks, peers)
    parts = _parts(ranks, peers)
    whole = [[rank for group in part for rank in group] for part in parts]
    first = [_hyper_hypercube(part, peers) for part in whole]
    then = [
        _beside(_hyper_hypercube(group, peers) for group in part) if len(part[0]) > 1 else first[number]
        for number, part in enumerate(parts)
    ]
    rounds = [_together(own[number % len(own)] for own in first if own) for number in range(len(first[0]))]
    last = len(parts) - 1
    for number in range(1 + len(then[0])):
        mixed = [_join(parts[number:], peers)] if number < last else []
        for place, own in enumerate(then):
            began = min(place + 1, last)
            if own and number >= began:
                mixed.append(own[(number - began) % len(own)])
        rounds.append(_together(mixed))
    return rounds


def _join(parts: Sequence[Sequence[Sequence[int]]], peers: int) -> Round:
    """Each worker of the later parts mixes with one of each group of the first, whose others average among themselves."""
    groups = [list(group) for group in parts[0]]
    ours = sum(map(len, groups))
    later = [rank for part in parts[1:] for group in part for rank in group]
    weight = ours / (ours + len(later)) / len(groups)
    joined: Round = {}
    for rank in later:
        for group in groups:
            joined[_pair(rank, group.pop())] = weight
    idle = [rank for group in groups for rank in group]
    for start in range(0, len(idle), peers + 1):
        joined |= _averaged(idle[start : start + peers + 1])
    return joined


def _parts(ranks: Sequence[int], peers: int) -> list[list[Sequence[int]]]:
    """The digits of n to the base k + 1, from the largest: a_l groups of (k+1)^{p_l} ranks each."""
    size = 1
    while size * (peers + 1) <= len(ranks):
        size *= peers + 1
    parts, start = [], 0
    while start < len(ranks):
        count = (len(ranks) - start) // size
        if count:
            parts.append([ranks[start + number * size : start + (number + 1) * size] for number in range(count)])
        start += count * size
        size //= peers + 1
    return parts


def _hyper_hypercube(ranks: Sequence[int], peers: int) -> list[Round]:
    """Algorithm 1: along each axis of a grid in turn, all workers of a line become equal.

    Args:
        ranks: as many as a product of numbers up to k + 1.
        peers: k.
    """
    rounds, stride, rest = [], 1, len(ranks)
    for size in reversed(range(2, peers + 2)):
        while rest % size == 0:
            rest //= size
            lines = [
                [ranks[start + offset + number * stride] for number in range(size)]
                for start in range(0, len(ranks), stride * size)
                for offset in range(stride)
            ]
            rounds.append(_together(map(_averaged, lines)))
            stride *= size
    return rounds


def _smooth_part(n: int, peers: int) -> int:
    """The largest divisor of n that has no prime factor above k + 1."""
    rest = n
    for factor in range(2, peers + 2):
        while rest % factor == 0:
            rest //= factor
    return n // rest


def _averaged(ranks: Sequence[int]) -> Round:
    """All of them become their mean."""
    return {_pair(i, j): 1.0 / len(ranks) for place, i in enumerate(ranks) for j in ranks[place + 1 :]}


def _beside(sequences: Iterable[list[Round]]) -> list[Round]:
    """Sequences of the same length, of different workers, in the same rounds."""
    return [_together(rounds) for rounds in zip(*sequences, strict=True)]


def _together(rounds: Iterable[Round]) -> Round:
    """Rounds of different workers as one."""
    return {pair: weight for part in rounds for pair, weight in part.items()}


def _pair(i: int, j: int) -> tuple[int, int]:
    return (i, j) if i < j else (j, i)


def _symmetric(name: str, n: int, rounds: Sequence[Round]) -> TopologySequence:
    sequence = []
    for edges in rounds or [{}]:
        rows: list[list[tuple[int, float]]] = [[] for _ in range(n)]
        for (i, j), weight in sorted(edges.items()):
            rows[i].append((j, weight))
            rows[j].append((i, weight))
        sequence.append(tuple(tuple(sorted(row)) for row in rows))
    return TopologySequence(name, tuple(sequence))


def _check(name: str, n: int, peers: int = 1) -> None:
    check_integer(f"topology {name!r}: the number of workers", n, example=4)
    check_integer("peers", peers, example=1)


SEQUENCES: Mapping[str, Callable[[int], TopologySequence]] = MappingProxyType(
    {
        "one_peer_hypercube": one_peer_hypercube,
        "one_peer_exponential": one_peer_exponential,
        "base_2": partial(base, peers=1),
        "base_3": partial(base, peers=2),
    }
)
"""Name → generator of the graphs that change from round to round."""
