"""EASGD and EAMSGD under virtual time: workers tied to a centre by an elastic force (arXiv 1412.6651).

What a worker decides and what the centre does is :mod:`lightning_gossip.algorithm.eamsgd`, as in the runtime; an exchange takes
what a request to the parameter server takes: a model there, a model back, over the port of the server's rank.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from simpy.events import Event
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm import eamsgd
from lightning_gossip.algorithm.apsgd.server import ServerRule
from lightning_gossip.algorithm.apsgd.worker import Served
from lightning_gossip.algorithm.eamsgd import ElasticCentre, ElasticProtocol
from lightning_gossip.algorithm.eamsgd_options import EAMSGDOptions
from lightning_gossip.algorithm.effects import perform_in_time
from lightning_gossip.algorithm.options import EpochOptions
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.cluster.collective_costs import all_reduce_s
from lightning_gossip.simulation.problems.batch_assignment import Session
from lightning_gossip.simulation.problems.sgd import StackedSGD
from lightning_gossip.simulation.record import Distances
from lightning_gossip.simulation.run import Process, Run, Strategy
from lightning_gossip.simulation.strategies.apsgd import Server, ServerWorker


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class EAMSGD(EAMSGDOptions, EpochOptions, Strategy):
    """Elastic averaging; the options of :class:`~lightning_gossip.strategies.EAMSGDStrategy`.

    The loss is that of the centre under ``at_rendezvous="evaluate"``, and of the workers' mean under ``"adopt"``. A
    ``momentum`` takes the place of the optimizer's.
    """

    name = "eamsgd"
    shares_work = True

    @override
    def start(self, run: Run) -> None:
        if self.momentum is not None:
            optimizer = run.models.optimizer
            if not isinstance(optimizer, StackedSGD):
                raise ConfigurationError(
                    f"momentum={self.momentum} takes the place of SGD's, and the workers' optimizer is another one. Write"
                    " momentum=null."
                )
            changed = replace(optimizer.options, momentum=self.momentum, nesterov=self.momentum > 0.0)
            run.models.change_optimizer(changed)
        Centre(self, run).start()


class Centre(Server):
    """The centre of a run, and its workers."""

    def __init__(self, strategy: EAMSGD, run: Run) -> None:
        self.strategy = strategy
        self._alpha = strategy.moving_rate(run.workers)
        self._adopts = strategy.at_rendezvous == "adopt"
        self._model: Tensor | None = None  # of the centre, where it outlives a session
        super().__init__(run, strategy.server_rank)
        if self._adopts:
            run.current = lambda: run.models.x

    @override
    def worker(self, rank: int) -> ServerWorker:
        return ElasticWorker(self, rank)

    @override
    def rule(self, session: Session) -> ServerRule:
        if self._adopts or self._model is None:
            self._model = self.run.models.rows[self.rank].clone()
        return ElasticCentre(self._model, alpha=self._alpha)

    @override
    def _average_s(self) -> float:
        run = self.run
        if not self._adopts:
            return super()._average_s()
        return all_reduce_s(run.links, run.living, run.nbytes, at_s=run.environment.now, seed=run.seed)

    @override
    def _average(self) -> Distances | None:
        run = self.run
        if not self._adopts:
            return run.distance(run.models.x, to=self.rules.model)
        distance = run.distance(run.models.x)
        run.models.x.copy_(run.models.x.sum(0).div_(run.workers))
        for worker in self.workers:
            assert isinstance(worker, ElasticWorker)
            worker.restart()
        return distance


class ElasticWorker(ServerWorker):
    """A worker of EAMSGD under virtual time, tied to the centre."""

    def __init__(self, server: Centre, rank: int) -> None:
        super().__init__(server, rank)
        self._protocol = ElasticProtocol(server.strategy.period)

    def restart(self) -> None:
        """Begin to count steps anew: all have taken the mean."""
        self._protocol.restart()

    @override
    def after_step(self) -> Process:
        yield from perform_in_time(self._protocol.step(), self._do)

    def _do(self, effect: eamsgd.Effect) -> Generator[Event, Any, Served | None]:
        """What the protocol asks for; it says what each effect is."""
        match effect:
            case eamsgd.Exchange():
                return (yield from self.request(self._own()))
            case eamsgd.Move():
                if self._x.numel():
                    self._x.add_(self._received)
            case eamsgd.Refused() | eamsgd.Follow():
                raise AssertionError("the simulated server refuses nothing")
        return None

    def _own(self) -> Tensor:
        return self._x.clone()
