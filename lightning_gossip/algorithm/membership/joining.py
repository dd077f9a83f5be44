"""Joining a job that has begun: a worker outside asks, and is admitted or refused.

| key | written by | says |
|---|---|---|
| ``members`` | the first member, when they change | who they are; while it is missing the job has not begun |
| ``stores`` (:mod:`.monitor`) | ″, before that | where they keep their stores |
| ``incarnation/<rank>`` | each process that starts or was excluded | how many there were with this initial rank |
| ``news`` (:mod:`.news`) | a worker outside | that it asks to join, and what its model and data are |
| ``grant/<worker>`` | every member | where the job is, or why this worker does not fit |
| ``closed`` | every member, at the end | the job has ended |

What needs every member to agree is decided in rounds (:mod:`.membership`), before anything is written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_gossip.algorithm.membership.monitor import Monitor, hosts_key, replaced
from lightning_gossip.algorithm.membership.store import Count, Delete, Encode, Pause, Read, Restore, Steps, Write
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import ConfigurationError, PeerError

_LOOK_S = 0.1  # between two looks of a worker that waits to be admitted


class Grant(NamedTuple):
    """Where the job is, for the workers that are admitted to it.

    Args:
        round: the first one that the joiners take part in.
        generation: of the members.
        admitters: the members before.
        joiners: the workers that are admitted, at the end of the ranks.
        excluded: the workers that were excluded so far.
        snapshot: state of the training, for the joiners.
        hosts: addresses of the stores that all of them keep (:mod:`.failover`): the store may be lost in the first round.
    """

    round: int
    generation: int
    admitters: tuple[WorkerId, ...]
    joiners: tuple[WorkerId, ...]
    excluded: list[WorkerId]
    snapshot: Any
    hosts: dict[WorkerId, str]


class Joining:
    """Joining as one worker sees it, as a member or from outside. All methods are protocols.

    Args:
        prefix: of the keys.
        monitor: of this worker.
        now_s: the clock, in seconds.
    """

    def __init__(self, prefix: str, monitor: Monitor, now_s: Callable[[], float]) -> None:
        self._prefix = prefix
        self._monitor = monitor
        self._now_s = now_s

    # -- of members --------------------------------------------------------------------------------------------------

    def tell_members(self, members: Sequence[WorkerId]) -> Steps[None]:
        """Write down who the members are, and so that the job has begun; before it, where they keep their stores."""
        if self._monitor.address is not None:
            yield Write(hosts_key(self._prefix), self._monitor.told_hosts(members))
        yield Write(f"{self._prefix}/members", json.dumps(members).encode())

    def grant(self, grant: Grant) -> Steps[None]:
        """Admit the joiners that a grant names."""
        answer = yield Encode(grant)
        for worker in grant.joiners:
            yield Write(self._grant_key(worker), answer)

    def refuse(self, worker: WorkerId, reason: str) -> Steps[None]:
        """Tell a worker outside that it will not be admitted."""
        yield Write(self._grant_key(worker), (yield Encode(reason)))

    def close(self) -> Steps[None]:
        """Write down that nobody is admitted any more."""
        yield Write(f"{self._prefix}/closed", b"1")

    def open(self) -> Steps[None]:
        """Write down that workers are admitted again."""
        yield Delete(f"{self._prefix}/closed")

    # -- of workers outside ------------------------------------------------------------------------------------------

    def next_incarnation(self, me: WorkerId) -> Steps[WorkerId]:
        """The next identity of a worker that was excluded under its present one.

        Raises:
            PeerError: if another process has been started with its initial rank meanwhile: there is one worker too many.
        """
        key = f"{self._prefix}/incarnation/{me.initial_rank}"
        # looked at before, since one incarnation too many ends the other process
        if int((yield Read(key)) or 0) != me.incarnation or (yield Count(key)) != me.incarnation + 1:
            raise replaced(me)
        return WorkerId(me.initial_rank, me.incarnation + 1)

    def await_grant(self, me: WorkerId, about: str, timeout_s: float) -> Steps[Grant | None]:
        """Ask to join, and wait for the answer; None if this identity has failed for the others meanwhile.

        Args:
            me: this worker.
            about: its model and data, for the members, who decide whether they fit.
            timeout_s: how long to wait while no member sends heartbeats. While one does there is no deadline: workers are
                admitted when an epoch begins, and an epoch lasts as long as it lasts.

        Raises:
            PeerError: if nobody admits this worker.
            ConfigurationError: if it does not fit.
        """
        self._monitor.request(about)
        give_up_s = self._now_s() + timeout_s
        try:
            while (answer := (yield Read(self._grant_key(me)))) is None:
                if (yield Read(f"{self._prefix}/closed")) is not None:  # perhaps by somebody who has not seen the request yet
                    raise PeerError(
                        f"Rank {me.initial_rank} comes too late: the job has ended. Start all of it, with a new store if it has"
                        " one.",
                        rank=me.initial_rank,
                        phase="join",
                    )
                self._monitor.raise_failure()
                if self._monitor.has_failed(me):
                    return None
                if self._monitor.hears_a_member():
                    give_up_s = self._now_s() + timeout_s
                if self._now_s() >= give_up_s:
                    raise PeerError(
                        f"Rank {me.initial_rank} waits to be admitted, and has heard no member of the job for {timeout_s:.3g}"
                        " s. Has it begun?",
                        phase="join",
                        seconds=timeout_s,
                    )
                yield Pause(_LOOK_S)
        finally:
            self._monitor.request(None)
        yield Delete(self._grant_key(me))
        (found,) = yield Restore((answer,))
        if isinstance(found, str):
            raise ConfigurationError(found)
        assert isinstance(found, Grant)
        return found

    def _grant_key(self, worker: WorkerId) -> str:
        return f"{self._prefix}/grant/{worker}"


def admitters_lost(me: WorkerId) -> PeerError:
    """What ends a joiner when none of the members that have admitted it is left: then nobody has the model that was trained."""
    return PeerError(
        f"All the workers that admitted rank {me.initial_rank} have failed before it had their model. Start all of"
        " the job, with a new store if it has one, from its last checkpoint.",
        rank=me.initial_rank,
        phase="join",
    )
