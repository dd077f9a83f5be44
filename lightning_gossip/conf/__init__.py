"""Hydra groups strategy, topology, schedule, outer, cluster. In your own app: ``hydra.searchpath: [pkg://lightning_gossip.conf]``."""
