"""Errors named by whose fault they are.

Each message says what was received, what is accepted, and what to do next.
"""


class GossipError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(GossipError, ValueError):
    """The user's: a value that cannot work. Raised before any process is started wherever that is possible."""


class PeerError(GossipError, RuntimeError):
    """Another worker's: it died, stopped answering, or closed the connection.

    Args:
        message: what happened and what to do next.
        rank: the peer, or None if it is not known which.
        phase: what was being waited for, for example ``"reply"`` or ``"exchange"``.
        seconds: how long it was waited for.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, phase: str | None = None, seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.seconds = seconds

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_peer_error, (str(self), self.rank, self.phase, self.seconds)


class ProtocolError(GossipError, RuntimeError):
    """Ours: two workers understand the protocol differently. Please report it."""


def _rebuild_peer_error(message: str, rank: int | None, phase: str | None, seconds: float | None) -> PeerError:
    return PeerError(message, rank=rank, phase=phase, seconds=seconds)
