"""The stores that workers keep: who listens, and what their owners say there."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import pytest
import torch.distributed as dist

from lightning_gossip.algorithm.membership.store import Reached
from lightning_gossip.runtime.membership import stores
from lightning_gossip.runtime.membership.stores import Stores, address_text, ask, reach, reach_all
from tests.runtime.cluster import eventually


def test_a_worker_that_has_left_its_own_store_as_the_jobs_still_says_there_where_it_is() -> None:
    one = Stores("127.0.0.1 1", "127.0.0.1", lost_s=6.0)
    one.adopt(2, one.own)
    store = one.connect()
    store.set("key", "value")
    one.leave()
    one.seek(3, "127.0.0.1 2")
    one.publish(3, "127.0.0.1 2")
    assert ask(one.own) == ((3, "127.0.0.1 2"), [])


def test_one_that_listens_one_that_has_ended_and_one_that_only_accepts_are_told_apart() -> None:
    one = Stores("127.0.0.1 1", "127.0.0.1", lost_s=6.0)
    with socket.create_server(("127.0.0.1", 0)) as ended, socket.create_server(("127.0.0.1", 0)) as mute:
        addresses = [
            one.own,
            address_text("127.0.0.1", ended.getsockname()[1]),
            address_text("127.0.0.1", mute.getsockname()[1]),
        ]
        ended.close()
        assert reach_all(addresses) == [Reached.OPEN, Reached.REFUSED, Reached.SILENT]
    assert reach_all([]) == []


def test_a_store_that_ends_while_somebody_connects_leaves_no_thread_behind() -> None:
    """Its host resets the connection and refuses the next ones; torch tries again, for a while."""
    with socket.create_server(("127.0.0.1", 0)) as store:

        def end() -> None:
            looked_at, _ = store.accept()
            looked_at.close()
            connected, _ = store.accept()
            connected.recv(1)
            store.close()
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connected.close()

        ending = threading.Thread(target=end)
        ending.start()
        assert reach(address_text("127.0.0.1", store.getsockname()[1])) == (Reached.SILENT, None)
        ending.join(5.0)
    # an attempt that a busy machine has slowed down is over a moment later
    assert eventually(lambda: not any("connects-with-a-store" in thread.name for thread in threading.enumerate()), 3.0)


def test_who_comes_while_the_jobs_store_is_lost_is_told_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_AGAIN_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as ended:
        lost = address_text("127.0.0.1", ended.getsockname()[1])
    member, other = (Stores(lost, "127.0.0.1", lost_s=6.0) for _ in range(2))
    joiner = Stores(lost, "127.0.0.1", lost_s=6.0)
    asked: list[str] = []

    def agreed(address: str) -> tuple[tuple[int, str] | None, list[str]]:
        """The members agree between the first question and the second."""
        asked.append(address)
        if len(asked) == 2:
            member.publish(1, other.own)
        return ask(address)

    monkeypatch.setattr(stores, "ask", agreed)
    joiner.follow(member.own, timeout_s=5.0).set("here", "1")
    assert asked == [member.own] * 2
    assert (joiner.view, joiner.address) == (1, other.own)
    assert ask(joiner.own)[0] == (1, other.own)


def test_a_worker_says_in_its_own_store_where_the_job_is_without_a_connection_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch looks up the names of both ends of each, and waits 5 s where the name server does not answer."""
    connects = stores.client

    def unreachable(*args: Any, **options: Any) -> Any:
        raise dist.DistNetworkError("no connection")

    monkeypatch.setattr(stores, "client", unreachable)
    one = Stores("127.0.0.1 1", "127.0.0.1", lost_s=6.0)
    one.publish(2, "127.0.0.1 2")
    one.tell_others(["127.0.0.1 3"])
    monkeypatch.setattr(stores, "client", connects)
    assert ask(one.own) == ((2, "127.0.0.1 2"), ["127.0.0.1 3"])


