"""Admission of workers that are threads: every wait outside ends, whatever becomes of the members."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lightning_gossip.algorithm.failure_detector import Verdict
from lightning_gossip.algorithm.membership.membership import MakeGroup
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.membership.membership import Membership
from tests.runtime.party import HEARTBEAT_S, PATIENCE_S, Party

LATE_S = 1.0  # for tests in which late heartbeats mean something: much longer than a heartbeat, much shorter than the patience


def until(condition: Callable[[], Any]) -> Any:
    """What it returns when that is true at last."""
    end_s, pause = time.monotonic() + PATIENCE_S / 2, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end_s, "nothing happened"
        pause.wait(HEARTBEAT_S)
    return value


def requesting(member: Membership) -> list[WorkerId]:
    """The workers whose join requests a member has read."""
    return list(member.monitor.join_requests())


def outsiders(made: Party, *workers: WorkerId) -> list[Membership]:
    """Workers that come later, whom everybody expects."""
    made_outside = [made.add(worker) for worker in workers]
    for outsider in made_outside:
        outsider.stay_outside()
    return made_outside


def freeze(member: Membership) -> Callable[[], None]:
    """Stop a worker's heartbeats as SIGSTOP would; returns what lets it go on."""
    monitor = member.monitor
    drive, monitor._drive = monitor._drive, lambda steps: None  # type: ignore[method-assign]

    def go_on() -> None:
        monitor._drive = drive  # type: ignore[method-assign]

    return go_on


@pytest.fixture(autouse=True)
def soon() -> Any:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < PATIENCE_S / 2  # nobody has waited until the end of its patience


def test_all_that_wait_for_members_that_have_died_end(party: Callable[..., Party]) -> None:
    made = party(2, fail_after_s=LATE_S)
    waiting = outsiders(made, WorkerId(2, 1), WorkerId(3, 1))

    def script(member: Membership) -> Any:
        if member in waiting:
            return member.join(PATIENCE_S)
        member.hello()
        freeze(member)
        return None

    for error in made.run(script)[2:]:
        assert isinstance(error, PeerError)
        assert "all its members have failed" in str(error)


def test_who_waits_for_members_that_end_by_an_exception_ends_and_says_why(party: Callable[..., Party]) -> None:
    made = party(2)
    (outsider,) = outsiders(made, WorkerId(2, 1))

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.join(PATIENCE_S)
        member.hello()
        try:
            if member.rank == 1:
                raise ArithmeticError("no")
            return member.gather(None)
        except (ArithmeticError, PeerError) as error:
            member.monitor.abort(f"{type(error).__name__}: {error}")
            member.monitor.rest()

    error = made.run(script)[2]
    assert isinstance(error, PeerError)
    assert "has failed" in str(error)
    assert "ArithmeticError: no" in str(error)


def test_an_aborted_worker_that_was_excluded_keeps_nobody_out(party: Callable[..., Party]) -> None:
    made, rested = party(2), threading.Event()
    (outsider,) = outsiders(made, WorkerId(2, 1))

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.join(PATIENCE_S)
        member.hello()
        if member.me.initial_rank == 1:
            made.bury(member.me)
            until(lambda: made.all[0].excluded)
            member.monitor.abort("ArithmeticError: no")
            member.monitor.rest()
            return rested.set()
        member.gather(None)
        assert rested.wait(PATIENCE_S)
        member.admit(until(lambda: requesting(member)), "snapshot")
        return None

    assert made.run(script)[2] == "snapshot"


def test_who_comes_before_the_job_has_begun_waits_for_it(party: Callable[..., Party]) -> None:
    made = party(1)
    (outsider,) = outsiders(made, WorkerId(1, 1))

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.join(PATIENCE_S)
        threading.Event().wait(10 * HEARTBEAT_S)
        member.hello()
        return member.admit(until(lambda: requesting(member)), "snapshot")

    assert made.run(script)[1] == "snapshot"


def test_a_worker_frozen_while_it_asks_to_join_is_admitted_when_its_heartbeats_go_on(party: Callable[..., Party]) -> None:
    made = party(1, fail_after_s=LATE_S)
    (outsider,) = outsiders(made, WorkerId(1, 1))

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.join(PATIENCE_S)
        member.hello()
        until(lambda: requesting(member))
        thaw = freeze(outsider)
        until(lambda: member.monitor.verdict(outsider.me) is Verdict.FAILED)
        assert not requesting(member)
        thaw()
        return member.admit(until(lambda: requesting(member)), None)

    assert made.run(script) == [None, None]
    assert made.all[0].members == (WorkerId(0, 1), WorkerId(1, 1))


def test_a_worker_outside_for_long_declares_no_member_failed(party: Callable[..., Party]) -> None:
    made = party(2, fail_after_s=LATE_S)
    away = made.all[1]

    def script(member: Membership) -> Any:
        if member is away:
            until(lambda: made.store.check(["p/heartbeat/0.1"]) and away.monitor.verdict(WorkerId(0, 1)) is Verdict.ALIVE)
            away._perform(away._protocol._leave())
            end_s = time.monotonic() + 2 * LATE_S
            until(lambda: away.monitor.verdict(WorkerId(0, 1)) is Verdict.FAILED or time.monotonic() > end_s)
            assert away.join(PATIENCE_S) == "snapshot"
            assert away.monitor.verdict(WorkerId(0, 1)) is not Verdict.FAILED
        else:
            made.bury(WorkerId(1, 1))
            member.gather(None)
            member.admit(until(lambda: requesting(member)), "snapshot")
        return [len(member.gather(None)) for _ in range(3)]

    assert made.run(script) == [[2, 2, 2]] * 2


