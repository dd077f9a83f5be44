"""Asynchronous SGD with a parameter server under virtual time.

A worker's request is what it is in the runtime: the update goes to the server, is applied when it is its turn, and the model
comes back when a place is free. Push and pull are one: no update of another comes between if it is this worker's turn at once.
Who may push and pull when, and how stale an update is, is the package's own
:class:`~lightning_gossip.algorithm.apsgd.server.ParameterServer`. All vectors share the port of the server's rank, in-cast and
out (or a bottleneck no wider than it; a wider one is not felt behind the port). The server's own rank sends nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from simpy.events import Event
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.apsgd import worker as apsgd_worker
from lightning_gossip.algorithm.apsgd.options import APSGDOptions
from lightning_gossip.algorithm.apsgd.server import ParameterServer, ServerRule
from lightning_gossip.algorithm.apsgd.worker import Served, WorkerProtocol
from lightning_gossip.algorithm.effects import perform_in_time
from lightning_gossip.algorithm.options import EpochOptions
from lightning_gossip.algorithm.step_timer import StepTimer
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.cluster.collective_costs import in_cast_s
from lightning_gossip.simulation.cluster.events import then
from lightning_gossip.simulation.problems.batch_assignment import Session
from lightning_gossip.simulation.record import Distances
from lightning_gossip.simulation.run import Process, Run, Strategy
from lightning_gossip.simulation.strategies.asynchronous import SyncPoint


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class APSGD(APSGDOptions, EpochOptions, Strategy):
    """Asynchronous SGD; the options of :class:`~lightning_gossip.strategies.APSGDStrategy`.

    An ``event_trigger`` needs an objective; ``at_rendezvous`` makes no difference, since there is one model.
    """

    name = "apsgd"
    shares_work = True

    @override
    def start(self, run: Run) -> None:
        if self.trigger is not None and not run.models.numel:
            raise ConfigurationError("event_trigger needs an objective: without one no update has a norm.")
        UpdatedServer(self, run).start()


@dataclass(eq=False)
class _Request:
    """What a worker asks of the server."""

    rank: int
    update: Tensor | None  # to apply first
    pulls: bool
    turn: Event  # all of it has been done
    model: Tensor | None = None  # that was pulled, or what else the server answers
    staleness: int | None = None  # of the update, if it was applied


class Server(ABC):
    """The server of a run, and its workers."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run = run
        self.rank = rank
        self.session: Session
        self.rules: ServerRule
        self._pushing: dict[int, _Request] = {}  # by rank, first come first: the update waits
        self._pulling: dict[int, _Request] = {}  # the model is waited for
        self.workers = [self.worker(rank) for rank in range(run.workers)]
        self.sync_point = SyncPoint(
            run, settle=self._settle, average=self._average, open_session=self._open, cost_s=self._average_s
        )
        run.current = lambda: self.rules.model.unsqueeze(0)

    @abstractmethod
    def worker(self, rank: int) -> ServerWorker:
        """A worker of this server."""

    @abstractmethod
    def rule(self, session: Session) -> ServerRule:
        """What the server holds, and what it does, in a session that begins."""

    def start(self) -> None:
        """Begin."""
        self.sync_point.begin()
        for worker in self.workers:
            worker.start()
        for rank, at_s in sorted(self.run.cluster.failures.items()):
            then(self.run.environment.timeout(at_s), self.workers[rank].fail)

    def serve(self, rank: int, update: Tensor | None, *, pull: bool) -> Generator[Event, Any, tuple[Tensor | None, Served]]:
        """Apply a worker's update when it is its turn, if there is one; then count it in flight, if it pulls.

        Each is done at the moment at which it may be, not when a process goes on: with step times that are all equal the
        others' updates, which end at the same moment, would all come before.

        Returns:
            The model then, None without a pull; and what became of the update.
        """
        request = _Request(rank, update, pull, turn=self.run.environment.event())
        if update is None:
            self._queue(request)
        else:
            self._pushing[rank] = request
        self.changed()
        if not request.turn.triggered:
            yield request.turn
        return request.model, Served(self.rules.version, request.staleness, sync_requested=False)

    def leave(self, rank: int) -> None:
        """Take a worker out of flight and of the queue."""
        self.rules.leave(rank)
        self._pushing.pop(rank, None)
        self._pulling.pop(rank, None)
        self.changed()

    def changed(self) -> None:
        """Serve those whose turn it is: the first in the queue for a model, and any whose update waits, first come first."""
        while True:
            first = next(iter(self._pulling.values()), None)
            if first is not None and self.rules.may_pull(first.rank):
                self._pull(first)
                continue
            ready = next((request for request in self._pushing.values() if self.rules.may_push(request.rank)), None)
            if ready is None:
                return
            self._push(ready)

    def _push(self, request: _Request) -> None:
        rank = request.rank
        del self._pushing[rank]
        assert request.update is not None
        staleness = request.staleness = self.rules.push(rank, request.update)
        self.run.record.event(self.run.environment.now, "push", rank)
        if staleness is None:
            self.run.record.accounts[rank].dropped += 1
        else:
            self.run.record.stale(rank, staleness)
        if request.pulls:
            self._queue(request)
        else:
            request.turn.succeed()

    def _queue(self, request: _Request) -> None:
        self.rules.queue(request.rank)
        self._pulling[request.rank] = request

    def _pull(self, request: _Request) -> None:
        del self._pulling[request.rank]
        self.rules.pull(request.rank)
        self.run.record.event(self.run.environment.now, "pull", request.rank)
        request.model = self.rules.answer(request.rank).clone()
        request.turn.succeed()

    def _open(self, session: Session) -> None:
        self.session = session
        self.rules = self.rule(session)

    def _settle(self) -> Process:
        """All updates have been applied when their workers had arrived."""
        yield from ()

    def _average_s(self) -> float:
        run = self.run
        return in_cast_s(run.links, len(run.living) - 1, run.nbytes, server=self.rank) if len(run.living) > 1 else 0.0

    @abstractmethod
    def _average(self) -> Distances | None:
        """All have arrived: what becomes of their models, and how far they were from it."""