def test_a_connection_whose_names_are_looked_up_for_long_is_overtaken_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Stores("127.0.0.1 1", "127.0.0.1", lost_s=6.0)
    answered, attempts = threading.Event(), []
    connects = stores.client

    def slow(*args: Any, **options: Any) -> Any:
        attempts.append(args)
        if len(attempts) == 1:
            answered.wait(20.0)
        return connects(*args, **options)

    monkeypatch.setattr(stores, "client", slow)
    monkeypatch.setattr(stores, "_OVERTAKE_S", 0.05)
    reached, store = reach(one.own)
    assert (reached, len(attempts), answered.is_set()) == (Reached.OPEN, 2, False)
    assert store is not None
    store.set("key", "value")
    answered.set()


def test_a_store_that_has_answered_too_late_is_waited_for_longer_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(stores, "now_s", lambda: clock[0])
    asked, one = (Stores("127.0.0.1 1", "127.0.0.1", lost_s=60.0) for _ in range(2))
    heard, answered = threading.Event(), threading.Event()
    connects = stores.client

    def late(*args: Any, **options: Any) -> Any:
        answered.wait(20.0)
        clock[0] += 4.0
        heard.set()
        return connects(*args, **options | {"connect_s": 10.0})

    for _ in range(20):
        one.patience.took(0.01)
        assert one.patience.deadline_s == 3.0  # on a quiet machine nobody waits longer
    monkeypatch.setattr(stores, "client", late)
    assert reach(asked.own, answer_s=0.05, answered=one.patience.took) == (Reached.SILENT, None)
    assert one.patience.deadline_s == 3.0  # and for what never answers neither
    answered.set()
    assert heard.wait(20.0)
    assert eventually(lambda: one.patience.deadline_s > 4.0, 20.0)
    for _ in range(20):
        one.patience.took(0.01)
    assert one.patience.deadline_s == 3.0


def test_a_host_whose_network_comes_up_just_now_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a worker that comes back by it takes itself for the first of the job, and waits for others that never come."""
    asked, reaches = Stores("127.0.0.1 1", "127.0.0.1", lost_s=6.0), stores.reach
    silent = [(Reached.SILENT, None)] * 2
    monkeypatch.setattr(stores, "reach", lambda *args, **options: silent.pop() if silent else reaches(*args, **options))
    monkeypatch.setattr(stores, "_AGAIN_S", 0.01)
    assert stores.ask(asked.own, host_s=20.0) == ((0, "127.0.0.1 1"), [])
    silent += [(Reached.SILENT, None)]
    assert stores.ask(asked.own) == (None, [])


def test_no_store_is_waited_for_longer_than_a_worker_that_is_silent() -> None:
    one = Stores("127.0.0.1 1", "127.0.0.1", lost_s=6.0)
    one.patience.took(100.0)
    assert one.patience.deadline_s == 6.0


def test_a_store_that_nobody_replaces_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as ended:
        lost = address_text("127.0.0.1", ended.getsockname()[1])
    member = Stores(lost, "127.0.0.1", lost_s=6.0)
    monkeypatch.setattr(stores, "_AGAIN_S", 0.01)
    with pytest.raises(dist.DistError, match="cannot be reached"):
        Stores(lost, "127.0.0.1", lost_s=6.0).follow(member.own, timeout_s=0.3)
    assert caplog.text.count("is asked again where it is") == 1


def test_who_comes_by_a_member_that_ends_with_the_jobs_store_finds_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_AGAIN_S", 0.01)
    ended = Stores("127.0.0.1 1", "127.0.0.1", lost_s=6.0)  # keeps the job's store, and is who the joiner comes by
    other = Stores(ended.own, "127.0.0.1", lost_s=6.0)
    for member in (ended, other):
        member.publish(1, ended.own)
        member.tell_others([other.own, ended.own])
    where, others = ask(ended.own)
    assert where is not None
    joiner = Stores(where[1], "127.0.0.1", lost_s=6.0, view=where[0])
    joiner.others = others
    by = ended.own
    del ended, member  # its process ends
    other.publish(2, other.own)
    joiner.follow(by, timeout_s=20.0).set("here", "1")
    assert (joiner.view, joiner.address) == (2, other.own)
