"""Decentralized training for PyTorch Lightning. Importing this package makes ``Trainer(strategy="adpsgd")`` known."""

from lightning_gossip.algorithm import AdaptivePeriod, ConstantPeriod, PostLocal
from lightning_gossip.errors import ConfigurationError, GossipError, PeerError, ProtocolError
from lightning_gossip.strategies import (
    ADPSGDStrategy,
    DPSGDStrategy,
    FitReport,
    PeriodicAveragingStrategy,
    QSGDStrategy,
    WorkerReport,
    register,
)

register()

__version__ = "0.1.0"
__all__ = [
    "ADPSGDStrategy",
    "AdaptivePeriod",
    "ConfigurationError",
    "ConstantPeriod",
    "DPSGDStrategy",
    "FitReport",
    "GossipError",
    "PeerError",
    "PeriodicAveragingStrategy",
    "PostLocal",
    "ProtocolError",
    "QSGDStrategy",
    "WorkerReport",
]
