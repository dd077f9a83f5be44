"""The only place with a thread, a lock and a clock: the gossip, the synchronisation point, the shared work."""
