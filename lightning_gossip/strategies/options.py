"""Options that all strategies of this package share."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

from lightning_gossip.algorithm.checks import is_finite
from lightning_gossip.algorithm.topology.generators import TOPOLOGIES, make_topology
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.adpsgd.nonfinite_guard import OnNonFinite

WorkSharing = Literal["auto"] | bool
AtRendezvous = Literal["adopt", "evaluate"]
CheckpointKind = Literal["mean", "replicas"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


@dataclass(frozen=True)
class FitOptions:
    """How a fit treats data, the mean model and checkpoints; see ``DecentralizedStrategy``."""

    work_sharing: WorkSharing = "auto"
    at_rendezvous: AtRendezvous = "adopt"
    checkpoint: CheckpointKind = "mean"
    averaged_buffers: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_choice("work_sharing", self.work_sharing, (True, False, "auto"))
        check_choice("at_rendezvous", self.at_rendezvous, get_args(AtRendezvous))
        check_choice("checkpoint", self.checkpoint, get_args(CheckpointKind))
        object.__setattr__(self, "averaged_buffers", _patterns(self.averaged_buffers))


def _patterns(value: object) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigurationError(f"averaged_buffers={value!r} is not a list of patterns of names, as ['*.running_covariance'].")
    return tuple(patterns)


TopologySpec = str | Topology | Iterable[tuple[int, int]]


def topology_of(spec: TopologySpec) -> str | Topology | tuple[tuple[int, int], ...]:
    """A topology as an option, whose size is not known yet: a name that exists, a Topology, or the edges.

    Raises:
        ConfigurationError: for an unknown name, and for what is no topology.
    """
    if isinstance(spec, str):
        make_topology(spec, 1)
    elif not isinstance(spec, Topology):
        try:
            return tuple((int(a), int(b)) for a, b in spec)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"topology={spec!r} is neither a name ({', '.join(TOPOLOGIES)}) nor pairs of ranks such as [(0, 1), (1, 2)]."
            ) from None
    return spec


def check_choice(name: str, value: object, accepted: Iterable[object]) -> None:
    """Refuse a value that is not one of a few.

    Raises:
        ConfigurationError: naming the value and what is accepted.
    """
    accepted = tuple(accepted)
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in accepted):
        raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(map(repr, accepted))}.")


def check_number(name: str, value: object, *, at_least: float = 0.0, above: float | None = None) -> None:
    """Refuse what is not a number in range.

    Raises:
        ConfigurationError: naming the value and the range.
    """
    bound = f"above {above:g}" if above is not None else f"of at least {at_least:g}"
    if not is_finite(value) or not (value > above if above is not None else value >= at_least):  # type: ignore[operator]
        raise ConfigurationError(f"{name}={value!r} is not a number {bound}.")


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


def check_nonfinite(refuses: bool, reaction: OnNonFinite) -> tuple[bool, OnNonFinite]:
    """The options ``refuse_nonfinite`` and ``on_nonfinite``.

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
    known = sorted(
        {
            name
            for cls in owner.__mro__
            if cls.__module__.startswith("lightning_gossip")
            for name, parameter in inspect.signature(cls).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
    )
    name = next(iter(unknown))
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigurationError(
        f"{owner.__name__} has no argument {name!r} (value {unknown[name]!r}).{hint} It has: {', '.join(known)}."
    )
