"""What follows from what each worker came for: a pure function."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from lightning_gossip.algorithm.membership.kinds import of_one_kind
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.sync_point import Arrival, Purpose, agree
from tests.runtime.party import Party

END, VALIDATE, SAVE = Purpose.EPOCH_END, Purpose.VALIDATE, Purpose.SAVE
STOP, REQUESTED, COLLECTIVE = Purpose.STOP, Purpose.REQUESTED, Purpose.COLLECTIVE


def come(*purposes: Purpose, asks: tuple[Any, ...] = (), stopping: int | None = None) -> list[Arrival]:
    return [
        Arrival(purpose, 10 * rank, rank == stopping, asks=asks if rank == 0 else ()) for rank, purpose in enumerate(purposes)
    ]


def test_whoever_waits_for_the_epoch_to_end_takes_part_in_a_checkpoint_and_comes_again() -> None:
    agreement = agree(come(SAVE, END, REQUESTED, asks=("a", "b")))
    assert agreement.asked == ("a", "b")
    assert not agreement.over
    assert not agreement.stop
    assert agreement.optimizer_steps == (0, 10, 20)
    assert agree(come(END, END, END)).over


def test_only_what_rank_0_was_asked_for_is_done() -> None:
    arrivals = [Arrival(REQUESTED, 0), Arrival(SAVE, 0, asks=("mine",))]
    assert agree(arrivals).asked == ()
    assert not agree(arrivals).over  # rank 1 goes on; nobody has saved


def test_when_rank_0_has_died_after_it_called_nobody_saves_and_all_go_on() -> None:
    agreement = agree(come(REQUESTED, END))
    assert (agreement.asked, agreement.over) == ((), False)


def test_a_stop_ends_all_and_what_was_asked_for_is_done_first() -> None:
    agreement = agree(come(SAVE, STOP, END, asks=("a",)))
    assert agreement.stop
    assert agreement.over
    assert agreement.asked == ("a",)


def test_one_that_leaves_the_epoch_early_ends_it_for_all_once_they_have_come_to_its_end() -> None:
    called = agree(come(REQUESTED, END, stopping=1))
    assert called.should_stop
    assert not called.over
    assert agree(come(END, END, stopping=1)).over
    assert agree(come(VALIDATE, END, stopping=1)).over  # it validates too


@pytest.mark.parametrize("purposes", [(END, VALIDATE), (END, COLLECTIVE), (VALIDATE, COLLECTIVE)])
def test_waiting_for_different_things_is_an_error_and_no_hang(purposes: tuple[Purpose, ...]) -> None:
    with pytest.raises(ConfigurationError, match=f"rank 0 for {purposes[0].name}, rank 1 for {purposes[1].name}"):
        agree(come(*purposes))
    assert not agree(come(*purposes, REQUESTED)).over  # unless somebody has yet to come


def test_two_collectives_of_the_users_own_must_be_the_same() -> None:
    same, other = Arrival(COLLECTIVE, 0, what="a barrier"), Arrival(COLLECTIVE, 0, what="a reduction")
    assert agree([same, same]).over
    with pytest.raises(ConfigurationError, match="rank 0 for a barrier, rank 1 for a reduction"):
        agree([same, other])


def test_values_of_another_call_are_refused() -> None:
    assert of_one_kind([("a metric", 1), ("a metric", None)]) == [1, None]
    with pytest.raises(ConfigurationError, match="rank 0 at a metric, rank 1 at a synchronisation point"):
        of_one_kind([("a metric", {"loss": 1.0}), ("a synchronisation point", (1, 0, 5))])


def test_no_member_reads_the_values_of_another_call(party: Callable[..., Party]) -> None:
    def script(member: Membership) -> Any:
        assert member.gather(member.rank, "the same") == [0, 1]
        return member.gather(member.rank, "a barrier" if member.rank else "a synchronisation point")

    for said in party(2).run(script):
        assert isinstance(said, ConfigurationError)
        assert "rank 0 at a synchronisation point, rank 1 at a barrier" in str(said)


def test_failed_ranks_are_those_of_the_members_that_were_there_and_not_of_those_that_are_left(
    party: Callable[..., Party],
) -> None:
    made = party(3)

    def script(member: Membership) -> Any:
        failed_ranks = member.failed_ranks()
        if member.me.initial_rank == 1:
            made.die(member)
        member.gather(None)
        assert len(member.members) == 2
        return failed_ranks(), member.failed_ranks()()

    results = made.run(script)
    assert results[0] == results[2] == (frozenset({1}), frozenset())


def test_an_epoch_that_was_left_is_done_as_far_as_the_first_of_all_has_come() -> None:
    shares = (Fraction(1, 3), Fraction(1, 2))
    assert agree([Arrival(END, 0, share=share) for share in shares]).share == Fraction(1, 2)
