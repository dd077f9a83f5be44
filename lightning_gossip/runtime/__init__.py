"""The only place with a thread, a lock and a clock: the gossip, the synchronisation point, the shared work."""

from lightning_gossip.runtime.adpsgd.gossip import Gossip
from lightning_gossip.runtime.adpsgd.nonfinite_guard import GossipCounters
from lightning_gossip.runtime.clock import Interval, StepTimer, Timeline, now_s
from lightning_gossip.runtime.sync_point import Agreement, Purpose, SyncPoint
from lightning_gossip.runtime.work_sharing.claim_counter import EpochQueue, Store

__all__ = [
    "Agreement",
    "EpochQueue",
    "Gossip",
    "GossipCounters",
    "Interval",
    "Purpose",
    "StepTimer",
    "Store",
    "SyncPoint",
    "Timeline",
    "now_s",
]
