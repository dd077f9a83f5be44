"""Options that all strategies of this package share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

from torch.nn.parallel import DistributedDataParallel

from lightning_gossip.algorithm.checks import check_choice as check_choice
from lightning_gossip.algorithm.checks import check_integer, is_finite
from lightning_gossip.algorithm.options import EpochOptions
from lightning_gossip.arguments import no_argument
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.adpsgd.nonfinite_guard import OnNonFinite

CheckpointKind = Literal["mean", "replicas"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
IslandSize = int | Literal["node"]

_NOT_FOR_USERS = {"module", "device_ids", "output_device", "dim", "process_group", "device_mesh", "mixed_precision"}
DDP_OPTIONS = frozenset(inspect.signature(DistributedDataParallel).parameters) - _NOT_FOR_USERS | {
    "ddp_comm_state",
    "ddp_comm_hook",
    "ddp_comm_wrapper",
}  # that a replicated island passes on; the last three are Lightning's


@dataclass(frozen=True, kw_only=True)
class FitOptions(EpochOptions):
    """How a fit treats data, the mean model and checkpoints; ``DecentralizedStrategy`` says what each means."""

    checkpoint: CheckpointKind = "mean"
    averaged_buffers: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("checkpoint", self.checkpoint, get_args(CheckpointKind))
        object.__setattr__(self, "averaged_buffers", _patterns(self.averaged_buffers))


def _patterns(value: object) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigurationError(f"averaged_buffers={value!r} is not a list of patterns of names, as ['*.running_covariance'].")
    return tuple(patterns)


def seconds_of(name: str, value: object) -> float:
    """A time as an option: seconds, or a timedelta.

    Raises:
        ConfigurationError: naming the value, if it is neither, or not positive.

    >>> seconds_of("timeout", 60), seconds_of("timeout", timedelta(minutes=1))
    (60.0, 60.0)
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not is_finite(seconds) or not 0 < seconds <= timedelta.max.total_seconds():  # type: ignore[operator]
        raise ConfigurationError(f"{name}={value!r} is not a time: write seconds above 0, as {name}=60, or a timedelta.")
    return float(seconds)  # type: ignore[arg-type]


def check_island(owner: type, island: object, *, allowed: bool) -> None:
    """Check the option ``island``.

    Args:
        owner: the strategy.
        island: the value.
        allowed: whether its workers may be islands.

    Raises:
        ConfigurationError: naming the value, and what to write instead.
    """
    if island != "node":
        check_integer("island", island, example=8, otherwise=", or 'node' for all ranks of a node")
    if island != 1 and not allowed:
        raise ConfigurationError(
            f"island={island!r} is not possible with {owner.__name__}: its workers are single ranks. Leave it out, or use the"
            " strategy 'adpsgd'."
        )


def check_nonfinite(refuses: bool, reaction: OnNonFinite) -> tuple[bool, OnNonFinite]:
    """Check the options ``refuse_nonfinite`` and ``on_nonfinite``.

    Raises:
        ConfigurationError: if one of them is unknown, or they do not fit together.
    """
    check_choice("refuse_nonfinite", refuses, (True, False))
    check_choice("on_nonfinite", reaction, get_args(OnNonFinite))
    if reaction == "adopt" and not refuses:
        raise ConfigurationError("on_nonfinite='adopt' needs refuse_nonfinite=True: without it nothing is looked at.")
    return refuses, reaction


def refuse_unknown(owner: type, unknown: Mapping[str, Any]) -> None:
    """Refuse arguments that a class does not have, with the nearest ones that it has.

    Raises:
        ConfigurationError: if there are any.
    """
    if not unknown:
        return
    known = {
        name
        for cls in owner.__mro__
        if cls.__module__.startswith("lightning_gossip")
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    name = next(iter(unknown))
    if name in DDP_OPTIONS:
        raise ConfigurationError(
            f"{owner.__name__} has no argument {name!r}: it is DDP's, and there is no DDP here. Leave it out: parameters"
            " without a gradient are no error. (With island=... it is DDP's inside each island, and accepted.)"
        )
    raise ConfigurationError(no_argument(owner.__name__, name, unknown[name], known))
