"""A parameter server's traffic, event by event: who computes, who is on the link, who waits for its turn.

Who may pull and push when is decided by the package's own :class:`~lightning_gossip.algorithm.ParameterServer`. What a worker
does between a pull and a push is a :class:`Work`: it counts steps (:class:`Steps`), or descends on a quadratic (descent.py). A
thousand updates take some milliseconds.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_gossip.algorithm.checks import check_not_negative
from lightning_gossip.algorithm.laws import Law
from lightning_gossip.algorithm.server import ParameterServer

_BLOCK = 256  # step times drawn at once


@dataclass(frozen=True, kw_only=True)
class Link:
    """The server's link. All vectors share its bandwidth fairly, each direction its own.

    Args:
        transfer_s: seconds of one vector that has the link for itself, at least 0.
        latency_s: seconds that every message takes besides.
    """

    transfer_s: float = 0.0
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative("transfer_s", self.transfer_s)
        check_not_negative("latency_s", self.latency_s)


@dataclass(frozen=True)
class Tally:
    """What has happened up to a moment.

    Args:
        time_s: the moment.
        pushed: updates, applied or dropped.
        applied: updates.
        computed_s: of all workers together, steps that have begun included.
        staleness: how many applied updates had each.
    """

    time_s: float
    pushed: int
    applied: int
    computed_s: float
    staleness: dict[int, int]

    def since(self, before: Tally) -> Tally:
        """What has happened in between."""
        staleness = {k: n - before.staleness.get(k, 0) for k, n in self.staleness.items() if n > before.staleness.get(k, 0)}
        return Tally(
            self.time_s - before.time_s,
            self.pushed - before.pushed,
            self.applied - before.applied,
            self.computed_s - before.computed_s,
            staleness,
        )


@dataclass(order=True)
class _Event:
    time_s: float
    number: int
    kind: str = field(compare=False)
    rank: int = field(compare=False)


class _Port:
    """One direction of the server's link: those on it share it fairly, so each is served at 1/(their number)."""

    def __init__(self, transfer_s: float) -> None:
        self.transfer_s = transfer_s
        self._served, self._since_s = 0.0, 0.0  # vectors that each has been served, had it been there from the beginning
        self._ends: list[tuple[float, int]] = []
        self.ticket = 0  # of the announcement that counts

    def begin(self, now_s: float, rank: int) -> None:
        self._advance(now_s)
        heapq.heappush(self._ends, (self._served + 1.0, rank))

    def end(self, now_s: float) -> int:
        self._advance(now_s)
        return heapq.heappop(self._ends)[1]

    def next_end_s(self) -> float | None:
        if not self._ends:
            return None
        return self._since_s + max(0.0, self._ends[0][0] - self._served) * self.transfer_s * len(self._ends)

    def _advance(self, now_s: float) -> None:
        if self._ends:
            self._served += (now_s - self._since_s) / (self.transfer_s * len(self._ends))
        self._since_s = now_s


class Work(Protocol):
    """What the workers do between a pull and a push."""

    def pulled(self, rank: int, model: Tensor) -> None:
        """A worker takes the server's model, shape (d,), which must be left as it is."""

    def stepped(self, rank: int) -> Tensor | None:
        """A worker has made a step: the update that it pushes now, shape (d,), or None to go on."""


class Steps:
    """So many steps, in the mean, and no model.

    Args:
        mean: m, at least 1.
        seed: of the draws that make a whole number of it.
    """

    def __init__(self, mean: float, seed: int) -> None:
        self._whole, self._more = int(mean), mean - int(mean)
        self._generator = np.random.default_rng([seed, 1])
        self._left: dict[int, int] = {}
        self._update = torch.zeros(1)

    def pulled(self, rank: int, model: Tensor) -> None:
        """See :class:`Work`."""
        self._left[rank] = self._whole + bool(self._more and self._generator.random() < self._more)

    def stepped(self, rank: int) -> Tensor | None:
        """See :class:`Work`."""
        self._left[rank] -= 1
        return None if self._left[rank] else self._update


