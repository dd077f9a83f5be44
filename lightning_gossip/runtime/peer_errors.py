"""Torch's errors when another worker has ended or does not answer, as PeerErrors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_gossip.errors import GossipError, PeerError
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.membership import membership
from lightning_gossip.runtime.membership.collective_errors import is_of_the_network


@contextmanager
def answering(phase: str) -> Iterator[None]:
    """What happens inside needs all workers; where failures are survived, whoever survives them sees torch's own error.

    Args:
        phase: what they do, for the message.

    Raises:
        PeerError: in place of an error of the backend or the store.
    """
    began_s = now_s()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, GossipError) or membership.current() is not None or not is_of_the_network(error):
            raise
        waited_s = now_s() - began_s
        raise PeerError(
            f"Another worker has ended or does not answer ({phase}, after {waited_s:.1f} s); its own log says why.",
            phase=phase,
            seconds=waited_s,
            timed_out="timed out" in str(error).lower(),
        ) from error
