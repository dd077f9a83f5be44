"""The only place with a thread, a lock and a clock: the gossip, the rendezvous, the shared work."""

from lightning_gossip.runtime.adpsgd.gossip import Gossip
from lightning_gossip.runtime.adpsgd.nonfinite_guard import GossipCounters
from lightning_gossip.runtime.clock import Interval, StepTimer, Timeline, now_s
from lightning_gossip.runtime.sync_point import Agreement, Purpose, Rendezvous
from lightning_gossip.runtime.work_sharing.claim_counter import EpochQueue, Store

__all__ = [
    "Agreement",
    "EpochQueue",
    "Gossip",
    "GossipCounters",
    "Interval",
    "Purpose",
    "Rendezvous",
    "StepTimer",
    "Store",
    "Timeline",
    "now_s",
]
