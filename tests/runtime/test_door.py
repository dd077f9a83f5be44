"""Workers that wait to be taken in, as threads: every wait ends, whatever becomes of those inside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lightning_gossip.algorithm.failure_detector import Verdict
from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.membership.round_store import Worker
from tests.runtime.party import BEAT_S, PATIENCE_S, Party

SILENCE_S = 1.0  # for tests in which silence means something: much longer than a beat, much shorter than the patience


def until(condition: Callable[[], Any]) -> Any:
    """What it returns when that is true at last."""
    end_s, pause = time.monotonic() + PATIENCE_S / 2, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end_s, "nothing happened"
        pause.wait(BEAT_S)
    return value


def knocking(member: Membership) -> list[Worker]:
    """Whom a member hears."""
    return list(member.watch.knocking(range(10)))


def outsiders(made: Party, *workers: Worker) -> list[Membership]:
    """Workers that come later, and everybody looks out for them."""
    made_outside = [made.add(worker) for worker in workers]
    for member in made.all:
        member.watch.look_out(range(10))
    for outsider in made_outside:
        outsider.stay_alone()
    return made_outside


def fall_silent(member: Membership) -> Callable[[], None]:
    """Stop a worker's beats as SIGSTOP would; returns what lets it go on."""
    watch = member.watch
    tell, watch._tell = watch._tell, lambda: None  # type: ignore[method-assign]

    def go_on() -> None:
        watch._tell = tell  # type: ignore[method-assign]

    return go_on


@pytest.fixture(autouse=True)
def soon() -> Any:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < PATIENCE_S / 2  # nobody has waited until the end of its patience


def test_all_that_wait_for_members_that_have_died_end(party: Callable[..., Party]) -> None:
    made = party(2, dead_s=SILENCE_S)
    waiting = outsiders(made, Worker(2, 1), Worker(3, 1))

    def script(member: Membership) -> Any:
        if member in waiting:
            return member.entrance.join(PATIENCE_S)
        member.hello()
        fall_silent(member)
        return None

    for error in made.run(script)[2:]:
        assert isinstance(error, PeerError)
        assert "all its members are gone" in str(error)


def test_who_waits_for_members_that_end_by_an_exception_ends_and_says_why(party: Callable[..., Party]) -> None:
    made = party(2)
    (outsider,) = outsiders(made, Worker(2, 1))

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.entrance.join(PATIENCE_S)
        member.hello()
        try:
            if member.rank == 1:
                raise ArithmeticError("no")
            return member.gather(None)
        except (ArithmeticError, PeerError) as error:
            member.watch.failed(f"{type(error).__name__}: {error}")
            member.watch.rest()

    error = made.run(script)[2]
    assert isinstance(error, PeerError)
    assert "has failed" in str(error)
    assert "ArithmeticError: no" in str(error)


def test_one_failed_worker_that_the_others_have_left_behind_keeps_nobody_out(party: Callable[..., Party]) -> None:
    made = party(2)
    (outsider,) = outsiders(made, Worker(2, 1))

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.entrance.join(PATIENCE_S)
        member.hello()
        if member.me.number == 1:
            made.bury(member.me)
            until(lambda: made.all[0].lost)
            member.watch.failed("ArithmeticError: no")
            return member.watch.rest()
        member.gather(None)
        until(lambda: made.store.get("p/beat/1.1").find(b"ArithmeticError") > 0)
        member.entrance.admit(until(lambda: knocking(member)), "news")
        return None

    assert made.run(script)[2] == "news"


def test_who_comes_before_the_job_has_begun_waits_for_it(party: Callable[..., Party]) -> None:
    made = party(1)
    (outsider,) = outsiders(made, Worker(1, 1))

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.entrance.join(PATIENCE_S)
        threading.Event().wait(10 * BEAT_S)
        member.hello()
        return member.entrance.admit(until(lambda: knocking(member)), "news")

    assert made.run(script)[1] == "news"


def test_who_was_frozen_while_it_knocked_is_taken_in_when_it_beats_again(party: Callable[..., Party]) -> None:
    made = party(1, dead_s=SILENCE_S)
    (outsider,) = outsiders(made, Worker(1, 1))

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.entrance.join(PATIENCE_S)
        member.hello()
        until(lambda: knocking(member))
        thaw = fall_silent(outsider)
        until(lambda: member.watch.verdict(outsider.me) is Verdict.DEAD)
        assert not knocking(member)
        thaw()
        return member.entrance.admit(until(lambda: knocking(member)), None)

    assert made.run(script) == [None, None]
    assert made.all[0].members == (Worker(0, 1), Worker(1, 1))


def test_who_was_outside_for_long_takes_no_member_for_dead(party: Callable[..., Party]) -> None:
    made = party(2, dead_s=SILENCE_S)
    away = made.all[1]

    def script(member: Membership) -> Any:
        if member is away:
            until(lambda: made.store.check(["p/beat/0.1"]) and away.watch.verdict(Worker(0, 1)) is Verdict.ALIVE)
            away._be_excluded()
            away.watch.look_out(())  # nor does it listen to those inside
            end_s = time.monotonic() + 2 * SILENCE_S
            until(lambda: away.watch.verdict(Worker(0, 1)) is Verdict.DEAD or time.monotonic() > end_s)
            assert away.entrance.join(PATIENCE_S) == "news"
            assert away.watch.verdict(Worker(0, 1)) is not Verdict.DEAD
        else:
            made.bury(Worker(1, 1))
            member.gather(None)
            member.watch.look_out(range(2))
            member.entrance.admit(until(lambda: knocking(member)), "news")
        return [len(member.gather(None)) for _ in range(3)]

    assert made.run(script) == [[2, 2, 2]] * 2


