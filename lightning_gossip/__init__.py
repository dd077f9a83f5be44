"""Decentralized training for PyTorch Lightning. Importing this package makes ``Trainer(strategy="adpsgd")`` known."""

from lightning_gossip.algorithm import AdaptivePeriod, ConstantPeriod, EventTrigger, Outer, PiecewisePeriod, PostLocal
from lightning_gossip.errors import ConfigurationError, GossipError, NonFiniteError, PeerError, ProtocolError
from lightning_gossip.strategies import (
    ADPSGDStrategy,
    APSGDStrategy,
    DPSGDStrategy,
    EAMSGDStrategy,
    FabricStrategy,
    FitReport,
    PeriodicAveragingStrategy,
    QSGDStrategy,
    ShardedADPSGDStrategy,
    WorkerReport,
    register,
    report,
)
from lightning_gossip.version import __version__

register()

__all__ = [
    "ADPSGDStrategy",
    "APSGDStrategy",
    "AdaptivePeriod",
    "ConfigurationError",
    "ConstantPeriod",
    "DPSGDStrategy",
    "EAMSGDStrategy",
    "EventTrigger",
    "FabricStrategy",
    "FitReport",
    "GossipError",
    "NonFiniteError",
    "Outer",
    "PeerError",
    "PeriodicAveragingStrategy",
    "PiecewisePeriod",
    "PostLocal",
    "ProtocolError",
    "QSGDStrategy",
    "ShardedADPSGDStrategy",
    "WorkerReport",
    "__version__",
    "report",
]
