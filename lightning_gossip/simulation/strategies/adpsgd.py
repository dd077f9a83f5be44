"""AD-PSGD under virtual time: asynchronous pairwise gossip behind the training (Lian et al. 2018, arXiv 1710.06952).

Each worker is three processes, as it is three threads in the runtime: one trains, one starts exchanges, one answers. What they
say and decide is :class:`~lightning_gossip.algorithm.adpsgd.protocol.GossipProtocol`, as in the runtime; here are its effects.
What a real exchange does chunk by chunk is done in one piece: both ends copy their published model when they know that the
exchange is on, and merge the half-difference when the other one's has come:

| at | initiator i | responder j |
|---|---|---|
| t | draws j, asks | |
| t + ℓ | | free: accepts, copies y_j, sends it |
| t + 2ℓ | copies y_i, sends it | |
| t + 2ℓ + B/b | y_j has come: merges | |
| t + 3ℓ + B/b | | y_i has come: merges |

A worker that fails closes its connections at once. Two seconds later, as heartbeats tell it, it has left the graph, which is
repaired. Nobody loses patience with a worker that is slow: deadlines are infinite.

How a worker trains, or with ``island`` several ranks together, is in
:mod:`lightning_gossip.simulation.strategies.adpsgd_island`.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import simpy
import torch
from simpy.events import Event
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.adpsgd.local_steps import LocalSteps
from lightning_gossip.algorithm.adpsgd.options import GossipOptions
from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerPicker, Roles
from lightning_gossip.algorithm.adpsgd.peer_selection import ChangingPeers
from lightning_gossip.algorithm.adpsgd.protocol import (
    Answer,
    Ask,
    Average,
    Averaged,
    AwaitAnswer,
    Effect,
    GossipProtocol,
    Reply,
    Request,
    Steps,
    Verdict,
    Wait,
)
from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.checks import check_integer
from lightning_gossip.algorithm.compression.pairwise import exchange_bytes, make_codec
from lightning_gossip.algorithm.compression.wires import Wire
from lightning_gossip.algorithm.effects import perform, perform_in_time
from lightning_gossip.algorithm.islands.places import pull_every, share_numel
from lightning_gossip.algorithm.membership.failure_detector import FailureDetector
from lightning_gossip.algorithm.membership.failure_detector import Verdict as Health
from lightning_gossip.algorithm.options import EpochOptions
from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.algorithm.topology.generators import make_topology
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError, PeerError
from lightning_gossip.simulation.cluster.collective_costs import all_reduce_s, islands_all_reduce_s
from lightning_gossip.simulation.cluster.events import then
from lightning_gossip.simulation.cluster.links import Links
from lightning_gossip.simulation.problems.batch_assignment import Session
from lightning_gossip.simulation.record import Distances
from lightning_gossip.simulation.run import Process, Run, Strategy
from lightning_gossip.simulation.strategies.adpsgd_island import Island
from lightning_gossip.simulation.strategies.asynchronous import SyncPoint

_NOTHING = torch.empty(0, device="cpu")  # what is sent where there are times only


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class ADPSGD(GossipOptions, EpochOptions, Strategy):
    """Asynchronous pairwise gossip; the options of :class:`~lightning_gossip.strategies.ADPSGDStrategy`.

    Args:
        seed: of the partner choice; None for the run's.
        island: k, ranks in a row that train together and gossip as one member, each its own k-th of the model; ``"node"`` for
            all ranks of a node.
    """

    name = "adpsgd"
    shares_work = True

    seed: int | None = None
    island: int | Literal["node"] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.island != "node":
            check_integer("island", self.island, example=8, otherwise=", or 'node' for all ranks of a node")

    @override
    def island_size(self, links: Links) -> int:
        if self.island != "node":
            return self.island
        if links.nodes is None or len(set(links.nodes.sizes)) > 1:
            raise ConfigurationError(
                "island='node' needs nodes, all with as many ranks. Write the number of ranks, for example island=8, or"
                " links=nodes."
            )
        return links.nodes.sizes[0]

    @override
    def start(self, run: Run) -> None:
        Gossip(self, run).start()


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class NoLoCo(ADPSGD):
    """Few exchanges, and an outer step of each worker's own after every 50 steps."""

    name = "noloco"

    wire: Wire = "int8"
    local_steps: int | None = 50
    outer: Outer | None = field(default_factory=Outer)


