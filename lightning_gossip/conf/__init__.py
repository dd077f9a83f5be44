"""Hydra configuration groups: strategy, topology, cluster. In your own app: ``hydra.searchpath: [pkg://lightning_gossip.conf]``."""
