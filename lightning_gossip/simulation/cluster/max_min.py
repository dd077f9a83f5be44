"""Many capacities that transfers share max-min fairly, each transfer over several of them at once.

Rates are max-min fair if none can grow without making one that is no greater smaller (Bertsekas & Gallager, Data Networks).
They are found by filling up: all transfers grow alike until a capacity is full or a transfer is at its own limit; those are
done, and the others go on.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import simpy
from simpy.events import Event

from lightning_gossip.simulation.cluster.events import then


class _Transfer:
    """One on its way."""

    __slots__ = ("done", "end_s", "left", "limit", "nbytes", "over", "rate", "since_s")

    def __init__(self, nbytes: float, over: Sequence[int], limit: float, done: Event) -> None:
        self.nbytes = self.left = nbytes
        self.over = over
        self.limit = limit
        self.done = done
        self.rate = 0.0
        self.since_s = self.end_s = math.inf


class MaxMin:
    """Capacities in use.

    When a transfer begins or ends the rates are found anew of those that share a capacity with it, and of those that share one
    with these, and so on. What begins or ends at one moment is reckoned with together.

    Args:
        environment: of the virtual time.
        capacities: bytes a second, each finite and above 0.

    Attributes:
        used: None, or a list that gets (second, capacity's number, bytes a second in use from then on) at each change.
    """

    def __init__(self, environment: simpy.Environment, capacities: Sequence[float]) -> None:
        self._environment = environment
        self._capacities = capacities
        self._on: list[dict[_Transfer, None]] = [{} for _ in capacities]  # ordered
        self._ends: list[tuple[float, int, _Transfer]] = []
        self._number = 0
        self._changed: dict[int, None] = {}  # capacities whose transfers are others than at the last division
        self._due = False  # whether a division is on its way
        self._timer_s = math.inf
        self.used: list[tuple[float, int, float]] | None = None

    def transfer(self, nbytes: float, over: Sequence[int], limit: float = math.inf) -> Event:
        """Begin a transfer; the event is its end.

        Args:
            nbytes: to move, at least 0.
            over: the capacities that it passes, by number.
            limit: of its rate, bytes a second, above 0.
        """
        done = self._environment.event()
        if nbytes <= 0.0 or (not over and limit == math.inf):
            return self._environment.timeout(0.0)
        if not over:
            return self._environment.timeout(nbytes / limit)
        transfer = _Transfer(nbytes, over, limit, done)
        for capacity in over:
            self._on[capacity][transfer] = None
            self._changed[capacity] = None
        self._divide_soon()
        return done

    def _divide_soon(self) -> None:
        if not self._due:
            self._due = True
            then(self._environment.timeout(0.0), self._divide)

    def _divide(self) -> None:
        """Find the rates of all that what has changed touches."""
        self._due = False
        now_s = self._environment.now
        touched, capacities = self._reached()
        for transfer, rate in self._filled(touched, capacities).items():
            if rate == transfer.rate:
                continue
            if transfer.rate > 0.0:
                transfer.left -= (now_s - transfer.since_s) * transfer.rate
            transfer.rate, transfer.since_s = rate, now_s
            transfer.end_s = now_s + max(0.0, transfer.left) / rate
            self._number += 1
            heapq.heappush(self._ends, (transfer.end_s, self._number, transfer))
        if self.used is not None:
            self.used += [(now_s, one, sum(transfer.rate for transfer in self._on[one])) for one in capacities]
        self._changed.clear()
        self._wait()

    def _reached(self) -> tuple[dict[_Transfer, None], dict[int, None]]:
        """Transfers and capacities that hang together with what has changed."""
        touched: dict[_Transfer, None] = {}
        capacities = dict.fromkeys(self._changed)
        open_ = list(capacities)
        while open_:
            for transfer in self._on[open_.pop()]:
                if transfer in touched:
                    continue
                touched[transfer] = None
                for capacity in transfer.over:
                    if capacity not in capacities:
                        capacities[capacity] = None
                        open_.append(capacity)
        return touched, capacities

    def _filled(self, touched: dict[_Transfer, None], capacities: dict[int, None]) -> dict[_Transfer, float]:
        """The max-min fair rates."""
        on = self._on
        left = {capacity: self._capacities[capacity] for capacity in capacities}
        open_ = {capacity: len(on[capacity]) for capacity in capacities}
        shares = [(left[capacity] / count, capacity) for capacity, count in open_.items() if count]
        heapq.heapify(shares)
        limited = sorted(touched, key=lambda transfer: transfer.limit, reverse=True)
        rates: dict[_Transfer, float] = {}

        def give(transfer: _Transfer, rate: float) -> None:
            rates[transfer] = rate
            for capacity in transfer.over:
                left[capacity] -= rate
                open_[capacity] -= 1

        while len(rates) < len(touched):
            while limited and limited[-1] in rates:
                limited.pop()
            share, capacity = shares[0]
            if not open_[capacity]:
                heapq.heappop(shares)
                continue
            now = max(left[capacity], 0.0) / open_[capacity]  # shares only grow while others are given less
            if now > share * (1.0 + 1e-12):
                heapq.heapreplace(shares, (now, capacity))
            elif limited[-1].limit <= now:
                give(transfer := limited.pop(), transfer.limit)
            else:
                heapq.heappop(shares)
                for transfer in on[capacity]:
                    if transfer not in rates:
                        give(transfer, now)
        return rates

    def _wait(self) -> None:
        """For the next end."""
        ends = self._ends
        while ends and ends[0][0] != ends[0][2].end_s:
            heapq.heappop(ends)  # its rate has changed since
        if ends and ends[0][0] < self._timer_s:
            self._timer_s = ends[0][0]
            then(self._environment.timeout(max(0.0, ends[0][0] - self._environment.now)), self._end, ends[0][0])

    def _end(self, timer_s: float) -> None:
        """Those that are due have ended; a timer may be too early, if rates have fallen since."""
        if timer_s == self._timer_s:
            self._timer_s = math.inf
        now_s, ends = self._environment.now, self._ends
        while ends and (ends[0][0] <= max(now_s, timer_s) or ends[0][0] != ends[0][2].end_s):
            end_s, _, transfer = heapq.heappop(ends)
            if end_s != transfer.end_s:
                continue
            transfer.end_s = -math.inf
            for capacity in transfer.over:
                del self._on[capacity][transfer]
                self._changed[capacity] = None
            transfer.done.succeed()
        if self._changed:
            self._divide_soon()
        else:
            self._wait()
