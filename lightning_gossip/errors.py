"""Errors named by whose fault they are.

Each message says what was received, what is accepted, and what to do next.
"""


class GossipError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(GossipError, ValueError):
    """The user's fault: a value that cannot work. Raised before any process is started wherever that is possible."""


class PeerError(GossipError, RuntimeError):
    """Another worker's fault: it failed, aborted, stopped answering, or closed the connection.

    Args:
        message: what happened and what to do next.
        rank: the peer, or None if it is not known which.
        phase: what was being waited for, for example ``"reply"`` or ``"exchange"``.
        seconds: how long it was waited for.
        timed_out: the peer may be there and merely slow: the time was over, and no connection closed.
        closed: a connection with the peer was seen to close, and this side has not closed it: the peer may have failed.
        reason: the exception that ended the peer, as it told the others; None if it did not.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        phase: str | None = None,
        seconds: float | None = None,
        timed_out: bool = False,
        closed: bool = False,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.seconds = seconds
        self.timed_out = timed_out
        self.closed = closed
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        told = (self.rank, self.phase, self.seconds, self.timed_out, self.closed, self.reason)
        return _rebuild_peer_error, (type(self), str(self), *told)


class ProtocolError(GossipError, RuntimeError):
    """Our fault: two workers understand the protocol differently. Please report it."""


class NonFiniteError(GossipError, ArithmeticError):
    """The training's fault: the model of this worker holds NaN or infinity, from its own steps."""


def another_aborted(rank: int, reason: str, phase: str) -> PeerError:
    """The error that ends a worker when another one has aborted.

    Args:
        rank: of the worker that has aborted.
        reason: its exception.
        phase: how this worker has heard of it.
    """
    message = f"Rank {rank} has failed and all end: {reason}. Its own log has the rest."
    return PeerError(message, rank=rank, phase=phase, reason=reason)


def reason_of(error: BaseException) -> str:
    """An exception in one line or a few, as other workers are told of it."""
    return f"{type(error).__name__}: {error}"


def _rebuild_peer_error(
    kind: type[PeerError],
    message: str,
    rank: int | None,
    phase: str | None,
    seconds: float | None,
    timed_out: bool,
    closed: bool,
    reason: str | None,
) -> PeerError:
    return kind(message, rank=rank, phase=phase, seconds=seconds, timed_out=timed_out, closed=closed, reason=reason)
