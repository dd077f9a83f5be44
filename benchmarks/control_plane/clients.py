"""Many workers in one process: each has its own protocols and its own two connections to the store.

A worker's script is a generator, as the protocols are. :class:`Loop` takes one effect after the other from all scripts in
turn. A call to the store blocks the process for its round trip, but a worker that waits for a key does not: the store's
answer comes on that worker's connection, and the loop listens to all of these.
"""

from __future__ import annotations

import heapq
import itertools
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, NamedTuple

from torch._C._distributed_c10d import TCPStore

from lightning_gossip.algorithm.membership.membership import (
    AdoptUse,
    DeleteBelow,
    DropGroup,
    MakeGroup,
    Membership,
    Outcome,
    TellChange,
)
from lightning_gossip.algorithm.membership.monitor import Monitor
from lightning_gossip.algorithm.membership.rounds import Survivable
from lightning_gossip.algorithm.membership.store import Await, Pause, Read, Steps
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.membership.monitor import HEARTBEAT_S
from lightning_gossip.runtime.membership.store_operations import StoreOperations
from lightning_gossip.runtime.store_client import delete_below

PREFIX = "control"
FAIL_AFTER_S, TIMEOUT_S = 60.0, 120.0
_WAIT = 6  # the message of a TCPStore's client that waits for keys; its answer is one byte
_POLL_S = 0.005
_BYTES_SENT, _BYTES_RECEIVED = 200, 128  # places in the kernel's struct tcp_info