class Play:
    """The workers' cycles: pull, down the link, compute step by step, up the link, push.

    Args:
        server: its rules and its model.
        work: between a pull and a push.
        workers: n; the first one is the server's own and uses no link.
        compute: law of the step times.
        link: of the server.
        seed: of the step times, a stream for each worker.

    Attributes:
        now_s: the time.
        pushes: updates so far, applied or dropped.
    """

    def __init__(self, server: ParameterServer, work: Work, workers: int, compute: Law, link: Link, seed: int) -> None:
        self.now_s, self.pushes = 0.0, 0
        self._server, self._work, self._compute, self._link = server, work, compute, link
        self._generators = np.random.default_rng(seed).spawn(workers)
        self._blocks: list[list[float]] = [[] for _ in range(workers)]
        self._events: list[_Event] = []
        self._numbers = itertools.count()
        self._ports = {"down": _Port(link.transfer_s), "up": _Port(link.transfer_s)}
        self._waiting: list[int] = []  # whose update waits for its turn
        self._queue: list[int] = []  # who waits for a model
        self._updates: dict[int, Tensor] = {}  # on their way
        self._computed_s = 0.0
        self._counts: dict[int, int] = {}
        for rank in range(workers):
            self._ask(rank)

    def until(self, pushes: int) -> Tally:
        """Go on until so many updates have been pushed; what has been seen from the beginning."""
        while self.pushes < pushes:
            self.advance()
        return self.tally()

    def tally(self) -> Tally:
        """What has been seen from the beginning."""
        return Tally(self.now_s, self.pushes, self._server.version, self._computed_s, dict(sorted(self._counts.items())))

    def advance(self) -> None:
        """The next event."""
        event = heapq.heappop(self._events)
        if event.kind in self._ports:
            self._end_of_transfer(event)
            return
        self.now_s = event.time_s
        if event.kind == "arrived down":
            self._begin_step(event.rank)
        elif event.kind == "computed":
            update = self._work.stepped(event.rank)
            if update is None:
                self._begin_step(event.rank)
            else:
                self._updates[event.rank] = update
                self._send("up", event.rank)
        else:
            self._waiting.append(event.rank)
            self._serve()

    def _end_of_transfer(self, event: _Event) -> None:
        port = self._ports[event.kind]
        if event.number == port.ticket:  # otherwise the link has been shared anew since
            self.now_s = event.time_s
            rank = port.end(self.now_s)
            self._announce(event.kind)
            self._later(self._link.latency_s, f"arrived {event.kind}", rank)

    def _ask(self, rank: int) -> None:
        self._server.queue(rank)
        self._queue.append(rank)
        self._pull_next()

    def _pull_next(self) -> None:
        while self._queue and self._server.may_pull(self._queue[0]):
            rank = self._queue.pop(0)
            self._server.pull(rank)
            self._work.pulled(rank, self._server.model)
            self._send("down", rank)

    def _serve(self) -> None:
        """Push every update whose turn it is; each may make it another's."""
        while ready := [rank for rank in self._waiting if self._server.may_push(rank)]:
            rank = ready[0]
            self._waiting.remove(rank)
            staleness = self._server.push(rank, self._updates.pop(rank))
            self.pushes += 1
            if staleness is not None:
                self._counts[staleness] = self._counts.get(staleness, 0) + 1
            self._ask(rank)

    def _send(self, way: str, rank: int) -> None:
        if rank == 0 or self._link.transfer_s == 0.0:
            self._later(0.0 if rank == 0 else self._link.latency_s, f"arrived {way}", rank)
            return
        self._ports[way].begin(self.now_s, rank)
        self._announce(way)

    def _announce(self, way: str) -> None:
        port = self._ports[way]
        port.ticket = next(self._numbers)
        end_s = port.next_end_s()
        if end_s is not None:
            heapq.heappush(self._events, _Event(end_s, port.ticket, way, -1))

    def _later(self, seconds: float, kind: str, rank: int) -> None:
        heapq.heappush(self._events, _Event(self.now_s + seconds, next(self._numbers), kind, rank))

    def _begin_step(self, rank: int) -> None:
        seconds = self._step_s(rank)
        self._computed_s += seconds
        self._later(seconds, "computed", rank)

    def _step_s(self, rank: int) -> float:
        block = self._blocks[rank]
        if not block:
            block.extend(self._compute.draw(self._generators[rank], _BLOCK, 0)[::-1].tolist())
        return block.pop()
