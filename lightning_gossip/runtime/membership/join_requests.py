"""The join protocol: a worker outside asks to join a job that has begun, and is admitted or refused.

| key | written by | says |
|---|---|---|
| ``begun`` | every member, after the first round | later workers have to ask to join |
| ``incarnation/<rank>`` | each process that starts or was excluded | how many there were with this initial rank |
| ``join_request/<rank>`` | a worker outside | its incarnation, and what its model and data are |
| ``grant/<worker>`` | every member | where the job is, or why this worker does not fit |
| ``closed`` | every member, at the end | the job has ended |

What needs every member to agree is decided in rounds (runtime/membership/membership.py), before anything is written here.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from lightning_gossip.errors import ConfigurationError, PeerError
from lightning_gossip.runtime.clock import Deadline
from lightning_gossip.runtime.membership.round_store import WorkerId
from lightning_gossip.runtime.store_client import look_up

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
    """

    round: int
    generation: int
    admitters: tuple[WorkerId, ...]
    joiners: tuple[WorkerId, ...]
    excluded: list[WorkerId]
    snapshot: Any


class JoinRequests:
    """The join protocol in the store, through the training thread's connection.

    Args:
        store: the connection.
        prefix: of the keys.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    # -- of members --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Write down that the job has begun."""
        self._store.set(f"{self._prefix}/begun", "1")

    @property
    def has_begun(self) -> bool:
        """Whether the first round is over, so that later workers must ask to join."""
        return self._store.check([f"{self._prefix}/begun"])

    def grant(self, grant: Grant) -> None:
        """Admit the joiners that a grant names."""
        answer = pickle.dumps(grant)
        for worker in grant.joiners:
            self._store.set(self._grant_key(worker), answer)  # type: ignore[arg-type]  # bytes are fine

    def refuse(self, worker: WorkerId, reason: str) -> None:
        """Tell a worker outside that it will not be admitted."""
        self._store.set(self._grant_key(worker), pickle.dumps(reason))  # type: ignore[arg-type]

    def close(self) -> None:
        """Write down that nobody is admitted any more."""
        self._store.set(f"{self._prefix}/closed", "1")

    def open(self) -> None:
        """Write down that workers are admitted again."""
        self._store.delete_key(f"{self._prefix}/closed")

    # -- of workers outside ------------------------------------------------------------------------------------------

    def next_incarnation(self, me: WorkerId) -> WorkerId:
        """The next identity of a worker that was excluded under its present one.

        Raises:
            PeerError: if another process has been started with its initial rank meanwhile: there is one worker too many.
        """
        key = f"{self._prefix}/incarnation/{me.initial_rank}"
        # looked at before, since one incarnation too many ends the other process
        if int(look_up(self._store, key) or 0) != me.incarnation or self._store.add(key, 1) != me.incarnation + 1:
            raise replaced(me)
        return WorkerId(me.initial_rank, me.incarnation + 1)

    def await_grant(self, me: WorkerId, about: str, look: Callable[[], bool], timeout_s: float) -> Grant:
        """Ask to join, and wait for the answer.

        Args:
            me: this worker.
            about: its model and data, for the members, who decide whether they fit.
            look: called now and then: whether a member sends heartbeats; raises when there is nobody to wait for.
            timeout_s: how long to wait while no member does.

        Raises:
            PeerError: if nobody admits this worker.
            ConfigurationError: if it does not fit.
        """
        self._store.set(f"{self._prefix}/join_request/{me.initial_rank}", f"{me.incarnation} {about}")
        deadline, pause = Deadline.after(timeout_s), threading.Event()
        while not self._store.check([self._grant_key(me)]):
            if self._store.check([f"{self._prefix}/closed"]):  # perhaps by somebody who has not seen the request yet
                raise PeerError(
                    f"Rank {me.initial_rank} comes too late: the job has ended. Start all of it, with a new store if it has"
                    " one.",
                    rank=me.initial_rank,
                    phase="join",
                )
            if look():  # workers are admitted when an epoch has ended, however long that is
                deadline = Deadline.after(timeout_s)
            if deadline.left_s <= 0:
                raise PeerError(
                    f"Rank {me.initial_rank} waits to be admitted, and has heard no member of the job for {timeout_s:.3g} s."
                    " Has it begun?",
                    phase="join",
                    seconds=timeout_s,
                )
            pause.wait(_LOOK_S)
        answer = pickle.loads(self._store.get(self._grant_key(me)))
        self._store.delete_key(self._grant_key(me))
        if isinstance(answer, str):
            raise ConfigurationError(answer)
        assert isinstance(answer, Grant)
        return answer

    def _grant_key(self, worker: WorkerId) -> str:
        return f"{self._prefix}/grant/{worker}"


class JoinRequestReader:
    """The join protocol in the store, as a monitor reads it through its own connection.

    Args:
        store: the connection.
        prefix: of the keys.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def requests(self, initial_ranks: Iterable[int]) -> dict[WorkerId, str]:
        """The last request of each initial rank: which worker, and what its model and data are."""
        found = {}
        for rank in initial_ranks:
            if request := look_up(self._store, f"{self._prefix}/join_request/{rank}"):
                incarnation, _, about = request.decode().partition(" ")
                found[WorkerId(rank, int(incarnation))] = about
        return found

    def newest(self, initial_ranks: Iterable[int]) -> list[WorkerId]:
        """The newest incarnation of each initial rank; nobody before the job has begun."""
        if not self._store.check([f"{self._prefix}/begun"]):
            return []
        incarnations = {rank: look_up(self._store, f"{self._prefix}/incarnation/{rank}") for rank in initial_ranks}
        return [WorkerId(rank, int(incarnation)) for rank, incarnation in incarnations.items() if incarnation is not None]


def replaced(me: WorkerId) -> PeerError:
    """What ends the older of two processes of one initial rank."""
    return PeerError(
        f"Rank {me.initial_rank} sent no heartbeat, and has been started again. This process, the older one, ends.",
        rank=me.initial_rank,
        phase="join",
    )


def why_nobody_admits(
    me: WorkerId, newest: Sequence[WorkerId], heard: Mapping[WorkerId, dict[str, Any]], not_failed: Sequence[WorkerId]
) -> str | None:
    """Why nobody will admit a worker outside; None while somebody may.

    Args:
        me: the worker outside.
        newest: the newest incarnation of each initial rank; none before the job has begun.
        heard: their heartbeats.
        not_failed: those that have not failed.
    """
    if any(worker.initial_rank == me.initial_rank and worker.incarnation > me.incarnation for worker in newest):
        return str(replaced(me))
    members = [worker for worker, message in heard.items() if not message["outside"]]
    aborted = [worker for worker in members if (why := heard[worker]["aborted"]) and why[0] == heard[worker]["use"]]
    if not newest or any(worker in not_failed and worker not in aborted for worker in members):
        return None
    why = "rank {1} has failed: {2}".format(*heard[aborted[0]]["aborted"]) if aborted else "all its members have failed"
    return (
        f"Rank {me.initial_rank} waits to be admitted by a job that nobody is in any more: {why}. Start all of it, with a new"
        " store if it has one, from its last checkpoint."
    )
