"""Who is in the job, in which order, and collectives that survive the failure of a member (decisions/005)."""

from __future__ import annotations

import logging
import pickle
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_gossip.algorithm.failure_detector import Verdict
from lightning_gossip.errors import ConfigurationError, GossipError, PeerError, another_aborted, reason_of
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.membership import uses
from lightning_gossip.runtime.membership.admission import Admission
from lightning_gossip.runtime.membership.collective_errors import may_pass
from lightning_gossip.runtime.membership.join_requests import JoinRequests
from lightning_gossip.runtime.membership.monitor import HeartbeatMonitor
from lightning_gossip.runtime.membership.round_kinds import of_one_kind
from lightning_gossip.runtime.membership.round_store import WorkerId
from lightning_gossip.runtime.membership.rounds import Rounds
from lightning_gossip.runtime.store_client import delete_below
from lightning_gossip.transport.endpoint import Endpoint, unreachable
from lightning_gossip.transport.gloo_group import set_timeout

log = logging.getLogger(__name__)
T = TypeVar("T")

_REST_S = 5.0  # for the others to end their Trainer's work
_USE_BITS = 32  # each use of a Trainer has rounds of its own: whoever has left one early misses none of the next


class _Outcome(NamedTuple):
    """What a member says of its attempt at something that all make together.

    Args:
        reason: why it has failed; None if it has worked.
        may_pass: whether it may work when it is made once more.
    """

    reason: str | None
    may_pass: bool = True


class _Arrival(NamedTuple):
    """What a member says at the beginning of a use of a Trainer.

    Args:
        intact: whether its default group is as it was made, and nothing has ended the use before.
        generation: of its members.
        members: as it knows them.
        endpoint: where its sockets listen, or what is wrong with that; None if it does not say.
    """

    intact: bool
    generation: int
    members: tuple[WorkerId, ...]
    endpoint: Endpoint | ConfigurationError | None


