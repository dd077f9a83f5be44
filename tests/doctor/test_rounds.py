"""Pairs that are measured at once share no worker and no network port, and in the end all have met."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.doctor.rounds import Pair, rounds, tournament

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def hosts_of(each: list[int]) -> list[list[int]]:
    ranks = itertools.count()
    return [[next(ranks) for _ in range(size)] for size in each]


def check_disjoint(made: list[list[Pair]], hosts: list[list[int]]) -> None:
    host = {rank: place for place, ranks in enumerate(hosts) for rank in ranks}
    for pairs in made:
        assert pairs
        assert max(Counter(rank for pair in pairs for rank in pair).values()) == 1
        across = Counter(host[rank] for pair in pairs if host[pair[0]] != host[pair[1]] for rank in pair)
        assert all(number == 1 for number in across.values())


@given(st.integers(0, 20))
def test_in_a_tournament_each_meets_each_once_in_as_few_rounds_as_can_be(number: int) -> None:
    made = tournament(range(number))
    met = [frozenset(pair) for pairs in made for pair in pairs]
    assert sorted(map(sorted, met)) == [list(pair) for pair in itertools.combinations(range(number), 2)]
    assert all(len({end for pair in pairs for end in pair}) == 2 * len(pairs) for pairs in made)
    assert len(made) <= (number if number % 2 else max(0, number - 1))


@given(sizes)
def test_with_time_enough_all_pairs_are_measured_once(each: list[int]) -> None:
    hosts = hosts_of(each)
    made = rounds(hosts, most=10_000)
    check_disjoint(made, hosts)
    assert sorted(itertools.chain(*made)) == list(itertools.combinations(range(sum(each)), 2))


@given(sizes, st.integers(0, 40))
def test_with_less_time_each_host_still_meets_each_once_and_no_pair_twice(each: list[int], most: int) -> None:
    hosts = hosts_of(each)
    made = rounds(hosts, most=most)
    check_disjoint(made, hosts)
    pairs = list(itertools.chain(*made))
    assert len(set(pairs)) == len(pairs)
    host = {rank: place for place, ranks in enumerate(hosts) for rank in ranks}
    met = {frozenset((host[i], host[j])) for i, j in pairs if host[i] != host[j]}
    assert met == {frozenset(pair) for pair in itertools.combinations(range(len(hosts)), 2)}
    needed = max(len(tournament(ranks)) for ranks in hosts) + len(tournament(range(len(hosts))))
    assert len(made) <= max(most, needed)


def test_sixteen_hosts_take_fifteen_rounds_and_sixteen_workers_of_two_hosts_no_more_than_their_meetings() -> None:
    assert len(rounds(hosts_of([1] * 16), most=240)) == 15
    assert len(rounds(hosts_of([8, 8]), most=240)) == 7 + 64
    assert len(rounds(hosts_of([8, 8]), most=30)) == 7 + 23
