"""Lightning callbacks: what the cluster does (metrics, collectives, progress), and slower workers for experiments."""

from lightning_gossip.callbacks.collectives import CollectiveCounter
from lightning_gossip.callbacks.curvature import CurvatureProbe
from lightning_gossip.callbacks.emulator import ClusterEmulator
from lightning_gossip.callbacks.monitor import GossipMonitor
from lightning_gossip.callbacks.progress import EpochProgressBar
from lightning_gossip.callbacks.reporter import FitReporter

__all__ = ["ClusterEmulator", "CollectiveCounter", "CurvatureProbe", "EpochProgressBar", "FitReporter", "GossipMonitor"]