def test_who_thaws_after_it_was_invited_and_lost_again_knocks_once_more(party: Callable[..., Party]) -> None:
    made = party(1)
    (outsider,) = outsiders(made, Worker(1, 1))
    lost = threading.Event()

    def script(member: Membership) -> Any:
        if member is outsider:
            made.store.set("p/knock/1", "1 ")
            assert lost.wait(PATIENCE_S)
            return member.entrance.join(PATIENCE_S), member.alone, member.me
        member.hello()
        until(lambda: knocking(member))
        made.bury(outsider.me)
        member.entrance.admit([outsider.me], "too early")
        assert member.lost == [outsider.me]
        lost.set()
        return member.entrance.admit(until(lambda: knocking(member)), "news")

    assert made.run(script)[1] == ("news", False, Worker(1, 2))


def test_a_name_that_was_lost_is_not_taken_in_again(party: Callable[..., Party]) -> None:
    made, gathered = party(2), threading.Event()

    def script(member: Membership) -> Any:
        member.watch.look_out(range(2))
        member.gather(None)
        if member.me.number == 1:
            made.store.set("p/knock/1", "1 ")
            gathered.set()
            return until(lambda: made.all[0].lost)
        assert gathered.wait(PATIENCE_S)
        until(lambda: member.watch.verdict(Worker(1, 1)) is Verdict.ALIVE)
        member._leave_out([Worker(1, 1)])  # by the word of a third one, who is gone too
        until(lambda: knocking(member))
        return member.entrance.waiting(range(2))

    assert made.run(script)[0] == {}


def test_who_was_started_again_while_it_was_frozen_ends(party: Callable[..., Party]) -> None:
    made = party(2)
    thawed, successor = made.members[1], Worker(1, 2)
    (outsider,) = outsiders(made, successor)

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.entrance.join(PATIENCE_S), member.gather("successor")
        if member.me == thawed:
            until(lambda: len(made.all[0].members) == 2 and successor in made.all[0].members)
            return member.gather("predecessor")
        made.bury(thawed)
        member.hello()
        member.entrance.admit(until(lambda: knocking(member)), "news")
        return member.gather("host")

    results = made.run(script)
    assert [results[0], results[2]] == [["host", "successor"], ("news", ["host", "successor"])]
    assert "has been started again" in str(results[1])
    assert made.store.get("p/life/1") == b"2"


def test_who_was_started_again_while_it_knocked_ends(party: Callable[..., Party]) -> None:
    made = party(1)
    first = outsiders(made, Worker(1, 1), Worker(1, 2))[0]
    made.run(lambda member: member.hello() if member.me.number == 0 else None)
    with pytest.raises(PeerError, match="has been started again"):
        first.entrance.join(PATIENCE_S)


def test_who_was_invited_by_workers_that_have_all_died_ends(party: Callable[..., Party]) -> None:
    made = party(1)
    (outsider,) = outsiders(made, Worker(1, 1))

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.entrance.join(PATIENCE_S)
        member.hello()
        until(lambda: knocking(member))
        member.make_groups = lambda: made.die(member)  # type: ignore[method-assign]
        return member.entrance.admit([outsider.me], "news")

    error = made.run(script)[1]
    assert isinstance(error, PeerError)
    assert "before it had their model" in str(error)


def test_the_doors_are_closed_though_rank_0_dies_at_the_very_end(party: Callable[..., Party]) -> None:
    made = party(2)
    (outsider,) = outsiders(made, Worker(2, 1))

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.entrance.join(PATIENCE_S)
        member.hello()
        if member.rank == 0:
            made.die(member)
        return member.entrance.close()

    assert "comes too late" in str(made.run(script)[2])


def test_who_waits_outside_waits_as_long_as_a_member_beats(party: Callable[..., Party]) -> None:
    made, patience_s = party(2), 10 * BEAT_S
    back = outsiders(made, Worker(1, 2))[0]

    def script(member: Membership) -> Any:
        if member is back:
            return member.entrance.join(patience_s)
        if member.me.number == 1:
            return member.hello()
        made.bury(Worker(1, 1))
        member.hello()
        until(lambda: knocking(member))
        threading.Event().wait(5 * patience_s)  # the epoch goes on
        return member.entrance.admit(knocking(member), "news")

    assert made.run(script)[2] == "news"


def test_who_waits_for_a_job_that_does_not_begin_gives_up(party: Callable[..., Party]) -> None:
    made = party(1)
    (outsider,) = outsiders(made, Worker(1, 1))

    def script(member: Membership) -> Any:
        return member.entrance.join(10 * BEAT_S) if member is outsider else None  # the other beats, and has not said hello

    assert "has heard no member" in str(made.run(script)[1])