class Membership:
    """The members of the job as one worker knows them; the same on all members after each round.

    Every member calls the same methods in the same order from its training thread. A member that fails is absent in the round
    under way, and so excluded from all after it; the default process group is then made anew before the call returns.

    Args:
        store: the training thread's connection.
        monitor: of this worker; it has a connection of its own.
        prefix: of the keys; another job has another one.
        members: the workers that are expected, in the order of their ranks, this worker among them.
        make_group: makes the default process group: ``(store, rank, world_size)``.
        min_workers: with fewer left the job ends.
        timeout_s: how long a round waits for a worker that is alive, in seconds.
        collective_timeout_s: how long one collective may take in :meth:`attempt`, in seconds; as long as any other if None.
        late: whether the others have begun without this worker, so that it has to be admitted.

    Attributes:
        members: at present; a worker's place among them is its rank.
        generation: how often the members or their groups have changed.
        changed: called after each change.
        excluded: workers that were excluded, in that order.
        outside: whether this worker is no member (any more, or not yet): every collective is then its own.
        admission: admits workers that come later.
    """

    def __init__(
        self,
        store: Store,
        monitor: HeartbeatMonitor,
        prefix: str,
        members: Sequence[WorkerId],
        *,
        make_group: Callable[[Store, int, int], None],
        min_workers: int,
        timeout_s: float,
        collective_timeout_s: float | None = None,
        late: bool = False,
    ) -> None:
        self.store = store
        self.monitor = monitor
        self.members = tuple(members)
        self.generation = 0
        self.changed: list[Callable[[], None]] = []
        self.excluded: list[WorkerId] = []
        self.prefix = prefix
        self._rested = ""  # where this worker was when it was resting last
        self._rounds = Rounds(store, monitor, prefix, timeout_s)
        self._join_requests = JoinRequests(store, prefix)
        self._make_group = make_group
        self._min_workers = min_workers
        self.timeout_s = timeout_s
        self._collective_timeout_s = collective_timeout_s
        self._hurries = False  # whether collectives are made whose workers have all met
        self._late = late
        self._met = False  # whether there has been a first round
        # the default group that was made last; held, its connections would stay when it is destroyed
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._oldest = 0  # generation whose keys may be there
        self.outside = False
        self.admission = Admission(self, self._join_requests)

    @property
    def me(self) -> WorkerId:
        """Identity of this worker."""
        return self.monitor.me

    @property
    def rank(self) -> int:
        """This worker's place among the members."""
        return self.members.index(self.me)

    def failed_ranks(self) -> Callable[[], frozenset[int]]:
        """A function to be called later: which of the present members have failed since, by their present ranks."""
        present, failed = self.members, Verdict.FAILED

        def failed_ranks() -> frozenset[int]:
            return frozenset(
                rank
                for rank, worker in enumerate(present)
                if worker not in self.members or self.monitor.verdict(worker) is failed
            )

        return failed_ranks

    @property
    def round(self) -> int:
        """The number of the next round: the same on all members at the same point."""
        return self._rounds.number

    # -- rounds ------------------------------------------------------------------------------------------------------

    def gather(self, mine: Any, kind: str = "values") -> list[Any]:
        """The values of all members that take part, in the order of their ranks (after the call, if somebody was excluded).

        Args:
            mine: this worker's value.
            kind: what is gathered, the same on all members.

        Raises:
            PeerError: if a worker does not come, has aborted, or too few are left.
            ConfigurationError: on all members, if one of them gathers something else.
        """
        said = self._hold(mine, kind)
        for worker, (_, value) in said.items():
            if isinstance(value, _Outcome) and value.reason is not None:  # its attempt has failed before it came to this round
                raise another_aborted(worker.initial_rank, value.reason, "a collective")
        return of_one_kind(list(said.values()))

    def _hold(self, mine: Any, kind: str) -> dict[WorkerId, tuple[str, Any]]:
        """Hold one round, and exclude absent members; returns each member's kind and value, in the order of their ranks."""
        if self.outside:
            return {self.me: (kind, mine)}
        said = self._hear(mine, kind)
        if said is not None and len(said) < len(self.members):
            self._exclude([worker for worker in self.members if worker not in said])
            self.make_groups()
        return {self.me: (kind, mine)} if said is None else said

    def _outcomes(self, failure: Exception | None, kind: str) -> dict[WorkerId, _Outcome]:
        """How an attempt has ended for each member.

        Raises:
            Exception: this worker's failure, if others are elsewhere: in a round that belongs to the attempt, where they raise.
            ConfigurationError: on all members, if one of them is at another call.
        """
        said = self._hold(_outcome(failure), kind)
        if failure is not None and not all(isinstance(value, _Outcome) for _, value in said.values()):
            raise failure
        return dict(zip(said, of_one_kind(list(said.values())), strict=True))

    def _hear(self, mine: Any, kind: str) -> dict[WorkerId, tuple[str, Any]] | None:
        """Hold one round, with nobody excluded yet; None if this worker itself was absent, and is outside now."""
        members = self.members
        said = self._rounds.hold(members, pickle.dumps((kind, mine)), tidies=self.rank == 0)
        if said is None:
            self._leave()
            return None
        return {worker: pickle.loads(value) for worker, value in zip(members, said, strict=True) if value is not None}

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of one rank; that of the first member left, if that one has failed."""
        sender = self.members[source]
        while True:
            values = self.gather(value if self.me == sender else None, "a broadcast")
            if sender in self.members:
                return values[self.members.index(sender)]  # type: ignore[no-any-return]
            sender = self.members[0]

    def attempt(self, collective: Callable[[], T]) -> T:
        """Run collectives on the default group, of workers that have met, until they have worked for all that are left.

        What fails although no member has failed is tried once more, on new groups. If it fails again, or must (out of memory, a
        bad argument), all workers raise, and new groups are there for whoever catches that.

        Args:
            collective: may be called again, and then with other members; must leave its inputs as they are.

        Raises:
            PeerError: as :meth:`gather`, and if it has failed on other workers only.
            Exception: what the collective has raised on this worker.
        """
        tried = False
        while not self._is_outside():
            generation, result, failure = self.generation, None, None
            try:
                with self._hurrying():
                    result = collective()
            except GossipError:
                raise
            except Exception as error:  # noqa: BLE001 - raised below, or made good
                failure = error
            if failure is not None and dist.is_initialized():
                _let_go(failure)
                # only neighbours of a failed worker hear of its end; those behind them wait for workers that have given up
                dist.destroy_process_group()
            outcomes = self._outcomes(failure, "the end of a collective")
            if self._is_outside():  # since now
                break
            if not _failed(outcomes):
                return result  # type: ignore[return-value]
            if self.generation != generation:  # somebody was excluded
                tried = False
                continue
            ends = tried or not _may_all_pass(outcomes)
            if not ends:
                log.warning("%s: a collective has failed, and is made once more: %s", self.me.spoken, _told(outcomes))
            self.generation += 1
            self.make_groups()
            if ends:
                raise self._failure_of(outcomes, failure)
            tried = True
        return collective()

    def _is_outside(self) -> bool:
        return self.outside

    @contextmanager
    def _hurrying(self) -> Iterator[None]:
        """Shorten the deadline: all have met, so a worker that takes no part now has failed or is frozen."""
        before, self._hurries = self._hurries, True
        self._set_deadline()
        try:
            yield
        finally:
            self._hurries = before
            self._set_deadline()

    def _set_deadline(self) -> None:
        if self._collective_timeout_s is not None and dist.is_initialized():
            set_timeout(self._collective_timeout_s if self._hurries else self.timeout_s)

    def hello(self, use: int = 0, *, aborted: bool = False, endpoint: Endpoint | ConfigurationError | None = None) -> None:
        """Begin a use of a Trainer, with the members that come to it. Makes the default group, if it is not as it was.

        An exception may have ended the use before on this worker, on others, or on all; they may have left it at different
        points, and with different knowledge of who has failed.

        Args:
            use: its number, the same on all workers.
            aborted: whether an exception has ended the use before on this worker.
            endpoint: where this worker's sockets listen, or what is wrong with that.

        Raises:
            ConfigurationError: if the workers cannot reach each other there.
            PeerError: as :meth:`gather`.
        """
        aborted = aborted or self.monitor.has_aborted
        self.monitor.begin_use(use)
        self.monitor.start()
        if self._late:
            self._late = False
            self.stay_outside()
        if self.outside:
            return
        self._rounds.begin_at(use << _USE_BITS)
        self.monitor.observe(self.members)
        intact = not aborted and dist.is_initialized() and (not self._met or self._group() is dist.group.WORLD)
        if not intact and dist.is_initialized():
            dist.destroy_process_group()  # somebody may wait in a collective for this worker, which has left it
        generation = self.generation if self._met else self.generation - 1
        heard = self._hear(_Arrival(intact, generation, self.members, endpoint), "the beginning of a Trainer's work")
        if heard is None:
            return
        said: dict[WorkerId, _Arrival] = dict(zip(heard, of_one_kind(list(heard.values())), strict=True))
        self._check_endpoints({worker: theirs.endpoint for worker, theirs in said.items()}, endpoint)
        # whoever has excluded more workers knows better: nobody that one of those present has excluded is a member
        members = tuple(worker for worker in self.members if all(worker in theirs.members for theirs in said.values()))
        members = tuple(worker for worker in members if worker in said)
        if self.me not in members:
            self._leave()
            return
        generation = max(theirs.generation for theirs in said.values())
        if absent := [worker for worker in self.members if worker not in members]:
            self._exclude(absent)
        views = {theirs.members for theirs in said.values()}
        if absent or len(views) > 1 or not all(theirs.intact for theirs in said.values()):
            self.generation = generation + 1
            self.make_groups()
        self._met = True
        self._group = weakref.ref(dist.group.WORLD) if dist.is_initialized() else lambda: None
        self._join_requests.begin()

    def _check_endpoints(
        self, said: dict[WorkerId, Endpoint | ConfigurationError | None], mine: Endpoint | ConfigurationError | None
    ) -> None:
        if isinstance(mine, ConfigurationError):
            raise mine
        for worker, theirs in said.items():
            if isinstance(theirs, ConfigurationError):
                raise another_aborted(worker.initial_rank, reason_of(theirs), "setup")
        endpoints = {worker.initial_rank: theirs for worker, theirs in said.items() if isinstance(theirs, Endpoint)}
        if wrong := unreachable(endpoints):
            raise ConfigurationError(wrong)

    def rest(self) -> None:
        """Stop heartbeats between two uses of a Trainer.

        Rank 0 waits up to 5 s for the others, because it may hold the store that they still read.
        """
        self.monitor.rest()
        key = f"{self.prefix}/resting/{self.generation}/{self._rounds.number}"
        if key == self._rested:
            return  # nothing has been said since
        self._rested = key
        try:
            if self.store.add(key, 1) == len(self.members):
                self.store.set(f"{key}/all", "1")
            elif self.rank == 0 and not self.monitor.has_aborted:
                self.store.wait([f"{key}/all"], timedelta(seconds=_REST_S))
        except dist.DistError as error:
            log.info("%s: ends without having heard that the other workers have ended: %s", self.me.spoken, _first_line(error))

    def _leave(self) -> None:
        """Go outside as a new incarnation, since the others have excluded this worker."""
        log.warning(
            "Rank %d sent no heartbeat for so long that the others have excluded it (peer_timeout_s). It asks to join again.",
            self.me.initial_rank,
        )
        self.monitor.take_identity(self._join_requests.next_incarnation(self.me))
        self.stay_outside()

    def stay_outside(self) -> None:
        """Be a group of one, until this worker is admitted."""
        self.outside = True
        self.generation += 1
        self.members = (self.me,)
        self.monitor.observe(self.members, outside=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._make_group(PrefixStore(f"{self.prefix}/outside/{self.me}", self.store), 0, 1)
        for call in self.changed:
            call()

    def grow(self, joiners: Sequence[WorkerId]) -> None:
        """Add members at the end of the ranks; the groups are still those of before."""
        self.members = (*self.members, *joiners)
        self.generation += 1
        self.monitor.observe(self.members)

    def take_part(self, members: Sequence[WorkerId], *, generation: int, round_: int, excluded: Sequence[WorkerId]) -> None:
        """Be a member from a round on; still outside afterwards, if the others have excluded this worker meanwhile."""
        self.members, self.generation, self.excluded = tuple(members), generation, list(excluded)
        self._rounds.begin_at(round_)
        uses.adopt(round_ >> _USE_BITS)
        self.monitor.begin_use(round_ >> _USE_BITS)
        self.outside, self._met = False, True
        if self._rounds.is_excluded:
            self._leave()
        else:
            self.monitor.observe(self.members)
            self.make_groups()

    # -- details -----------------------------------------------------------------------------------------------------

    def _exclude(self, absent: list[WorkerId]) -> None:
        self.excluded += absent
        self.members = tuple(worker for worker in self.members if worker not in absent)
        self.generation += 1
        ranks = ", ".join(str(worker.initial_rank) for worker in absent)
        self.monitor.observe(self.members)
        log.warning("%s: rank %s is gone; %d workers go on", self.me.spoken, ranks, len(self.members))
        if len(self.members) < self._min_workers:
            raise PeerError(
                f"Rank {ranks} is gone, {len(self.members)} workers are left, and min_workers={self._min_workers}: the job"
                " ends. Resume it from its last checkpoint, or pass a smaller min_workers"
                " (with on_peer_failure='raise' it is all workers).",
                rank=absent[0].initial_rank,
                phase="membership",
            )

    def make_groups(self) -> None:
        """Make the default process group of the present members; those that fail meanwhile are excluded.

        Raises:
            PeerError: as :meth:`gather`, and if it has failed twice on other workers only.
            Exception: what has made it fail twice on this worker.
        """
        tried = False
        while True:
            began_s, generation, failure = now_s(), self.generation, None
            try:
                if dist.is_initialized():
                    dist.destroy_process_group()
                self._make_group(PrefixStore(self._group_keys(generation), self.store), self.rank, len(self.members))
            except Exception as error:  # noqa: BLE001 - raised below, or made good
                failure = error
                _let_go(error)
            outcomes = self._outcomes(failure, "the making of groups")
            if self.generation != generation or self.outside:
                return  # somebody was excluded in this round, and the groups have been made in there
            if not _failed(outcomes):
                break
            if dist.is_initialized():
                dist.destroy_process_group()
            if tried or not _may_all_pass(outcomes):
                self._forget_groups(generation + 1)
                raise self._failure_of(outcomes, failure)
            log.warning("%s: the process groups could not be made, and are made once more: %s", self.me.spoken, _told(outcomes))
            self.generation += 1
            tried = True
        log.debug("%s: process groups of %d workers made in %.3f s", self.me.spoken, len(self.members), now_s() - began_s)
        if dist.is_initialized():
            self._group = weakref.ref(dist.group.WORLD)
        self._set_deadline()
        self._forget_groups(self.generation)
        for call in self.changed:
            call()

    def _group_keys(self, generation: int) -> str:
        return f"{self.prefix}/group/{generation}"

    def _forget_groups(self, generation: int) -> None:
        """Delete the keys of the groups before a generation, which everybody has left."""
        first, self._oldest = self._oldest, generation
        if self.rank == 0:
            for old in range(first, generation):
                delete_below(self.store, f"{self._group_keys(old)}/")

    def _failure_of(self, outcomes: dict[WorkerId, _Outcome], mine: Exception | None) -> Exception:
        """What ends this worker when an attempt has failed for good: its own failure, or the first of the others'."""
        if mine is not None:
            return mine
        worker, outcome = _failed(outcomes)[0]
        return another_aborted(worker.initial_rank, outcome.reason or "", "a collective")


