"""Decentralized training for PyTorch Lightning. Importing this package makes ``Trainer(strategy="adpsgd")`` known."""

from lightning_gossip.algorithm import AdaptivePeriod, ConstantPeriod, EventTrigger, Outer, PiecewisePeriod, PostLocal
from lightning_gossip.errors import ConfigurationError, GossipError, NonFiniteError, PeerError, ProtocolError
from lightning_gossip.strategies import (
    ADPSGDStrategy,
    APSGDStrategy,
    DPSGDStrategy,
    EAMSGDStrategy,
    FitReport,
    PeriodicAveragingStrategy,
    QSGDStrategy,
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
    "WorkerReport",
    "__version__",
    "report",
]