class Gossip:
    """All workers of a run of AD-PSGD.

    Attributes:
        workers: the gossiping sides of all ranks.
        peers: of each index in an island, those of all islands.
    """

    def __init__(self, strategy: ADPSGD, run: Run) -> None:
        self.run = run
        self.wire, size = strategy.wire, run.islands.size
        self.pull_every = strategy.push_every if size == 1 else pull_every(strategy.exchanges_per_step, strategy.push_every)
        numel = share_numel(run.nbytes // run.models.x.element_size(), size)
        self.exchange_bytes = math.ceil(run.nbytes / size) if self.wire == "float32" else exchange_bytes(self.wire, numel)
        self.adopts = strategy.at_rendezvous == "adopt"
        self.session: Session
        self._sessions = 0
        n, d = run.members, run.models.numel
        self.published = torch.zeros(n, d, dtype=run.models.x.dtype, device="cpu")
        self.merges = torch.zeros_like(self.published)
        self.topology = make_topology(strategy.topology, n)
        self._roles = strategy.roles
        self.monitor = Monitor(run)
        self.peers = [self._of_index(strategy, index) for index in range(size)]
        self.workers = [self.peers[index][number] for number in range(n) for index in range(size)]
        self._islands = [Island(self, number, [peers[number] for peers in self.peers]) for number in range(n)]
        run.current = lambda: self.published
        self.sync_point = SyncPoint(
            run, settle=self._drain, average=self._average, open_session=self._open, cost_s=self._average_s
        )

    def start(self) -> None:
        """Begin."""
        for number, island in enumerate(self._islands):
            first, *others = [peers[number] for peers in self.peers]
            first.start(island.train())
            for worker in others:
                worker.start()
        self.sync_point.begin()
        for rank, at_s in sorted(self.run.cluster.failures.items()):
            then(self.run.environment.timeout(at_s), self.workers[rank].fail)

    def _of_index(self, strategy: ADPSGD, index: int) -> list[Worker]:
        """The gossiping sides of the ranks of one index, by island."""
        run, n = self.run, self.run.members
        seed, choice = run.seed if strategy.seed is None else strategy.seed, strategy.partner_choice
        members = [Member(run.islands.rank(number, index)) for number in range(n)]
        workers = []
        for number in range(n):
            picker = PartnerPicker(self.topology, number, roles=strategy.roles, seed=seed, choice=choice, part=index)
            peers = PatientPeers(run, self.monitor, members, self.topology, strategy.roles, picker)
            workers.append(Worker(self, number, index, peers, strategy))
        return workers

    def _open(self, session: Session) -> None:
        self.session = session
        self._sessions += 1
        for worker in self.workers:
            if not worker.failed:
                worker.open(self._sessions)

    def _drain(self) -> Process:
        """No new exchange; those under way end; every x takes over the last merges."""
        self.run.record.event(self.run.environment.now, "close", -1)
        drains = [self.workers[rank].drain() for rank in self.run.living]
        for drain in drains:
            yield from drain
        for rank in self.run.living:
            self.workers[rank].take_over_last_merges()
        for island in self._islands:
            island.hand_round()

    def _average_s(self) -> float:
        run = self.run
        if run.islands.size > 1:
            ranks = [[peers[number].rank for peers in self.peers] for number in range(run.members)]
            return islands_all_reduce_s(run.links, ranks, run.nbytes, at_s=run.environment.now, seed=run.seed)
        return all_reduce_s(run.links, run.living, run.nbytes, at_s=run.environment.now, seed=run.seed)

    def _average(self) -> Distances | None:
        living, models = self.run.living_members, self.run.models
        distance = self.run.distance(self.published)
        if self.adopts and models.numel:
            mean = self.published[living].sum(0).div_(len(living))
            for rank in self.run.living:
                self.workers[rank].adopt(mean)
            for island in self._islands:
                island.hand_round()
        return distance


class Member(NamedTuple):
    """A worker, as :class:`~lightning_gossip.algorithm.adpsgd.peer_selection.ChangingPeers` calls it."""

    initial_rank: int

    @property
    def spoken(self) -> str:
        """The worker's name in messages."""
        return f"rank {self.initial_rank}"


# as in the runtime, with its default peer_timeout_s
_HEARTBEAT_S = 0.5
_SUSPECT_AFTER_S, _FAIL_AFTER_S = 2.0, 30.0


class Monitor:
    """What heartbeats and closed connections tell of the workers of a run. All workers know the same.

    Heartbeats of workers that live are on time and not simulated; those that a failed one does not send are listened for.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._detector = FailureDetector[int](suspect_after_s=_SUSPECT_AFTER_S, fail_after_s=_FAIL_AFTER_S)
        self._silent: set[int] = set()

    def listen(self, rank: int) -> Process:
        """Listen for the heartbeats of a worker that has failed, until that is known: a process."""
        self._silent.add(rank)
        while True:
            self._detector.heard(rank, count=0, at_s=self._run.environment.now)
            if self._detector.verdict(rank) is Health.FAILED:
                return
            yield self._run.environment.timeout(_HEARTBEAT_S)

    @property
    def version(self) -> int:
        """How many workers are known to have failed."""
        return sum(self._detector.verdict(rank) is Health.FAILED for rank in self._silent) if self._silent else 0

    def verdict(self, worker: Member) -> Health:
        """Whether a worker is alive, as far as the others know."""
        rank = worker.initial_rank
        return self._detector.verdict(rank) if rank in self._silent else Health.ALIVE

    def connection_lost(self, worker: Member) -> None:
        """Note that a worker has closed a connection."""
        self._detector.connection_lost(worker.initial_rank)


class PatientPeers(ChangingPeers[Member]):
    """The runtime's peers, with infinite deadlines."""

    def __init__(
        self, run: Run, monitor: Monitor, members: list[Member], topology: Topology, roles: Roles, picker: PartnerPicker
    ) -> None:
        super().__init__(
            monitor,
            picker.rank,
            members,
            topology,
            roles=roles,
            picker=picker,
            ceiling_s=math.inf,
            now_s=lambda: run.environment.now,
            say=_say_nothing,
        )
        self._may_change = bool(run.cluster.failures)

    @property
    @override
    def deadline_s(self) -> float:
        return math.inf

    @property
    @override
    def answer_s(self) -> float:
        return math.inf

    @property
    @override
    def looks_again_s(self) -> float:
        return super().looks_again_s if self._may_change else math.inf


def _say_nothing(*_: object) -> None:
    """What happens to simulated workers is in the record."""


class Swap:
    """An exchange under way: both ends' copies, and when they arrive."""

    def __init__(self, environment: simpy.Environment, initiator: Worker, responder: Worker) -> None:
        self.initiator = initiator.rank
        self.to_initiator: Event | None = None
        self.to_responder = environment.event()  # the initiator's copy leaves later than the responder waits for it
        self.greetings = {end.rank: end.greeting() for end in (responder, initiator)}
        self.payloads: dict[int, Tensor] = {}  # by sender


class Worker:
    """One worker's gossip: its replica of its part of the model, its side of the protocol, its two processes.

    Args:
        gossip: of the run.
        number: of its island, which is its number in the graph; without islands its rank.
        index: its place in the island.
        peers: that it draws.
        strategy: of the run.

    Attributes:
        part: of the model that it averages with peers; all of it without islands.
    """

    def __init__(self, gossip: Gossip, number: int, index: int, peers: PatientPeers, strategy: ADPSGD) -> None:
        self.rank = gossip.run.islands.rank(number, index)
        self._number = number
        self._index = index
        share = share_numel(gossip.run.models.numel, gossip.run.islands.size)
        self.part = slice(min(index * share, gossip.run.models.numel), min((index + 1) * share, gossip.run.models.numel))
        self._x = [gossip.run.models.rows[self.rank][self.part]]
        self.failed = False
        self._gossip = gossip
        self._run = gossip.run
        self._environment = gossip.run.environment
        self._peers = peers
        self._exchanges_per_step = strategy.exchanges_per_step
        self._local_steps = LocalSteps(strategy)
        self._starts = self._exchanges_per_step > 0.0
        self._protocol = GossipProtocol(
            number,
            gossip.run.members,
            peers,
            gossip.run.record.accounts[self.rank],
            now_s=lambda: self._environment.now,
            generator=random.Random(f"{gossip.run.seed}/{self.rank}"),
            exchanges_per_step=self._local_steps.rate(self._exchanges_per_step),
        )
        self._waiting: list[tuple[Wait, Event]] = []
        self._asked: Worker | None = None  # whose answer this worker waits for
        self._ticket = 0  # of its last request
        self._answers: deque[Answer | PeerError] = deque()
        self._answer: Event | None = None
        self._swap: Swap | None = None  # of the exchange under way
        self._partner: tuple[Worker, simpy.Process] | None = None  # in an exchange with, and the partner's process in it
        self._processes: list[simpy.Process] = []
        vectors = iter((gossip.published[number][self.part], gossip.merges[number][self.part]))
        self.replica = Replica(
            self._x,
            dtype=gossip.published.dtype,
            push_every=gossip.pull_every,
            host_vector=lambda *_: next(vectors),
        )
        self._codec = make_codec(gossip.wire, self.replica.published)

    def start(self, *beside: Process) -> None:
        """Begin the processes, and others that end with this worker."""
        process = self._environment.process
        self._processes = [process(self._guarded(one)) for one in (*beside, self._drive(self._protocol.respond()))]
        if self._starts:
            self._processes.append(process(self._guarded(self._drive(self._protocol.initiate()))))

    def open(self, session: int) -> None:
        """Begin a session: publish the model; exchanges may be due from now on."""
        self._local_steps.open(["x"], self._x, self._gossip.topology)
        self.replica.followers = self._local_steps.followers
        self.replica.push_pull(self._x)
        self._protocol.open(session, layout=0)
        self._changed()

    def drain(self) -> Process:
        """End the session, at once for new exchanges; the process ends with the exchange under way."""
        steps = self._protocol.drain()
        effect = next(steps, None)
        self._changed()

        def ends(effect: Any) -> Process:
            while effect is not None:
                yield from self._wait(effect)
                effect = next(steps, None)
            self._changed()

        return ends(effect)

    def take_over_last_merges(self) -> None:
        """x takes over what the exchanges since its last step have changed."""
        with self._local_steps.merging(self._x):
            self.replica.push_pull(self._x, forward_passes=0)
        self.record_staleness()

    def adopt(self, mean: Tensor) -> None:
        """Take over the mean, shape (d,), when all have met: y and x become it."""
        self.replica.settle().copy_(mean[self.part])
        with self._local_steps.adopting(self._x):
            self.replica.copy_out(self._x)

    def record_staleness(self) -> None:
        """Write down the staleness of the steps that have been pushed."""
        for staleness in self.replica.take_staleness():
            self._run.record.stale(self.rank, staleness)

    def fail(self) -> None:
        """Stop for good."""
        if self._run.ended is not None:
            return
        self.failed = True
        self._protocol.fail(RuntimeError("failed"))
        self._run.fail(self.rank, self._gossip.session)
        self._environment.process(self._gossip.monitor.listen(self.rank))
        for process in self._processes:
            if process.is_alive:
                process.interrupt("failed")
        if self._partner is not None and self._partner[1].is_alive:
            self._partner[1].interrupt("partner failed")
        for worker in self._gossip.workers:
            if worker._asked is self:
                worker._hear(self, worker._ticket, self._closed())
        self._changed()
        self._gossip.sync_point.check()

    # -- training ----------------------------------------------------------------------------------------------------

    def follow_step(self) -> None:
        """Follow a step of the optimizer: push and pull, and perhaps an outer step."""
        x = self._x
        self._local_steps.step(
            x,
            progress=self._run.progress,
            push_pull=lambda: self.replica.step(x),
            publish=lambda: self.replica.publish(x),
        )
        self.replica.followers = self._local_steps.followers
        self.record_staleness()
        self._protocol.exchanges_per_step = self._local_steps.rate(self._exchanges_per_step)

    def stepped(self, step_s: float | None) -> None:
        """Tell the protocol how long the step took, in seconds, when it has been written down."""
        self._protocol.stepped(step_s)
        self._changed()

    # -- the protocol's generators and effects ------------------------------------------------------------------------

    def _drive(self, steps: Steps) -> Process:
        yield from perform_in_time(steps, self._do)
        self._changed()

    def _do(self, effect: Effect) -> Generator[Event, Any, Any]:
        """What the protocol asks for; it says what each effect is."""
        self._changed()
        match effect:
            case Wait():
                yield from self._wait(effect)
            case Ask(peer, request):
                return (yield from self._ask(self._peer(peer), request))
            case AwaitAnswer():
                return (yield from self._next_answer())
            case Reply(peer, answer):
                return self._reply(self._peer(peer), answer)
            case Average(peer):
                return (yield from self._average(self._peer(peer)))
        return None  # a connection with a worker that lives stands

    def _peer(self, number: int) -> Worker:
        return self._gossip.peers[self._index][number]

    def _changed(self) -> None:
        """Resume whom an event or an effect of this worker has made ready."""
        for wait, event in self._waiting:
            if not event.triggered and wait.ready():
                event.succeed()

    def _wait(self, wait: Wait) -> Process:
        environment = self._environment
        if wait.ready() or wait.until_s <= environment.now:
            return
        event = environment.event()
        if wait.until_s < math.inf:
            then(environment.timeout(wait.until_s - environment.now), _succeed, event)
        self._waiting.append((wait, event))
        try:
            yield event
        finally:
            self._waiting.remove((wait, event))

    def _ask(self, peer: Worker, request: Request) -> Generator[Event, Any, Answer | PeerError]:
        self._run.record.event(self._environment.now, "request", self.rank, peer.rank)
        self._asked = peer
        self._ticket += 1
        self._answers.clear()
        sent = replace(request, ticket=self._ticket)
        then(self._run.network.message(self.rank, peer.rank), self._deliver, peer, sent)
        return (yield from self._next_answer())

    def _deliver(self, peer: Worker, request: Request) -> None:
        """The request has reached the peer."""
        if peer.failed:
            self._hear(peer, request.ticket, self._closed(peer))
            return

        def reply(effect: Effect) -> PeerError | None:
            assert isinstance(effect, Reply)
            return peer._reply(self, effect.answer)

        perform(peer._protocol.receive(self._number, request), reply)
        peer._changed()

    def _next_answer(self) -> Generator[Event, Any, Answer | PeerError]:
        if not self._answers:
            self._answer = self._environment.event()
            yield self._answer
            self._answer = None
        answer = self._answers.popleft()
        if isinstance(answer, PeerError) or answer.verdict is not Verdict.QUEUED:
            if isinstance(answer, Answer) and answer.verdict is Verdict.REFUSED:
                self._run.record.event(self._environment.now, "refused", self.rank, self._asked.rank)  # type: ignore[union-attr]
            self._asked = None
        return answer

    def _hear(self, peer: Worker, ticket: int, answer: Answer | PeerError) -> bool:
        """An answer has come, or the connection has closed; False if it is not of the request under way."""
        if self._asked is not peer or self._ticket != ticket:
            return False
        self._answers.append(answer)
        if self._answer is not None:
            _succeed(self._answer)
        return True

    def _reply(self, peer: Worker, answer: Answer) -> PeerError | None:
        if answer.verdict is not Verdict.QUEUED:
            self._run.record.event(self._environment.now, "answer", self.rank, peer.rank)
        if peer.failed:
            return self._closed(peer)
        if answer.verdict is Verdict.ACCEPTED:
            self._swap = Swap(self._environment, initiator=peer, responder=self)
        then(self._run.network.message(self.rank, peer.rank), self._answered, peer, answer, self._swap)
        return None

    def _answered(self, peer: Worker, answer: Answer, swap: Swap | None) -> None:
        """The answer has reached the peer that has asked, which may have heard of this worker's failure before."""
        if not (peer.failed or self.failed) and peer._hear(self, answer.ticket, answer) and answer.verdict is Verdict.ACCEPTED:
            peer._swap = swap

    def _closed(self, peer: Worker | None = None) -> PeerError:
        rank = self.rank if peer is None else peer.rank
        return PeerError(f"Rank {rank} has failed.", rank=rank, phase="exchange", closed=True)

    def _average(self, peer: Worker) -> Generator[Event, Any, Averaged | PeerError]:
        """Average with a peer that runs the same."""
        environment, run, swap = self._environment, self._run, self._swap
        began_s, whole = environment.now, slice(0, self.replica.numel)
        process = environment.active_process
        assert process is not None
        assert swap is not None
        peer._partner = (self, process)
        try:
            run.record.event(began_s, "snapshot", self.rank, peer.rank)
            mine = swap.payloads[self.rank] = self._encoded(whole, swap.greetings[peer.rank])
            transfer = run.network.transfer(self.rank, peer.rank, self._gossip.exchange_bytes)
            if swap.initiator == self.rank:
                then(transfer, swap.to_responder.succeed)
                assert swap.to_initiator is not None
                yield swap.to_initiator
            else:
                swap.to_initiator = transfer
                yield swap.to_responder
            if self.replica.numel:
                theirs = swap.payloads[peer.rank].clone()
                self.replica.merge(whole, self._codec.half_difference(whole, mine, theirs))
            self.replica.exchange_done()
            run.record.event(environment.now, "merge", self.rank, peer.rank)
            run.record.exchange(self.rank, began_s, environment.now, peer.rank, self._gossip.exchange_bytes)
            return Averaged()
        except simpy.Interrupt:
            if self.failed:
                raise
            run.record.event(environment.now, "lost", self.rank, peer.rank)
            return self._closed(peer)
        finally:
            if peer._partner is not None and peer._partner[0] is self:
                peer._partner = None

    def greeting(self) -> Tensor | None:
        """What this worker's codec says before an exchange."""
        greeting = self._codec.greeting()
        return None if greeting is None else greeting.clone()

    def _encoded(self, whole: slice, greeting: Tensor | None) -> Tensor:
        """A copy of the published model, as it is sent to a peer whose codec says so."""
        codec, numel = self._codec, self.replica.numel
        if not numel:
            return _NOTHING
        payload = torch.empty(codec.payload_numel(numel), dtype=codec.payload_dtype, device="cpu")
        if greeting is not None:
            codec.agree(greeting)
        self.replica.snapshot(whole, codec.room(payload, numel))
        codec.encode(whole, payload)
        return payload

    def _guarded(self, process: Process) -> Process:
        """A process that ends when the worker fails."""
        try:
            yield from process
        except simpy.Interrupt:
            if not self.failed:
                raise


def _succeed(event: Event) -> None:
    """Trigger an event that may have been triggered before."""
    if not event.triggered:
        event.succeed()
