"""A worker's gossip: its threads, its exchanges, the peers it chooses."""
