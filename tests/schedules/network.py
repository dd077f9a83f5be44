"""Messages between the workers of a schedule, in the order of each lane, and connections that close."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from tests.schedules.choices import Choices

Lane = Literal["request", "reply", "chunk"]

# seconds that a message is under way, by what the network is like; the harmless first
PROMPT_S = (0.0, 0.0, 0.0, 0.001, 0.01, 0.1, 0.3)
SLOW_S = (0.4, 0.5, 0.6)  # an answer and a piece together in less than the shortest deadline
LATE_S = (*PROMPT_S, 5.0, 40.0)


@dataclass
class Sent:
    """A message on its way."""

    arrives_s: float
    edge: int  # number of the connection
    content: Any


class Network:
    """Connections between pairs, numbered; those that are closed take nothing and give nothing.

    Args:
        choices: of the delays.
        delays_s: among which.
        workers: ranks.

    Attributes:
        touched: ranks that a message or the end of a connection may let go on.
    """

    def __init__(self, choices: Choices, delays_s: tuple[float, ...], workers: int) -> None:
        self.touched = set(range(workers))
        self.requests_to: list[list[tuple[int, deque[Sent]]]] = [[] for _ in range(workers)]  # by sender
        self._queues_to: list[list[deque[Sent]]] = [[] for _ in range(workers)]
        self._choices = choices
        self._delays_s = delays_s
        self._edges: dict[frozenset[int], int] = {}
        self.lanes: dict[tuple[Lane, int, int], deque[Sent]] = {}
        self.closed_by: dict[tuple[frozenset[int], int], int] = {}  # who has closed a connection

    def edge(self, a: int, b: int) -> int:
        """Number of the connection that two workers have now."""
        return self._edges.setdefault(frozenset((a, b)), 0)

    def close(self, a: int, b: int, edge: int, by: int) -> None:
        """Close a connection, if it is the present one: an earlier one's end is not the later one's."""
        pair = frozenset((a, b))
        if self._edges.setdefault(pair, 0) == edge:
            self.closed_by[pair, edge] = by
            self._edges[pair] = edge + 1
            self.touched |= pair

    def is_closed(self, a: int, b: int, edge: int) -> bool:
        """Whether a connection has been closed."""
        return self.edge(a, b) != edge

    def send(self, lane: Lane, sender: int, receiver: int, edge: int, content: Any, now_s: float) -> None:
        """Put a message on its way; those of a lane keep their order."""
        queue = self.lanes.get((lane, sender, receiver))
        if queue is None:
            queue = self.lanes[lane, sender, receiver] = deque()
            self._queues_to[receiver].append(queue)
            if lane == "request":
                self.requests_to[receiver].append((sender, queue))
        self.touched.add(receiver)
        arrives_s = now_s + self._choices.of(self._delays_s)
        if queue:
            arrives_s = max(arrives_s, queue[-1].arrives_s)
        queue.append(Sent(arrives_s, edge, content))

    def head(self, lane: Lane, sender: int, receiver: int) -> Sent | None:
        """The next message of a lane, whether it has arrived or not."""
        queue = self.lanes.get((lane, sender, receiver))
        return queue[0] if queue else None

    def take(self, lane: Lane, sender: int, receiver: int) -> Sent:
        """Take it."""
        return self.lanes[lane, sender, receiver].popleft()

    def next_s(self, receiver: int, after_s: float) -> float:
        """When the next message arrives at a worker after a time."""
        next_s = math.inf
        for queue in self._queues_to[receiver]:
            if queue and after_s < queue[0].arrives_s < next_s:
                next_s = queue[0].arrives_s
        return next_s
