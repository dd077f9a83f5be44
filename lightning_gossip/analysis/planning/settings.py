"""What can be chosen on a parameter server, what is predicted of it, and curves of predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gossip.algorithm.apsgd.options import OnStale
from lightning_gossip.algorithm.checks import check_integer, check_not_negative, check_positive
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError

_NEARLY = 1.02  # times the soonest: predictions are no sharper


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class Setting:
    """What can be chosen.

    Args:
        lr: γ, learning rate of the workers, above 0.
        active_workers: N, at least 1.
        max_staleness, on_stale: see :class:`~lightning_gossip.algorithm.ServerOptions`; with ``"wait"`` at least N − 1.
        event_threshold: δ of ‖u‖, at least 0; None to send after every step.
    """

    lr: float
    active_workers: int
    max_staleness: int | None = None
    on_stale: OnStale = "drop"
    event_threshold: float | None = None

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_integer("active_workers", self.active_workers, example=4)
        if self.event_threshold is not None:
            check_not_negative("event_threshold", self.event_threshold)


@dataclass(frozen=True)
class Prediction:
    """What a setting leads to.

    Args:
        setting: the setting.
        time_s: seconds until the loss stays below the target (with an event trigger: until it first is); infinite if it never
            does.
        decay: of the slowest direction at the beginning, in 1/s; negative if it diverges.
        margin: largest stable learning rate over this one; below 1 it diverges.
        rate: applied updates a second, at the beginning.
        staleness: mean, in updates.
        dropped: share of updates thrown away as too stale.
        computing: share of the workers' time in which they compute.
    """

    setting: Setting
    time_s: float
    decay: float
    margin: float
    rate: float
    staleness: float
    dropped: float
    computing: float


@dataclass(frozen=True)
class Curve:
    """Predictions along one knob.

    Args:
        knob: name of the setting's field.
        predictions: in the order of its values.
    """

    knob: str
    predictions: Sequence[Prediction]

    @property
    def values(self) -> list[float | None]:
        """Values of the knob, one a prediction."""
        return [getattr(prediction.setting, self.knob) for prediction in self.predictions]

    @property
    def best(self) -> Prediction:
        """The soonest; of those that are nearly as soon the one with the largest margin, and of equals the first.

        Raises:
            ConfigurationError: if none ever reaches the target.
        """
        soonest = min(prediction.time_s for prediction in self.predictions)
        if math.isinf(soonest):
            raise ConfigurationError(
                f"no {self.knob} of {self.values} reaches the target loss: all diverge, or send too seldom. Lower the learning"
                " rate or the event threshold."
            )
        nearly = [prediction for prediction in self.predictions if prediction.time_s <= _NEARLY * soonest]
        return max(nearly, key=lambda prediction: prediction.margin)
