"""Who is in the job, in which order, and the collectives that survive a death (decisions/005)."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_gossip.algorithm.liveness import Verdict
from lightning_gossip.errors import GossipError, PeerError
from lightning_gossip.runtime.board import Worker
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.door import Door
from lightning_gossip.runtime.entrance import Entrance
from lightning_gossip.runtime.kinds import of_one_kind
from lightning_gossip.runtime.rounds import Rounds
from lightning_gossip.runtime.watch import Watch

log = logging.getLogger(__name__)
T = TypeVar("T")

_REST_S = 5.0  # for the others to end their Trainer's work


class Membership:
    """One worker's view, the same on all members after each round.

    Every member calls the same methods in the same order from its training thread. A member that dies is left out of the round
    under way and of all after it; the default process group is then made anew before the call returns.

    Args:
        store: the training thread's connection.
        watch: of this worker; it has a connection of its own.
        prefix: of the keys.
        members: who is expected, in the order of their ranks, this worker among them.
        make_group: makes the default process group: ``(store, rank, world_size)``.
        min_workers: with fewer left the job ends.
        timeout_s: how long a round waits for a worker that is alive, in seconds.

    Attributes:
        members: at present; a worker's place among them is its rank.
        generation: how often the members or their groups have changed.
        changed: called after each change.
        lost: workers that were left out, in that order.
        entrance: where those who come later are taken in.
    """

    def __init__(
        self,
        store: Store,
        watch: Watch,
        prefix: str,
        members: Sequence[Worker],
        *,
        make_group: Callable[[Store, int, int], None],
        min_workers: int,
        timeout_s: float,
    ) -> None:
        self.store = store
        self.watch = watch
        self.members = tuple(members)
        self.generation = 0
        self.changed: list[Callable[[], None]] = []
        self.lost: list[Worker] = []
        self._prefix = prefix
        self._rounds = Rounds(store, watch, prefix, timeout_s)
        self._door = Door(store, prefix)
        self._make_group = make_group
        self._min_workers = min_workers
        self.timeout_s = timeout_s
        self.alone = False  # a worker that is not taken in yet: every collective is its own
        self.entrance = Entrance(self, self._door)

    @property
    def me(self) -> Worker:
        """This worker."""
        return self.watch.me

    @property
    def rank(self) -> int:
        """This worker's place among the members."""
        return self.members.index(self.me)

    def gone(self) -> Callable[[], frozenset[int]]:
        """To be asked later: which of the present members have died since, by their present ranks."""
        present, dead = self.members, Verdict.DEAD

        def gone() -> frozenset[int]:
            return frozenset(
                rank for rank, worker in enumerate(present) if worker not in self.members or self.watch.verdict(worker) is dead
            )

        return gone

    @property
    def round(self) -> int:
        """The number of the next round: the same on all members at the same point."""
        return self._rounds.number

    # -- rounds ------------------------------------------------------------------------------------------------------

    def gather(self, mine: Any, kind: str = "values") -> list[Any]:
        """The values of all members that take part, in the order of their ranks (after the call, if somebody has died).

        Args:
            mine: this worker's.
            kind: what is gathered, the same on all members.

        Raises:
            PeerError: if a worker does not come, has failed, or too few are left.
            ConfigurationError: on all members, if one of them gathers something else.
        """
        if self.alone:
            return [mine]
        members = self.members
        said = self._rounds.hold(members, pickle.dumps((kind, mine)), tidies=self.rank == 0)
        if said is None:
            self._be_excluded()
            return [mine]
        present = [worker for worker, value in zip(members, said, strict=True) if value is not None]
        if len(present) < len(members):
            self._lose([worker for worker in members if worker not in present])
        return of_one_kind([pickle.loads(value) for value in said if value is not None])

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of one rank; that of the first survivor, if that one has died."""
        sender = self.members[source]
        while True:
            values = self.gather(value if self.me == sender else None, "a broadcast")
            if sender in self.members:
                return values[self.members.index(sender)]  # type: ignore[no-any-return]
            sender = self.members[0]

    def attempt(self, collective: Callable[[], T]) -> T:
        """Run collectives on the default group until they have worked for everybody that is left.

        Args:
            collective: may be called again, and then with other members; must leave its inputs as they are.

        Raises:
            PeerError: as :meth:`gather`.
        """
        while True:
            generation = self.generation
            if self.alone:
                return collective()
            worked, result = True, None
            try:
                result = collective()
            except RuntimeError as error:
                if isinstance(error, GossipError):
                    raise
                worked = False
                log.info(
                    "%s: a collective failed, and is repeated by the workers that are left: %s",
                    self.me.spoken,
                    _first_line(error),
                )
            if not worked and dist.is_initialized():
                # only neighbours of a dead worker's hear of its end; those behind them wait for workers that have given up
                dist.destroy_process_group()
            if all(self.gather(worked, "the end of a collective")) and not self.alone:
                return result  # type: ignore[return-value]
            if self.generation == generation:  # nobody has died: a connection broke
                self.generation += 1
                self.make_groups()

    def hello(self) -> None:
        """The first round: whoever has come by then is a member. Makes the default group, unless there is one."""
        expected = self.members
        self.gather(None)
        if self.members == expected and not dist.is_initialized():
            self.make_groups()
        self._door.begin()

    def rest(self) -> None:
        """Watch and be watched no more, for now: the Trainer's work has ended. Waits a little for the others.

        Rank 0, which may hold the store, so leaves it to the others until they have said so too.
        """
        self.watch.rest()
        try:
            key = f"{self._prefix}/resting/{self.generation}/{self._rounds.number}"
            if self.store.add(key, 1) == len(self.members):
                self.store.set(f"{key}/all", "1")
            elif self.rank == 0 and not self.watch.has_failed:
                self.store.wait([f"{key}/all"], timedelta(seconds=_REST_S))
        except dist.DistError as error:
            log.info("%s: ends without having heard that the other workers have ended: %s", self.me.spoken, _first_line(error))

    def _be_excluded(self) -> None:
        """The others have gone on without this worker: it is as if it had come back, under a new name."""
        log.warning(
            "Rank %d was silent for so long that the others went on without it (peer_timeout_s). It asks to be taken in again.",
            self.me.number,
        )
        self.watch.be_reborn(self._door.another_life(self.me))
        self.stay_alone()

    def stay_alone(self) -> None:
        """Be a group of one, until this worker is taken in."""
        self.alone = True
        self.generation += 1
        self.members = (self.me,)
        self.watch.look_at(self.members, outside=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._make_group(PrefixStore(f"{self._prefix}/alone/{self.me}", self.store), 0, 1)
        for call in self.changed:
            call()

    def grow(self, joiners: Sequence[Worker]) -> None:
        """These are members too, at the end of the ranks; the groups are still those of before."""
        self.members = (*self.members, *joiners)
        self.generation += 1
        self.watch.look_at(self.members)

    def take_part(self, members: Sequence[Worker], *, generation: int, round_: int, lost: Sequence[Worker]) -> None:
        """Be a member from a round on; still alone afterwards, if the others have gone on without this worker meanwhile."""
        self.members, self.generation, self.lost = tuple(members), generation, list(lost)
        self._rounds.begin_at(round_)
        self.alone = False
        if self._rounds.is_over:
            self._be_excluded()
        else:
            self.watch.look_at(self.members)
            self.make_groups()

    # -- details -----------------------------------------------------------------------------------------------------

    def _lose(self, absent: list[Worker]) -> None:
        self.lost += absent
        self.members = tuple(worker for worker in self.members if worker not in absent)
        self.generation += 1
        numbers = ", ".join(str(worker.number) for worker in absent)
        self.watch.look_at(self.members)
        log.warning("%s: rank %s is gone; %d workers go on", self.me.spoken, numbers, len(self.members))
        if len(self.members) < self._min_workers:
            raise PeerError(
                f"Rank {numbers} is gone, {len(self.members)} workers are left, and min_workers={self._min_workers}: the job"
                " ends. Resume it from its last checkpoint, or pass a smaller min_workers.",
                rank=absent[0].number,
                phase="membership",
            )
        self.make_groups()

    def make_groups(self) -> None:
        """The default process group of the present members; those who die meanwhile are left out."""
        while True:
            began_s, generation = now_s(), self.generation
            failure: RuntimeError | None = None
            try:
                if dist.is_initialized():
                    dist.destroy_process_group()
                prefix = f"{self._prefix}/group/{generation}"
                self._make_group(PrefixStore(prefix, self.store), self.rank, len(self.members))
            except RuntimeError as error:
                if isinstance(error, GossipError):
                    raise
                failure = error
                log.warning(
                    "%s: the process groups could not be made, and are tried again: %s", self.me.spoken, _first_line(error)
                )
            worked = self.gather(failure is None, "the making of groups")
            if self.generation != generation or self.alone:
                return  # somebody died in this round, and the groups have been made in there
            if all(worked):
                break
            self.generation += 1
        log.debug("%s: process groups of %d workers made in %.3f s", self.me.spoken, len(self.members), now_s() - began_s)
        for call in self.changed:
            call()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


class _Process:
    """What belongs to this process, as its default group does."""

    current: Membership | None = None
    kept: Membership | None = None  # between two Trainers, whose strategies need not be the same


def current() -> Membership | None:
    """The membership behind this process's default group; None while no strategy survives deaths."""
    return _Process.current


def kept() -> Membership | None:
    """The last one, if its group still is the default group."""
    return _Process.kept if dist.is_initialized() else None


def set_current(membership: Membership | None) -> None:
    """Set it; None at the end of a Trainer's work."""
    _Process.current = membership
    _Process.kept = membership or _Process.kept
