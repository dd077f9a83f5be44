"""AD-PSGD under virtual time: asynchronous pairwise gossip behind the training (Lian et al. 2018, arXiv 1710.06952).

Each worker is three processes, as it is three threads in the runtime: one trains, one starts exchanges at its pace if the
worker initiates, one answers. Replica, partner choice, pace and the claim rule are the runtime's own. What a real exchange does
chunk by chunk is done here in one piece: both ends copy their published model when they know that the exchange is on, and merge
the half-difference when the other one's has come:

| at | caller i | responder j |
|---|---|---|
| t | draws j, asks | |
| t + ℓ | | free: accepts, copies y_j, sends it |
| t + 2ℓ | copies y_i, sends it | |
| t + 2ℓ + B/b | y_j has come: merges | |
| t + 3ℓ + B/b | | y_i has come: merges |

A responder that is in an exchange lets the caller wait; one that is calling (symmetric roles) refuses.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import simpy
import torch
from simpy.events import Event
from torch import Tensor

from lightning_gossip.algorithm.adpsgd.pace import Pace, backoff_s
from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerChoice, PartnerPicker, Roles, resolve_roles
from lightning_gossip.algorithm.adpsgd.replica import Replica
from lightning_gossip.algorithm.checks import check_choice, is_finite
from lightning_gossip.algorithm.compression.pairwise import Wire, exchange_bytes, make_codec
from lightning_gossip.algorithm.topology.generators import make_topology
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.cluster.collective_costs import ring_all_reduce_s
from lightning_gossip.simulation.cluster.network import then
from lightning_gossip.simulation.problems.batch_assignment import Session
from lightning_gossip.simulation.record import Distances
from lightning_gossip.simulation.run import Process, Run, Strategy
from lightning_gossip.simulation.strategies.asynchronous import Rendezvous, StepTimes

TopologySpec = str | Topology | Iterable[Iterable[int]]
AtRendezvous = Literal["adopt", "evaluate"]
WorkSharing = Literal["auto"] | bool


@dataclass(frozen=True, kw_only=True)
class ADPSGD(Strategy):
    """Asynchronous pairwise gossip; the options of :class:`~lightning_gossip.strategies.ADPSGDStrategy`.

    Args:
        topology: who averages with whom: a name, a topology, or the edges.
        roles: ``"auto"``, ``"bipartite"`` or ``"symmetric"``.
        exchanges_per_step: averagings that a worker takes part in per step of its neighbourhood; 0 for none.
        work_sharing: ``"auto"`` and ``True`` share an epoch by the claim rule; ``False`` gives equal shares.
        at_rendezvous: ``"adopt"`` makes every worker take the mean at an epoch's end; ``"evaluate"`` only looks at it.
        seed: of the partner choice; None for the run's.
        wire: how a model is sent; see :mod:`lightning_gossip.algorithm.compression.pairwise`.
        partner_choice: ``"uniform"`` or ``"fast_links"``; see :mod:`lightning_gossip.algorithm.adpsgd.partner_sampler`.
    """

    name = "adpsgd"
    shares_work = True

    topology: TopologySpec = "ring"
    roles: Roles = "auto"
    exchanges_per_step: float = 1.0
    work_sharing: WorkSharing = "auto"
    at_rendezvous: AtRendezvous = "adopt"
    seed: int | None = None
    wire: Wire = "float32"
    partner_choice: PartnerChoice = "uniform"

    def __post_init__(self) -> None:
        check_choice("wire", self.wire, get_args(Wire))
        check_choice("partner_choice", self.partner_choice, get_args(PartnerChoice))
        check_choice("work_sharing", self.work_sharing, (True, False, "auto"))
        check_choice("roles", self.roles, get_args(Roles))
        check_at_rendezvous(self.at_rendezvous)
        if not is_finite(self.exchanges_per_step) or self.exchanges_per_step < 0.0:
            raise ConfigurationError(f"exchanges_per_step={self.exchanges_per_step!r} is not a number of at least 0.")

    @property
    def topology_name(self) -> str:
        """See :class:`Strategy`."""
        return topology_name(self.topology)

    def check(self, workers: int) -> None:
        """See :meth:`Strategy.check`."""
        resolve_roles(make_topology(self.topology, workers), self.roles)

    def start(self, run: Run) -> None:
        """See :meth:`Strategy.start`."""
        Gossip(self, run).start()


def topology_name(spec: TopologySpec) -> str:
    """What a graph is called in logs."""
    return spec if isinstance(spec, str) else getattr(spec, "name", "custom")


def check_at_rendezvous(value: object) -> None:
    """Refuse what is not known.

    Raises:
        ConfigurationError: naming the key.
    """
    check_choice("at_rendezvous", value, get_args(AtRendezvous))


class Gossip:
    """All workers of a run of AD-PSGD."""

    def __init__(self, strategy: ADPSGD, run: Run) -> None:
        self.run = run
        self.wire = strategy.wire
        numel = run.nbytes // run.models.x.element_size()
        self.exchange_bytes = run.nbytes if self.wire == "float32" else exchange_bytes(self.wire, numel)
        self.adopts = strategy.at_rendezvous == "adopt"
        self.is_open = False
        self.session: Session
        n, d = run.workers, run.models.numel
        self.published = torch.zeros(n, d, dtype=run.models.x.dtype)
        self.merges = torch.zeros_like(self.published)
        topology = make_topology(strategy.topology, n)
        seed = run.seed if strategy.seed is None else strategy.seed
        pickers = [
            PartnerPicker(topology, rank, roles=strategy.roles, seed=seed, choice=strategy.partner_choice) for rank in range(n)
        ]
        self.workers = [Worker(self, rank, picker, strategy.exchanges_per_step) for rank, picker in enumerate(pickers)]
        run.current = lambda: self.published
        self.meeting = Rendezvous(
            run, settle=self._drain, average=self._average, open_session=self._open, cost_s=self._average_s
        )
        self._drained: Event | None = None

    def start(self) -> None:
        """Begin."""
        for worker in self.workers:
            worker.start()
        self.meeting.begin()
        for rank, at_s in sorted(self.run.cluster.failures.items()):
            then(self.run.environment.timeout(at_s), self.workers[rank].fail)

    def note_end_of_exchange(self) -> None:
        """Somebody has become free."""
        if self._drained is not None and not any(worker.busy for worker in self.workers):
            self._drained.succeed()
            self._drained = None

    def _open(self, session: Session) -> None:
        self.session = session
        self.is_open = True
        for worker in self.workers:
            if not worker.failed:
                worker.open()

    def _drain(self) -> Process:
        """No new exchange; those under way end; every x takes over the last merges."""
        self.is_open = False
        self.run.record.event(self.run.environment.now, "close", -1)
        if any(worker.busy for worker in self.workers):
            self._drained = self.run.environment.event()
            yield self._drained
        for rank in self.run.living:
            self.workers[rank].replica.push_pull([self.run.models.rows[rank]], forward_passes=0)

    def _average_s(self) -> float:
        run = self.run
        return ring_all_reduce_s(run.links, len(run.living), run.nbytes, at_s=run.environment.now, seed=run.seed)

    def _average(self) -> Distances | None:
        living, models = self.run.living, self.run.models
        distance = self.run.distance(self.published)
        if self.adopts and models.numel:
            mean = self.published[living].sum(0).div_(len(living))
            for rank in living:
                self.workers[rank].replica.settle().copy_(mean)
                self.workers[rank].replica.copy_out([models.rows[rank]])
        return distance


class Swap:
    """Both ends' copies on their way, and when they arrive."""

    def __init__(self, environment: simpy.Environment, ends: tuple[Worker, Worker]) -> None:
        self.to_caller: Event | None = None
        self.to_responder = environment.event()  # the caller's copy leaves later than the responder waits for it
        self.greetings = {end.rank: end.greeting() for end in ends}
        self.payloads: dict[int, Tensor] = {}  # by sender


