"""AD-PSGD's protocol under a schedule: its generators, their effects, faults, and what must hold after each event.

| invariant | checked |
|---|---|
| one exchange at a time a worker | at each start |
| both ends of an exchange are in one session, and mean the same exchange | at each start and chunk |
| what one end adds to a piece of its model the other subtracts, or loses with the connection | at each merge |
| a worker's model is what it began with, its updates and its merges: nothing is lost between push and pull | at each drain |
| nobody is busy or in an exchange after the drain of all | at each synchronisation |
| where no worker fails and no message is late nobody gives up, and every drain ends | at the end |
| whoever waits is woken by an event that comes, or by a deadline; all sessions end, all generators end | at the end |
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch

from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerChoice, PartnerPicker
from lightning_gossip.algorithm.adpsgd.peer_selection import ChangingPeers
from lightning_gossip.algorithm.adpsgd.protocol import (
    Announce,
    Answer,
    Ask,
    Average,
    Averaged,
    AwaitAnswer,
    Effect,
    GossipProtocol,
    Probe,
    Reply,
    Request,
    Verdict,
    Wait,
)
from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.compression.pairwise import half_difference
from lightning_gossip.algorithm.membership.failure_detector import FailureDetector
from lightning_gossip.algorithm.membership.failure_detector import Verdict as Health
from lightning_gossip.algorithm.topology.generators import complete, exponential, ring, star
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import PeerError
from tests.schedules.choices import Choices
from tests.schedules.network import LATE_S, PROMPT_S, SLOW_S, Network
from tests.schedules.violation import Violation, judge

HEARTBEAT_S = 0.5
SUSPECTED_S, DEAD_S = 2.0, 30.0  # of silence
CHUNKS, DEPTH = 3, 2  # of a model; in flight
CEILING_S = 3.0  # the longest deadline; a worker of a slow star is queued for longer
EVENTS = 60_000  # a schedule has a thousand or so; one that has more goes on for ever

GRAPHS: tuple[Callable[[int], Topology], ...] = (ring, complete, exponential, star)


class Member(NamedTuple):
    initial_rank: int

    @property
    def spoken(self) -> str:
        return f"rank {self.initial_rank}"


class Counts:
    refused = 0


class Actor:
    """A generator of one worker, and what it waits for.

    Args:
        worker: whose.
        steps: the generator; its effects are the protocol's, or a Wait of the world's.
        trains: it is the worker's training thread.
    """

    def __init__(self, worker: Worker, steps: Generator[Any, Any, Any], *, trains: bool = False) -> None:
        self.worker = worker
        self.trains = trains
        self.stack = [steps]  # an effect that takes several events is a generator on top
        self.until_s = -math.inf
        self.ready: Callable[[], bool] | None = None  # None: at once
        self.ended = False
        self.result: Any = None


class Worker:
    """One worker of the job: its model and its side of the protocol."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.alive = True
        self.frozen_until_s = -math.inf
        self.silent_since_s: float | None = None
        self.next_s = 0.0  # when time may let one of its actors go on
        self.x = [torch.tensor([float(rank + 1)] * CHUNKS, dtype=torch.float64)]
        self.expected = self.x[0].clone()
        self.replica = Replica(self.x)
        self.arrived = self.drained = 0
        self.exchanging: tuple[int, int, int] | None = None  # the peer, the connection, the session
        self.requests: dict[int, int] = {}  # by peer: the connection on which it has asked
        self.ticket = self.asked_on = 0  # of its last request, and the connection
        self.protocol: GossipProtocol
        self.peers: ChangingPeers[Member]
        self.actors: list[Actor] = []

    @property
    def runs(self) -> bool:
        return self.alive and self.frozen_until_s <= self.world.now_s


