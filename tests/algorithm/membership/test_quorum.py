"""Who may go on without the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
