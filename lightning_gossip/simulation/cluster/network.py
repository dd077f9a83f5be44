"""Messages and vectors on their way, under virtual time.

A transfer takes the link's latency and its bytes over the link's bandwidth. Where several share one capacity (the bottleneck,
the server's port) it is divided max-min fairly: every transfer gets the same rate, but none more than its own link allows, and
what such a one leaves goes to the others. With nodes transfers share several: cards, uplinks, links inside; see
:mod:`lightning_gossip.simulation.cluster.max_min`.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import simpy
from simpy.events import Event

from lightning_gossip.simulation.cluster.events import then
from lightning_gossip.simulation.cluster.links import Links
from lightning_gossip.simulation.cluster.max_min import MaxMin


@dataclass
class _Class:
    """The transfers under way that have the same limit; all of them move at one rate."""

    limit: float
    served: float = 0.0  # bytes that each would have received had it begun when the class did
    rate: float = 0.0
    ends: list[tuple[float, int, Event]] = field(default_factory=list)  # by ``served`` at the end


class FairShare:
    """A capacity that the transfers under way share max-min fairly.

    One step of the arithmetic is of the order of the number of distinct limits, not of the transfers: those of one limit keep
    their order, so that a heap of their ends suffices.

    Args:
        environment: of the virtual time.
        capacity: bytes a second, above 0.
    """

    def __init__(self, environment: simpy.Environment, capacity: float) -> None:
        self._environment = environment
        self._capacity = capacity
        self._classes: dict[float, _Class] = {}
        self._numbers = itertools.count()
        self._since_s = 0.0
        self._timer = 0  # number of the timer that counts; earlier ones are void

    def transfer(self, nbytes: float, limit: float) -> Event:
        """Begin a transfer; the event is its end.

        Args:
            nbytes: to move, at least 0.
            limit: of its rate, bytes a second, above 0.
        """
        done = self._environment.event()
        self._advance()
        members = self._classes.setdefault(limit, _Class(limit))
        heapq.heappush(members.ends, (members.served + nbytes, next(self._numbers), done))
        self._divide()
        return done

    def _advance(self) -> None:
        """Bring what was served up to now."""
        passed_s = self._environment.now - self._since_s
        self._since_s = self._environment.now
        if passed_s > 0.0:
            for members in self._classes.values():
                members.served += members.rate * passed_s

    def _divide(self) -> None:
        """Divide the capacity anew, and wait for the next end."""
        left, flows = self._capacity, sum(len(members.ends) for members in self._classes.values())
        next_s, first = float("inf"), None
        for limit in sorted(self._classes):
            members = self._classes[limit]
            members.rate = min(limit, left / flows)
            left -= members.rate * len(members.ends)
            flows -= len(members.ends)
            end_s = (members.ends[0][0] - members.served) / members.rate
            if end_s < next_s:
                next_s, first = end_s, members
        self._timer += 1
        if first is not None:
            then(self._environment.timeout(max(0.0, next_s)), self._end, self._timer, first)

    def _end(self, number: int, due: _Class) -> None:
        """The first of a class has ended, unless the division has changed since."""
        if number != self._timer:
            return
        self._advance()
        due.served = max(due.served, due.ends[0][0])  # to the bit, whatever the rounding
        for members in list(self._classes.values()):
            while members.ends and members.ends[0][0] <= members.served:
                heapq.heappop(members.ends)[2].succeed()
            if not members.ends:
                del self._classes[members.limit]
        self._divide()


class Network:
    """The links of a run.

    Args:
        environment: of the virtual time.
        links: between the workers.
        seed: of the links that are slow at random.
        server: the rank whose port all others share; None if nobody's is. With nodes each rank's port is its card.

    Attributes:
        shares: of the capacities of nodes; None without nodes.
    """

    def __init__(self, environment: simpy.Environment, links: Links, *, seed: int, server: int | None = None) -> None:
        self._environment = environment
        self._links = links
        self._seed = seed
        self._server = server
        self._bottleneck: FairShare | None = None
        self._in_port: FairShare | None = None
        self._out_port: FairShare | None = None
        self.shares: MaxMin | None = None
        if links.nodes is not None:
            self.shares = MaxMin(environment, links.fabric.capacities)
            return
        port = links.bandwidth / (links.slow.get(server, 1.0) if server is not None else 1.0)
        shared = links.shared if links.shared is not None else float("inf")
        if shared < float("inf") and (server is None or shared <= port):
            self._bottleneck = FairShare(environment, shared)
        elif server is not None and port < float("inf"):
            self._in_port, self._out_port = FairShare(environment, port), FairShare(environment, port)

    def message(self, sender: int, receiver: int) -> Event:
        """A message without a vector; the event is its arrival."""
        return self._environment.timeout(self.latency_s(sender, receiver))

    def latency_s(self, sender: int, receiver: int) -> float:
        """Seconds of a message between two ranks that leaves now."""
        if sender == receiver:
            return 0.0
        if self.shares is not None:
            links = self._links
            return links.fabric.latency_s(sender, receiver) * links.factor(sender, receiver, self._environment.now, self._seed)
        if not self._links.latency_s:
            return 0.0
        return self._links.latency_s * self._links.factor(sender, receiver, self._environment.now, self._seed)

    def transfer(self, sender: int, receiver: int, nbytes: float) -> Event:
        """A vector on its way; the event is its arrival. What stays on one rank takes no time."""
        if sender == receiver:
            return self._environment.timeout(0.0)
        factor = self._links.factor(sender, receiver, self._environment.now, self._seed)
        if self.shares is not None:
            fabric = self._links.fabric
            rate = fabric.limit(sender, receiver) / factor
            sent = self.shares.transfer(nbytes, fabric.over(sender, receiver), rate)
            return self._after(sent, fabric.latency_s(sender, receiver) * factor)
        latency_s, rate = self._links.latency_s * factor, self._links.bandwidth / factor
        capacity = self._bottleneck
        if capacity is None and self._server is not None:
            capacity = self._in_port if receiver == self._server else self._out_port if sender == self._server else None
        if capacity is None:
            return self._environment.timeout(latency_s + nbytes / rate)
        return self._after(capacity.transfer(nbytes, rate), latency_s)

    def _after(self, sent: Event, latency_s: float) -> Event:
        """So many seconds after an event."""
        if not latency_s:
            return sent
        arrival = self._environment.event()
        then(sent, self._arrive, arrival, latency_s)
        return arrival

    def _arrive(self, arrival: Event, latency_s: float) -> None:
        then(self._environment.timeout(latency_s), arrival.succeed)
