"""Connections to the store of the job: where it is, and a second one for a second thread."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lightning_gossip.algorithm.membership.store import StoreLostError
from lightning_gossip.errors import ConfigurationError, PeerError
from lightning_gossip.runtime.clock import Deadline
from lightning_gossip.transport.network_interface import listen
from lightning_gossip.transport.threads import in_background

_NOTHING = "<nothing>"
_START_IT = "Start it on that host with `python -m lightning_gossip.store --port {port}`, and look at firewalls."
_LOOK_S = 0.1  # between two looks whether a store has begun to listen, or has ended
_CONNECT_S = 5.0  # for a host that is there to answer
_NAMES_S = 30.0  # for torch, which asks the name server for both ends of a connection, and waits for it where it is silent
_PROBES = 4  # sent to a silent host before the connection is given up
_FILES = Path("/proc/self/fd")


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``.

    Raises:
        ConfigurationError: for anything else.

    >>> parse_address("tcp://10.0.0.1:29400")
    ('10.0.0.1', 29400)
    """
    try:
        parsed = urlparse(address)
        host, port = parsed.hostname, parsed.port
    except (ValueError, AttributeError):
        host, port = None, None
    if not host or not port or parsed.scheme != "tcp":
        raise ConfigurationError(f"store={address!r} is not an address. Write it as store='tcp://host:port'.")
    return host, port


def connect(
    address: str | None, *, rank: int, timeout_s: float, lost_s: float | None = None, interface: str | None = None
) -> Store:
    """A connection to the store that all workers of the job share.

    It lives in torchrun's agent, or at the given address; otherwise in rank 0, which serves it from here on. Nobody waits
    here for other workers.

    Args:
        address: of the option ``store``; None for the one of the environment (``MASTER_ADDR``, ``MASTER_PORT``).
        rank: of this process when the job was started.
        timeout_s: how long to try, in seconds.
        interface: on which rank 0's listens; all if None.
        lost_s: how long its host may be out of reach, in seconds, before calls fail; as long as the kernel likes if None.

    Raises:
        PeerError: if it cannot be reached.
        ConfigurationError: if rank 0 cannot serve it, since another program has its port.
    """
    if address is not None:
        host, port, serves = *parse_address(address), False
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        serves = rank == 0 and not uses_agent_store()
    try:
        if serves:
            store = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listen(interface, host, port),
            )
        else:
            _await_listener(host, port, timeout_s)
            store = client(host, port, timeout_s=timeout_s)
    except dist.DistError as error:
        if serves and "EADDRINUSE" in str(error):
            raise port_in_use(port) from error
        who = "Rank 0 serves it; its own log says why it does not." if address is None else _START_IT.format(port=port)
        raise PeerError(
            f"The store of the job at {host}:{port} could not be reached within {timeout_s:.3g} s. {who}",
            phase="store",
            seconds=timeout_s,
        ) from error
    if lost_s is not None:
        end_when_lost(port, lost_s)
    return store


def client(host: str, port: int, *, timeout_s: float, connect_s: float = _NAMES_S) -> TCPStore:
    """A connection with a store that is there; at once an error if it has ended, or ends meanwhile.

    Torch would try again and again for twice the time that calls may wait, which may be an hour.

    Args:
        timeout_s: how long a call may wait, in seconds.
        connect_s: after how long torch may not begin another attempt to connect, in seconds.

    Raises:
        torch.distributed.DistNetworkError: if nobody listens there.
    """
    try:
        watched = socket.create_connection((host, port), _CONNECT_S)
    except OSError as error:
        raise dist.DistNetworkError(f"No store answers at {host}:{port} ({error.strerror or error}).") from error
    make = partial(TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=connect_s))
    if connect_s > _CONNECT_S:
        with watched:
            store = _while_it_lives(watched, make)
    else:  # torch gives up as soon
        watched.close()
        store = make()
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _while_it_lives(watched: socket.socket, make: Callable[[], TCPStore]) -> TCPStore:
    """What is made in a thread of its own; an error as soon as the other end of a connection has ended, though it goes on."""
    watched.setblocking(False)
    made = in_background("gossip-connects", make)
    while not wait([made], _LOOK_S).done:
        if _has_ended(watched):
            raise dist.DistNetworkError("The process that holds the store has ended.")
    return made.result()


def _has_ended(watched: socket.socket) -> bool:
    """Whether the other end of a connection, which never says anything, has closed it."""
    try:
        return not watched.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _await_listener(host: str, port: int, timeout_s: float) -> OSError | None:
    """Wait until somebody listens at an address, who may not have started yet, for as long as the time-out.

    Returns:
        None; or, when the time is over, why the last connection was not made.
    """
    deadline = Deadline.after(timeout_s)
    while True:
        try:
            socket.create_connection((host, port), max(_LOOK_S, deadline.left_s)).close()
            return None
        except OSError as error:
            if not deadline.left_s:
                return error
        time.sleep(min(_LOOK_S, deadline.left_s))


class Space(PrefixStore):
    """A store's keys with a prefix of their own.

    Args:
        name: the prefix.
        store: whose.
    """

    def __init__(self, name: str, store: Store) -> None:
        super().__init__(name, store)
        self.name = name
        self.store = store


