"""What a parameter server and its workers are told, in a real run and in a simulated one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lightning_gossip.algorithm.checks import check_choice, check_integer, is_finite
from lightning_gossip.algorithm.options import Options
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError

OnStale = Literal["drop", "wait"]


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """What a parameter server accepts, and when.

    Args:
        max_staleness: S, of an update that is applied; None for any.
        on_stale: what becomes of older ones: ``"drop"`` or ``"wait"``.
        active_workers: K, at most so many in flight; None for all.
        scale: c; None for 1/n.
    """

    max_staleness: int | None = None
    on_stale: OnStale = "drop"
    active_workers: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("on_stale", self.on_stale, get_args(OnStale))
        no_limit = ", or None for no limit"
        if self.max_staleness is not None:
            check_integer("max_staleness", self.max_staleness, at_least=0, example=16, otherwise=no_limit)
        if self.active_workers is not None:
            check_integer("active_workers", self.active_workers, example=4, otherwise=no_limit)
        if self.scale is not None and not (is_finite(self.scale) and self.scale > 0.0):
            raise ConfigurationError(f"scale={self.scale!r} is not a number above 0. Leave it out for 1/n.")
        if self.on_stale == "wait" and self.max_staleness is None:
            raise ConfigurationError("on_stale='wait' needs max_staleness: how stale may an update be?")

    def check(self, workers: int) -> None:
        """Refuse what does not fit the number of workers.

        Raises:
            ConfigurationError: naming the option.
        """
        active = workers if self.active_workers is None else self.active_workers
        if active > workers:
            raise ConfigurationError(f"active_workers={active} of {workers} workers: at most {workers}.")
        if self.on_stale == "wait" and self.max_staleness is not None and self.max_staleness < active - 1:
            raise ConfigurationError(
                f"on_stale='wait' cannot keep max_staleness={self.max_staleness} with {active} workers in flight, whose mean"
                f" staleness is {active - 1}. Use max_staleness={active - 1} or more, active_workers={self.max_staleness + 1}"
                " or fewer, or on_stale='drop'."
            )


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class EventTrigger:
    """Event-triggered sending: a worker pushes only when its update has grown.

    Args:
        threshold: of ‖u‖, at least 0.
        relative: the threshold is a multiple of ‖x‖, the norm of the model pulled.
    """

    threshold: float
    relative: bool = False

    def __post_init__(self) -> None:
        if not is_finite(self.threshold) or self.threshold < 0.0:
            raise ConfigurationError(f"the event trigger's threshold={self.threshold!r} is not a number of at least 0.")

    @classmethod
    def of(cls, option: float | EventTrigger | Mapping[str, Any] | None) -> EventTrigger | None:
        """The trigger that an option describes: by a threshold, a trigger, its arguments as a mapping, or None for none.

        Raises:
            ConfigurationError: for a mapping of other names, and a threshold out of its range.
        """
        if option is None or isinstance(option, EventTrigger):
            return option
        if not isinstance(option, Mapping):
            return cls(threshold=option)
        return cls(**option)

    def fires(self, update_norm: float, model_norm: float) -> bool:
        """Whether to push now. A norm that is not finite fires: what is wrong must be seen."""
        if not (math.isfinite(update_norm) and math.isfinite(model_norm)):
            return True
        return update_norm >= self.threshold * (model_norm if self.relative else 1.0)


@dataclass(frozen=True, kw_only=True)
class APSGDOptions(ServerOptions):
    """What asynchronous SGD is told, in a real run and in a simulated one.

    Args:
        server_rank: on which rank the server is.
        event_trigger: a threshold of ‖u‖, an :class:`EventTrigger`, its arguments as a mapping, or None to send after every
            step.
    """

    server_rank: int = 0
    event_trigger: float | EventTrigger | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("server_rank", self.server_rank, at_least=0, example=0)
        self.trigger  # noqa: B018 - refuses what cannot work

    @property
    def trigger(self) -> EventTrigger | None:
        """The event trigger: when an update is sent."""
        return EventTrigger.of(self.event_trigger)

    @property
    def of_server(self) -> dict[str, Any]:
        """The options that the server needs."""
        return {each.name: getattr(self, each.name) for each in fields(ServerOptions)}

    def check(self, workers: int) -> None:
        """Refuse what does not fit the number of workers.

        Raises:
            ConfigurationError: naming the option.
        """
        super().check(workers)
        if self.server_rank >= workers:
            raise ConfigurationError(f"server_rank={self.server_rank} of {workers} workers: ranks are 0 to {workers - 1}.")
