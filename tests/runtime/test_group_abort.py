"""Collectives that nobody but the failure detector can end: a worker has gone, and its connections are still there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import PeerError
from lightning_gossip.runtime.group_abort import NCCL_ENVIRONMENT, GroupGuard, abort_group, prepare_nccl
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.membership.monitor import HeartbeatMonitor
from lightning_gossip.runtime.process_groups import make_default_group
from lightning_gossip.runtime.store_client import another
from lightning_gossip.transport.network_interface import restore
from tests.workers import run_processes

COLLECTIVE_S = 60.0  # what Gloo would wait
SOON_S = 10.0
FAIL_AFTER_S = 2.0


def killed(store: dist.Store) -> None:
    """End as a worker whose loader processes hold its sockets: nobody's connection closes."""
    child = os.fork()
    if child == 0:
        signal.pause()
    store.set("rest", str(child))
    os.kill(os.getpid(), signal.SIGKILL)


def frozen(store: dist.Store) -> None:
    """Stop as a machine that is gone: no connection closes, no heartbeat comes, and its process is there."""
    store.set("rest", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def in_a_collective(rank: int, server: dist.TCPStore, goes: Callable[[dist.Store], None], min_workers: int) -> Any:
    """The last of three workers goes while the others are in an all-reduce."""
    dist.barrier()
    dist.destroy_process_group()  # that of the test
    store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    members = [WorkerId(number, 1) for number in range(3)]
    store.add(f"p/incarnation/{rank}", 1)
    member = Membership(
        store,
        HeartbeatMonitor(another(store), "p", members[rank], fail_after_s=FAIL_AFTER_S),
        "p",
        members,
        make_group=make_default_group("gloo", COLLECTIVE_S),
        min_workers=min_workers,
        timeout_s=COLLECTIVE_S,
    )
    member.hello()
    began_s: list[float] = []

    def collective() -> float:
        began_s.append(time.monotonic())
        if rank == 2:
            goes(store)
        total = torch.full((1 << 20,), float(rank + 1))
        dist.all_reduce(total)
        return float(total[0])

    try:
        result: Any = member.attempt(collective)
    except PeerError as error:
        result = str(error)
    seconds = time.monotonic() - began_s[0]
    member.rest()
    if store.add("survivors", 1) == 2:
        os.kill(int(store.get("rest")), signal.SIGKILL)
    return result, len(member.members), seconds


@pytest.mark.processes
@pytest.mark.parametrize("goes", [killed, frozen])
def test_a_collective_whose_worker_is_gone_without_a_word_is_ended_and_made_by_the_others(
    goes: Callable[[dist.Store], None], tmp_path: Path
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = run_processes(lambda rank: in_a_collective(rank, server, goes, 1), tmp_path, deadline_s=3 * SOON_S)[:2]
    assert [result[:2] for result in results] == [(3.0, 2)] * 2
    assert max(seconds for *_, seconds in results) < FAIL_AFTER_S + SOON_S


@pytest.mark.processes
def test_where_no_worker_may_be_missing_all_end_with_a_peer_error(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = run_processes(lambda rank: in_a_collective(rank, server, killed, 3), tmp_path, deadline_s=3 * SOON_S)[:2]
    for error, _, seconds in results:
        assert "min_workers=3" in error
        assert seconds < SOON_S


class Backend:
    """A backend that is no Gloo, as :func:`abort_group` sees it."""

    def __init__(self) -> None:
        self.aborts = 0
        self.error = ErrorType.SUCCESS

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.aborts += 1

    def get_error(self) -> ErrorType:
        return self.error


class Group:
    """A group for tensors of two kinds of devices, with one backend."""

    def __init__(self) -> None:
        self.backend = Backend()
        self._device_types = [torch.device("cuda"), torch.device("xpu")]

    def _get_backend(self, device: torch.device) -> Backend:
        return self.backend


def test_another_backend_is_aborted_once_by_its_own_function() -> None:
    group = Group()
    abort_group(group)  # type: ignore[arg-type]
    assert group.backend.aborts == 1


def test_what_a_collective_returned_counts_for_nothing_once_the_group_is_aborted() -> None:
    group, guard, failed = Group(), GroupGuard(), False
    guard.guard([group], lambda: failed)  # type: ignore[arg-type]
    guard.look()
    guard.check()
    failed = True
    guard.look()
    guard.look()
    with pytest.raises(dist.DistBackendError, match="A worker has failed"):
        guard.check()
    guard.release()
    assert group.backend.aborts == 1
    guard.guard([Group()], lambda: False)  # type: ignore[arg-type]
    guard.check()


def test_what_a_collective_returned_counts_for_nothing_once_its_backend_has_seen_an_error() -> None:
    group, guard = Group(), GroupGuard()
    guard.guard([group], lambda: False)  # type: ignore[arg-type]
    guard.check()
    group.backend.error = ErrorType.TIMEOUT
    with pytest.raises(dist.DistBackendError):
        guard.check()


def test_a_group_that_has_been_let_go_is_not_aborted() -> None:
    group, guard = Group(), GroupGuard()
    guard.guard([group], lambda: True)  # type: ignore[arg-type]
    guard.release()
    guard.look()
    assert group.backend.aborts == 0


@pytest.mark.parametrize("error", [dist.DistNetworkError("closed"), ArithmeticError("a bug")])
def test_a_failure_detector_that_can_look_no_more_ends_the_collectives(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor, seen = HeartbeatMonitor(dist.HashStore(), "p", WorkerId(0, 1), fail_after_s=FAIL_AFTER_S), []
    ended = threading.Event()

    def looked() -> None:
        seen.append(monitor.has_aborted)
        if seen[-1]:
            ended.set()

    def tick() -> Any:
        if seen:
            raise error
        yield from ()

    monitor.looked = looked
    monkeypatch.setattr(monitor.protocol, "tick", tick)
    monkeypatch.setattr(monitor, "_heartbeat_s", 0.0)
    monkeypatch.setattr(monitor, "_connect_anew", _raise)  # as if it had been tried
    monitor.start()
    assert ended.wait(SOON_S)
    assert seen == [False, True]
    monitor.rest()


def _raise(error: Exception) -> None:
    raise error


def test_torch_is_told_to_end_no_process_where_that_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() & NCCL_ENVIRONMENT.keys():
        monkeypatch.delenv(name)
    assert prepare_nccl("gloo") == {}
    before = prepare_nccl("cpu:gloo,cuda:nccl")
    assert {name: os.environ[name] for name in NCCL_ENVIRONMENT} == NCCL_ENVIRONMENT
    restore(before)
    assert not os.environ.keys() & NCCL_ENVIRONMENT.keys()


def test_what_a_user_has_set_for_nccl_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    restore(prepare_nccl("nccl"))
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")
    assert prepare_nccl("nccl") == {}


def _under_nccl(rank: int, port: int) -> Any:
    """The last worker goes before an all-reduce of tensors on the devices, which the others have begun."""
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    workers = torch.cuda.device_count()
    members = [WorkerId(number, 1) for number in range(workers)]
    store.add(f"p/incarnation/{rank}", 1)
    before = prepare_nccl("cpu:gloo,cuda:nccl")
    member = Membership(
        store,
        HeartbeatMonitor(another(store), "p", members[rank], fail_after_s=FAIL_AFTER_S),
        "p",
        members,
        make_group=make_default_group("cpu:gloo,cuda:nccl", COLLECTIVE_S),
        min_workers=1,
        timeout_s=COLLECTIVE_S,
    )
    member.hello()
    began_s = 0.0

    def collective() -> float:
        nonlocal began_s
        total = torch.full((1 << 20,), float(rank + 1), device="cuda")
        dist.all_reduce(total)  # connects
        torch.cuda.synchronize()
        began_s = began_s or time.monotonic()
        if rank == workers - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total.fill_(float(rank + 1))
        dist.all_reduce(total)
        return float(total[0])

    result = member.attempt(collective)
    member.rest()
    restore(before)
    return result, len(member.members), time.monotonic() - began_s


def _alone_under_nccl(rank: int, port: int) -> Any:
    """Abort a group of one from another thread, and make it anew."""
    torch.cuda.set_device(rank)
    store, guard = dist.TCPStore("127.0.0.1", port, wait_for_workers=False), GroupGuard()
    make = make_default_group("cpu:gloo,cuda:nccl", COLLECTIVE_S)
    told: list[Any] = []
    for number in range(3):
        make(dist.PrefixStore(str(number), store), 0, 1)
        assert dist.group.WORLD is not None
        guard.guard([dist.group.WORLD], lambda: True)
        total = torch.ones(4, device="cuda")
        dist.all_reduce(total)
        guard.check()
        guard.look()
        try:
            guard.check()
        except dist.DistBackendError as error:
            told.append((str(error), total.sum().item()))
        guard.release()
        dist.destroy_process_group()
    return told


def _queued(function: Callable[[int, int], Any], rank: int, port: int, results: Any) -> None:
    results.put(function(rank, port))


def _on_devices(function: Callable[[int, int], Any], workers: int, tellers: int) -> list[Any]:
    """What the processes that end well return; each with a device."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")  # CUDA may be in use here already
    results = context.SimpleQueue()
    processes = [context.Process(target=_queued, args=(function, rank, server.port, results)) for rank in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(COLLECTIVE_S)
        if process.is_alive():
            process.kill()
            process.join()
    return [results.get() for _ in range(tellers) if not results.empty()]


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
def test_a_group_with_nccl_is_aborted_from_another_thread_and_made_anew() -> None:
    [told] = _on_devices(_alone_under_nccl, 1, 1)
    assert told == [("A worker has failed, and the collective that waited for it was ended.", 4.0)] * 3


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a device for each worker, and a death two workers")
def test_a_collective_of_nccl_whose_worker_is_killed_is_ended_and_made_by_the_others() -> None:
    workers = torch.cuda.device_count()
    told = _on_devices(_under_nccl, workers, workers - 1)
    expected = float(sum(range(1, workers)))
    assert [result[:2] for result in told] == [(expected, workers - 1)] * (workers - 1)
    assert max(seconds for *_, seconds in told) < SOON_S