def check_answers(address: str, *, timeout_s: float) -> None:
    """Refuse the address of a store where nobody listens.

    Args:
        address: of the option ``store``.
        timeout_s: how long to try, in seconds: it may have been started with the job.

    Raises:
        ConfigurationError: with the command that starts one.
    """
    host, port = parse_address(address)
    error = _await_listener(host, port, timeout_s)
    if error is not None:
        raise ConfigurationError(
            f"No store answers at {address} ({error.strerror or error}). {_START_IT.format(port=port)}"
        ) from error


def check_port_is_free(port: int) -> None:
    """Refuse a port for rank 0's store that another program of this machine listens on.

    Raises:
        ConfigurationError: naming it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_in_use(port) from error


def port_in_use(port: int) -> ConfigurationError:
    """The error when rank 0 cannot serve the store, since its port is in use."""
    return ConfigurationError(
        f"Port {port} of this machine is in use, perhaps by another job: rank 0 cannot serve the store of this one there. Set"
        " the environment variable MASTER_PORT (under torchrun --master-port) to a free one."
    )


def uses_agent_store() -> bool:
    """Whether torchrun's agent holds the store of the job."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def look_up(store: Store, key: str) -> bytes | None:
    """The value of a key that somebody may be deleting, or None; never waits, as ``get`` would for a key that is not there."""
    # a swap of something that nobody writes: it tells the value, or, if there is none, what was expected
    found: bytes = store.compare_set(key, _NOTHING, _NOTHING)
    return None if found == _NOTHING.encode() else found


def delete_below(store: Store, prefix: str) -> None:
    """Delete all keys that begin so; with a torch that does not tell a store's keys they stay."""
    if hasattr(store, "list_keys"):
        for key in store.list_keys():
            if key.startswith(prefix):
                store.delete_key(key)


def another(store: Store, *, timeout_s: float | None = None, connect_s: float = _NAMES_S) -> Store:
    """A second connection to a store, since one serves one call at a time.

    Args:
        store: the first one.
        timeout_s: how long a call may wait, in seconds; as for the first one if None.
        connect_s: after how long torch may not begin another attempt to connect, in seconds.

    Raises:
        torch.distributed.DistNetworkError: at once, if the store has ended.
    """
    if isinstance(store, Space):
        return Space(store.name, another(store.store, timeout_s=timeout_s, connect_s=connect_s))
    if isinstance(store, TCPStore):
        as_first: timedelta = store.timeout  # type: ignore[attr-defined]
        call_s = as_first.total_seconds() if timeout_s is None else timeout_s
        second = client(store.host, store.port, timeout_s=call_s, connect_s=connect_s)
        if lost_s := max((_lost_s(end) for end in _connections(store.port)), default=0.0):
            end_when_lost(store.port, lost_s)
        return second
    return store  # in memory or a file: calls are short


def end_when_lost(port: int, lost_s: float) -> None:
    """Let the kernel end the connections to a store when its host has acknowledged nothing for so long.

    A call waits without a deadline for the store's answer, and in a partition there is none: the kernel would try for a quarter
    of an hour, and a waiting call, which has nothing to send, would never end. A store that is only busy or frozen stays: its
    kernel acknowledges.
    """
    for end in _connections(port):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            end.setsockopt(socket.IPPROTO_TCP, option, max(1, round(lost_s / _PROBES)))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(lost_s * 1000))


def cut_connections(host: str, port: int) -> None:
    """End this process's connections with a host's port; a call under way there ends with an error."""
    addresses = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for end in _connections(port):
        if end.getpeername()[0].removeprefix("::ffff:") in addresses:
            with suppress(OSError):  # ended meanwhile
                end.shutdown(socket.SHUT_RDWR)


def _lost_s(end: socket.socket) -> float:
    return float(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)) / 1000


def _connections(port: int) -> Iterator[socket.socket]:
    """This process's connections to a port, each as long as the caller looks at it; none where the system does not tell."""
    if not hasattr(socket, "TCP_USER_TIMEOUT") or not _FILES.exists():
        return
    for name in os.listdir(_FILES):
        with suppress(OSError):  # closed meanwhile, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] == port:
                        yield end


class ReportingStore:
    """A store whose methods are those of torch's, and raise what :func:`store_errors` does.

    Args:
        store: that is asked.
        survives: whether the job goes on without it; then it is asked no more when it is lost.
    """

    def __init__(self, store: Store, *, survives: bool = False) -> None:
        self.store = store
        self._survives = survives
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def call(*args: Any) -> Any:
            if self._is_lost:  # torch writes a stack to the log for each attempt
                raise StoreLostError
            try:
                with store_errors(survives=self._survives):
                    return method(*args)
            except StoreLostError:
                self._is_lost = True
                raise

        return call


@contextmanager
def store_errors(*, survives: bool = False) -> Iterator[None]:
    """What happens inside needs the store of the job.

    Args:
        survives: whether the job goes on when it is lost.

    Raises:
        PeerError: in the place of torch's error, if the store does not answer, and of a StoreLostError.
        StoreLostError: in the place of torch's error, where the job survives that.
    """
    try:
        yield
    except dist.DistError as error:
        if survives:
            raise StoreLostError(str(error)) from error
        raise store_lost() from error
    except StoreLostError as error:
        if survives:
            raise
        raise store_lost() from error


def store_lost() -> PeerError:
    """The error when the store does not answer any more."""
    return PeerError(
        "The store of the job does not answer: the process that holds it has ended, or cannot be reached. Workers go on with"
        " another one when all have met once, and where neither store=... says that it is elsewhere nor on_peer_failure='raise'"
        " that one failure ends all; a store=... belongs on a machine that stays (docs/survival.md).",
        phase="store",
    )