class ServerWorker:
    """A worker of a parameter server under virtual time."""

    def __init__(self, server: Server, rank: int) -> None:
        self._server = server
        self._rank = rank
        self._run = server.run
        self._x = server.run.models.rows[rank]
        self._received = self._x.clone()
        self._times = StepTimer()

    def start(self) -> None:
        """Begin."""
        self._run.environment.process(self._train())

    def fail(self) -> None:
        """Stop for good; the others end too, as the runtime's do."""
        run = self._run
        if run.ended is not None:
            return
        run.fail(self._rank, self._server.session)
        run.finish("stalled")

    def _train(self) -> Process:
        run, rank, environment = self._run, self._rank, self._run.environment
        models, compute_times = run.models, run.compute_times[rank]
        while True:
            session = self._server.session
            self._times.begin(environment.now)
            while (task := session.next(rank, self._times.median_s)) is not None:
                yield from self.before_step()
                began_s = environment.now
                models.begin(rank, task.batch)
                yield environment.timeout(compute_times.next_s())
                models.step(rank, run.lr)
                self._times.tick(environment.now)
                run.record.compute(rank, began_s, environment.now)
                run.record.event(environment.now, "step", rank)
                session.stepped(rank)
                run.count_step(rank, task.size)
                yield from self.after_step()
                run.evaluate_if_due()
            yield from self.arrive()
            yield self._server.sync_point.arrive(rank)

    def before_step(self) -> Process:
        """A step is about to begin."""
        yield from ()

    def after_step(self) -> Process:
        """A step has ended."""
        yield from ()

    def arrive(self) -> Process:
        """The worker has come to the synchronisation point."""
        yield from ()

    def request(self, update: Tensor | None, *, pull: bool = True) -> Generator[Event, Any, Served]:
        """Push an update, if there is one, and receive the answer, if it is wanted."""
        run, server, rank = self._run, self._server, self._rank
        began_s, remote = run.environment.now, self._rank != server.rank
        if remote:
            yield (
                run.network.message(rank, server.rank)
                if update is None
                else run.network.transfer(rank, server.rank, run.nbytes)
            )
        if update is not None:
            account = run.record.accounts[rank]
            account.exchanges += 1
            account.bytes_sent += run.nbytes if remote else 0
        model, served = yield from server.serve(rank, update, pull=pull)
        if model is not None:
            self._received.copy_(model)
        if remote:
            yield run.network.transfer(server.rank, rank, run.nbytes) if pull else run.network.message(server.rank, rank)
            run.record.accounts[server.rank].bytes_sent += run.nbytes if pull else 0
        run.record.wait(rank, began_s, run.environment.now, server.rank)
        return served


class UpdatedServer(Server):
    """The server of A-PSGD."""

    def __init__(self, strategy: APSGD, run: Run) -> None:
        self.trigger = strategy.trigger
        self._options = strategy.of_server
        super().__init__(run, strategy.server_rank)

    @override
    def worker(self, rank: int) -> ServerWorker:
        return UpdatingWorker(self, rank)

    @override
    def rule(self, session: Session) -> ServerRule:
        start = self.run.models.rows[self.rank].clone()
        return ParameterServer(start, workers=self.run.workers, **self._options)

    @override
    def _average(self) -> Distances | None:
        """Everybody takes the server's model."""
        distance = self.run.distance(self.run.models.x, to=self.rules.model)
        self.run.models.x.copy_(self.rules.model)
        return distance


class UpdatingWorker(ServerWorker):
    """A worker that sends its updates."""

    def __init__(self, server: UpdatedServer, rank: int) -> None:
        super().__init__(server, rank)
        self._protocol = WorkerProtocol(server.trigger)

    @override
    def before_step(self) -> Process:
        yield from self._perform(self._protocol.begin_step())

    @override
    def after_step(self) -> Process:
        yield from self._perform(self._protocol.step())

    @override
    def arrive(self) -> Process:
        yield from self._perform(self._protocol.arrive())

    def _perform(self, effects: apsgd_worker.Effects) -> Process:
        yield from perform_in_time(effects, self._do)

    def _do(self, effect: apsgd_worker.Effect) -> Generator[Event, Any, Served | tuple[float, float] | None]:
        """What the protocol asks for; it says what each effect is."""
        match effect:
            case apsgd_worker.Measure():
                return float(self._update().norm()), float(self._received.norm())
            case apsgd_worker.Pull(passes):
                return (yield from self.request(self._update() if passes else None))
            case apsgd_worker.Leave(passes):  # what needs no answer takes no time
                served = (yield from self.request(self._update(), pull=False)) if passes else None
                self._server.leave(self._rank)
                return served
            case apsgd_worker.Take():
                if self._x.numel():
                    self._x.copy_(self._received)
        return None

    def _update(self) -> Tensor:
        return self._x - self._received if self._x.numel() else self._x
