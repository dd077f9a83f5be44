"""EASGD and EAMSGD as a Lightning strategy: workers tied to a centre by an elastic force (arXiv 1412.6651)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gossip.algorithm import eamsgd
from lightning_gossip.algorithm.apsgd.worker import Served
from lightning_gossip.algorithm.eamsgd import ElasticCentre, ElasticProtocol
from lightning_gossip.algorithm.eamsgd_options import EAMSGDOptions
from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.tensors.finite import all_finite
from lightning_gossip.algorithm.tensors.flat import views_like
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.adpsgd.nonfinite_guard import OnNonFinite
from lightning_gossip.runtime.apsgd.client import Update
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.sync_point import SyncPoint
from lightning_gossip.strategies.parameter_server import ServerStrategy, ServerWorker
from lightning_gossip.strategies.report import WorkerReport
from lightning_gossip.strategies.worker_algorithm import Algorithm, Step


@clear_arguments
class EAMSGDStrategy(ServerStrategy):
    """Elastic averaging: each worker trains on its own model, and now and then it and a common centre move towards each other.

    Args:
        period: own steps between two exchanges with the centre.
        alpha: the share of their difference by which worker and centre move, in [0, 0.5]; None for 0.9/n.
        momentum: Nesterov's, set in the workers' ``torch.optim.SGD`` when a fit begins: 0.0 is EASGD. None leaves the optimizer
            as it is, of whatever kind.
        server_rank: on which rank the centre's threads run, beside that rank's own training.
        exchange_timeout_s: deadline, in seconds, of a model on its way.
        refuse_nonfinite: keep models that hold NaN or infinities away from the centre and the mean, and count them.
        on_nonfinite: what a worker does whose model was refused: ``"raise"`` ends the job with a NonFiniteError; ``"adopt"``
            makes it go on from the centre (at a synchronisation point, the mean of the healthy ones) with a fresh optimizer
            state.
        options: see :class:`~lightning_gossip.strategies.DecentralizedStrategy`. With ``at_rendezvous="evaluate"``, the
            published algorithm, the centre is validated and saved, and the workers go on from their own models; with
            ``"adopt"`` the mean is, and workers and centre go on from it.

    Example::

        Trainer(strategy=EAMSGDStrategy(period=8, momentum=0.9), devices=4)
    """

    name = "eamsgd"

    def __init__(
        self,
        *,
        period: int = 8,
        alpha: float | None = None,
        momentum: float | None = None,
        server_rank: int = 0,
        exchange_timeout_s: float = 120.0,
        refuse_nonfinite: bool = True,
        on_nonfinite: OnNonFinite = "raise",
        **options: Any,
    ) -> None:
        super().__init__(
            exchange_timeout_s=exchange_timeout_s, refuse_nonfinite=refuse_nonfinite, on_nonfinite=on_nonfinite, **options
        )
        self.elastic = EAMSGDOptions(period=period, alpha=alpha, momentum=momentum, server_rank=server_rank)

    @override
    def check(self, workers: int) -> None:
        self.elastic.check(workers)

    @override
    def on_train_start(self) -> None:
        if self.elastic.momentum is not None:  # after a checkpoint's, if there is one
            set_momentum(self.optimizers, self.elastic.momentum)
        super().on_train_start()

    @override
    def algorithm(self, timeline: Timeline) -> Algorithm:
        return ElasticWorker(self, timeline)


class ElasticWorker(ServerWorker):
    """One worker's exchanges with the centre during one fit, and on one rank the centre.

    Args:
        strategy: whose options.
        timeline: where waits are recorded.
    """

    def __init__(self, strategy: EAMSGDStrategy, timeline: Timeline) -> None:
        self._options = strategy.elastic
        super().__init__(strategy, self._options.server_rank, timeline)
        self._adopts = strategy.fit_options.at_rendezvous == "adopt"
        self._saves_own = strategy.fit_options.checkpoint == "replicas"
        self._protocol = ElasticProtocol(self._options.period)
        self._finite = True  # this worker's model, when it came to the synchronisation point
        self._adopted = 0
        self._centre: dict[str, Tensor] = {}  # x̃ as it was seen last, by the tensors' names; under "evaluate"

    @override
    def rule(self, model: Tensor) -> ElasticCentre:
        for name, view in zip(self._model.names, views_like(model, self._model.tensors), strict=True):
            if name in self._centre:  # else all begin equal, or it is trained from now on
                view.copy_(self._centre[name])
        return ElasticCentre(model, alpha=self._options.moving_rate(self._workers))

    @override
    def step(self, step: Step) -> None:
        self.raise_failure()
        perform(self._protocol.step(), self._do)

    @override
    def arrive(self) -> None:
        if self._refuses and self._adopts:
            self._finite = all_finite(self._sent.read(self._model.tensors))
            if not self._finite:
                self.refused()

    @override
    def average(self, sync_point: SyncPoint) -> float:
        flat = self._sent.read(self._model.tensors)
        if self._adopts:
            distance = sync_point.average_of(flat, takes_part=self._finite) if self._refuses else sync_point.average(flat)
            self._protocol.restart()
        else:
            distance = sync_point.adopt(flat, None if self._server is None else self._server.model, source=self._rank)
            self._remember(flat)
        self._sent.write(self._model.tensors)
        return distance if self._finite else 0.0

    @override
    def complete(self, report: WorkerReport) -> None:
        report.exchanges = self._protocol.exchanges
        report.bytes_sent = self.connected.bytes_sent
        report.refused_nonfinite = self._protocol.refused
        report.adopted = self._adopted
        report.describe_staleness(self._protocol.staleness)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._protocol.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._protocol.load_state_dict(state)

    @override
    def common_tensors(self, sync_point: SyncPoint, *, adopts: bool, keeps: Callable[[], bool]) -> dict[str, Tensor]:
        return self._centre if self._saves_own and keeps() else {}  # else all that resume begin from it

    @override
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self._centre = {} if self._adopts else dict(tensors)

    # -- details -----------------------------------------------------------------------------------------------------

    def _remember(self, flat: Tensor) -> None:
        """The centre, on whose rank the next session begins with it, and elsewhere where a checkpoint needs it."""
        if self._server is not None or self._saves_own:
            views = views_like(flat, self._model.tensors)
            self._centre = {name: view.clone() for name, view in zip(self._model.names, views, strict=True)}

    @override
    def refused(self) -> None:
        super().refused()
        self._adopted += 1

    def _do(self, effect: eamsgd.Effect) -> Served | None:
        """What the protocol asks for; it says what each effect is."""
        match effect:
            case eamsgd.Exchange():
                return self.pull(Update(self._sent.read(self._model.tensors)))
            case eamsgd.Move():
                self._received.add_to(self._model.tensors)
            case eamsgd.Refused():
                self.refused()
            case eamsgd.Follow():
                self._received.write(self._model.tensors)
        return None


def set_momentum(optimizers: Sequence[Optimizer], momentum: float) -> None:
    """Give ``torch.optim.SGD`` Nesterov's momentum, or none.

    Raises:
        ConfigurationError: for other optimizers, and for dampened momentum.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if not {"momentum", "nesterov", "dampening"} <= group.keys():
                raise ConfigurationError(
                    f"momentum={momentum!r} is for torch.optim.SGD, and this model trains with {type(optimizer).__name__}."
                    " Leave momentum out: the optimizer's own does."
                )
            if momentum and group["dampening"]:
                raise ConfigurationError(
                    f"momentum={momentum!r} is Nesterov's, which has no dampening={group['dampening']!r}. Leave dampening out."
                )
            group["momentum"], group["nesterov"] = momentum, momentum > 0.0
