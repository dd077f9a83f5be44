"""The strategies by name, the same names and options as those of the package's Lightning strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from lightning_gossip.arguments import did_you_mean
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.run import Strategy
from lightning_gossip.simulation.strategies.adpsgd import ADPSGD, NoLoCo
from lightning_gossip.simulation.strategies.apsgd import APSGD
from lightning_gossip.simulation.strategies.dpsgd import DPSGD
from lightning_gossip.simulation.strategies.eamsgd import EAMSGD
from lightning_gossip.simulation.strategies.periodic_averaging import AdaptiveAveraging, DiLoCo, PeriodicAveraging
from lightning_gossip.simulation.strategies.synchronous import QSGD, AllReduce

STRATEGIES: Mapping[str, Callable[..., Strategy]] = MappingProxyType(
    {
        "adpsgd": ADPSGD,
        "dpsgd": DPSGD,
        "apsgd": APSGD,
        "eamsgd": EAMSGD,
        "periodic_averaging": PeriodicAveraging,
        "adaptive_averaging": AdaptiveAveraging,
        "diloco": DiLoCo,
        "noloco": NoLoCo,
        "qsgd": QSGD,
        "ddp": AllReduce,
        "allreduce": AllReduce,
    }
)
"""Name → description. A new strategy is one new file and one row here."""

_ONLY_REAL = frozenset(
    {
        "exchange_timeout_s",
        "checkpoint",
        "averaged_buffers",
        "start_method",
        "timeout",
        "interface",
        "refuse_nonfinite",
        "on_nonfinite",
        "on_peer_failure",
        "min_workers",
        "max_workers",
        "peer_timeout_s",
        "joiner_optimizer",
        "store",
        "_target_",
        "_convert_",
    }
)


def make_strategy(name: str, **options: Any) -> Strategy:
    """A strategy by its name in `STRATEGIES`.

    Args:
        name: of it.
        options: as of the Lightning strategy of this name; those that only a real run has (time-outs,
            checkpoints, launching, survival) are left out.

    Raises:
        ConfigurationError: for an unknown name or option, or a value out of its range.

    >>> make_strategy("adpsgd", topology="exponential", checkpoint="mean").topology
    'exponential'
    """
    if name not in STRATEGIES:
        hint = did_you_mean(name, STRATEGIES)
        raise ConfigurationError(f"unknown strategy {name!r}; the known ones are {', '.join(STRATEGIES)}.{hint}")
    return STRATEGIES[name](**{key: value for key, value in options.items() if key not in _ONLY_REAL})
