"""Collectives of all workers, whose errors are a PeerError where failures are not survived."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from lightning_gossip.runtime.membership import membership
from lightning_gossip.transport.peer_errors import peer_errors


def answering(phase: str) -> AbstractContextManager[None]:
    """What happens inside needs all workers; where failures are survived, whoever survives them sees torch's own error.

    Args:
        phase: what they do, for the message.
    """
    return peer_errors(phase) if membership.current() is None else nullcontext()
