"""Which version this is, and whether all workers of a job are of one."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gossip.errors import ConfigurationError
from lightning_gossip.transport.messages import VERSION

__version__ = "0.1.0"


def mine() -> str:
    """The versions of the package and of its message format."""
    return f"{__version__}, message format {VERSION}"


def understands(theirs: str) -> bool:
    """Whether this worker's messages are those of a worker of which :func:`mine` says this."""
    return theirs.rpartition(" ")[2] == str(VERSION)


def check(everyones: Sequence[str], names: Sequence[str] = ()) -> None:
    """Refuse a job whose workers are of different versions.

    Args:
        everyones: what :func:`mine` says on each rank.
        names: who says it, if not each rank.

    Raises:
        ConfigurationError: on every rank.
    """
    if len(set(everyones)) > 1:
        names = names or [f"rank {rank}" for rank in range(len(everyones))]
        said = "; ".join(f"{name} has {theirs}" for name, theirs in zip(names, everyones, strict=True))
        raise ConfigurationError(
            f"The workers run different versions of lightning_gossip: {said}. Install the same one everywhere."
        )
