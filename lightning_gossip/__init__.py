"""Decentralized training for PyTorch Lightning. Importing this package makes ``Trainer(strategy="adpsgd")`` known."""

from lightning_gossip.errors import ConfigurationError, GossipError, PeerError, ProtocolError
from lightning_gossip.strategies import ADPSGDStrategy, FitReport, WorkerReport, register

register()

__version__ = "0.1.0"
__all__ = [
    "ADPSGDStrategy",
    "ConfigurationError",
    "FitReport",
    "GossipError",
    "PeerError",
    "ProtocolError",
    "WorkerReport",
]
