"""Asynchronous SGD with a parameter server inside the job, as a Lightning strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from typing_extensions import override

from lightning_gossip.algorithm.server import EventTrigger, OnStale, ServerOptions
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.health import OnNonFinite
from lightning_gossip.strategies.algorithm import Algorithm
from lightning_gossip.strategies.decentralized import DecentralizedStrategy
from lightning_gossip.strategies.options import check_nonfinite, seconds_of
from lightning_gossip.strategies.serving import ServerWorker


class APSGDStrategy(DecentralizedStrategy):
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
        super().__init__(**options)
        self.refuse_nonfinite, self.on_nonfinite = check_nonfinite(refuse_nonfinite, on_nonfinite)
        self.fit_options = replace(self.fit_options, at_rendezvous="adopt")  # a worker's own model is the server's, of late
        if not isinstance(server_rank, int) or isinstance(server_rank, bool) or server_rank < 0:
            raise ConfigurationError(f"server_rank={server_rank!r} is not a rank (0, 1, …).")
        self.server_options = ServerOptions(
            max_staleness=max_staleness, on_stale=on_stale, active_workers=active_workers, scale=scale
        )
        self.server_rank = server_rank
        self.event_trigger = _trigger(event_trigger)
        self._exchange_timeout_s = seconds_of("exchange_timeout_s", exchange_timeout_s)

    @override
    def check(self, workers: int) -> None:
        self.server_options.check(workers)
        if self.server_rank >= workers:
            raise ConfigurationError(f"server_rank={self.server_rank} of {workers} workers: ranks are 0 to {workers - 1}.")

    @override
    def algorithm(self, timeline: Timeline) -> Algorithm:
        return ServerWorker(self, timeline, self._exchange_timeout_s)


def _trigger(option: float | EventTrigger | Mapping[str, Any] | None) -> EventTrigger | None:
    if option is None or isinstance(option, EventTrigger):
        return option
    if isinstance(option, Mapping):
        unknown = set(option) - {"threshold", "relative"}
        if unknown or "threshold" not in option:
            raise ConfigurationError(f"event_trigger={dict(option)!r} is not like {{'threshold': 0.01, 'relative': True}}.")
        return EventTrigger(**option)
    return EventTrigger(threshold=option)