class Traffic(NamedTuple):
    """Of one connection, or several, so far."""

    calls: int = 0
    sent: int = 0
    received: int = 0

    def __add__(self, other: Traffic) -> Traffic:  # type: ignore[override]
        return Traffic(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class Connection:
    """One connection to a TCPStore. It counts the calls, whatever their names, and the kernel counts the bytes."""

    def __init__(self, port: int) -> None:
        free = os.dup(0)  # the number that the next descriptor gets
        os.close(free)
        self._store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self.socket = socket.socket(fileno=os.dup(free))
        assert self.socket.getpeername()[1] == port
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name in ("timeout", "set_timeout"):  # asks nobody
            return method

        def call(*arguments: Any) -> Any:
            self._calls += 1
            return method(*arguments)

        setattr(self, name, call)
        return call

    def begin_wait(self, key: str) -> None:
        """Begin to wait for a key, as ``wait`` does; the socket is readable when it has a value."""
        self._calls += 1
        name = f"/{key}".encode()
        self.socket.sendall(struct.pack("<BQQ", _WAIT, 1, len(name)) + name)

    def end_wait(self) -> None:
        """Take the answer."""
        assert self.socket.recv(1) == b"\0"

    @property
    def traffic(self) -> Traffic:
        """So far."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        sent, received = (struct.unpack_from("<Q", info, place)[0] for place in (_BYTES_SENT, _BYTES_RECEIVED))
        return Traffic(self._calls, sent, received)


class Script:
    """One of the things that a worker does."""

    def __init__(self, steps: Steps[Any], connection: Connection) -> None:
        self.steps = steps
        self.connection = connection
        self.outcome: Any = None
        self.ended = False
        self.pause = 0  # its number; 0 for none
        self.do = StoreOperations(
            connection,  # type: ignore[arg-type]
            {
                MakeGroup: lambda _: Outcome(None),  # groups are made on other connections, and not here
                DropGroup: lambda _: None,
                TellChange: lambda _: None,
                AdoptUse: lambda _: None,
                DeleteBelow: lambda effect: delete_below(connection, effect.prefix),  # type: ignore[arg-type]
            },
        )


class Loop:
    """Runs the scripts of all workers of this process."""

    def __init__(self) -> None:
        self._ready = deque[Script]()
        self._pauses: list[tuple[float, int, Script]] = []
        self._waiting: dict[int, Script] = {}
        self._answers = select.epoll()
        self._numbers = itertools.count(1)

    def start(self, steps: Steps[Any], connection: Connection, *, after_s: float = 0.0) -> Script:
        """Begin a script."""
        script = Script(steps, connection)
        self._pause(script, after_s)
        return script

    def wake(self, script: Script) -> None:
        """End the pause in which a script is, if it is in one."""
        if script.pause:
            self._pause(script, 0.0)

    def run(self, until: Callable[[], bool]) -> None:
        """Go on with all scripts until something is so."""
        while not until():
            self._look()
            for _ in range(len(self._ready)):
                self._step(self._ready.popleft())

    def stop(self, script: Script) -> None:
        """End a script where it is."""
        script.ended = True
        script.steps.close()

    def _pause(self, script: Script, seconds: float) -> None:
        script.pause = next(self._numbers)
        heapq.heappush(self._pauses, (now_s() + seconds, script.pause, script))

    def _look(self) -> None:
        """Whose pause or wait has ended."""
        timeout_s = 0.0
        if not self._ready:
            timeout_s = min(_POLL_S, max(0.0, self._pauses[0][0] - now_s())) if self._pauses else _POLL_S
        for number, _ in self._answers.poll(timeout_s):
            script = self._waiting.pop(number)
            self._answers.unregister(number)
            script.connection.end_wait()
            self._ready.append(script)
        while self._pauses and self._pauses[0][0] <= now_s():
            _, pause, script = heapq.heappop(self._pauses)
            if pause == script.pause:  # else it was woken before
                script.pause, script.outcome = 0, None
                self._ready.append(script)

    def _step(self, script: Script) -> None:
        if script.ended:
            return
        if isinstance(script.outcome, Await):  # the key has been written
            waited = script.outcome
            script.outcome = script.do(Read(waited.key))
            if script.outcome is None:
                self._wait(script, waited)
                return
        try:
            effect = script.steps.send(script.outcome)
        except StopIteration:
            script.ended = True
            return
        if isinstance(effect, Await):
            self._wait(script, effect)
        elif isinstance(effect, Pause):
            self._pause(script, effect.seconds)
        else:
            script.outcome = script.do(effect)
            self._ready.append(script)

    def _wait(self, script: Script, effect: Await) -> None:
        script.outcome = effect
        script.connection.begin_wait(effect.key)
        number = script.connection.socket.fileno()
        self._waiting[number] = script
        self._answers.register(number, select.EPOLLIN)


class Worker:
    """One worker: its identity, protocols and connections, of the training thread and of the monitor.

    Args:
        port: of the store.
        me: who it is.
        members: of the job.
        late: whether it has to be admitted.
    """

    def __init__(self, port: int, me: WorkerId, members: list[WorkerId], *, late: bool = False) -> None:
        self.training, self.monitoring = Connection(port), Connection(port)
        elsewhere = f"00000000-0000-0000-0000-{me.initial_rank:012d} pid:[4026531836] 4242 1234567"  # each on its own host
        self.monitor = Monitor(PREFIX, me, elsewhere, now_s, fail_after_s=FAIL_AFTER_S, heartbeat_s=HEARTBEAT_S)
        self.membership = Membership(
            PREFIX, members, self.monitor, now_s, min_workers=1, timeout_s=TIMEOUT_S, late=late, survivable=Survivable()
        )
        self.ticks = 0
        self.scripts: list[Script] = []

    @property
    def me(self) -> WorkerId:
        """Who it is."""
        return self.monitor.me

    @property
    def generation(self) -> int:
        """Of the members."""
        return self.membership.generation

    @property
    def outside(self) -> bool:
        """Whether it waits to be admitted."""
        return self.membership.outside

    def heartbeats(self) -> Generator[Any, Any, Any]:
        """What the thread of the monitor does."""
        while True:
            yield from self.monitor.tick()
            self.ticks += 1
            yield Pause(HEARTBEAT_S)

    def close(self) -> None:
        """Close the connections, as the end of the process does."""
        for connection in (self.training, self.monitoring):
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
            connection.socket.close()


def cpu_s(pid: int) -> float:
    """CPU time of another process so far, in seconds; Linux tells it to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)
