"""The way into a job that has begun: a worker knocks, and is invited, refused, or told that there is nobody inside any more.

| key | written by | says |
|---|---|---|
| ``begun`` | every member, after the first round | whoever comes now has to knock |
| ``life/<number>`` | each process that is started, and each that was taken for dead | how many there were with this number |
| ``knock/<number>`` | who waits outside | its life, and what it is about |
| ``invited/<worker>`` | every member | where the job is, or why this worker does not fit |
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
from lightning_gossip.runtime.membership.round_store import Worker
from lightning_gossip.runtime.store_client import look_up

_LOOK_S = 0.1  # between two looks of a worker that waits to be taken in


class Invitation(NamedTuple):
    """Where the job is.

    Args:
        round: the first one that those who come take part in.
        generation: of the members.
        hosts: who was a member before.
        joiners: who comes, at the end of the ranks.
        lost: who was left out so far.
        news: for those who come.
    """

    round: int
    generation: int
    hosts: tuple[Worker, ...]
    joiners: tuple[Worker, ...]
    lost: list[Worker]
    news: Any


class Door:
    """Seen through the training thread's connection.

    Args:
        store: the connection.
        prefix: of the keys.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    # -- inside ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The job has begun."""
        self._store.set(f"{self._prefix}/begun", "1")

    @property
    def has_begun(self) -> bool:
        """Whether it has."""
        return self._store.check([f"{self._prefix}/begun"])

    def invite(self, invitation: Invitation) -> None:
        """To all who come with it."""
        told = pickle.dumps(invitation)
        for worker in invitation.joiners:
            self._store.set(self._invited(worker), told)  # type: ignore[arg-type]  # bytes are fine

    def refuse(self, worker: Worker, reason: str) -> None:
        """Tell a worker that waits that it will not be taken in."""
        self._store.set(self._invited(worker), pickle.dumps(reason))  # type: ignore[arg-type]

    def close(self) -> None:
        """Nobody is taken in any more."""
        self._store.set(f"{self._prefix}/closed", "1")

    def open(self) -> None:
        """Those who come are taken in again."""
        self._store.delete_key(f"{self._prefix}/closed")

    # -- outside -----------------------------------------------------------------------------------------------------

    def another_life(self, me: Worker) -> Worker:
        """The next name of a worker that is dead to the others under its present one.

        Raises:
            PeerError: if another process has been started with its number meanwhile: there is one worker too many.
        """
        key = f"{self._prefix}/life/{me.number}"
        # looked at before, since a life too many is the end of the other one
        if int(look_up(self._store, key) or 0) != me.life or self._store.add(key, 1) != me.life + 1:
            raise replaced(me)
        return Worker(me.number, me.life + 1)

    def await_invitation(self, me: Worker, about: str, look: Callable[[], bool], timeout_s: float) -> Invitation:
        """Knock, and wait.

        Args:
            me: who waits.
            about: it, for those who decide whether it fits.
            look: called now and then: whether somebody inside beats; raises when there is nobody to wait for.
            timeout_s: how long while nobody does.

        Raises:
            PeerError: if nobody takes this worker in.
            ConfigurationError: if it does not fit.
        """
        self._store.set(f"{self._prefix}/knock/{me.number}", f"{me.life} {about}")
        deadline, pause = Deadline.after(timeout_s), threading.Event()
        while not self._store.check([self._invited(me)]):
            if self._store.check([f"{self._prefix}/closed"]):  # perhaps by somebody who has not heard the knock yet
                raise PeerError(
                    f"Rank {me.number} comes too late: the job has ended. Start all of it, with a new store if it has one.",
                    rank=me.number,
                    phase="join",
                )
            if look():  # it takes this worker in when its epoch has ended, however long that is
                deadline = Deadline.after(timeout_s)
            if deadline.left_s <= 0:
                raise PeerError(
                    f"Rank {me.number} waits to be taken in, and has heard no member of the job for {timeout_s:.3g} s. Has it"
                    " begun?",
                    phase="join",
                    seconds=timeout_s,
                )
            pause.wait(_LOOK_S)
        told = pickle.loads(self._store.get(self._invited(me)))
        self._store.delete_key(self._invited(me))
        if isinstance(told, str):
            raise ConfigurationError(told)
        assert isinstance(told, Invitation)
        return told

    def _invited(self, worker: Worker) -> str:
        return f"{self._prefix}/invited/{worker}"


class Doorstep:
    """What a watch sees there, through its own connection.

    Args:
        store: the connection.
        prefix: of the keys.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def knocks(self, numbers: Iterable[int]) -> dict[Worker, str]:
        """Who has knocked last under each number, and what about."""
        found = {}
        for number in numbers:
            if knock := look_up(self._store, f"{self._prefix}/knock/{number}"):
                life, _, about = knock.decode().partition(" ")
                found[Worker(number, int(life))] = about
        return found

    def processes(self, numbers: Iterable[int]) -> list[Worker]:
        """The last process of each number; nobody before the job has begun."""
        if not self._store.check([f"{self._prefix}/begun"]):
            return []
        lives = {number: look_up(self._store, f"{self._prefix}/life/{number}") for number in numbers}
        return [Worker(number, int(life)) for number, life in lives.items() if life is not None]


def replaced(me: Worker) -> PeerError:
    """What ends the older of two processes of one number."""
    return PeerError(
        f"Rank {me.number} was silent, and has been started again meanwhile. This process, the older one, ends.",
        rank=me.number,
        phase="join",
    )


def forsaken(
    me: Worker, processes: Sequence[Worker], heard: Mapping[Worker, dict[str, Any]], alive: Sequence[Worker]
) -> str | None:
    """Why nobody will take in a worker that waits; None while somebody may.

    Args:
        me: who waits.
        processes: the last one of each number; none before the job has begun.
        heard: what they say.
        alive: those that are not dead.
    """
    if any(worker.number == me.number and worker.life > me.life for worker in processes):
        return str(replaced(me))
    inside = [worker for worker, said in heard.items() if not said["outside"]]
    failed = [worker for worker in inside if (said := heard[worker])["failed"] and said["failed"][0] == said["use"]]
    if not processes or any(worker in alive and worker not in failed for worker in inside):
        return None
    why = "rank {1} has failed: {2}".format(*heard[failed[0]]["failed"]) if failed else "all its members are gone"
    return (
        f"Rank {me.number} waits to be taken in by a job that nobody is in any more: {why}. Start all of it, with a new store"
        " if it has one, from its last checkpoint."
    )
