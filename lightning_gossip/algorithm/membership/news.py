"""The news: what every worker has to know of failures and join requests, in one small value of the store.

Whoever finds out something adds it by a swap, and all read the value at each tick of their monitors: so a worker asks the store
for one value, however many workers there are.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from lightning_gossip.algorithm.membership.worker_id import WorkerId

_USES = 2  # whose aborts are kept: a worker may be in the use of a Trainer that others have left


class Aborted(NamedTuple):
    """An exception has ended a use of a Trainer.

    Args:
        use: its number.
        by: the worker that says so.
        rank: on which the exception was raised first.
        reason: the exception.
    """

    use: int
    by: WorkerId
    rank: int
    reason: str


class News(NamedTuple):
    """What the members know of failures, aborts and join requests.

    Args:
        number: of changes; later news have a larger one.
        failed: workers that have failed, for good.
        lost: workers with which somebody has lost a connection, and that have not been heard since.
        aborted: of the last uses of a Trainer, by use.
        joining: workers that ask to join, and what each says of its model and data; one an initial rank.
        ended: those of the failed whose processes are known to have ended; the others are silent, and may be alive.
    """

    number: int = 0
    failed: frozenset[WorkerId] = frozenset()
    lost: frozenset[WorkerId] = frozenset()
    aborted: tuple[Aborted, ...] = ()
    joining: tuple[tuple[WorkerId, str], ...] = ()
    ended: frozenset[WorkerId] = frozenset()

    def abort_of(self, use: int) -> Aborted | None:
        """How a use was ended, None if it was not."""
        return next((told for told in self.aborted if told.use == use), None)

    def with_abort(self, told: Aborted) -> tuple[Aborted, ...]:
        """The aborts with one more worker's.

        Unless its use was ended by another one before, or is long over, or whoever says so is no member any more: it has failed
        for the others. If it fails afterwards its word stays.
        """
        if self.abort_of(told.use) is not None or told.by in self.failed:
            return self.aborted
        uses = {other.use: other for other in self.aborted} | {told.use: told}
        return tuple(uses[use] for use in sorted(uses)[-_USES:])

    def encode(self) -> bytes:
        """As a value of the store."""
        told = [self.number, sorted(self.failed), sorted(self.lost), self.aborted, self.joining, sorted(self.ended)]
        return json.dumps(told).encode()

    @classmethod
    def decode(cls, value: bytes) -> News:
        """The news of a value of the store."""
        number, failed, lost, aborted, joining, ended = json.loads(value)
        return cls(
            number,
            frozenset(WorkerId(*worker) for worker in failed),
            frozenset(WorkerId(*worker) for worker in lost),
            tuple(Aborted(use, WorkerId(*by), rank, reason) for use, by, rank, reason in aborted),
            tuple((WorkerId(*worker), about) for worker, about in joining),
            frozenset(WorkerId(*worker) for worker in ended),
        )
