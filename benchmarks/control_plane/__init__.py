"""What do membership, rounds, heartbeats and claims cost the store and the workers, as the workers grow in number?

    python -m benchmarks.control_plane [--workers 16 64 256 1024] [--quick]

The protocols of this package, unchanged, for so many workers in four processes, against a TCPStore in a process of its own
(``python -m lightning_gossip.store``). Each worker has its two connections; groups are not made. docs/control-plane.md has the
numbers.
"""
