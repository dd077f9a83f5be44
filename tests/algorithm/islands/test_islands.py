"""Islands: places, groups of batches, the pull schedule, owners."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.islands.batches import count_groups, groups
from lightning_gossip.algorithm.islands.places import Islands, Place, owns, pull_every, share_numel
from lightning_gossip.algorithm.work_sharing import EpochPlan
from lightning_gossip.errors import ConfigurationError


@given(st.integers(1, 9), st.integers(0, 200))
def test_a_rank_has_one_place(size: int, rank: int) -> None:
    islands = Islands(size)
    place = islands.place(rank)
    assert islands.rank(place.island, place.index) == rank
    assert 0 <= place.index < size
    assert {rank, *islands.mates(rank)} == {islands.rank(place.island, index) for index in range(size)}


def test_an_island_of_one_is_a_rank() -> None:
    assert Islands(1).place(3) == Place(3, 0)
    assert Islands(1).mates(3) == []
    assert Islands(1).incomplete([0, 2]) == []


def test_ranks_that_do_not_come_out_even_are_refused_with_what_would() -> None:
    with pytest.raises(ConfigurationError, match=r"island=4 does not divide the 6 ranks .* 1, 2, 3, 6\."):
        Islands(4).count(6)
    assert Islands(3).count(6) == 2


def test_an_island_that_lacks_a_rank_is_incomplete() -> None:
    assert Islands(2).incomplete([0, 1, 2, 3]) == []
    assert Islands(2).incomplete([1, 2, 3, 4]) == [0, 2]


@given(st.integers(2, 6), st.integers(1, 8), st.integers(1, 200), st.booleans())
def test_every_sample_is_in_one_group_and_every_rank_has_some(
    size: int, batch_size: int, samples: int, drops_last: bool
) -> None:
    count = samples // batch_size if drops_last else -(-samples // batch_size)
    batches = [list(range(i * batch_size, min(samples, (i + 1) * batch_size))) for i in range(count)]
    found = groups(batches, size)
    assert [number for group in found for number in group.numbers] == list(range(len(batches)))
    for group in found:
        assert len(group.batches) == size
        lengths = [len(batch) for batch in group.batches]
        assert min(lengths) >= min(2, max(map(len, batches))) or len(group.numbers) == size  # else it was a batch of the user's
        assert sorted({*itertools.chain(*group.batches)}) == sorted({s for number in group.numbers for s in batches[number]})
    everything = [sample for group in found for batch in group.batches for sample in batch]
    if len(batches) >= size:
        assert sorted(everything) == [sample for batch in batches for sample in batch]  # each once


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 200), st.booleans())
def test_groups_are_counted_without_being_made(size: int, batch_size: int, samples: int, drops_last: bool) -> None:
    plan = EpochPlan(samples, batch_size, False, drops_last, 0)
    assert count_groups(plan, size) == len(groups(plan.batches(0), size))


@given(st.integers(2, 6), st.integers(2, 8), st.integers(1, 60))
def test_full_groups_are_the_users_batches(size: int, batch_size: int, count: int) -> None:
    batches = [list(range(i * batch_size, (i + 1) * batch_size)) for i in range(count * size)]
    assert [batch for group in groups(batches, size) for batch in group.batches] == batches


def test_pieces_of_the_last_group_differ_by_one() -> None:
    batches = [list(range(8 * i, 8 * i + 8)) for i in range(9)]
    last = groups(batches, 4)[-1]
    assert sorted(map(len, last.batches)) == [2, 2, 2, 2]
    assert last.numbers == [8]
    last = groups([*batches, [72, 73, 74]], 4)[-1]
    assert sorted(map(len, last.batches)) == [2, 3, 3, 3]
    assert last.numbers == [8, 9]


@pytest.mark.parametrize(("rate", "push_every", "every"), [(1.0, 1, 1), (0.5, 1, 2), (0.1, 1, 10), (4.0, 1, 1), (0.0, 7, 7)])
def test_pulls_follow_the_rate(rate: float, push_every: int, every: int) -> None:
    assert pull_every(rate, push_every) == every


@given(st.integers(0, 1000), st.integers(1, 9))
def test_shares_cover_a_vector(numel: int, size: int) -> None:
    share = share_numel(numel, size)
    assert share * size >= numel
    assert (share - 1) * size < max(numel, 1)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_each_copy_has_one_owner(shape: list[int], data: st.DataObject) -> None:
    replicated = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    owners = [place for place in itertools.product(*map(range, shape)) if owns(place, replicated)]
    shards = {tuple(c for d, c in enumerate(place) if d not in replicated) for place in itertools.product(*map(range, shape))}
    assert len(owners) == len(shards)  # one for each different shard
