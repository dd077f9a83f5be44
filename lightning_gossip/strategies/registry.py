"""The names of the strategies in Lightning's registry."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_gossip.algorithm.outer import DILOCO, Outer
from lightning_gossip.algorithm.periodic_averaging.adaptive_period import AdaptivePeriod
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.strategies.adpsgd import ADPSGDStrategy, ShardedADPSGDStrategy
from lightning_gossip.strategies.apsgd import APSGDStrategy
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.dpsgd import DPSGDStrategy
from lightning_gossip.strategies.eamsgd import EAMSGDStrategy
from lightning_gossip.strategies.fabric.strategy import FabricStrategy
from lightning_gossip.strategies.periodic_averaging import PeriodicAveragingStrategy
from lightning_gossip.strategies.qsgd import QSGDStrategy


class Registered(NamedTuple):
    """A strategy by name: its class, what it is, and the options that the name stands for."""

    cls: type[DecentralizedStrategy]
    description: str
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed


STRATEGIES = {
    "adpsgd": Registered(ADPSGDStrategy, "asynchronous pairwise gossip (AD-PSGD, arXiv 1710.06952)"),
    "dpsgd": Registered(DPSGDStrategy, "synchronous averaging with the neighbours (D-PSGD, arXiv 1705.09056)"),
    "apsgd": Registered(APSGDStrategy, "asynchronous SGD with a parameter server (A-PSGD)"),
    "eamsgd": Registered(EAMSGDStrategy, "local SGD tied to a centre by an elastic force (EASGD, EAMSGD, arXiv 1412.6651)"),
    "periodic_averaging": Registered(PeriodicAveragingStrategy, "local SGD with an average every few steps (CPSGD)"),
    "adaptive_averaging": Registered(
        PeriodicAveragingStrategy,
        "local SGD with an average whose period adapts (ADPSGD, arXiv 2007.06134)",
        {"period": AdaptivePeriod()},
    ),
    "diloco": Registered(
        PeriodicAveragingStrategy,
        "local SGD with an average and an outer step every 50 steps (DiLoCo, arXiv 2311.08105)",
        {"period": 50, "outer": DILOCO},
    ),
    "noloco": Registered(
        ADPSGDStrategy,
        "asynchronous gossip with few exchanges and outer steps (in the manner of NoLoCo)",
        {"local_steps": 50, "outer": Outer(), "wire": "int8"},
    ),
    "qsgd": Registered(QSGDStrategy, "all-reduce SGD with quantized gradients (QSGD, arXiv 1610.02132)"),
}
# the same with islands as workers, by a name of their own for Trainer(strategy=...) and configurations
WITH_ISLANDS = {
    "adpsgd_islands": Registered(
        ADPSGDStrategy, "gossip between nodes, whose ranks train together (docs/islands.md)", {"island": "node"}
    ),
}
# and with islands of which no rank has a whole model: the user's module shards it, so there is no configuration of it
IN_SHARDS = {
    "adpsgd_sharded": Registered(
        ShardedADPSGDStrategy,
        "gossip between islands with one model in shards each: FSDP2, tensor parallelism (docs/islands.md)",
    ),
}
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def register() -> None:
    """Make the names known to ``Trainer(strategy=...)`` and ``Fabric(strategy=...)``; idempotent.

    The same names are registered with the package ``pytorch_lightning`` where it is in use, to say that they do not work there;
    and those of islands with every way to start workers, though they take only one: the strategy says which.
    """
    for name, (cls, description, options) in {**STRATEGIES, **WITH_ISLANDS, **IN_SHARDS}.items():
        for suffix, start_method in _START_METHODS.items():
            what = f"{description}, workers started by {start_method}"
            if name + suffix not in StrategyRegistry:
                StrategyRegistry.register(name + suffix, cls, what, start_method=start_method, **options)
            if name + suffix not in FABRIC_REGISTRY:
                FABRIC_REGISTRY.register(name + suffix, partial(_of_fabric, cls), what, start_method=start_method, **options)
            if "pytorch_lightning" in sys.modules:
                _refuse(sys.modules["pytorch_lightning"].strategies.StrategyRegistry, name + suffix, "pytorch_lightning")


def _of_fabric(cls: type[DecentralizedStrategy], **options: Any) -> FabricStrategy:
    return FabricStrategy(cls(**options))


def _refuse(registry: Any, name: str, where: str) -> None:
    def refuse(**_: Any) -> None:
        raise ConfigurationError(
            f"The strategy {name!r} does not work with {where}. Use `from lightning.pytorch import Trainer`."
        )

    if name not in registry:
        registry.register(name, refuse, f"not with {where}")