class Worker:
    """One worker: its replica, its pace, its three processes."""

    def __init__(self, gossip: Gossip, rank: int, picker: PartnerPicker, exchanges_per_step: float) -> None:
        self.rank = rank
        self.busy = False
        self.failed = False
        self._gossip = gossip
        self._run = gossip.run
        self._environment = gossip.run.environment
        self._picker = picker
        self._rate = exchanges_per_step * picker.start_share
        self._pace = Pace()
        self._times = StepTimes()
        self._backoff = random.Random(f"{gossip.run.seed}/{rank}")
        self._inbox: deque[tuple[Worker, float, Event]] = deque()  # who asks, its step time, where the answer goes
        self._mail: Event | None = None
        self._news: Event | None = None  # what the caller waits for: something that may make an exchange due
        self._partner: tuple[Worker, simpy.Process] | None = None  # in an exchange with, and the partner's process in it
        self._processes: list[simpy.Process] = []
        vectors = iter((gossip.published[rank], gossip.merges[rank]))
        self.replica = Replica(
            [self._run.models.rows[rank]], dtype=gossip.published.dtype, host_vector=lambda *_: next(vectors)
        )

        self._codec = make_codec(gossip.wire, self.replica.published)

    def start(self) -> None:
        """Begin the processes."""
        process = self._environment.process
        self._processes = [process(self._guarded(self._train()))]
        if self._picker.answers:
            self._processes.append(process(self._guarded(self._listen())))
        if self._picker.initiates and self._rate > 0.0:
            self._processes.append(process(self._guarded(self._call())))

    def open(self) -> None:
        """A session begins: publish, and exchanges may be due."""
        self.replica.push_pull([self._run.models.rows[self.rank]])
        self._pace.begin_session()
        self._notify()

    def fail(self) -> None:
        """Stop for good."""
        if self._run.ended is not None:
            return
        self.failed, self.busy = True, False
        self._run.fail(self.rank, self._gossip.session)
        for process in self._processes:
            if process.is_alive:
                process.interrupt("failed")
        if self._partner is not None and self._partner[1].is_alive:
            self._partner[1].interrupt("partner failed")
        for _, _, answer in self._inbox:
            answer.succeed(None)
        self._inbox.clear()
        self._gossip.note_end_of_exchange()
        self._gossip.meeting.check()

    # -- training ----------------------------------------------------------------------------------------------------

    def _train(self) -> Process:
        run, rank, environment = self._run, self.rank, self._environment
        models, compute_times, x = run.models, run.compute_times[rank], [run.models.rows[rank]]
        while True:
            session = self._gossip.session
            self._times.begin(environment.now)
            while (task := session.next(rank, self._times.median_s)) is not None:
                began_s = environment.now
                models.begin(rank, task.batch)
                yield environment.timeout(compute_times.next_s())
                models.step(rank, run.lr)
                run.record.stale(rank, self.replica.push_pull(x))
                run.record.compute(rank, began_s, environment.now)
                run.record.event(environment.now, "step", rank)
                session.stepped(rank)
                run.count_step(rank, task.size)
                self._note_step(self._times.tick(environment.now))
                run.evaluate_if_due()
            yield self._gossip.meeting.arrive(rank)

    def _note_step(self, step_s: float) -> None:
        self._pace.step(step_s)
        self._notify()

    # -- starting exchanges ------------------------------------------------------------------------------------------

    def _call(self) -> Process:
        environment, network, record = self._environment, self._run.network, self._run.record
        refusals = 0
        while True:
            yield from self._due()
            self.busy = True
            self._pace.start(environment.now)
            peer = self._gossip.workers[self._picker.pick()]
            record.event(environment.now, "request", self.rank, peer.rank)
            answer = environment.event()
            step_s = self._pace.own_step_s
            yield network.message(self.rank, peer.rank)
            peer.ask(self, step_s, answer)
            swap = yield answer
            if isinstance(swap, Swap):
                refusals = 0
                yield from self._exchange(peer, swap, calling=True)
            else:
                record.event(environment.now, "refused", self.rank, peer.rank)
                record.accounts[self.rank].refused += 1
                refusals += 1
                self._pace.draw_again(environment.now + self._backoff.uniform(0.0, backoff_s(refusals)))
                self._free()

    def _due(self) -> Process:
        """Wait until the next exchange is due."""
        environment = self._environment
        while True:
            due_s = self._pace.next_start_s(self._rate) if self._gossip.is_open and not self.busy else math.inf
            if due_s <= environment.now:
                return
            news = self._news = environment.event()
            if due_s < math.inf:
                then(environment.timeout(due_s - environment.now), _succeed, news)
            yield news

    def _notify(self) -> None:
        """Something has changed that may make an exchange due."""
        if self._news is not None:
            _succeed(self._news)

    # -- answering ---------------------------------------------------------------------------------------------------

    def ask(self, caller: Worker, step_s: float, answer: Event) -> None:
        """A request has come; the answer is a swap, or None for a refusal."""
        if self.failed:
            answer.succeed(None)
            return
        self._inbox.append((caller, step_s, answer))
        if self._mail is not None:
            self._mail.succeed()
            self._mail = None

    def _listen(self) -> Process:
        environment = self._environment
        while True:
            while not self._inbox:
                self._mail = environment.event()
                yield self._mail
            caller, step_s, answer = self._inbox.popleft()
            swap = None
            self._run.record.event(environment.now, "answer", self.rank, caller.rank)
            if self._gossip.is_open and not self.busy and not caller.failed:
                self.busy = True
                swap = Swap(environment, (self, caller))
            self._note_peer(caller.rank, step_s)
            own_step_s = self._pace.own_step_s
            arrival = self._run.network.message(self.rank, caller.rank)
            then(arrival, self._answered, caller, own_step_s, answer, swap)
            if swap is not None:
                yield from self._exchange(caller, swap, calling=False)

    def _answered(self, caller: Worker, step_s: float, answer: Event, swap: Swap | None) -> None:
        """The answer has reached the caller."""
        if not caller.failed:
            caller._note_peer(self.rank, step_s)
            answer.succeed(None if self.failed else swap)

    def _note_peer(self, peer: int, step_s: float) -> None:
        if step_s > 0.0 and self._pace.peer_step_s.get(peer) != step_s:
            self._pace.peer_step_s[peer] = step_s
            self._notify()

    # -- exchanging --------------------------------------------------------------------------------------------------

    def _exchange(self, peer: Worker, swap: Swap, *, calling: bool) -> Process:
        """Average with a peer that runs the same; this worker is busy when it begins and free when it ends."""
        environment, run = self._environment, self._run
        began_s, whole = environment.now, slice(0, self.replica.numel)
        process = environment.active_process
        assert process is not None
        peer._partner = (self, process)
        try:
            run.record.event(began_s, "snapshot", self.rank, peer.rank)
            mine = swap.payloads[self.rank] = self._encoded(whole, swap.greetings[peer.rank])
            transfer = run.network.transfer(self.rank, peer.rank, self._gossip.exchange_bytes)
            if calling:
                then(transfer, swap.to_responder.succeed)
                assert swap.to_caller is not None
                yield swap.to_caller
            else:
                swap.to_caller = transfer
                yield swap.to_responder
            if self.replica.numel:
                theirs = swap.payloads[peer.rank].clone()
                self.replica.merge(whole, self._codec.half_difference(whole, mine, theirs))
            self.replica.exchange_done()
            run.record.event(environment.now, "merge", self.rank, peer.rank)
            self._picker.took(peer.rank, environment.now - began_s)
            run.record.exchange(self.rank, began_s, environment.now, peer.rank, self._gossip.exchange_bytes)
        except simpy.Interrupt:
            if self.failed:
                raise
            run.record.event(environment.now, "lost", self.rank, peer.rank)
        if peer._partner is not None and peer._partner[0] is self:
            peer._partner = None
        self._free()

    def greeting(self) -> Tensor | None:
        """What this worker's codec says before an exchange."""
        greeting = self._codec.greeting()
        return None if greeting is None else greeting.clone()

    def _encoded(self, whole: slice, greeting: Tensor | None) -> Tensor:
        """A copy of the published model, as it is sent to a peer whose codec says so."""
        codec, numel = self._codec, self.replica.numel
        payload = torch.empty(codec.payload_numel(numel), dtype=codec.payload_dtype)
        if numel:
            if greeting is not None:
                codec.agree(greeting)
            self.replica.snapshot(whole, codec.room(payload, numel))
            codec.encode(whole, payload)
        return payload

    def _free(self) -> None:
        self.busy = False
        self._notify()
        self._gossip.note_end_of_exchange()

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
