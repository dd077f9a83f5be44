"""Lightning glue: translate, delegate, return."""

from lightning_gossip.strategies.adpsgd import ADPSGDStrategy
from lightning_gossip.strategies.apsgd import APSGDStrategy
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.dpsgd import DPSGDStrategy
from lightning_gossip.strategies.eamsgd import EAMSGDStrategy
from lightning_gossip.strategies.periodic_averaging import PeriodicAveragingStrategy
from lightning_gossip.strategies.qsgd import QSGDStrategy
from lightning_gossip.strategies.registry import STRATEGIES, register
from lightning_gossip.strategies.report import FitReport, WorkerReport, report

__all__ = [
    "STRATEGIES",
    "ADPSGDStrategy",
    "APSGDStrategy",
    "DPSGDStrategy",
    "DecentralizedStrategy",
    "EAMSGDStrategy",
    "FitReport",
    "PeriodicAveragingStrategy",
    "QSGDStrategy",
    "WorkerReport",
    "register",
    "report",
]
