"""Which pairs of workers are measured at once: the rounds of a tournament, so that nobody waits for a chain of others.

Two pairs of one round share no worker, and no network port: of a host that has several workers one at a time talks to another
host. Inside a host the pairs of a round are disjoint only, since memory is what they share.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import TypeVar

Pair = tuple[int, int]
T = TypeVar("T", bound=Hashable)


def tournament(members: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Rounds of disjoint pairs in which each meets each other once, by the circle method (Kirkman 1847).

    Args:
        members: n of them; n − 1 rounds where n is even, n where it is odd.

    >>> tournament([0, 1, 2, 3])
    [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]
    """
    circle: list[T | None] = [*members, *([None] if len(members) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = [(one, other) for one, other in zip(circle[:half], reversed(circle[half:]), strict=True)]
        rounds.append([(one, other) for one, other in met if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def rounds(hosts: Sequence[Sequence[int]], most: int) -> list[list[Pair]]:
    """The rounds of a measurement, each a list of pairs of ranks, the lower one first.

    All pairs, if that takes no more rounds than may be; else all pairs inside hosts, and between each two hosts as many pairs
    of workers as there is time for, one at least, each of other workers.

    Args:
        hosts: ranks of each host.
        most: rounds that there is time for. There may be more: one for each meeting of two hosts.

    >>> rounds([[0, 1], [2, 3]], most=10)
    [[(0, 1), (2, 3)], [(0, 2)], [(1, 3)], [(1, 2)], [(0, 3)]]
    """
    inside = [tournament(ranks) for ranks in hosts if len(ranks) > 1]
    made = [list(itertools.chain(*together)) for together in itertools.zip_longest(*inside, fillvalue=[])]
    meetings = tournament(range(len(hosts))) if len(hosts) > 1 else []
    largest = max((len(ranks) for ranks in hosts), default=0)
    times = max(1, (most - len(made)) // len(meetings)) if meetings else 0
    for time in range(min(times, largest * largest)):
        for meeting in meetings:
            pairs = [_meeting(hosts[one], hosts[other], time) for one, other in meeting]
            made.append([pair for pair in pairs if pair is not None])
    ordered = [[(min(pair), max(pair)) for pair in pairs] for pairs in made]
    return [pairs for pairs in ordered if pairs]


def _meeting(ones: Sequence[int], others: Sequence[int], time: int) -> Pair | None:
    """The pair of workers of two hosts at their t-th meeting; each with each in the end, and each worker once in a turn."""
    few, many = sorted((ones, others), key=len)
    if time >= len(few) * len(many):
        return None
    turn, place = divmod(time, len(many))
    return few[(place + turn) % len(few)], many[place]
