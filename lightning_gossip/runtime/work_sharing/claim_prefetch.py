"""The batches that a worker takes from the shared counter, claimed ahead where the store is slow to answer."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress

from lightning_gossip.algorithm.membership.store import StoreLostError
from lightning_gossip.errors import GossipError
from lightning_gossip.runtime.work_sharing.claim_counter import EpochQueue
from lightning_gossip.transport.threads import in_background

_WORTH_A_WAIT = 0.01  # of a step: a claim that takes longer is made ahead
_RECENT = 8  # claims that tell how long the next one will take


class Claims:
    """The batches of a queue, one after the other. The next one is claimed ahead where the store is slow to answer.

    A claim costs a round trip to the store, over the very links that exchanges fill: on a slow one a worker would wait half of
    a step for it, and for every batch. So where claims have taken more than a hundredth of a step, the next one is made by a
    thread while the loader has its batch. Then this worker holds one batch more than else, and the claim rule knows.

    For one thread, but for the claim that is under way; the queue's ledger is up to date after :meth:`settle`.

    Args:
        queue: whose.
        step_s: asked for this worker's time a batch in seconds, None if it is not known yet.
        tell: called with each position as soon as it is claimed, and with None at the end; on whichever thread claims.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        queue: EpochQueue,
        step_s: Callable[[], float | None],
        *,
        tell: Callable[[int | None], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = queue
        self._tell = tell
        self._step_s = step_s
        self._clock = clock
        self._took_s: deque[float] = deque(maxlen=_RECENT)
        self._ahead: int | None = None  # settled, and not yielded yet
        self._under_way: Future[tuple[int | None, float]] | None = None

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        """The next position.

        Raises:
            StopIteration: when this worker is done with claiming.
        """
        self.settle()
        position, self._ahead = self._ahead, None
        if position is None:
            position = self._claim()
        if position is None:
            raise StopIteration
        step_s = self._step_s()
        if step_s is not None and self._took_s and statistics.median(self._took_s) > _WORTH_A_WAIT * step_s:
            self._under_way = in_background("gossip-claim", self._claim_ahead, step_s, self.queue.ledger.held)
        return position

    def settle(self) -> None:
        """Wait for the claim that is under way, if there is one: it is in the ledger then, and nobody claims."""
        claim, self._under_way = self._under_way, None
        if claim is None:
            return
        position, took_s = claim.result()
        if position is not None:
            self._took_s.append(took_s)
            self.queue.ledger.claim(position)
            self._ahead = position

    def close(self, timeout_s: float = 2.0) -> None:
        """Claim no more; what a claim under way brings is nobody's. May be called twice.

        Args:
            timeout_s: how long to wait for that claim: the store may be out of reach.
        """
        claim, self._under_way = self._under_way, None
        if claim is not None:
            wait([claim], timeout_s)
        with suppress(GossipError, StoreLostError):  # whoever is told has lost the store, too
            self._tell(None)

    def _claim(self) -> int | None:
        began_s = self._clock()
        position = self.queue.claim(self._step_s())
        self._tell(position)
        self._took_s.append(self._clock() - began_s)
        return position

    def _claim_ahead(self, step_s: float, held: int) -> tuple[int | None, float]:
        """The next position, not in the ledger yet, and how long it took, in seconds. On a thread of its own."""
        began_s = self._clock()
        position = self.queue.draw(step_s, held)
        self._tell(position)
        return position, self._clock() - began_s
