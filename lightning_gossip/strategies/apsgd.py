"""Asynchronous SGD with a parameter server inside the job, as a Lightning strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.apsgd import worker as apsgd_worker
from lightning_gossip.algorithm.apsgd.options import APSGDOptions, EventTrigger, OnStale
from lightning_gossip.algorithm.apsgd.server import ParameterServer, put_in
from lightning_gossip.algorithm.apsgd.worker import Served, WorkerProtocol
from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.tensors.flat import Fading, fading
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.runtime.adpsgd.nonfinite_guard import OnNonFinite
from lightning_gossip.runtime.apsgd.client import Update
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.sync_point import SyncPoint
from lightning_gossip.strategies.parameter_server import ServerStrategy, ServerWorker
from lightning_gossip.strategies.report import WorkerReport
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from lightning_gossip.strategies.worker_algorithm import Algorithm, Step


@clear_arguments
class APSGDStrategy(ServerStrategy):
    """Asynchronous SGD: each worker pushes its updates to a server and pulls the model, at its own pace.

    Args:
        server_rank: on which rank the server's threads run, beside that rank's own training.
        max_staleness: of an update that is applied: at most so many updates of others since its worker pulled the model; None
            for any.
        on_stale: ``"drop"`` throws an older update away; ``"wait"`` makes the updates of fast workers wait, so that none grows
            older.
        active_workers: at most so many hold a model that they have not pushed an update to; None for all.
        event_trigger: workers send only when the update since their last pull has grown: a threshold of ‖u‖, or an
            :class:`~lightning_gossip.algorithm.EventTrigger`, or its arguments as a mapping; None to send after every step.
        scale: of an update that the server adds; None for 1/n, with which a worker takes the learning rate of the global batch.
        exchange_timeout_s: deadline, in seconds, of a model or an update on its way.
        refuse_nonfinite: the server refuses and counts updates that hold NaN or infinities.
        on_nonfinite: what the worker does whose update was refused: ``"raise"`` ends the job with a NonFiniteError; ``"adopt"``
            makes it go on from the server's model with a fresh optimizer state.
        options: see :class:`~lightning_gossip.strategies.DecentralizedStrategy`. ``at_rendezvous`` makes no difference:
            there is one model.

    Example::

        Trainer(strategy=APSGDStrategy(max_staleness=16, active_workers=4), devices=8)
    """

    name = "apsgd"

    def __init__(
        self,
        *,
        server_rank: int = 0,
        max_staleness: int | None = None,
        on_stale: OnStale = "drop",
        active_workers: int | None = None,
        event_trigger: float | EventTrigger | Mapping[str, Any] | None = None,
        scale: float | None = None,
        exchange_timeout_s: float = 120.0,
        refuse_nonfinite: bool = True,
        on_nonfinite: OnNonFinite = "raise",
        **options: Any,
    ) -> None:
        super().__init__(
            exchange_timeout_s=exchange_timeout_s, refuse_nonfinite=refuse_nonfinite, on_nonfinite=on_nonfinite, **options
        )
        self.fit_options = replace(self.fit_options, at_rendezvous="adopt")  # a worker's own model is the server's, of late
        self.server_options = APSGDOptions(
            server_rank=server_rank,
            max_staleness=max_staleness,
            on_stale=on_stale,
            active_workers=active_workers,
            event_trigger=event_trigger,
            scale=scale,
        )
        self.event_trigger = self.server_options.trigger

    @override
    def check(self, workers: int) -> None:
        self.server_options.check(workers)

    @override
    def algorithm(self, timeline: Timeline) -> Algorithm:
        return UpdatingWorker(self, timeline)


class UpdatingWorker(ServerWorker):
    """One worker's updates during one fit, and on one rank the server.

    Args:
        strategy: whose options.
        timeline: where waits are recorded.
    """

    def __init__(self, strategy: APSGDStrategy, timeline: Timeline) -> None:
        self._options = strategy.server_options
        super().__init__(strategy, self._options.server_rank, timeline)
        self._protocol = WorkerProtocol(self._options.trigger)
        self._fading: list[Fading] = []
        self._parameters = 0  # elements of the parameters, which come first

    @override
    def open(self, model: SharedModel) -> None:
        self._parameters = sum(tensor.numel() for tensor in model.tensors[: model.parameters])
        self._fading = fading(model.tensors, model.retention)
        super().open(model)

    @override
    def rule(self, model: Tensor) -> ParameterServer:
        return ParameterServer(model, workers=self._workers, fading=self._fading, **self._options.of_server)

    @override
    def begin_step(self) -> None:
        perform(self._protocol.begin_step(), self._do)

    @override
    def step(self, step: Step) -> None:
        self.raise_failure()
        self._read_update()
        perform(self._protocol.step(step.forward_passes), self._do)

    @override
    def arrive(self) -> None:
        self._read_update()  # what is held back
        perform(self._protocol.arrive(), self._do)

    @override
    def average(self, sync_point: SyncPoint) -> float:
        server = self._server
        flat = self._sent.read(self._model.tensors)
        distance = sync_point.adopt(flat, server.model if server is not None else None, source=self._rank)
        self._sent.write(self._model.tensors)
        return distance

    @override
    def complete(self, report: WorkerReport) -> None:
        report.exchanges = self._protocol.pushes
        report.bytes_sent = self.connected.bytes_sent
        report.dropped = self._protocol.dropped
        report.refused_nonfinite = self._protocol.refused
        report.adopted = self._protocol.refused if self._strategy.on_nonfinite == "adopt" else 0
        report.describe_staleness(self._protocol.staleness)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._protocol.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._protocol.load_state_dict(state)

    # -- details -----------------------------------------------------------------------------------------------------

    def _read_update(self) -> None:
        """u ← x' − x."""
        self._sent.read(self._model.tensors).sub_(self._received.flat)

    def _do(self, effect: apsgd_worker.Effect) -> Served | tuple[float, float] | None:
        """What the protocol asks for; it says what each effect is."""
        match effect:
            case apsgd_worker.Measure():
                return _norm(self._sent.flat[: self._parameters]), _norm(self._received.flat[: self._parameters])
            case apsgd_worker.Pull(passes):
                return self.pull(self._pushed(passes))
            case apsgd_worker.Leave(passes):
                return self.heard(self.connected.leave(self._session, self._pushed(passes)))
            case apsgd_worker.Take():
                self._received.write(self._model.tensors)
            case apsgd_worker.Refused():
                self.refused()
        return None

    def _pushed(self, passes: int) -> Update | None:
        """What the server is sent of x' − x."""
        if not passes:
            return None
        put_in(self._sent.flat, self._received.flat, self._fading, passes)
        return Update(self._sent.flat, passes)


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))
