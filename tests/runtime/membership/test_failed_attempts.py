"""Failures that are no deaths: tried once more at most, told to all as they are, and of one use of a Trainer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gossip.algorithm.membership.failure_detector import Verdict
from lightning_gossip.algorithm.membership.news import Aborted
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import ConfigurationError, PeerError
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.membership.monitor import HeartbeatMonitor
from lightning_gossip.runtime.process_groups import make_default_group
from lightning_gossip.runtime.store_client import another
from lightning_gossip.transport.endpoint import Endpoint
from lightning_gossip.transport.peer_errors import peer_errors
from tests.runtime.party import FAIL_AFTER_S, PATIENCE_S, Party
from tests.workers import run_processes

SOON_S = 5.0  # far more than a party needs, far less than it waits for anything


def _ends(error: BaseException) -> Callable[[Membership], Any]:
    """A script whose collective fails on every rank; what it raised, and how often it was made."""

    def script(member: Membership) -> Any:
        tries = []

        def collective() -> None:
            tries.append(1)
            raise error

        with pytest.raises(type(error)) as caught:
            member.attempt(collective)
        return caught.value, len(tries), member.gather("still there")

    return script


@pytest.mark.parametrize(("error", "tries"), [(RuntimeError("x"), 2), (torch.OutOfMemoryError("x"), 1), (ValueError("x"), 1)])
def test_what_fails_on_all_is_raised_by_all_after_one_repeat_at_most(
    error: Exception, tries: int, party: Callable[..., Party], caplog: pytest.LogCaptureFixture
) -> None:
    began_s = time.monotonic()
    results = party(3).run(_ends(error))
    assert results == [(error, tries, ["still there"] * 3)] * 3
    assert time.monotonic() - began_s < SOON_S
    said = [record for record in caplog.records if "made once more" in record.message]
    assert len(said) == 3 * (tries - 1)
    assert all(record.levelno == logging.WARNING and f"{type(error).__name__}: x" in record.message for record in said)


@pytest.mark.parametrize("error", [RuntimeError("x"), torch.OutOfMemoryError("x"), TypeError("x")])
def test_what_fails_on_one_that_is_alive_ends_all_and_they_say_why(error: Exception, party: Callable[..., Party]) -> None:
    def script(member: Membership) -> Any:
        def collective() -> None:
            if member.rank == 1:
                raise error

        try:
            return member.attempt(collective)
        except (RuntimeError, TypeError) as raised:
            return raised

    mine, theirs = party(3).run(script), f"Rank 1 has failed and all end: {type(error).__name__}: x."
    assert mine[1] is error
    for other in (mine[0], mine[2]):
        assert isinstance(other, PeerError)
        assert str(other).startswith(theirs)
        assert (other.rank, other.reason) == (1, f"{type(error).__name__}: x")


def test_a_failure_before_a_round_inside_an_attempt_is_told_in_that_round(party: Callable[..., Party]) -> None:
    def script(member: Membership) -> Any:
        def collective() -> list[int]:
            if member.rank == 1:
                raise RuntimeError("x")
            return member.gather(member.rank)

        try:
            return member.attempt(collective)
        except RuntimeError as raised:
            return str(raised)

    began_s = time.monotonic()
    first, mine, last = party(3).run(script)
    assert mine == "x"
    assert first == last == "Rank 1 has failed and all end: RuntimeError: x. Its own log has the rest."
    assert time.monotonic() - began_s < SOON_S


def test_a_death_between_two_failures_is_no_reason_to_give_up(party: Callable[..., Party]) -> None:
    made = party(3)

    def script(member: Membership) -> Any:
        tries = 0

        def collective() -> int:
            nonlocal tries
            tries += 1
            if tries == 2 and member.me.initial_rank == 0:
                made.die(member)
            if tries < 4 - (
                member.me.initial_rank == 0
            ):  # the first for no reason, the second for the death, the third once more
                raise RuntimeError("a connection broke")
            return tries

        return member.attempt(collective), len(member.members)

    assert made.run(script)[1:] == [(4, 2)] * 2


@pytest.mark.parametrize("where", ["all", "one"])
def test_groups_that_can_never_be_made_are_tried_twice(where: str, party: Callable[..., Party]) -> None:
    made = party(3)
    made.fail_groups = lambda me, generation: where == "all" or me.initial_rank == 1

    def script(member: Membership) -> Any:
        try:
            return member.hello()
        except RuntimeError as raised:
            return str(raised)

    began_s = time.monotonic()
    results = made.run(script)
    assert len(made.made) == 2 * 3
    assert results[1] == "no group"
    told = "Rank 1 has failed and all end: RuntimeError: no group. Its own log has the rest."
    others = "no group" if where == "all" else told
    assert (results[0], results[2]) == (others, others)
    assert time.monotonic() - began_s < SOON_S


def test_the_keys_of_groups_that_are_left_do_not_stay(party: Callable[..., Party]) -> None:
    made = party(3)  # of two the one that is left needs no store for its group
    for member in made.all:
        make = member._make_group

        def keyed(store: Any, rank: int, size: int, make: Any = make) -> None:
            store.set(f"rank{rank}", "address")
            make(store, rank, size)

        member._make_group = keyed

    def script(member: Membership) -> Any:
        member.hello()
        if member.rank == 2:
            member.gather(None)
            made.die(member)
        member.gather(None)
        return member.gather(None)

    made.fail_groups = lambda me, generation: generation == 0
    made.run(script)
    assert sorted(key for key in made.store.list_keys() if "/group/" in key) == ["p/group/2/rank0", "p/group/2/rank1"]


def _uses(count: int, work: Callable[[Membership, int], Any]) -> Callable[[Membership], list[Any]]:
    """A script that uses a Trainer several times, and catches what ends each."""

    def script(member: Membership) -> list[Any]:
        ends: list[Any] = []
        for use in range(1, count + 1):
            try:
                member.hello(use)
                ends.append(work(member, use))
            except (ArithmeticError, PeerError) as error:
                member.monitor.abort(f"{type(error).__name__}: {error}")
                ends.append(error)
            member.monitor.rest()
        return ends

    return script


def test_an_exception_on_all_ends_one_use_only(party: Callable[..., Party]) -> None:
    together = threading.Barrier(3, timeout=PATIENCE_S)  # one that still waits to begin would be told of another's exception

    def work(member: Membership, use: int) -> Any:
        if use in (1, 2):
            together.wait()
            raise ArithmeticError(use)
        return member.gather(member.rank)

    for ends in party(3).run(_uses(4, work)):
        assert [type(end) for end in ends] == [ArithmeticError, ArithmeticError, list, list]
        assert ends[2:] == [[0, 1, 2]] * 2


def test_an_exception_on_one_ends_that_use_for_all_and_the_next_begins(party: Callable[..., Party]) -> None:
    def work(member: Membership, use: int) -> Any:
        for turn in range(3):
            if (use, member.rank, turn) == (1, 2, 1):
                raise ArithmeticError("no")
            member.gather(turn)
        return member.gather(member.rank), member.excluded

    results = party(3).run(_uses(3, work))
    assert [ends[1:] for ends in results] == [[([0, 1, 2], [])] * 2] * 3
    for ends in results[:2]:
        assert isinstance(ends[0], PeerError)
        assert ends[0].reason == "ArithmeticError: no"
        assert "Rank 2 has failed" in str(ends[0])
    assert isinstance(results[2][0], ArithmeticError)


def test_one_that_has_gone_on_to_the_next_use_still_ends_those_who_are_in_the_last(party: Callable[..., Party]) -> None:
    made = party(2)
    gone_on = threading.Event()

    def work(member: Membership, use: int) -> Any:
        if use == 1 and member.rank == 0:
            raise ArithmeticError("no")
        if use == 1:
            assert gone_on.wait(PATIENCE_S)
        return member.gather(use)

    begin = made.all[0].monitor.begin_use

    def begun(use: int) -> None:
        begin(use)
        if use == 2:
            gone_on.set()

    made.all[0].monitor.begin_use = begun  # type: ignore[method-assign]
    first, second = made.run(_uses(2, work))
    assert second[0].reason == "ArithmeticError: no"
    assert first[1] == second[1] == [2, 2]


def test_a_failure_is_known_by_the_worker_that_failed_first(party: Callable[..., Party]) -> None:
    made = party(2)

    def work(member: Membership, use: int) -> Any:
        if member.rank == 1:
            raise ArithmeticError("no")
        return member.gather(None)

    made.run(_uses(1, work))
    assert all(member.monitor.protocol._abort == Aborted(1, member.me, 1, "ArithmeticError: no") for member in made.all)


def test_a_worker_that_dies_between_two_uses_is_excluded_from_the_next(party: Callable[..., Party]) -> None:
    made = party(3)

    def work(member: Membership, use: int) -> Any:
        if use == 1 and member.me.initial_rank != 0:
            raise ArithmeticError("no")
        if member.me.initial_rank == 2:
            made.die(member)
        return member.gather(member.rank), member.excluded, member.monitor.verdict(WorkerId(2, 1))

    results = made.run(_uses(2, work))
    assert [results[0][1], results[1][1]] == [([0, 1], [WorkerId(2, 1)], Verdict.FAILED)] * 2


def test_workers_that_know_of_different_deaths_agree_when_the_next_use_begins(party: Callable[..., Party]) -> None:
    made = party(3)

    def work(member: Membership, use: int) -> Any:
        if use == 1 and member.me.initial_rank == 2:
            made.die(member)
        if use == 1 and member.me.initial_rank == 0:  # it has read the round that the dead one was absent in; the other has not
            member._protocol._exclude([WorkerId(2, 1)])
            raise ArithmeticError("no")
        return member.gather(member.rank), member.generation, len(member.members)

    results = made.run(_uses(2, work))
    assert results[0][1] == results[1][1]
    assert results[0][1][0] == [0, 1]


def test_no_round_of_an_earlier_use_stays_in_the_store(party: Callable[..., Party]) -> None:
    made = party(2)

    def work(member: Membership, use: int) -> Any:
        if use < 3 and member.rank == 1:
            raise ArithmeticError("no")
        return [member.gather(turn) for turn in range(3)]

    made.run(_uses(3, work))
    left = {int(key.split("/")[2]) >> 32 for key in made.store.list_keys() if key.startswith("p/round/")}
    assert left == {3}


@pytest.mark.processes
def test_a_worker_that_stops_in_a_collective_is_noticed_sooner_than_one_that_comes_late_is_given_up(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def script(rank: int) -> Any:
        dist.barrier()
        dist.destroy_process_group()  # that of the test
        store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        members = [WorkerId(number, 1) for number in range(2)]
        store.add(f"p/incarnation/{rank}", 1)
        member = Membership(
            store,
            HeartbeatMonitor(another(store), "p", members[rank], fail_after_s=FAIL_AFTER_S),
            "p",
            members,
            make_group=make_default_group("gloo", PATIENCE_S),
            min_workers=1,
            timeout_s=PATIENCE_S,
            collective_timeout_s=0.5,
        )
        member.hello()
        if rank == 1:
            store.get("waits")
            threading.Event().wait(1.0)  # longer than a collective of those that have met may take
        else:
            store.set("waits", "")
        dist.barrier()  # the user's own
        tries: list[float] = []

        def collective() -> None:
            tries.append(time.monotonic())
            if len(tries) == 1 and rank == 1:
                store.get("given up")  # silent: it is there, and takes no part
            try:
                dist.barrier()
            finally:
                store.set("given up", "")

        member.attempt(collective)
        member.rest()
        return len(tries), tries[1] - tries[0]

    results = run_processes(script, tmp_path, world_size=2, deadline_s=2 * PATIENCE_S)
    assert not [result for result in results if isinstance(result, str)], results
    for tries, seconds in results:
        assert tries == 2
        assert seconds < PATIENCE_S / 2


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (RuntimeError("timeout reading socket"), RuntimeError),
        (RuntimeError("the connection to the label service was closed by peer"), RuntimeError),
        (RuntimeError("Cannot use ReduceOp.BAND with non-integral dtype"), RuntimeError),
        (RuntimeError("[/torch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 50ms"), PeerError),
        (dist.DistNetworkError("The client socket has failed to connect"), PeerError),
    ],
)
def test_only_what_torchs_backend_raises_is_taken_for_another_workers_end(error: Exception, becomes: type) -> None:
    with pytest.raises(becomes) as caught, peer_errors("a test"):
        raise error
    assert (caught.value is error) is (becomes is RuntimeError)
    if becomes is PeerError:
        assert caught.value.__cause__ is error


def test_workers_that_cannot_reach_each_other_are_told_before_any_connection_is_tried(party: Callable[..., Party]) -> None:
    made = party(2)

    def script(member: Membership) -> Any:
        host = f"host{member.rank}"
        address = ("10.0.0.1", "127.0.1.1")[member.rank]
        with pytest.raises(ConfigurationError) as caught:
            member.hello(endpoint=Endpoint(host, host, address, "its host name resolves to that", ("eth0 10.0.0.2",)))
        return str(caught.value)

    first, second = made.run(script)
    assert first == second
    assert first.startswith("Rank 1 on host 'host1' listens at 127.0.1.1")
    assert made.made == []


def test_a_wrong_interface_of_one_is_told_to_all(party: Callable[..., Party]) -> None:
    wrong = ConfigurationError("no interface 'nosuch0'")

    def script(member: Membership) -> Any:
        with pytest.raises((ConfigurationError, PeerError)) as caught:
            member.hello(endpoint=wrong if member.rank == 1 else None)
        return caught.value

    other, mine = party(2).run(script)
    assert mine is wrong
    assert (other.rank, other.reason) == (1, "ConfigurationError: no interface 'nosuch0'")
