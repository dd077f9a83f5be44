"""Lightning glue: translate, delegate, return."""

from lightning_gossip.strategies.adpsgd import ADPSGDStrategy, ShardedADPSGDStrategy
from lightning_gossip.strategies.apsgd import APSGDStrategy
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.dpsgd import DPSGDStrategy
from lightning_gossip.strategies.eamsgd import EAMSGDStrategy
from lightning_gossip.strategies.fabric.strategy import FabricStrategy
from lightning_gossip.strategies.periodic_averaging import PeriodicAveragingStrategy
from lightning_gossip.strategies.qsgd import QSGDStrategy
from lightning_gossip.strategies.registry import STRATEGIES, WITH_ISLANDS, register
from lightning_gossip.strategies.report import FitReport, WorkerReport, report

__all__ = [
    "STRATEGIES",
    "WITH_ISLANDS",
    "ADPSGDStrategy",
    "APSGDStrategy",
    "DPSGDStrategy",
    "DecentralizedStrategy",
    "EAMSGDStrategy",
    "FabricStrategy",
    "FitReport",
    "PeriodicAveragingStrategy",
    "QSGDStrategy",
    "ShardedADPSGDStrategy",
    "WorkerReport",
    "register",
    "report",
]
