"""Lightning glue: translate, delegate, return."""

from lightning_gossip.strategies.adpsgd import ADPSGDStrategy
from lightning_gossip.strategies.apsgd import APSGDStrategy
from lightning_gossip.strategies.averaging import PeriodicAveragingStrategy
from lightning_gossip.strategies.decentralized import DecentralizedStrategy
from lightning_gossip.strategies.dpsgd import DPSGDStrategy
from lightning_gossip.strategies.qsgd import QSGDStrategy
from lightning_gossip.strategies.registry import STRATEGIES, register
from lightning_gossip.strategies.reports import FitReport, WorkerReport, report

__all__ = [
    "STRATEGIES",
    "ADPSGDStrategy",
    "APSGDStrategy",
    "DPSGDStrategy",
    "DecentralizedStrategy",
    "FitReport",
    "PeriodicAveragingStrategy",
    "QSGDStrategy",
    "WorkerReport",
    "register",
    "report",
]