class Monitor:
    """What the failure detector makes of heartbeats and closed connections; the same at all workers.

    A worker that runs sends its heartbeats; those that a silent one does not send are listened for when somebody asks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._detector = FailureDetector[int](suspect_after_s=SUSPECTED_S, fail_after_s=DEAD_S)
        self._counts: Counter[int] = Counter()  # of heartbeats that tell one silence from another
        self._silences: dict[int, tuple[float, float]] = {}  # when it began, and when it was listened to last
        self.dead: set[int] = set()

    @property
    def version(self) -> int:
        return len(self.dead)

    def look(self) -> None:
        """Time has gone on."""
        for worker in self._world.workers:
            if worker.silent_since_s is not None:
                self.verdict(Member(worker.rank))

    def verdict(self, member: Member) -> Health:
        rank, worker = member.initial_rank, self._world.workers[member.initial_rank]
        if rank in self.dead:
            return Health.FAILED
        if worker.silent_since_s is None:
            return Health.ALIVE
        self._listen(rank, worker.silent_since_s)
        found = self._detector.verdict(rank)
        if found is Health.FAILED:
            self.dead.add(rank)
            self._world.kill(worker)  # a worker that finds itself excluded ends
        return found

    def _listen(self, rank: int, since_s: float) -> None:
        began_s, at_s = self._silences.get(rank, (math.nan, since_s))
        if began_s != since_s:  # its heartbeats have come before
            at_s = since_s
            for _ in range(2):  # the first may be from before a connection closed
                self._counts[rank] += 1
                self._detector.heard(rank, count=self._counts[rank], at_s=at_s)
        while at_s < self._world.now_s:
            at_s = min(at_s + HEARTBEAT_S, self._world.now_s)
            self._detector.heard(rank, count=self._counts[rank], at_s=at_s)
        self._silences[rank] = since_s, at_s

    def connection_lost(self, member: Member) -> None:
        worker = self._world.workers[member.initial_rank]
        if worker.silent_since_s is not None:
            self._listen(worker.rank, worker.silent_since_s)
            self._detector.connection_lost(worker.rank)


class World:
    """A job under one schedule.

    Args:
        choices: the schedule.
        protocol: of AD-PSGD, or one with a fault.
        numbered: whether an answer of an earlier connection or request is told from one of the present.
    """

    def __init__(self, choices: Choices, protocol: type[GossipProtocol] = GossipProtocol, *, numbered: bool = True) -> None:
        self.choices = choices
        self.now_s = 0.0
        self.events = 0
        self._protocol = protocol
        self._numbered = numbered
        self.n = 4 + choices.below(5)
        graph = choices.of(GRAPHS)
        self.topology = (ring if graph is exponential and self.n % 2 else graph)(self.n)
        self.sessions = 1 + choices.below(3)
        self.rate = choices.of((1.0, 2.0, 0.5))
        delays_s = choices.of((PROMPT_S, PROMPT_S, PROMPT_S, SLOW_S, LATE_S))
        # by what was chosen, and no choice of its own: a schedule that is kept stays what it is
        self.partner_choice: PartnerChoice = "fast_links" if sum(choices.made) % 2 else "uniform"
        self.is_late, self.is_slow = delays_s is LATE_S, delays_s is SLOW_S
        self.network = Network(choices, delays_s, self.n)
        self._enabled: list[list[Actor | tuple[int, int]]] = [[] for _ in range(self.n)]
        self.monitor = Monitor(self)
        self.members = [Member(rank) for rank in range(self.n)]
        self.workers = [Worker(self, rank) for rank in range(self.n)]
        self.faults = self._drawn_faults()
        self.merged: dict[tuple[frozenset[int], int, int, int], tuple[int, torch.Tensor]] = {}
        self.exchanges = self.given_up = 0
        self.failed: PeerError | None = None  # that ends the job
        for worker in self.workers:
            self._begin(worker)
            self._act(worker, self._train(worker), trains=True)

    # -- the schedule ----------------------------------------------------------------------------------------------------

    def _drawn_faults(self) -> list[tuple[float, str, int, float]]:
        """When, what, to whom, for how long."""
        faults = []
        for _ in range(self.choices.of((0, 0, 1, 2))):
            kind = self.choices.of(("freeze", "close", "kill"))
            at_s = self.choices.of((0.0, 0.05, 0.2, 0.5, 1.0, 3.0))
            faults.append((at_s, kind, self.choices.below(self.n), self.choices.of((0.5, 3.0, 10.0, 35.0))))
        return sorted(faults)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing goes wrong, so that nobody may give up."""
        return not self.is_late and not self._had_faults

    def run(self) -> None:
        """To the end; raises a Violation."""
        self._had_faults = bool(self.faults)
        while not all(worker.drained == self.sessions + 1 for worker in self.workers if worker.alive):
            if self.failed is not None:
                if not self.is_late:
                    raise Violation(f"the job has failed: {self.failed}")
                return
            self._advance()
        for worker in self.workers:
            if worker.alive and any(not actor.ended for actor in worker.actors):
                raise Violation(f"rank {worker.rank} has not ended all of its generators")
        if self.is_quiet and self.given_up:
            raise Violation(f"{self.given_up} exchanges were given up although nothing went wrong")

    def _advance(self) -> None:
        """One event, or a later time."""
        self.events += 1
        if self.events > EVENTS:
            raise Violation(f"no end after {EVENTS} events")
        for rank in self.network.touched:
            self._enabled[rank] = self._enabled_of(self.workers[rank])
        self.network.touched.clear()
        strikes = bool(self.faults) and self.faults[0][0] <= self.now_s
        number = strikes + sum(map(len, self._enabled))
        if number:
            chosen = self.choices.below(number) - strikes
            if chosen < 0:
                self._strike()
                return
            for enabled in self._enabled:
                if chosen < len(enabled):
                    event = enabled[chosen]
                    break
                chosen -= len(enabled)
            if isinstance(event, Actor):
                self.network.touched.add(event.worker.rank)
                self._resume(event)
            else:
                self.network.touched.add(event[1])
                self._deliver(*event)
            return
        self.now_s = min(
            self.faults[0][0] if self.faults else math.inf, *(worker.next_s for worker in self.workers if worker.alive)
        )
        if math.isinf(self.now_s):
            raise Violation(f"all wait for ever: {self._waiting()}")
        version = self.monitor.version
        self.monitor.look()
        for worker in self.workers:
            if worker.next_s <= self.now_s or version != self.monitor.version:
                self.network.touched.add(worker.rank)
                if worker.alive and worker.frozen_until_s <= self.now_s:
                    worker.silent_since_s = None

    def _enabled_of(self, worker: Worker) -> list[Actor | tuple[int, int]]:
        """Who of a worker's may go on, and whose requests have reached it; asked when something has touched the worker."""
        now_s = self.now_s
        if not worker.runs:
            worker.next_s = worker.frozen_until_s if worker.alive else math.inf
            return []
        enabled: list[Actor | tuple[int, int]] = []
        next_s = self.network.next_s(worker.rank, now_s)
        for actor in worker.actors:
            if actor.ended:
                continue
            if actor.ready is None or actor.until_s <= now_s or actor.ready():
                enabled.append(actor)
            elif actor.until_s < next_s:
                next_s = actor.until_s
        for sender, requests in self.network.requests_to[worker.rank]:
            if requests and requests[0].arrives_s <= now_s:
                enabled.append((sender, worker.rank))
        worker.next_s = next_s
        return enabled

    def _waiting(self) -> list[str]:
        return [
            f"rank {worker.rank} {worker.protocol.phase.value}{' busy' * worker.protocol.busy}"
            for worker in self.workers
            if worker.alive
        ]

    def _strike(self) -> None:
        _, kind, rank, seconds = self.faults.pop(0)
        worker = self.workers[rank]
        self.network.touched.update(range(self.n))
        if not worker.alive:
            return
        if kind == "kill" and sum(each.alive for each in self.workers) > 1:
            self.kill(worker)
        elif kind == "freeze":
            worker.frozen_until_s = self.now_s + seconds
            worker.silent_since_s = self.now_s
        elif kind == "close":
            peer = self.choices.of(self.topology.neighbours(rank))
            self.network.close(rank, peer, self.network.edge(rank, peer), by=-1)

    def kill(self, worker: Worker) -> None:
        """Its process ends without a word; its connections close."""
        if not worker.alive:
            return
        worker.alive = False
        self.network.touched.update(range(self.n))
        if worker.silent_since_s is None:
            worker.silent_since_s = self.now_s
        for peer in range(self.n):
            if peer != worker.rank:
                self.network.close(worker.rank, peer, self.network.edge(worker.rank, peer), by=worker.rank)

    # -- workers ---------------------------------------------------------------------------------------------------------

    def _begin(self, worker: Worker) -> None:
        picker = PartnerPicker(self.topology, worker.rank, seed=1, choice=self.partner_choice)
        worker.peers = ChangingPeers(
            self.monitor,
            worker.rank,
            self.members,
            self.topology,
            roles="auto",
            picker=picker,
            ceiling_s=CEILING_S,
            now_s=lambda: self.now_s,
            say=_say_nothing,
        )
        worker.protocol = self._protocol(
            worker.rank,
            self.n,
            worker.peers,
            Counts(),
            now_s=lambda: self.now_s,
            generator=random.Random(worker.rank),
            exchanges_per_step=self.rate,
        )
        self._act(worker, worker.protocol.initiate())
        self._act(worker, worker.protocol.respond())

    def _act(self, worker: Worker, steps: Generator[Any, Any, Any], *, trains: bool = False) -> None:
        worker.actors = [actor for actor in worker.actors if not actor.ended]
        worker.actors.append(Actor(worker, steps, trains=trains))

    def _train(self, worker: Worker) -> Generator[Any, Any, None]:
        protocol, x = worker.protocol, worker.x
        for session in range(1, self.sessions + 1):
            yield self._pause(self.choices.of((0.0, 0.0, 0.01, 0.5)))
            worker.replica.push_pull(x)
            protocol.open(session, layout=7)
            for _ in range(self.choices.below(5)):
                step_s = self.choices.of((0.1, 0.1, 0.02, 8.0 if self.is_slow else 1.0))
                yield self._pause(step_s)
                update = float(1 + self.choices.below(3))
                x[0] += update
                worker.expected += update
                worker.replica.push_pull(x)
                protocol.stepped(step_s)
            if self.choices.below(12) == 11:
                yield from protocol.request_sync()
            worker.arrived = session
            self.network.touched.update(range(self.n))
            yield Wait(math.inf, lambda session=session: self._all("arrived", session))  # type: ignore[misc]
            try:
                yield from protocol.drain()
            except PeerError as error:
                self.failed = error
                return
            worker.replica.push_pull(x, forward_passes=0)
            if not torch.allclose(x[0], worker.expected, rtol=0.0, atol=1e-9):
                raise Violation(f"rank {worker.rank} has {x[0].tolist()} instead of {worker.expected.tolist()}")
            worker.drained = session
            self.network.touched.update(range(self.n))
            yield Wait(math.inf, lambda session=session: self._all("drained", session))  # type: ignore[misc]
            if worker.exchanging is not None or protocol.busy:
                raise Violation(f"rank {worker.rank} is busy after the drain of session {session}")
        protocol.stop()
        protocol.hears_no_more()
        yield Wait(self.now_s + 100.0, lambda: all(actor.ended for actor in worker.actors if not actor.trains))
        worker.drained = self.sessions + 1

    def _all(self, what: str, session: int) -> bool:
        """Whether all that are not known to be dead have come so far; who is dead is found out at a synchronisation too."""
        for member in self.members:
            worker = self.workers[member.initial_rank]
            if not worker.alive and self.monitor.verdict(member) is not Health.FAILED:
                self.monitor.dead.add(member.initial_rank)  # its launcher has seen its end
        return all(getattr(worker, what) >= session for worker in self.workers if worker.alive)

    def _pause(self, seconds: float) -> Wait:
        return Wait(self.now_s + seconds, lambda: False)

    # -- effects ---------------------------------------------------------------------------------------------------------

    def _resume(self, actor: Actor) -> None:
        """Let a generator go on to its next effect."""
        result, actor.result, actor.ready, actor.until_s = actor.result, None, None, -math.inf
        while True:
            try:
                effect = actor.stack[-1].send(result)
            except StopIteration as end:
                actor.stack.pop()
                if not actor.stack:
                    actor.ended = True
                    return
                result = end.value
                continue
            if isinstance(effect, Wait):
                actor.until_s, actor.ready = effect.until_s, effect.ready
                return
            made = self._do(actor.worker, effect)
            if isinstance(made, Generator):
                actor.stack.append(made)
                result = None
            else:
                actor.result = made  # another generator may go on before it
                return

    def _do(self, worker: Worker, effect: Effect) -> Any:
        """The result of an effect, or a generator that has it in the end."""
        rank = worker.rank
        match effect:
            case Ask(peer, request, timeout_s):
                return self._ask(worker, peer, request, timeout_s)
            case AwaitAnswer(peer, timeout_s):
                return self._await_answer(worker, peer, worker.asked_on, timeout_s)
            case Reply(peer, answer):
                return self._reply(worker, peer, answer)
            case Average(peer, _, timeout_s):
                return self._average(worker, peer, timeout_s)
            case Probe(peer):
                return None if self.workers[peer].alive else self._closed(peer)
            case Announce(peer, session):
                self.network.send("request", rank, peer, -1, session, self.now_s)
        return None

    def _ask(self, worker: Worker, peer: int, request: Request, timeout_s: float) -> Generator[Any, Any, Any]:
        if not self.workers[peer].alive:
            return self._closed(peer)
        edge = self.network.edge(worker.rank, peer)
        worker.ticket, worker.asked_on = worker.ticket + 1, edge
        asked = Request(request.session, request.layout, request.step_s, request.adopts, worker.ticket)
        self.network.send("request", worker.rank, peer, edge, asked, self.now_s)
        return (yield from self._await_answer(worker, peer, edge, timeout_s))

    def _await_answer(self, worker: Worker, peer: int, edge: int, timeout_s: float) -> Generator[Any, Any, Any]:
        deadline_s = self.now_s + timeout_s
        while True:
            received = yield from self._receive(worker, "reply", peer, edge, deadline_s)
            if isinstance(received, PeerError) or not self._numbered or received.ticket == worker.ticket:
                if isinstance(received, Answer) and received.verdict is Verdict.ACCEPTED:
                    worker.requests[peer] = edge
                return received

    def _reply(self, worker: Worker, peer: int, answer: Answer) -> PeerError | None:
        edge = worker.requests[peer]
        if self._numbered and self.network.is_closed(worker.rank, peer, edge):
            return self._lost(worker, peer, edge)
        self.network.send("reply", worker.rank, peer, edge, answer, self.now_s)
        return None

    def _average(self, worker: Worker, peer: int, timeout_s: float) -> Generator[Any, Any, Any]:
        edge, session = worker.requests[peer], worker.protocol.session
        if worker.exchanging is not None:
            raise Violation(f"rank {worker.rank} begins an exchange with rank {peer} in the middle of another")
        other = self.workers[peer]
        if other.alive and other.protocol.session != session and not self.network.is_closed(worker.rank, peer, edge):
            raise Violation(f"ranks {worker.rank} and {peer} exchange in sessions {session} and {other.protocol.session}")
        worker.exchanging = (peer, edge, session)
        in_flight: list[tuple[int, torch.Tensor]] = []
        try:
            for chunk in (*range(CHUNKS), *[-1] * CHUNKS):
                if in_flight and (len(in_flight) == DEPTH or chunk < 0):
                    number, mine = in_flight.pop(0)
                    theirs = yield from self._receive(worker, "chunk", peer, edge, self.now_s + timeout_s)
                    if isinstance(theirs, PeerError):
                        return theirs
                    self._merge(worker, peer, edge, number, mine, theirs)
                if chunk >= 0:
                    mine = torch.empty(1, dtype=torch.float64)
                    worker.replica.snapshot(slice(chunk, chunk + 1), mine)
                    self.network.send("chunk", worker.rank, peer, edge, (session, chunk, mine), self.now_s)
                    in_flight.append((chunk, mine))
                    yield self._pause(0.0)
            worker.replica.exchange_done()
            self.exchanges += 1
            return Averaged()
        finally:
            worker.exchanging = None

    def _merge(self, worker: Worker, peer: int, edge: int, chunk: int, mine: torch.Tensor, content: Any) -> None:
        session, number, theirs = content
        if (session, number) != (worker.protocol.session, chunk):
            raise Violation(f"rank {worker.rank} reads piece {number} of session {session} for piece {chunk}")
        difference = half_difference(mine, theirs.clone())
        key = (frozenset((worker.rank, peer)), edge, session, chunk)
        first = self.merged.pop(key, None)
        if first is None:
            self.merged[key] = (worker.rank, difference)
        elif first[0] == worker.rank or not torch.equal(first[1], -difference):
            raise Violation(f"rank {worker.rank} adds {difference.tolist()}, rank {first[0]} {first[1].tolist()}")
        worker.replica.merge(slice(chunk, chunk + 1), difference)
        worker.expected[chunk] += difference[0]

    def _receive(self, worker: Worker, lane: Any, peer: int, edge: int, deadline_s: float) -> Generator[Any, Any, Any]:
        """The next message of a lane on a connection; those of earlier ones are thrown away."""
        network, rank = self.network, worker.rank

        def arrived() -> bool:
            while (head := network.head(lane, peer, rank)) is not None and self._numbered and head.edge < edge:
                network.take(lane, peer, rank)
            return head is not None and head.arrives_s <= self.now_s

        while True:
            yield Wait(deadline_s, lambda: arrived() or network.is_closed(rank, peer, edge))
            if arrived():
                return network.take(lane, peer, rank).content
            if network.is_closed(rank, peer, edge):
                return self._lost(worker, peer, edge)
            if self.now_s >= deadline_s:
                self.given_up += 1
                network.close(rank, peer, edge, by=rank)
                return PeerError(f"rank {peer} is late", rank=peer, phase=lane, timed_out=True)

    def _deliver(self, sender: int, receiver: int) -> None:
        """A request, or one for a synchronisation, has reached the mailbox's owner."""
        worker, sent = self.workers[receiver], self.network.take("request", sender, receiver)
        if not isinstance(sent.content, Request):
            worker.protocol.sync_requested(sent.content)
            return
        if self.network.is_closed(sender, receiver, sent.edge):
            return  # its sender has given up
        worker.requests[sender] = sent.edge
        self._act(worker, worker.protocol.receive(sender, sent.content))

    def _lost(self, worker: Worker, peer: int, edge: int) -> PeerError:
        """A connection has closed; whoever has closed it itself has no evidence of a death."""
        by = self.network.closed_by.get((frozenset((worker.rank, peer)), edge))
        if by == worker.rank:
            return PeerError("given up here before", rank=peer)
        return self._closed(peer)

    def _closed(self, peer: int) -> PeerError:
        return PeerError(f"rank {peer} has closed the connection", rank=peer, closed=True)


def _say_nothing(*_: object) -> None:
    """What happens to peers is in the schedule."""


def run(choices: Choices, protocol: type[GossipProtocol] = GossipProtocol, **options: Any) -> World:
    """Run one schedule; an exception of the product is a violation too."""
    world = World(choices, protocol, **options)
    judge(world.run)
    return world
