"""Rounds among workers that are threads on one store in memory: who dies when is chosen, and groups are not made."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gossip.algorithm.membership.failure_detector import Verdict
from lightning_gossip.algorithm.membership.monitor import Heartbeat
from lightning_gossip.algorithm.membership.news import News
from lightning_gossip.algorithm.membership.rounds import _word
from lightning_gossip.algorithm.membership.store import Await, ReadAll
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import ConfigurationError, PeerError, ProtocolError
from lightning_gossip.runtime.membership.local_processes import has_ended, identity
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.membership.monitor import HeartbeatMonitor
from lightning_gossip.runtime.membership.store_operations import StoreOperations
from lightning_gossip.runtime.process_groups import make_default_group
from lightning_gossip.runtime.store_client import another
from tests.runtime.party import FAIL_AFTER_S, HEARTBEAT_S, PATIENCE_S, Died, Party
from tests.workers import run_processes


def test_everybody_gets_everybodys_value_by_rank(party: Callable[..., Party]) -> None:
    results = party(4).run(lambda member: [member.gather((member.rank, n)) for n in range(5)])
    assert results == [[[(rank, n) for rank in range(4)] for n in range(5)]] * 4


def test_a_large_value_is_cut_and_put_together(party: Callable[..., Party]) -> None:
    large = bytes(range(256)) * 40_000  # 10 MB; a TCPStore takes 8
    results = party(2).run(lambda member: member.gather(large if member.rank == 0 else b""))
    assert results == [[large, b""]] * 2


def test_a_worker_that_dies_before_it_writes_is_excluded_from_that_round_and_all_after_it(party: Callable[..., Party]) -> None:
    made = party(3)

    def script(member: Membership) -> Any:
        first = member.gather(member.me.initial_rank)
        if member.me.initial_rank == 1:
            made.die(member)
        return first, member.gather(member.me.initial_rank), member.gather(member.rank), member.excluded, member.members

    results = made.run(script)
    expected = ([0, 1, 2], [0, 2], [0, 1], [WorkerId(1, 1)], (WorkerId(0, 1), WorkerId(2, 1)))
    assert [results[0], results[2]] == [expected] * 2
    assert (1, 2) in made.made  # worker 2 has become rank 1 of 2


def test_a_worker_that_ended_before_its_first_heartbeat_is_excluded_when_its_launcher_has_seen_that(
    party: Callable[..., Party],
) -> None:
    made = party(3)
    made.all.pop()  # it has never beaten

    def script(member: Membership) -> Any:
        if member.rank == 0:
            member.monitor.process_ended(WorkerId(2, 1))
        member.hello()
        return member.members

    assert made.run(script) == [(WorkerId(0, 1), WorkerId(1, 1))] * 2


def test_the_value_of_a_worker_that_dies_after_it_wrote_counts_in_that_round(party: Callable[..., Party]) -> None:
    made = party(3)

    def script(member: Membership) -> Any:
        if member.me.initial_rank == 1:
            made.store.append("p/round/0/said", _word(member.me, b"0 +" + pickle.dumps(("values", 7, {}))))
            made.die(member)
        return member.gather(member.me.initial_rank), member.gather(member.me.initial_rank)

    results = made.run(script)
    assert [results[0], results[2]] == [([0, 7, 2], [0, 2])] * 2


class Vanishing:
    """A store in which what was there a moment ago is gone: somebody else has deleted it meanwhile."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if not callable(getattr(self._store, name)):
            return getattr(self._store, name)

        def call(*args: Any) -> Any:
            result = getattr(self._store, name)(*args)
            if name in ("check", "wait"):
                for key in args[0]:
                    self._store.delete_key(key)
            return result

        return call


def test_what_is_deleted_while_it_is_looked_at_holds_nobody_up() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=HEARTBEAT_S))
    do = StoreOperations(Vanishing(store))  # type: ignore[arg-type]
    began_s = time.monotonic()
    store.set("key", "value")
    assert do(ReadAll(("key",))) is None
    store.set("key", "value")
    assert do(Await("key", HEARTBEAT_S)) is None
    assert time.monotonic() - began_s < PATIENCE_S / 4


def test_an_attempt_that_fails_for_one_is_made_again_by_all(party: Callable[..., Party]) -> None:
    made = party(3)

    def script(member: Membership) -> Any:
        tries = 0

        def collective() -> int:
            nonlocal tries
            tries += 1
            if tries == 1 and member.rank == 2:
                raise RuntimeError("a connection broke")
            return tries

        return member.attempt(collective), member.generation, len(member.members)

    assert made.run(script) == [(2, 1, 3)] * 3