def _let_go(error: BaseException | None) -> None:
    """Clear what a traceback's frames hold: a group that one of them knows is not closed when it is destroyed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _outcome(failure: Exception | None) -> _Outcome:
    return _Outcome(None) if failure is None else _Outcome(reason_of(failure), may_pass(failure))


def _failed(outcomes: dict[WorkerId, _Outcome]) -> list[tuple[WorkerId, _Outcome]]:
    return [(worker, said) for worker, said in outcomes.items() if said != _Outcome(None)]


def _may_all_pass(outcomes: dict[WorkerId, _Outcome]) -> bool:
    return all(said.may_pass for said in outcomes.values())


def _told(outcomes: dict[WorkerId, _Outcome]) -> str:
    return "; ".join(f"rank {worker.initial_rank}: {said.reason}" for worker, said in _failed(outcomes))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


class _Process:
    """What belongs to this process, as its default group does."""

    current: Membership | None = None
    kept: Membership | None = None  # between two Trainers, whose strategies need not be the same


def current() -> Membership | None:
    """The membership behind this process's default group; None while no strategy survives failures."""
    return _Process.current


def kept(prefix: str) -> Membership | None:
    """The last one, if it is of the job whose keys have this prefix."""
    last = _Process.kept
    return last if last is not None and last.prefix == prefix else None


def set_current(membership: Membership | None) -> None:
    """Set it; None at the end of a Trainer's work."""
    _Process.current = membership
    _Process.kept = membership or _Process.kept
