"""Torch's errors when another worker is gone, as PeerErrors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lightning_gossip.errors import GossipError, PeerError
from lightning_gossip.runtime import membership
from lightning_gossip.runtime.clock import now_s

# Gloo's errors are bare RuntimeErrors that only their text tells from others
_OF_A_BACKEND = re.compile(r"gloo|nccl|connection|timed out|timeout|closed by peer|socket", re.IGNORECASE)


@contextmanager
def answering(phase: str) -> Iterator[None]:
    """What happens inside needs all workers; where deaths are survived, whoever survives them sees torch's own error.

    Args:
        phase: what they do, for the message.

    Raises:
        PeerError: in place of an error of the backend or the store.
    """
    began_s = now_s()
    try:
        yield
    except RuntimeError as error:
        of_a_backend = isinstance(error, dist.DistError) or _OF_A_BACKEND.search(str(error)) is not None
        if isinstance(error, GossipError) or membership.current() is not None or not of_a_backend:
            raise
        waited_s = now_s() - began_s
        raise PeerError(
            f"Another worker has ended or does not answer ({phase}, after {waited_s:.1f} s); its own log says why.",
            phase=phase,
            seconds=waited_s,
            timed_out="timed out" in str(error).lower(),
        ) from error
