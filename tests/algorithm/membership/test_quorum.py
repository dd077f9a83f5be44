"""Who may go on without the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.quorum import has_quorum, witnesses
from lightning_gossip.algorithm.membership.worker_id import WorkerId

MEMBERS = [WorkerId(rank, 1) for rank in range(6)]
subsets = st.sets(st.sampled_from(MEMBERS))


@given(st.integers(1, 6), subsets, subsets, subsets)
def test_no_two_sides_of_living_workers_may_go_on(
    workers: int, one: set[WorkerId], other: set[WorkerId], ended: set[WorkerId]
) -> None:
    members = MEMBERS[:workers]
    one, other = (side - ended for side in (one, other - one))
    at_store = has_quorum(one, members, ended & set(members), at_store=True)
    elsewhere = has_quorum(other, members, ended & set(members), at_store=False)
    assert not (at_store and elsewhere)


@given(st.sampled_from([4, 6]), subsets, subsets, subsets)
def test_no_two_sides_of_islands_may_go_on(ranks: int, one: set[WorkerId], other: set[WorkerId], ended: set[WorkerId]) -> None:
    members, islands = MEMBERS[:ranks], Islands(2)
    one, other = (side - ended for side in (one, other - one))
    at_store = has_quorum(one, members, ended & set(members), at_store=True, islands=islands)
    elsewhere = has_quorum(other, members, ended & set(members), at_store=False, islands=islands)
    assert not (at_store and elsewhere)


def test_an_island_counts_with_all_its_ranks_and_has_ended_with_the_first_of_them() -> None:
    members, islands = MEMBERS, Islands(2)  # three islands
    assert has_quorum(MEMBERS[2:], members, [], at_store=False, islands=islands)
    assert not has_quorum(MEMBERS[2:5], members, [], at_store=False, islands=islands)  # four of six were enough, three are not
    assert not has_quorum(MEMBERS[1:5], members, [], at_store=False, islands=islands)  # one island, and two halves
    assert has_quorum(MEMBERS[2:4], MEMBERS[:4], [MEMBERS[0]], at_store=False, islands=islands)  # what is left of the other
    assert has_quorum(MEMBERS[:2], MEMBERS[:3], [], at_store=False, islands=islands)  # has nobody to go on with


def test_the_survivor_of_two_goes_on_if_the_other_is_known_to_have_ended() -> None:
    first, second = MEMBERS[:2]
    assert has_quorum([second], [first, second], [first], at_store=False)
    assert not has_quorum([second], [first, second], [], at_store=False)
    assert not has_quorum([second], [first, second, MEMBERS[2]], [first], at_store=False)  # the third is silent


def test_who_has_said_how_many_are_enough_is_obeyed() -> None:
    assert has_quorum(MEMBERS[4:], MEMBERS, [], at_store=False, least=2)
    assert not has_quorum(MEMBERS[:5], MEMBERS, [], at_store=True, least=6)


def test_a_result_that_enough_know_is_known_in_any_quorum() -> None:
    for workers in range(1, 7):
        for present in range(1, workers + 1):
            know = witnesses(present, workers)
            assert know == present or 2 * know > workers
