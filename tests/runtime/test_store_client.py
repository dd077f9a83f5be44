"""Connections to the store: which they are, that every wait in making one has a deadline, and what is refused before."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import ConfigurationError, PeerError
from lightning_gossip.runtime import store_client
from lightning_gossip.runtime.membership.monitor import HeartbeatMonitor
from lightning_gossip.runtime.store_client import another, check_answers, check_port_is_free, connect
from tests.runtime.cluster import eventually


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system gives lost connections up when it likes")
def test_connections_are_found_among_sockets_that_have_no_port() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    mine, theirs = socket.socketpair()
    with mine, theirs, socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket():
        store = connect(f"tcp://127.0.0.1:{server.port}", rank=1, timeout_s=10, lost_s=7.0)
        second = another(store)
        store.set("key", "value")
        assert second.get("key") == b"value"
        given_up_after_s = [store_client._lost_s(end) for end in store_client._connections(server.port)]
    assert given_up_after_s.count(7.0) >= 2


def test_a_connection_whose_calls_may_wait_for_ever_is_not_waited_for_for_ever_itself() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=1))
    assert another(one, timeout_s=1e6).timeout == timedelta(seconds=1e6)  # type: ignore[attr-defined]
    del server
    began_s = time.monotonic()
    with pytest.raises(dist.DistError):
        another(one, timeout_s=1e6)
    assert time.monotonic() - began_s < 20


def test_a_connection_whose_calls_are_short_may_take_as_long_as_the_names_of_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given: list[timedelta] = []

    def made(*args: Any, timeout: timedelta, **options: Any) -> TCPStore:
        given.append(timeout)
        return TCPStore(*args, timeout=timeout, **options)

    monkeypatch.setattr(store_client, "TCPStore", made)
    store = store_client.client("127.0.0.1", server.port, timeout_s=0.5)
    assert store.timeout == timedelta(seconds=0.5)  # type: ignore[attr-defined]
    assert min(given) >= timedelta(seconds=10)  # a name server that loses a question costs 5 s, torch asks for two names


def test_the_store_of_rank_0_looks_no_mapped_address_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch listens on all addresses of both families, and asks a name server for each client's ``::ffff:127.0.0.1``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = connect(None, rank=0, timeout_s=10.0)
    ends = [end for end in psutil.Process().net_connections("tcp") if end.laddr.port == port and end.status == "LISTEN"]
    assert [end.family for end in ends] == [socket.AF_INET]
    another(store).set("key", "value")
    assert store.get("key") == b"value"


def test_a_store_that_has_ended_is_not_waited_for_by_who_wants_a_second_connection() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = connect(f"tcp://127.0.0.1:{server.port}", rank=1, timeout_s=1800)
    del server
    began_s = time.monotonic()
    with pytest.raises(dist.DistError):
        another(one)
    assert time.monotonic() - began_s < 10


def test_a_store_that_ends_while_somebody_connects_with_it_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    over = threading.Event()

    def tries_again_and_again(*args: Any, **options: Any) -> TCPStore:
        listener.close()
        over.wait(20.0)
        raise dist.DistNetworkError("timed out")

    monkeypatch.setattr(store_client, "TCPStore", tries_again_and_again)
    began_s = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="has ended"):
        store_client.client("127.0.0.1", port, timeout_s=1800)
    assert time.monotonic() - began_s < 10
    over.set()


def test_whatever_torch_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any, **options: Any) -> TCPStore:
        raise TypeError("of torch's")

    monkeypatch.setattr(store_client, "TCPStore", refuses)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TypeError, match="of torch's"):
        store_client.client("127.0.0.1", listener.getsockname()[1], timeout_s=1800)


def test_who_comes_before_the_store_is_there_waits_for_it_and_no_longer_than_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began_s = time.monotonic()
    with pytest.raises(PeerError, match=r"could not be reached within 1\.5 s"):
        connect(f"tcp://127.0.0.1:{port}", rank=1, timeout_s=1.5)
    assert time.monotonic() - began_s < 5


def test_a_monitor_whose_store_has_ended_ends_soon() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=600))
    monitor = HeartbeatMonitor(another(store), "test", WorkerId(1, 1), fail_after_s=0.05, heartbeat_s=0.01)
    monitor._connected_s -= 1.0  # it has had this connection for a while, so it would try another
    monitor.start()
    monitor.observe([WorkerId(1, 1)])
    del server
    began_s = time.monotonic()
    assert eventually(lambda: monitor.has_aborted, 20.0)
    monitor.rest()
    assert time.monotonic() - began_s < 10.0
    with pytest.raises(PeerError, match="store of the job does not answer"):
        monitor.raise_failure()


def test_an_address_where_no_store_answers_is_refused_with_the_command_that_starts_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        check_answers(address, timeout_s=10.0)
    with pytest.raises(ConfigurationError, match=rf"No store answers at {address} .*python -m lightning_gossip.store"):
        check_answers(address, timeout_s=0.0)


def test_a_port_that_another_program_listens_on_is_refused_by_name() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"Port {port} .*MASTER_PORT"):
            check_port_is_free(port)
    check_port_is_free(port)
