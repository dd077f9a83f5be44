"""All workers of a job, as each of them speaks to the others when they have met: values are gathered, collectives are run.

| class | when a worker fails |
|---|---|
| :class:`FixedWorkers` | all end, with a PeerError |
| :class:`~lightning_gossip.runtime.membership.membership.Membership` | the others go on, and what was under way is done again |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from typing_extensions import override

from lightning_gossip.algorithm.membership.kinds import of_one_kind
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.transport.peer_errors import peer_errors

T = TypeVar("T")

WRITTEN = "the end of a checkpoint's writing"  # the kind of a gather


class Workers(Protocol):
    """All workers of a job. Every worker calls the same methods in the same order."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all workers, for collectives in :meth:`attempt`; None for the default one. Another after a failure."""

    def gather(self, mine: Any, kind: str = "values") -> list[Any]:
        """The values of all workers, by rank.

        Args:
            mine: this worker's value; any that can be pickled.
            kind: what is gathered, the same on all workers.

        Raises:
            ConfigurationError: on all workers, if one of them gathers something else.
        """

    def gather_for(self, rank: int, mine: Any, kind: str = "values") -> list[Any]:
        """Gather large values for one rank, by rank; the others may get an empty list."""

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of one rank, on all."""

    def attempt(self, collective: Callable[[], T]) -> T:
        """Run collectives on the default group; where failures are survived, again with the workers that are left.

        Args:
            collective: leaves its inputs as they are, if it fails.
        """

    def attempt_and_tell(self, collective: Callable[[], T], tell: Callable[[], Any]) -> tuple[T, list[Any]]:
        """Run collectives as :meth:`attempt` does, and gather what each worker tells when they have worked.

        Returns:
            The result of the collectives, and what all have told, by rank.
        """

    def write_by_first(self, collect: Callable[[], T], write: Callable[[T], None]) -> None:
        """Write what is made of all workers: rank 0 does, and it is there when this returns, on all.

        Where failures are survived and rank 0 is killed while it writes, the next one writes it.

        Args:
            collect: makes what is written, of all workers; rank 0 may be the only one that has all of it. Called again with
                those that are left.
            write: puts it on the disk, on rank 0; all call it.
        """

    def answering(self, phase: str) -> AbstractContextManager[None]:
        """What happens inside needs all workers, and is a PeerError if one has ended, unless failures are survived.

        Args:
            phase: what they do, for the message.
        """

    def raise_failure(self) -> None:
        """Raise if another worker has aborted, or the store does not answer: for the middle of an epoch. Waits for nobody.

        Raises:
            PeerError: saying which.
        """

    @property
    def excluded(self) -> Sequence[WorkerId]:
        """Workers that have failed, and the others went on without."""


class FixedWorkers(Workers):
    """The workers of a process group, all of which end if one does. A process without a group is the only one.

    Args:
        group: of all workers; the default group if None.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    @override
    def group(self) -> dist.ProcessGroup | None:
        return self._group

    @override
    def gather(self, mine: Any, kind: str = "values") -> list[Any]:
        if self._is_alone:
            return [mine]
        everyones: list[Any] = [None] * dist.get_world_size(self._group)
        with peer_errors(kind):
            dist.all_gather_object(everyones, (kind, mine), group=self._group)
        return of_one_kind(everyones)

    @override
    def gather_for(self, rank: int, mine: Any, kind: str = "values") -> list[Any]:
        return self.gather(mine, kind)

    @override
    def broadcast(self, value: T, source: int = 0) -> T:
        if self._is_alone:
            return value
        sent = [value]
        with peer_errors("a broadcast"):
            dist.broadcast_object_list(sent, group=self._group, group_src=source)
        return sent[0]

    @override
    def attempt(self, collective: Callable[[], T]) -> T:
        with peer_errors("a collective"):
            return collective()

    @override
    def attempt_and_tell(self, collective: Callable[[], T], tell: Callable[[], Any]) -> tuple[T, list[Any]]:
        return self.attempt(collective), self.gather(tell())

    @override
    def write_by_first(self, collect: Callable[[], T], write: Callable[[T], None]) -> None:
        write(collect())
        self.gather(None, kind=WRITTEN)

    @override
    def raise_failure(self) -> None:
        return  # nobody hears of the others but in a collective

    @override
    def answering(self, phase: str) -> AbstractContextManager[None]:
        return peer_errors(phase)

    @property
    @override
    def excluded(self) -> Sequence[WorkerId]:
        return ()

    @property
    def _is_alone(self) -> bool:
        return not dist.is_initialized() or dist.get_world_size(self._group) == 1