@pytest.mark.processes
def test_a_collective_that_fails_for_one_fails_for_those_that_wait_for_it(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def script(rank: int) -> tuple[int, float]:
        store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        monitor = HeartbeatMonitor(
            another(store), "p", WorkerId(rank, store.add(f"p/incarnation/{rank}", 1)), fail_after_s=FAIL_AFTER_S
        )
        members = [WorkerId(number, 1) for number in range(5)]
        made = make_default_group("gloo", PATIENCE_S)
        member = Membership(store, monitor, "p", members, make_group=made, min_workers=1, timeout_s=PATIENCE_S)
        dist.barrier()
        dist.destroy_process_group()  # that of the test
        monitor.observe(members)
        monitor.start()
        member.hello()
        tries: list[float] = []

        def collective() -> None:
            if rank == 4:
                os._exit(0)  # a neighbour of 0 and 3 in the ring, not of 1 and 2
            tries.append(time.monotonic())
            dist.all_reduce(torch.ones(1 << 20))

        member.attempt(collective)
        member.rest()
        return len(tries), time.monotonic() - tries[0]

    results = run_processes(script, tmp_path, world_size=5, deadline_s=2 * PATIENCE_S)
    assert not [result for result in results if isinstance(result, str) and result != "died"]
    for tries, seconds in results[:4]:
        assert tries == 2
        assert seconds < PATIENCE_S / 2


def test_a_result_that_every_survivor_has_got_is_kept(party: Callable[..., Party]) -> None:
    made = party(3)

    def script(member: Membership) -> Any:
        tries = []

        def collective() -> str:
            tries.append(member.me.initial_rank)
            if member.me.initial_rank == 0:
                made.die(member)
            return "done"

        return member.attempt(collective), len(tries), len(member.members)

    assert made.run(script)[1:] == [("done", 1, 2)] * 2


def test_groups_that_could_not_be_made_are_made_again(party: Callable[..., Party]) -> None:
    made = party(3)
    made.fail_groups = lambda me, generation: me.initial_rank == 1 and generation == 0
    assert made.run(lambda member: (member.hello(), member.generation)[1]) == [1, 1, 1]


def test_with_too_few_left_all_end(party: Callable[..., Party]) -> None:
    made = party(3, min_workers=3)

    def script(member: Membership) -> Any:
        if member.me.initial_rank == 0:
            made.die(member)
        return member.gather(None)

    for error in made.run(script)[1:]:
        assert isinstance(error, PeerError)
        assert "min_workers=3" in str(error)


def test_an_exception_of_one_ends_all(party: Callable[..., Party]) -> None:
    made = party(3)

    def script(member: Membership) -> Any:
        if member.me.initial_rank == 2:
            member.monitor.abort("ArithmeticError: no")
            return None
        return member.gather(None)

    for error in made.run(script)[:2]:
        assert isinstance(error, PeerError)
        assert "Rank 2 has failed" in str(error)
        assert "ArithmeticError: no" in str(error)


def test_the_value_of_a_sender_that_dies_is_replaced_by_a_survivors(party: Callable[..., Party]) -> None:
    made = party(3)

    def script(member: Membership) -> Any:
        if member.me.initial_rank == 0:
            made.die(member)
        return member.broadcast(member.me.initial_rank, source=0)

    assert made.run(script)[1:] == [1, 1]


@pytest.mark.parametrize("dies", ["before", "while"])
def test_what_rank_0_does_not_live_to_write_the_next_one_writes_once(dies: str, party: Callable[..., Party]) -> None:
    job, written = party(3), []

    def script(member: Membership) -> None:
        def collect() -> list[int]:
            if dies == "before" and member.me.initial_rank == 0:
                job.die(member)
            return member.gather(member.me.initial_rank)

        def write(ranks: list[int]) -> None:
            if member.rank == 0:
                if member.me.initial_rank == 0:
                    job.die(member)
                written.append((member.me.initial_rank, ranks))

        member.write_by_first(collect, write)
        assert written == [(1, [1, 2])]

    results = job.run(script)
    assert isinstance(results[0], Died)
    assert results[1:] == [None, None]


def test_an_excluded_worker_is_outside_until_it_is_admitted_again(party: Callable[..., Party]) -> None:
    made = party(3)
    thawed, taken_in = threading.Event(), threading.Event()

    def script(member: Membership) -> Any:
        if member.me.initial_rank == 2:
            monitor = member.monitor
            drive, monitor._drive = monitor._drive, lambda steps: None  # type: ignore[method-assign]  # frozen
            made.bury(member.me)
            assert thawed.wait(PATIENCE_S)
            monitor._drive = drive  # type: ignore[method-assign]
            assert member.gather("lonely") == ["lonely"]
            assert member.outside
            snapshot = member.join(PATIENCE_S)
            return snapshot, member.gather(member.me), member.rank
        assert len(member.gather(None)) == 2
        thawed.set()
        while not (waiting := member.gather(list(member.monitor.join_requests()))[0]):
            taken_in.wait(HEARTBEAT_S)
        member.admit(waiting, "snapshot")
        return member.gather(member.me)

    results = made.run(script)
    now = [WorkerId(0, 1), WorkerId(1, 1), WorkerId(2, 2)]
    assert results == [now, now, ("snapshot", now, 2)]


def test_who_was_away_while_the_others_left_a_round_behind_is_outside(party: Callable[..., Party]) -> None:
    made = party(2)
    away = made.members[0]
    # both were in the round; the answer did not reach the one whose network was gone, and the other has gone on without it
    made.store.append("p/round/1/said", _word(away, b"-"))
    made.store.set("p/news", News(1, failed=frozenset({away})).encode())
    made.all.pop()

    def script(member: Membership) -> list[str]:
        return member.gather("mine")

    assert made.run(script) == [["mine"]]
    assert made.all[0].outside


def test_a_new_worker_comes_last_in_the_ranks_and_too_late_is_told_so(party: Callable[..., Party]) -> None:
    made = party(2)
    newcomer = made.add(WorkerId(2, 1))

    def script(member: Membership) -> Any:
        if member is newcomer:
            member.stay_outside()
            member.join(PATIENCE_S)
            member.gather("here")
            made.die(member)
        while not (waiting := member.gather(list(member.monitor.join_requests()))[0]):
            threading.Event().wait(HEARTBEAT_S)
        member.admit(waiting, None)
        both = member.gather("here"), member.gather(None), len(member.members)
        member.close_admission()
        return both

    results = made.run(script)
    assert results[:2] == [(["here"] * 3, [None, None], 2)] * 2
    with pytest.raises(PeerError, match="comes too late"):
        made.add(WorkerId(1, 2)).join(1.0)


def test_a_worker_that_asks_to_join_while_admission_is_closed_is_told_so_at_once(party: Callable[..., Party]) -> None:
    made = party(1)
    newcomer = made.add(WorkerId(1, 1))

    def script(member: Membership) -> Any:
        if member is newcomer:
            member.stay_outside()
            return member.join(PATIENCE_S)
        while b"1, 1" not in made.store.get("p/news"):
            threading.Event().wait(HEARTBEAT_S)
        return member.close_admission()  # it expects nobody, as in the half second before its monitor reads the request

    began_s = time.monotonic()
    assert "comes too late" in str(made.run(script)[1])
    assert time.monotonic() - began_s < PATIENCE_S / 2


def test_a_worker_that_does_not_fit_or_gives_up_ends_nobody_else(party: Callable[..., Party]) -> None:
    made = party(2)
    newcomer = made.add(WorkerId(2, 1))

    def script(member: Membership) -> Any:
        if member is newcomer:
            member.stay_outside()
            try:
                return member.join(PATIENCE_S, "another model")
            finally:
                member.monitor.abort("ConfigurationError: another model")
                member.monitor.rest()
        while not (waiting := member.gather(member.monitor.join_requests())[0]):
            threading.Event().wait(HEARTBEAT_S)
        if member.rank == 0:
            member.refuse(next(iter(waiting)), f"it is {next(iter(waiting.values()))}")
        threading.Event().wait(10 * HEARTBEAT_S)
        return member.gather("here")

    results = made.run(script)
    assert results[:2] == [["here", "here"]] * 2
    assert isinstance(results[2], ConfigurationError)
    assert "it is another model" in str(results[2])


def test_an_excluded_worker_says_so_at_the_end(party: Callable[..., Party], caplog: pytest.LogCaptureFixture) -> None:
    made = party(2)
    member = made.all[1]
    member.stay_outside()
    member.close_admission()
    assert "its model is its own" in caplog.text
    assert not made.store.check(["p/closed"])


def test_an_exception_in_the_monitor_of_one_ends_all(party: Callable[..., Party]) -> None:
    made = party(2)

    def script(member: Membership) -> Any:
        member.gather(None)
        if member.rank == 0:
            member.monitor.protocol._hear = {}.__getitem__  # type: ignore[assignment, method-assign]  # an error in the next tick
        while member.rank == 1 and not member.monitor.has_aborted:
            threading.Event().wait(HEARTBEAT_S)
        return member.gather(None)

    began_s = time.monotonic()
    mine, others = made.run(script)
    assert isinstance(mine, ProtocolError)
    assert isinstance(mine.__cause__, TypeError)
    assert "Rank 0 has failed" in str(others)
    assert time.monotonic() - began_s < PATIENCE_S / 2


def test_a_monitor_whose_connection_breaks_makes_another_one() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store, before = another(server), _connections(server.port)
    monitor = HeartbeatMonitor(another(store), "p", WorkerId(0, 1), fail_after_s=FAIL_AFTER_S, heartbeat_s=HEARTBEAT_S)
    (connection,) = _connections(server.port) - before
    members = [WorkerId(0, 1), WorkerId(1, 1)]
    for worker in members:
        store.set(f"p/incarnation/{worker.initial_rank}", "1")
    monitor.observe(members)
    monitor.start()
    member = Membership(store, monitor, "p", members, make_group=_no_group, min_workers=1, timeout_s=PATIENCE_S)
    with socket.socket(fileno=os.dup(connection)) as end:
        end.shutdown(socket.SHUT_RDWR)
    other = threading.Timer(10 * HEARTBEAT_S, monitor.process_ended, (members[1],))
    other.start()
    assert member.gather("alive") == ["alive"]
    other.join()
    assert not monitor.has_aborted
    monitor.rest()


def _connections(port: int) -> set[int]:
    """Of this process to a port: the descriptors."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:  # the folder's own, or no socket
            if end.getpeername()[1] == port:
                found.add(int(name))
    return found


def _no_group(store: Any, rank: int, world_size: int) -> None:
    """There is none to be made."""


def test_the_end_of_a_resting_process_is_seen() -> None:
    store, rests = dist.HashStore(), WorkerId(1, 1)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    place = " ".join((identity() or "").split(" ")[:-2])
    store.set("p/heartbeat/1.1", Heartbeat(9, f"{place} {child} 1", use=0, resting=True, outside=False).encode())
    monitor = HeartbeatMonitor(store, "p", WorkerId(0, 1), fail_after_s=FAIL_AFTER_S)
    monitor.observe([WorkerId(0, 1), rests])
    monitor._drive(monitor.protocol.tick())
    assert monitor.verdict(rests) is Verdict.FAILED


@pytest.mark.parametrize("seed", range(6))
def test_survivors_agree_on_every_round_whoever_dies_whenever(seed: int, party: Callable[..., Party]) -> None:
    random_ = random.Random(seed)
    made, rounds = party(5), 12
    deaths = {number: random_.randrange(rounds) for number in random_.sample(range(5), 3)}
    in_attempts = {number: random_.random() < 0.5 for number in deaths}

    def script(member: Membership) -> Any:
        seen: list[Any] = []
        number = member.me.initial_rank
        for round_ in range(rounds):

            def collective(round_: int = round_) -> int:
                if deaths.get(number) == round_ and in_attempts[number]:
                    made.die(member)
                return round_

            if deaths.get(number) == round_ and not in_attempts[number]:
                made.die(member)
            seen += [member.gather(number), member.attempt(collective), member.members]
        return seen

    results = made.run(script)
    left = [number for number in range(5) if number not in deaths]
    assert all(results[number] == results[left[0]] for number in left)
    assert results[left[0]][-1] == tuple(WorkerId(number, 1) for number in left)
    assert made.all[left[0]].monitor.verdict(WorkerId(left[1], 1)) is Verdict.ALIVE


def test_a_process_of_this_machine_is_seen_to_end() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, (identity() or "").encode())
        signal.pause()
    name = os.read(reader, 1000).decode()
    try:
        assert not has_ended(name)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert has_ended(name)  # though its parent has not asked for it yet
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    assert has_ended(name)
    assert not has_ended(identity())
    assert not has_ended(None)
    assert not has_ended("another machine pid:[1] 1 1")


def test_the_monitor_says_when_somebody_may_have_failed_and_only_then() -> None:
    store, me, others = dist.HashStore(), WorkerId(0, 1), [WorkerId(number, 1) for number in (1, 2, 3)]
    monitor = HeartbeatMonitor(store, "p", me, fail_after_s=FAIL_AFTER_S)
    monitor.observe([me, *others])
    for count in range(5):
        for worker in others:
            said = Heartbeat(count, None, use=0, resting=False, outside=False)
            store.set(f"p/heartbeat/{worker}", said.encode())
        monitor._drive(monitor.protocol.tick())
    assert monitor.version == 0
    monitor.connection_lost(others[0])  # with silence it is dead
    monitor.process_ended(others[1])
    successor = HeartbeatMonitor(store, "p", WorkerId(3, 2), fail_after_s=FAIL_AFTER_S)  # started again
    successor._drive(successor.protocol.send())
    successor._drive(successor.protocol.publish())
    seen = monitor.version
    assert seen == 2
    monitor._drive(monitor.protocol.tick())
    assert monitor.version == seen + 1
    monitor._drive(monitor.protocol.tick())
    assert monitor.version == seen + 1
    assert [monitor.verdict(worker) for worker in others] == [Verdict.ALIVE, Verdict.FAILED, Verdict.FAILED]
