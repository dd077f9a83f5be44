"""The stores of one worker: where the job's is, the one that this worker keeps in reserve, and connections with them.

What is decided is in :mod:`lightning_gossip.algorithm.membership.failover`. A worker keeps a TCPStore, which serves others on a
thread of C++, also while Python is busy. The job's keys of each view, the workers' meeting and the completion logs have
prefixes of their own in it.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from lightning_gossip.algorithm.membership.failure_detector import Patience
from lightning_gossip.algorithm.membership.store import Reached
from lightning_gossip.runtime.clock import Deadline, now_s
from lightning_gossip.runtime.membership.store_operations import StoreOperations
from lightning_gossip.runtime.store_client import Space, client, cut_connections, end_when_lost, look_up
from lightning_gossip.transport.network_interface import address_of
from lightning_gossip.transport.threads import in_background

log = logging.getLogger(__name__)

T = TypeVar("T")

MEETING, LOGS = "meeting", "logs"
_BACKLOG = 2048  # as torch's store
_REACH_S = 1.0  # for a host that is there to answer
_ANSWER_S = 3.0  # for its store, where stores have answered at once so far
_OVERTAKE_S = 1.0  # after which another attempt is made beside one that has not answered; each time twice as long
_TORCH_SHARE = 0.3  # of that, after which torch begins no other attempt: its pause before that and the last one come on top
_AGAIN_S = 1.0  # between two questions where the job's store is
_AT_ONCE = 32  # hosts that are asked whether they answer
_CALL_S = 5.0  # of a meeting's operations: milliseconds


def address_text(host: str, port: int) -> str:
    """One text for a host and a port.

    >>> parse(address_text("fe80::1", 29400))
    ('fe80::1', 29400)
    """
    return f"{host} {port}"


def parse(address: str) -> tuple[str, int]:
    """Host and port of :func:`address_text`."""
    host, port = address.split(" ")
    return host, int(port)


def reach(
    address: str,
    *,
    timeout_s: float = _CALL_S,
    answer_s: float = _ANSWER_S,
    answered: Callable[[float], None] = lambda took_s: None,
) -> tuple[Reached, TCPStore | None]:
    """Connect with the store at an address, if there is one, within a second or so.

    Args:
        address: of :func:`address_text`.
        timeout_s: of the store's calls, in seconds.
        answer_s: how long to wait for a store whose host answers, in seconds.
        answered: told how long the first answer took, in seconds, also if it comes later than that.
    """
    host, port = parse(address)
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except ConnectionRefusedError:
        return Reached.REFUSED, None
    except OSError:
        return Reached.SILENT, None
    began_s, first = now_s(), threading.Lock()

    def connect() -> TCPStore | None:
        try:
            store = client(host, port, timeout_s=timeout_s, connect_s=_TORCH_SHARE * answer_s)
        except dist.DistError as error:
            log.debug("no store answers at %s: %s", address, error)
            return None
        if first.acquire(blocking=False):
            answered(now_s() - began_s)
        return store

    # Torch waits for the first answer without a deadline, and a process that is stopped gives none. It looks up the names of
    # both ends, too, which takes 5 s where the name server loses a question, and no time when it is asked again.
    deadline, pause_s, attempts = Deadline.after(answer_s), _OVERTAKE_S, set[Future[TCPStore | None]]()
    while deadline.left_s:
        attempts.add(in_background("gossip-connects-with-a-store", connect))
        until = Deadline.after(min(pause_s, deadline.left_s))
        pause_s *= 2
        while until.left_s:
            ended, attempts = wait(attempts, until.left_s, FIRST_COMPLETED)
            for attempt in ended:
                if (store := attempt.result()) is not None:
                    return Reached.OPEN, store
            if not attempts:
                return Reached.SILENT, None
    return Reached.SILENT, None


def reach_all(addresses: Sequence[str]) -> list[Reached]:
    """Look whether somebody listens at addresses, at several at a time: each that is silent takes a second."""
    if not addresses:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(addresses)), thread_name_prefix="gossip-looks-at-stores") as threads:
        return [reached for reached, _ in threads.map(reach, addresses)]


def serve(host: str, interface: str | None) -> TCPStore:
    """A store of this process, at a free port.

    Args:
        host: where others reach this process.
        interface: on which it listens; all if None.
    """
    at = "" if interface is None else address_of(interface)
    # of the family of its address: torch looks each client's name up, and for mapped addresses asks a name server
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((at, 0), family=family, backlog=_BACKLOG)
    port = int(listener.getsockname()[1])
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class Stores:
    """The stores that one worker knows.

    Args:
        first: the address of the store that the job begins with.
        host: where others reach this worker.
        interface: on which the store that it keeps listens; all if None.
        lost_s: how long a host may be out of reach before a connection is given up, in seconds.
        view: that the job is in.

    Attributes:
        view, address: of the job's store.
        others: addresses of the stores that members keep, as this worker was told before it was one.
        own: address of the store that this worker keeps.
        patience: how long those of others are waited for.
    """

    def __init__(self, first: str, host: str, *, interface: str | None = None, lost_s: float, view: int = 0) -> None:
        self._reserve = serve(host, interface)
        self._mine = self._reserve  # a connection with it
        self.patience = Patience(floor_s=_ANSWER_S, ceiling_s=max(_ANSWER_S, lost_s))
        self._lost_s = lost_s
        self.view, self.address = view, first
        self.others: list[str] = []
        self.own = address_text(host, self._reserve.port)
        self.publish(view, first)

    def publish(self, view: int, address: str) -> None:
        """Tell those that come to this worker where the job's store is."""
        self._tell("where", view, address)

    def seek(self, view: int, address: str) -> None:
        """Tell those that come to this worker where it waits for others."""
        self._tell("seeks", view, address)

    def at_own(self, operation: Any) -> Any:
        """Do an operation of a meeting in the store that this worker keeps."""
        return self._at_own(lambda mine: StoreOperations(mine)(operation))

    def tell_others(self, others: Sequence[str]) -> None:
        """Tell those that come to this worker where the others keep their stores: it may end before they are admitted."""
        self._tell("others", *others)

    def _tell(self, key: str, *told: int | str) -> None:
        said = json.dumps(told)
        self._at_own(lambda mine: mine.set(key, said))

    def _at_own(self, do: Callable[[Any], T]) -> T:
        # no new connection, if it can be helped: torch looks up the names of both ends, the client's on the thread that serves
        try:
            return do(Space(MEETING, self._mine))
        except dist.DistError:  # cut by leave(), as all with this worker's store, if it is the job's
            self._mine = client(*parse(self.own), timeout_s=_CALL_S)
            return do(Space(MEETING, self._mine))

    def adopt(self, view: int, address: str) -> None:
        """Note where the job's store is now."""
        self.view, self.address = view, address

    def leave(self) -> None:
        """End all connections of this process with the job's store."""
        host, port = parse(self.address)
        cut_connections(host, port)

    def connect(self, *, timeout_s: float = _CALL_S) -> Store:
        """A connection with the job's store.

        Raises:
            torch.distributed.DistError: if there is none.
        """
        return self._in_view(self.view, self._open(self.address, timeout_s))

    def connect_logs(self, address: str) -> Store:
        """A connection with the completion logs that are at an address.

        Raises:
            torch.distributed.DistError: if there is none.
        """
        return Space(LOGS, self._open(address, _CALL_S))

    def follow(self, member: str, *, timeout_s: float) -> Store:
        """A connection with the job's store, wherever a member says that it is.

        It may have been lost a moment ago: while it does not answer, the members that are known are asked one after the other,
        since those that are left agree on another one.

        Args:
            member: address of the store that one of them keeps.
            timeout_s: for how long, and of the store's calls, in seconds.

        Raises:
            torch.distributed.DistError: if it never answers.
        """
        deadline = Deadline.after(timeout_s)
        told: str | None = None  # of which store that does not answer
        asked = -1
        while True:
            try:
                return self.connect(timeout_s=timeout_s)
            except dist.DistError as error:
                if not deadline.left_s:
                    raise
                if told != self.address:
                    log.warning("%s The worker at %s is asked again where it is.", error, member)
                told = self.address
            time.sleep(min(_AGAIN_S, deadline.left_s))
            asked += 1
            known = list(dict.fromkeys([member, *self.others]))
            found, others = ask(known[asked % len(known)])
            self.others = others or self.others
            if found is not None and found[0] >= self.view:
                self.adopt(*found)
                self.publish(*found)

    def enter(self, address: str, view: int | None = None) -> tuple[Reached, Store | None]:
        """Connect with the meeting at an address, or with the keys of a view there."""
        reached, store = self._reach(address)
        if store is None:
            return reached, None
        end_when_lost(parse(address)[1], self._lost_s)
        return reached, Space(MEETING, store) if view is None else self._in_view(view, store)

    def _open(self, address: str, timeout_s: float) -> TCPStore:
        reached, store = self._reach(address, timeout_s=timeout_s)
        if store is None:
            raise dist.DistNetworkError(f"The store at {address} cannot be reached ({reached.value}).")
        end_when_lost(parse(address)[1], self._lost_s)
        return store

    def _reach(self, address: str, *, timeout_s: float = _CALL_S) -> tuple[Reached, TCPStore | None]:
        return reach(address, timeout_s=timeout_s, answer_s=self.patience.deadline_s, answered=self.patience.took)

    @staticmethod
    def _in_view(view: int, store: Store) -> Store:
        return store if view == 0 else Space(f"view/{view}", store)


