"""The names of the strategies in Lightning's registry."""

from __future__ import annotations

import sys
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.strategies.adpsgd import ADPSGDStrategy
from lightning_gossip.strategies.decentralized import DecentralizedStrategy

STRATEGIES: dict[str, tuple[type[DecentralizedStrategy], str]] = {
    "adpsgd": (ADPSGDStrategy, "asynchronous pairwise gossip (AD-PSGD, arXiv 1710.06952)"),
}
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def register() -> None:
    """Make the names known to ``Trainer(strategy=...)``; idempotent.

    The same names are registered with Fabric, and with the package ``pytorch_lightning`` where it is in use, to say that they
    do not work there.
    """
    for name, (cls, description) in STRATEGIES.items():
        for suffix, start_method in _START_METHODS.items():
            if name + suffix not in StrategyRegistry:
                StrategyRegistry.register(
                    name + suffix, cls, f"{description}, workers started by {start_method}", start_method=start_method
                )
            _refuse(FABRIC_REGISTRY, name + suffix, "Fabric")
            if "pytorch_lightning" in sys.modules:
                _refuse(sys.modules["pytorch_lightning"].strategies.StrategyRegistry, name + suffix, "pytorch_lightning")


def _refuse(registry: Any, name: str, where: str) -> None:
    def refuse(**_: Any) -> None:
        raise ConfigurationError(
            f"The strategy {name!r} does not work with {where}. Use `from lightning.pytorch import Trainer`."
        )

    if name not in registry:
        registry.register(name, refuse, f"not with {where}")