def test_a_worker_excluded_right_after_its_grant_asks_once_more(party: Callable[..., Party]) -> None:
    made = party(1)
    (outsider,) = outsiders(made, WorkerId(1, 1))
    lost = threading.Event()

    def script(member: Membership) -> Any:
        if member is outsider:
            member.monitor.protocol.request("")
            assert lost.wait(PATIENCE_S)
            return member.join(PATIENCE_S), member.outside, member.me
        member.hello()
        until(lambda: requesting(member))
        made.bury(outsider.me)
        member.admit([outsider.me], "too early")
        assert member.excluded == [outsider.me]
        lost.set()
        return member.admit(until(lambda: requesting(member)), "snapshot")

    assert made.run(script)[1] == ("snapshot", False, WorkerId(1, 2))


def test_an_excluded_incarnation_is_not_admitted_again(party: Callable[..., Party]) -> None:
    made, gathered = party(2), threading.Event()

    def script(member: Membership) -> Any:
        member.gather(None)
        if member.me.initial_rank == 1:
            member.monitor.protocol.request("")
            gathered.set()
            return until(lambda: made.all[0].excluded)
        assert gathered.wait(PATIENCE_S)
        until(lambda: member.monitor.verdict(WorkerId(1, 1)) is Verdict.ALIVE)
        member._protocol._exclude([WorkerId(1, 1)])  # by the word of a third one, who is gone too
        until(lambda: requesting(member))
        return member.waiting(range(2))

    assert made.run(script)[0] == {}


def test_who_was_started_again_while_it_was_frozen_ends(party: Callable[..., Party]) -> None:
    made = party(2)
    thawed, successor = made.members[1], WorkerId(1, 2)
    (outsider,) = outsiders(made, successor)

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.join(PATIENCE_S), member.gather("successor")
        if member.me == thawed:
            until(lambda: len(made.all[0].members) == 2 and successor in made.all[0].members)
            return member.gather("predecessor")
        made.bury(thawed)
        member.hello()
        member.admit(until(lambda: requesting(member)), "snapshot")
        return member.gather("admitter")

    results = made.run(script)
    assert [results[0], results[2]] == [["admitter", "successor"], ("snapshot", ["admitter", "successor"])]
    assert "has been started again" in str(results[1])
    assert made.store.get("p/incarnation/1") == b"2"


def test_a_worker_started_again_while_it_asks_to_join_ends(party: Callable[..., Party]) -> None:
    made = party(1)
    first = outsiders(made, WorkerId(1, 1), WorkerId(1, 2))[0]
    made.run(lambda member: member.hello() if member.me.initial_rank == 0 else None)
    with pytest.raises(PeerError, match="has been started again"):
        first.join(PATIENCE_S)


def test_a_joiner_whose_admitters_have_all_died_ends(party: Callable[..., Party]) -> None:
    made = party(1)
    (outsider,) = outsiders(made, WorkerId(1, 1))

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.join(PATIENCE_S)
        member.hello()
        until(lambda: requesting(member))
        member._operations._by_type[MakeGroup] = lambda effect: made.die(member)
        return member.admit([outsider.me], "snapshot")

    error = made.run(script)[1]
    assert isinstance(error, PeerError)
    assert "before it had their model" in str(error)


def test_admission_is_closed_though_rank_0_dies_at_the_very_end(party: Callable[..., Party]) -> None:
    made = party(2)
    (outsider,) = outsiders(made, WorkerId(2, 1))

    def script(member: Membership) -> Any:
        if member is outsider:
            return member.join(PATIENCE_S)
        member.hello()
        if member.rank == 0:
            made.die(member)
        return member.close_admission()

    assert "comes too late" in str(made.run(script)[2])


def test_a_worker_outside_waits_as_long_as_a_member_sends_heartbeats(party: Callable[..., Party]) -> None:
    made, patience_s = party(2), 10 * HEARTBEAT_S
    back = outsiders(made, WorkerId(1, 2))[0]

    def script(member: Membership) -> Any:
        if member is back:
            return member.join(patience_s)
        if member.me.initial_rank == 1:
            return member.hello()
        made.bury(WorkerId(1, 1))
        member.hello()
        until(lambda: requesting(member))
        threading.Event().wait(5 * patience_s)  # the epoch goes on
        return member.admit(requesting(member), "snapshot")

    assert made.run(script)[2] == "snapshot"


def test_who_waits_for_a_job_that_does_not_begin_gives_up(party: Callable[..., Party]) -> None:
    made = party(1)
    (outsider,) = outsiders(made, WorkerId(1, 1))

    def script(member: Membership) -> Any:
        # the other sends heartbeats, and has not said hello
        return member.join(10 * HEARTBEAT_S) if member is outsider else None

    assert "has heard no member" in str(made.run(script)[1])
