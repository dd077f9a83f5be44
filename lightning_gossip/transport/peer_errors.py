"""Torch's errors in what needs other workers: which of them mean that another has ended, as PeerErrors, and which pass."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_gossip.errors import GossipError, PeerError

# Gloo throws bare RuntimeErrors, but each tells the line of Gloo's source that it comes from; all but one
_FROM_GLOO = re.compile(r"\[[^\]\s]*\bgloo/[^\]\s]*:\d+\]|Application timeout caused pair closure")


def is_of_the_network(error: BaseException) -> bool:
    """Whether torch's backend or store has raised it, so that another worker may be the reason.

    Told by the error's type, or by the place in Gloo's source where it was thrown; not by what it is about: a collective that
    is refused for its arguments and an error of the user's that speaks of sockets are neither.

    >>> is_of_the_network(RuntimeError("[/torch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    True
    >>> is_of_the_network(RuntimeError("timeout reading socket"))
    False
    """
    if isinstance(error, PeerError) and error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_FROM_GLOO.search(str(error))))


def may_pass(error: BaseException) -> bool:
    """Whether a collective that has failed with this may work when it is made again: out of memory, or refused, it will not.

    >>> [may_pass(error) for error in (RuntimeError("a connection broke"), torch.OutOfMemoryError("5 GiB"), TypeError("float"))]
    [True, False, False]
    """
    hopeless = (torch.OutOfMemoryError, NotImplementedError, RecursionError)
    return isinstance(error, RuntimeError) and not isinstance(error, hopeless)


@contextmanager
def peer_errors(phase: str, peer: int | None = None) -> Iterator[None]:
    """What happens inside needs another worker, or all.

    A connection that Gloo has closed because another operation of this process was over its time says nothing about the peer;
    nor does an error of the store.

    Args:
        phase: what is done, for the message.
        peer: the rank; None if it may be any.

    Raises:
        PeerError: in place of an error of the backend or the store; it names the peer, the phase and the wait.
    """
    began_s = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, GossipError) or not is_of_the_network(error):
            raise
        waited_s, text = time.monotonic() - began_s, str(error).lower()
        timed_out = "timed out" in text or isinstance(error, dist.DistStoreError)  # Gloo says so in its text only
        given_up = "application timeout" in text
        message = f"Another worker has ended or does not answer ({phase}, after {waited_s:.1f} s); its own log says why."
        if peer is not None:
            reason = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).split(". ")[0]  # without Gloo's file, line and advice
            state = "is frozen or slow, or cannot be reached" if timed_out else "has probably ended; its own log says why"
            if given_up:
                state = "did not answer another operation of this process in time"
            message = f"The {phase} with rank {peer} failed after {waited_s:.1f} s: {reason}. Rank {peer} {state}."
        raise PeerError(
            message,
            rank=peer,
            phase=phase,
            seconds=waited_s,
            timed_out=timed_out,
            closed=peer is not None and not (timed_out or given_up or isinstance(error, dist.DistError)),
        ) from error