def ask_keys(address: str, keys: Sequence[str]) -> tuple[Reached, tuple[bytes | None, ...]]:
    """What stands at keys of the meeting in the store at an address; nothing if it does not answer."""
    reached, store = reach(address)
    if store is None:
        return reached, (None,) * len(keys)
    try:
        meeting = Space(MEETING, store)
        return reached, tuple(look_up(meeting, key) for key in keys)
    except dist.DistError as error:
        log.debug("the store at %s has answered no more: %s", address, error)
        return Reached.SILENT, (None,) * len(keys)


def ask(address: str, *, answer_s: float = _ANSWER_S, host_s: float = 0.0) -> tuple[tuple[int, str] | None, list[str]]:
    """What the worker says that keeps the store at an address, if one does.

    Args:
        address: of :func:`address_text`.
        answer_s: how long to wait for a store whose host answers, in seconds.
        host_s: how long to try again if the host does not, in seconds.

    Returns:
        View and address of the job's store, and the addresses of those that other members keep.
    """
    deadline = Deadline.after(host_s)
    reached, store = reach(address, answer_s=answer_s)
    while reached is Reached.SILENT and deadline.left_s:
        time.sleep(min(_AGAIN_S, deadline.left_s))
        reached, store = reach(address, answer_s=answer_s)
    if store is None:
        return None, []
    meeting = Space(MEETING, store)
    where, others = look_up(meeting, "where"), look_up(meeting, "others")
    if where is None:
        return None, []
    view, there = json.loads(where)
    return (int(view), str(there)), [] if others is None else json.loads(others)
