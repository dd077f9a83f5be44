"""Every round says what it is for, so that no worker takes the values of one call for those of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_gossip.errors import ConfigurationError


def of_one_kind(said: Sequence[tuple[str, Any]]) -> list[Any]:
    """The values, by rank, if all workers are at the same call.

    Args:
        said: each worker's kind and value.

    Raises:
        ConfigurationError: if they are at different calls; the same on all workers.
    """
    if len({kind for kind, _ in said}) > 1:
        places = ", ".join(f"rank {rank} at {kind}" for rank, (kind, _) in enumerate(said))
        raise ConfigurationError(
            f"The workers are at different calls that need all of them: {places}. Outside of an epoch's batches every rank has"
            " to make the same calls in the same order, as under DDP: look for one that only some ranks make."
        )
    return [value for _, value in said]
