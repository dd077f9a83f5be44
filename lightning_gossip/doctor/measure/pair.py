"""What two workers measure with each other over a connection of their own: latency, rates, clocks, packets sent again.

A plain TCP connection between the addresses that Gloo uses, so that each wait has a deadline and the kernel can be asked about
it. One connects and asks, in the direction in which Gloo connects, where a firewall would matter; the other one answers:

    (_PING, 0)      → its clock
    (_TAKE, n) + n bytes → its clock
    (_GIVE, n)      → n bytes
    (_END, 0)       → share of packets that it sent again
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from lightning_gossip.doctor.report import Link, Worker
from lightning_gossip.runtime.clock import Deadline, now_s

_PING, _TAKE, _GIVE, _END = range(4)
_REQUEST, _ANSWER = struct.Struct("<qq"), struct.Struct("<d")
_HELLO = struct.Struct("<32sqq")  # the visit's token, the round, the rank
_PINGS, _PINGS_SHARE = 40, 0.15  # at most; and of a pair's time
_FIRST_BYTES, _MOST_BYTES, _ENOUGH_S = 1 << 14, 1 << 26, 0.1
_GROWTH = 8.0
_PART = 1 << 20
_LEAST_PACKETS = 20  # of which a share can be told
_PIECES = memoryview(bytearray(os.urandom(1 << 16) * 16))  # nothing on the way can make it shorter


def connects(one: Worker, other: Worker) -> bool:
    """Whether the first is the one that opens Gloo's connection between them: who has the higher address, byte by byte.

    At one address Gloo compares ports, which are others for each group; there it is the higher rank here.
    """

    def order(worker: Worker) -> tuple[int, bytes, int]:
        address = ipaddress.ip_address(worker.listening.address)
        return address.version, address.packed, worker.rank

    return order(one) > order(other)


def measure(peer: Worker, link: Link, hello: bytes, *, connect_s: float, pair_s: float) -> Link:
    """The part of who connects.

    Args:
        peer: the other one.
        link: with both ranks, and nothing measured.
        hello: says who calls.
        connect_s: how long to try to connect, in seconds.
        pair_s: how long the rest may take.

    Returns:
        What was measured, from this side; with ``failed`` if something came in between.
    """
    try:
        with socket.create_connection((peer.listening.address, peer.port), connect_s) as connection:
            return _Asker(connection, Deadline.after(pair_s), pair_s).run(link, hello)
    except OSError as error:
        return replace(link, failed=_said(error, connect_s), phase="connect")


def answer(listener: socket.socket, expected: bytes, *, connect_s: float, pair_s: float) -> None:
    """Play the other one's part in a measurement, until the other one ends it, or the time is over.

    Args:
        listener: this worker's.
        expected: what the caller says of itself; others are hung up on.
        connect_s, pair_s: as for :func:`measure`.
    """
    deadline = Deadline.after(connect_s)
    while deadline.left_s:
        listener.settimeout(max(0.001, deadline.left_s))
        try:
            connection, _ = listener.accept()
        except OSError:  # the caller tells why it could not connect
            return
        with connection, suppress(OSError):  # here too
            end = Deadline.after(pair_s)
            if hmac.compare_digest(bytes(_received(connection, _HELLO.size, end)), expected):
                connection.sendall(_ANSWER.pack(time.time()))
                _serve(connection, end)
                return


def hello(token: bytes, number: int, rank: int) -> bytes:
    """What a caller says of itself.

    Args:
        token: of the visit, 32 bytes.
        number: of the round.
        rank: of the caller.
    """
    return _HELLO.pack(token, number, rank)


class _Asker:
    """The side that measures.

    Args:
        connection: with the other one.
        deadline: of all of it.
        pair_s: its length.
    """

    def __init__(self, connection: socket.socket, deadline: Deadline, pair_s: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._pair_s = pair_s
        self._clock: tuple[float, float] | None = None

    def run(self, link: Link, said: bytes) -> Link:
        connection = self._connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        phase = "connect"
        try:
            connection.settimeout(max(0.001, self._deadline.left_s))
            connection.sendall(said)
            _received(connection, _ANSWER.size, self._deadline)  # the listener is the peer, and not somebody else's
            phase = "latency"
            trips = self._pings()
            link = replace(link, latency_s=statistics.median(trips) / 2, worst_s=max(trips) / 2)
            # an answer that is lost counts here too: it would have acknowledged the question
            link = replace(link, resent_idle=_word(connection, _TOTAL_RETRANS))
            if self._clock is not None:
                error_s, ahead_s = self._clock
                link = replace(link, clock_s=ahead_s, clock_error_s=error_s)
            phase = "bandwidth"
            trip_s = statistics.median(trips)
            link = replace(link, there=self._rate(self._send, trip_s, 0.45))
            link = replace(link, back=self._rate(self._receive, trip_s, 0.9))
            phase = "end"
            theirs = self._ask(_END, 0)
            shares = [share for share in (theirs, resent(connection)) if share is not None and share >= 0]
            return replace(link, resent=max(shares) if shares else None, path_mtu=path_mtu(connection))
        except OSError as error:
            if phase == "connect" and isinstance(error, ConnectionError):
                return replace(link, failed="something else answers at its address and port", phase=phase)
            mine, mtu = resent(connection), path_mtu(connection)
            done = phase == "end"
            return replace(
                link,
                resent=mine,
                path_mtu=mtu,
                failed=None if done else _said(error, self._pair_s),
                phase=None if done else phase,
            )

    def _pings(self) -> list[float]:
        trips: list[float] = []
        enough = Deadline.after(_PINGS_SHARE * self._pair_s)
        self._ask(_PING, 0)  # the first one wakes the other side
        while len(trips) < _PINGS and (enough.left_s or not trips):
            wall, began_s = time.time(), now_s()
            theirs = self._ask(_PING, 0)
            trip_s = now_s() - began_s
            trips.append(trip_s)
            if self._clock is None or trip_s / 2 < self._clock[0]:
                self._clock = (trip_s / 2, theirs - (wall + trip_s / 2))
        return trips

    def _rate(self, transfer: Callable[[int], None], trip_s: float, until: float) -> float:
        """Bytes a second: of a transfer that takes long enough, or the largest that there is time for."""
        size, end_s = _FIRST_BYTES, self._deadline.at_s - (1.0 - until) * self._pair_s
        while True:
            began_s = now_s()
            transfer(size)
            took_s = now_s() - began_s
            sending_s = max(took_s - trip_s, took_s / 10, 1e-9)
            left_s = end_s - now_s()
            factor = min(_GROWTH, _MOST_BYTES / size, 0.5 * left_s / took_s)
            if took_s >= _ENOUGH_S or factor < 1.5:
                return size / sending_s
            size = int(size * min(factor, max(2.0, 1.5 * _ENOUGH_S / took_s)))

    def _send(self, size: int) -> None:
        self._connection.sendall(_REQUEST.pack(_TAKE, size))
        _send(self._connection, size, self._deadline)
        _received(self._connection, _ANSWER.size, self._deadline)

    def _receive(self, size: int) -> None:
        self._connection.sendall(_REQUEST.pack(_GIVE, size))
        _swallow(self._connection, size, self._deadline)

    def _ask(self, what: int, size: int) -> float:
        self._connection.settimeout(max(0.001, self._deadline.left_s))
        self._connection.sendall(_REQUEST.pack(what, size))
        return float(_ANSWER.unpack(_received(self._connection, _ANSWER.size, self._deadline))[0])


def _serve(connection: socket.socket, deadline: Deadline) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        what, size = _REQUEST.unpack(_received(connection, _REQUEST.size, deadline))
        if what == _GIVE:
            _send(connection, size, deadline)
            continue
        if what == _END:
            share = resent(connection)
            connection.sendall(_ANSWER.pack(-1.0 if share is None else share))
            return
        if what == _TAKE:
            _swallow(connection, size, deadline)
        connection.sendall(_ANSWER.pack(time.time()))


def _received(connection: socket.socket, size: int, deadline: Deadline) -> bytearray:
    buffer = bytearray(size)
    _fill(connection, memoryview(buffer), deadline)
    return buffer


def _fill(connection: socket.socket, view: memoryview, deadline: Deadline) -> None:
    at = 0
    while at < len(view):
        connection.settimeout(max(0.001, deadline.left_s))
        got = connection.recv_into(view[at:])
        if not got:
            raise ConnectionResetError(errno.ECONNRESET, "the other end has closed the connection")
        at += got


def _swallow(connection: socket.socket, size: int, deadline: Deadline) -> None:
    buffer = memoryview(bytearray(min(size, _PART)))
    while size:
        part = min(size, len(buffer))
        _fill(connection, buffer[:part], deadline)
        size -= part


def _send(connection: socket.socket, size: int, deadline: Deadline) -> None:
    while size:
        part = min(size, len(_PIECES))
        connection.settimeout(max(0.001, deadline.left_s))
        connection.sendall(_PIECES[:part])
        size -= part


# ---- struct tcp_info of linux/tcp.h: the kernel gives as much of it as it has

_PMTU, _TOTAL_RETRANS, _SEGS_OUT, _DATA_SEGS_OUT = 60, 100, 136, 156


def resent(connection: socket.socket) -> float | None:
    """Packets with data that this end had to send again, over all; None where the kernel does not tell, or there are few."""
    again, sent = _word(connection, _TOTAL_RETRANS), _word(connection, _DATA_SEGS_OUT)
    return None if again is None or sent is None or sent < _LEAST_PACKETS else again / sent


def path_mtu(connection: socket.socket) -> int | None:
    """The largest packet of a connection, in bytes."""
    return _word(connection, _PMTU)


def _word(connection: socket.socket, offset: int) -> int | None:
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None
    return int(struct.unpack_from("=I", info, offset)[0]) if len(info) >= offset + 4 else None


def _said(error: OSError, seconds: float) -> str:
    """In words."""
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"nothing came back within {seconds:.3g} s"
    return (error.strerror or str(error)).lower()
