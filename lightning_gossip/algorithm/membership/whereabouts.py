"""What a worker says of where it is, in the store that it itself keeps (:mod:`.failover` has the table)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

WHERE, SEEKS, RESTS = "where", "seeks", "rests"
AWAKE = b"awake"


class Rest(NamedTuple):
    """What stands in the store of a worker that rests.

    Args:
        number: how often it has rested.
        view: that it is bound to: it takes part in no earlier one.
        address: where that is; empty if it has not been called.
    """

    number: int
    view: int
    address: str

    def encode(self) -> bytes:
        """What is written to the store."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, told: bytes) -> Rest:
        """Read what was written by :meth:`encode`."""
        return cls(*json.loads(told))


def place_of(told: bytes | None) -> tuple[int, str] | None:
    """A view, and the address of its store, as ``where`` and ``seeks`` say it."""
    if told is None:
        return None
    view, address = json.loads(told)
    return int(view), str(address)


def latest_view(told: Sequence[bytes | None]) -> int:
    """The latest view that a worker is in, waits for, or is bound to, by what stands at ``where``, ``seeks`` and ``rests``.

    >>> latest_view([b'[0, "a 1"]', None, b"awake"]), latest_view([b'[0, "a 1"]', None, Rest(2, 7, "b 1").encode()])
    (0, 7)
    """
    where, seeks, rests = told
    rest = 0 if rests is None or rests == AWAKE else Rest.decode(rests).view
    return max(rest, *(found[0] for found in (place_of(where), place_of(seeks)) if found is not None), 0)
