"""The members of the job as one worker knows them, and collectives that survive the failure of a member (decisions/005, 019).

The protocol is :class:`lightning_gossip.algorithm.membership.membership.Membership`; here are the store, the process groups
and the exceptions.
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from typing_extensions import override

from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.membership import membership as protocol
from lightning_gossip.algorithm.membership.quorum import with_mates
from lightning_gossip.algorithm.membership.rounds import Survivable
from lightning_gossip.algorithm.membership.store import NextStore, Reconnect, Steps, StoreLostError
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import ConfigurationError, GossipError, PeerError, another_aborted, reason_of
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.group_abort import GroupGuard
from lightning_gossip.runtime.membership import uses
from lightning_gossip.runtime.membership.monitor import HeartbeatMonitor
from lightning_gossip.runtime.membership.store_operations import StoreOperations
from lightning_gossip.runtime.membership.stores import parse
from lightning_gossip.runtime.process_groups import DefaultGroup, MemberGroups
from lightning_gossip.runtime.store_client import delete_below, store_errors, store_lost
from lightning_gossip.runtime.workers import WRITTEN, Workers
from lightning_gossip.transport.endpoint import Endpoint, unreachable
from lightning_gossip.transport.gloo_group import set_timeout
from lightning_gossip.transport.peer_errors import may_pass

log = logging.getLogger(__name__)
T = TypeVar("T")


class Membership(Workers):
    """The members of the job as one worker knows them; the same on all members after each round.

    Every member calls the same methods in the same order from its training thread. A member that fails is absent in the round
    under way, and so excluded from all after it; the default process group is then made anew before the call returns.

    Args:
        store: the training thread's connection.
        monitor: of this worker; it has a connection of its own.
        prefix: of the keys; another job has another one.
        members: the workers that are expected, in the order of their ranks, this worker among them.
        make_group: makes the process groups of the members: ``(store, rank, world_size)``.
        groups: what that makes; the default group if None.
        min_workers: with fewer left the job ends.
        timeout_s: how long a round waits for a worker that is alive, in seconds.
        collective_timeout_s: how long one collective may take in :meth:`attempt`, in seconds; as long as any other if None.
        late: whether the others have begun without this worker, so that it has to be admitted.
        survivable: whether the store may be lost; the monitor then knows where others are. None: it outlives all workers.

    Attributes:
        store: the training thread's connection; another one when the store was lost.
        changed: called after each change of the members or their groups.
        looked: called by the failure detector's thread after each look at the others; returns soon.
        groups: of the members.
    """

    def __init__(
        self,
        store: Store,
        monitor: HeartbeatMonitor,
        prefix: str,
        members: Sequence[WorkerId],
        *,
        make_group: Callable[[Store, int, int], None],
        groups: MemberGroups | None = None,
        min_workers: int,
        timeout_s: float,
        collective_timeout_s: float | None = None,
        late: bool = False,
        survivable: Survivable | None = None,
    ) -> None:
        self.store = store
        self.monitor = monitor
        self.prefix = prefix
        self.timeout_s = timeout_s
        self.changed: list[Callable[[], None]] = []
        self._protocol = protocol.Membership(
            prefix,
            members,
            monitor.protocol,
            now_s,
            min_workers=min_workers,
            timeout_s=timeout_s,
            late=late,
            survivable=survivable,
        )
        if survivable is not None:
            monitor.survive(self._protocol.rounds, survivable.least)
        self._make_group = make_group
        self.groups: MemberGroups = DefaultGroup() if groups is None else groups
        self._collective_timeout_s = collective_timeout_s
        self._hurries = False  # whether collectives are made whose workers have all met
        self._attempting = False
        self._connected = 0  # moves from store to store, when the training thread connected last
        self._failures: dict[type, Exception] = {}  # of the last attempt, by its effect
        self._guard = GroupGuard()
        self.looked: list[Callable[[], None]] = [self._guard.look]
        monitor.looked = self._tell_look
        # the groups that were made last; held, their connections would stay when they are destroyed
        self._noted: list[Callable[[], dist.ProcessGroup | None]] = []
        self._operations = StoreOperations(
            store,
            {
                protocol.MakeGroup: self._do_make_group,
                protocol.DropGroup: lambda _: self._drop_group(),
                protocol.AdoptUse: lambda effect: uses.adopt(effect.use),
                protocol.TellChange: lambda _: self._tell_change(),
                protocol.DeleteBelow: lambda effect: delete_below(self.store, effect.prefix),
                NextStore: lambda _: self._go_to_next_store(),
                Reconnect: lambda _: self._reconnect(),
            },
        )

    @property
    def me(self) -> WorkerId:
        """Identity of this worker."""
        return self.monitor.me

    @property
    @override
    def group(self) -> dist.ProcessGroup | None:
        return self.groups.group

    @property
    def members(self) -> tuple[WorkerId, ...]:
        """The present members; a worker's place among them is its rank."""
        return self._protocol.members

    @property
    def rank(self) -> int:
        """This worker's place among the members."""
        return self._protocol.rank

    @property
    def generation(self) -> int:
        """How often the members or their groups have changed."""
        return self._protocol.generation

    @property
    @override
    def excluded(self) -> list[WorkerId]:
        """Workers that were excluded, in that order."""
        return self._protocol.excluded

    @property
    def outside(self) -> bool:
        """Whether this worker is no member (any more, or not yet): every collective is then its own."""
        return self._protocol.outside

    @property
    def has_met(self) -> bool:
        """Whether this worker has met the others, as a member."""
        return bool(self._protocol.rounds.agreed)

    @property
    def moves(self) -> int:
        """How often this worker has gone to another store."""
        return self._protocol.rounds.moves

    @property
    def survives_store(self) -> bool:
        """Whether the job goes on when its store is lost."""
        return self.monitor.stores is not None

    def log_reserve(self) -> Callable[[], Store] | None:
        """How to connect with a store that what must outlive the job's is in, too: of the first member that does not keep that.

        It is of another island, since one that loses a rank ends with all, and on another host if there is one.
        """
        stores, hosts, islands = self.monitor.stores, self.monitor.protocol.hosts, self.monitor.protocol.islands
        if stores is None or self.outside:
            return None
        present = [worker for worker in self.members if worker in hosts]
        holds = {worker for worker in present if (hosts[worker] == stores.address if stores.view else worker.initial_rank == 0)}
        ends = with_mates(holds, present, islands)
        near = {parse(hosts[worker])[0] for worker in ends}
        others = sorted((parse(hosts[worker])[0] in near, worker) for worker in present if worker not in ends)
        return partial(stores.connect_logs, hosts[others[0][1]]) if others else None

    @property
    def round(self) -> int:
        """The number of the next round: the same on all members at the same point."""
        return self._protocol.round

    def failed_ranks(self) -> Callable[[], frozenset[int]]:
        """A function to be called later: which of the present members have failed since, by their present ranks."""
        present = self.members
        ranks = {worker: rank for rank, worker in enumerate(present)}

        def failed_ranks() -> frozenset[int]:
            left = set() if self.members is present else {*present}.difference(self.members)
            return frozenset(ranks[worker] for worker in left | self.monitor.failed() if worker in ranks)

        return failed_ranks

    # -- rounds and attempts -----------------------------------------------------------------------------------------

    @override
    def gather(self, mine: Any, kind: str = "values") -> list[Any]:
        """The values of all members that take part, in the order of their ranks (after the call, if somebody was excluded).

        Args:
            mine: this worker's value; any that can be pickled.
            kind: what is gathered, the same on all members.

        Raises:
            PeerError: if a worker does not come, has aborted, or too few are left.
            ConfigurationError: on all members, if one of them gathers something else.
        """
        return self._perform(self._protocol.gather(mine, kind))

    @override
    def gather_for(self, rank: int, mine: Any, kind: str = "values") -> list[Any]:
        """Gather the values of all members, by rank, for one of them, which alone reads them; the others get an empty list."""
        return self._perform(self._protocol.gather_for(rank, mine, kind))

    @override
    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of one rank; that of the first member left, if that one has failed."""
        sent: T = self._perform(self._protocol.broadcast(value, source))
        return sent

    @override
    def attempt(self, collective: Callable[[], T]) -> T:
        """Run collectives on the default group, of workers that have met, until they have worked for all that are left.

        What fails although no member has failed is tried once more, on new groups. If it fails again, or must (out of memory, a
        bad argument), all workers raise, and new groups are there for whoever catches that.

        An attempt inside another one is part of that: the whole is made again.

        Args:
            collective: may be called again, and then with other members; must leave its inputs as they are.

        Raises:
            PeerError: as :meth:`gather`, and if it has failed on other workers only.
            Exception: what the collective has raised on this worker.
        """
        return self.attempt_and_tell(collective, lambda: None)[0]

    @override
    def attempt_and_tell(self, collective: Callable[[], T], tell: Callable[[], Any]) -> tuple[T, list[Any]]:
        """Run collectives as :meth:`attempt` does, and gather, in the same round, what each member tells when they have worked.

        Returns:
            The result of the collective, and what all have told, by rank.
        """
        if self._attempting:
            return collective(), [tell()]
        result: T | None = None

        def run(_: Any) -> protocol.Outcome:
            nonlocal result
            self._attempting = True
            try:
                with self._hurrying():
                    result = collective()
                    self._guard.check()
            except GossipError:
                raise
            except Exception as error:  # noqa: BLE001 - raised in the end, or made good
                return self._note_failure(protocol.Run, error)
            finally:
                self._attempting = False
            return protocol.Outcome(None, value=tell())

        told = self._perform(self._protocol.attempt(), {protocol.Run: run})
        return result, told  # type: ignore[return-value]

    @override
    def write_by_first(self, collect: Callable[[], T], write: Callable[[T], None]) -> None:
        writer = None
        while writer not in self.members:  # killed while it wrote: the next one does
            writer = self.members[0]
            collected = collect()
            if self.members[0] == writer:  # which may alone have been given all of it
                write(collected)
                self.gather(None, kind=WRITTEN)

    @override
    def answering(self, phase: str) -> AbstractContextManager[None]:
        return nullcontext()  # an attempt looks at torch's own error

    @override
    def raise_failure(self) -> None:
        self.monitor.raise_failure()

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
        if self._collective_timeout_s is not None:
            for group in self.groups.made:
                set_timeout(self._collective_timeout_s if self._hurries else self.timeout_s, group)

    # -- uses of a Trainer -------------------------------------------------------------------------------------------

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
        kept = bool(self.groups.made) and (not self._protocol.met or self._are_noted())
        intact = kept and not aborted and not self._guard.is_aborted

        def check(said: Mapping[WorkerId, Endpoint | ConfigurationError | None]) -> None:
            _check_endpoints(said, endpoint)

        self._perform(self._protocol.hello(use, intact=intact, about=endpoint, check=check))
        if self.groups.made and not self._are_noted():
            self._note_groups()
        self._tell_others()

    def _tell_others(self) -> None:
        stores, hosts = self.monitor.stores, self.monitor.protocol.hosts
        if stores is None:
            return
        try:
            stores.tell_others([hosts[worker] for worker in self.members if worker in hosts and worker != self.me])
        except dist.DistError as error:
            log.info("%s: those that come by its address hear of no other: %s", self.me.spoken, error)

    def rest(self) -> None:
        """Stop heartbeats between two uses of a Trainer.

        Rank 0 waits up to 5 s for the others, because it may hold the store that they still read.
        """
        self.monitor.rest()
        self._guard.join()
        try:
            self._perform(self._protocol.rest())
        except PeerError as error:
            log.info("%s: ends without having heard that the other workers have ended: %s", self.me.spoken, _first_line(error))

    def abort(self, reason: str) -> None:
        """End this use of a Trainer on all members, after an exception of this worker. It has been said when this returns."""
        self.monitor.abort(reason)
        self.monitor.rest()
        self._guard.join()

    # -- joining -----------------------------------------------------------------------------------------------------

    def waiting(self, initial_ranks: Sequence[int]) -> dict[WorkerId, str]:
        """The workers that ask to join with one of these ranks, and what each says of its model and data.

        Those that rank 0 knew of in the last round: the same on all members.
        """
        others = {*self.excluded, *self.members}  # one that was excluded asks again as a new incarnation
        return {
            worker: about
            for worker, about in self._protocol.waiting.items()
            if worker.initial_rank in initial_ranks and worker not in others
        }

    def admit(self, joiners: Sequence[WorkerId], snapshot: Any) -> None:
        """Admit workers that wait, at the end of the ranks. All members call it with the same joiners and snapshot.

        Args:
            joiners: the workers to admit.
            snapshot: state of the training, for them.
        """
        self._perform(self._protocol.admit(joiners, snapshot))

    def refuse(self, worker: WorkerId, reason: str) -> None:
        """Tell a worker that waits that it will not be admitted."""
        self._perform(self._protocol.on_store(lambda: self._protocol.joining.refuse(worker, reason)))

    def close_admission(self) -> None:
        """Admit nobody any more, since the job ends. All members write it down, since each may be killed before.

        A worker that is outside says that its model is its own. It does not raise: the launchers would end the others.
        """
        if not self.outside:
            self._perform(self._protocol.close())
            return
        log.error(
            "Rank %d was excluded (peer_timeout_s) and has not joined the others again before its fit ended: its model is its"
            " own. Take theirs, from their last checkpoint.",
            self.me.initial_rank,
        )

    def open_admission(self) -> None:
        """Admit workers again, since another fit begins. Rank 0 writes it down."""
        if self.rank == 0 and not self.outside:
            self._perform(self._protocol.on_store(self._protocol.joining.open))

    def stay_outside(self) -> None:
        """Be a group of one, until this worker is admitted."""
        self._perform(self._protocol.stay_outside())

    def join(self, timeout_s: float, about: str = "") -> Any:
        """Wait to be admitted, as a member at the end of the ranks; returns the snapshot.

        Args:
            timeout_s: how long to wait while no member sends heartbeats. While one does there is no deadline: workers are
                admitted when an epoch begins, and an epoch lasts as long as it lasts.
            about: this worker's model and data, for the members, who decide whether they fit.

        Raises:
            PeerError: if nobody admits this worker.
            ConfigurationError: if it does not fit.
        """
        return self._perform(self._protocol.join(timeout_s, about))

    def check_admitters(self) -> None:
        """Check that an admitter is left; a joiner calls it until it has the state of the training.

        Raises:
            PeerError: if none of the members that have admitted it is left: then nobody has the model that was trained.
        """
        self._protocol.check_admitters()

    # -- the driver --------------------------------------------------------------------------------------------------

    def _perform(self, steps: Steps[T], others: Mapping[type, Callable[[Any], Any]] | None = None) -> T:
        """Run a protocol.

        Raises:
            PeerError: if the store does not answer.
            Exception: what this worker's attempt has raised.
        """

        def do(effect: Any) -> Any:
            special = (others or {}).get(type(effect))
            if special is not None:
                return special(effect)
            with store_errors(survives=self.survives_store):
                return self._operations(effect)

        try:
            return perform(steps, do, lock=self.monitor.lock, outcomes=(StoreLostError,))
        except protocol.OwnFailureError as own:
            failure = self._failures[own.effect]
        except StoreLostError as error:
            raise store_lost() from error
        finally:
            if not self._attempting:
                self._failures.clear()
        raise failure

    def _go_to_next_store(self) -> None:
        self.monitor.await_next_store(self._protocol.rounds, self._connected)
        self._reconnect()

    def _reconnect(self) -> None:
        stores = self.monitor.stores
        assert stores is not None
        with self.monitor.lock:
            self._connected = self.moves
        try:
            self.store = stores.connect(timeout_s=self.timeout_s)
        except dist.DistError as error:
            log.info("%s: the store cannot be reached: %s", self.me.spoken, error)  # the next operation finds that too
        else:
            self._operations.use(self.store)

    def _do_make_group(self, effect: protocol.MakeGroup) -> protocol.Outcome:
        try:
            self._drop_group()
            # a worker alone asks nobody, so that it needs no store that may be lost
            found = HashStore() if effect.size == 1 else self.store
            self._make_group(PrefixStore(effect.keys, found), effect.rank, effect.size)
        except Exception as error:  # noqa: BLE001 - raised in the end, or made good
            return self._note_failure(protocol.MakeGroup, error)
        if self.groups.made:
            self._note_groups()
        log.debug("%s: a process group of %d workers", self.me.spoken, effect.size)
        return protocol.Outcome(None)

    def _note_groups(self) -> None:
        """The groups are those of the present members, and end when one of them fails, or all end."""
        groups, members = self.groups.made, frozenset(self.members)
        self._noted = [weakref.ref(group) for group in groups]
        self._guard.guard(groups, lambda: self.monitor.has_aborted or not members.isdisjoint(self.monitor.failed()))

    def _are_noted(self) -> bool:
        made = self.groups.made
        return len(made) == len(self._noted) and all(ref() is group for ref, group in zip(self._noted, made, strict=True))

    def _drop_group(self) -> None:
        self._guard.release()
        self.groups.drop()

    def _note_failure(self, effect: type, error: Exception) -> protocol.Outcome:
        self._failures[effect] = error
        _let_go(error)
        return protocol.Outcome(reason_of(error), may_pass(error))

    def _tell_look(self) -> None:
        for call in tuple(self.looked):
            call()

    def _tell_change(self) -> None:
        self._tell_others()
        self._set_deadline()
        for call in self.changed:
            call()


def _check_endpoints(
    said: Mapping[WorkerId, Endpoint | ConfigurationError | None], mine: Endpoint | ConfigurationError | None
) -> None:
    if isinstance(mine, ConfigurationError):
        raise mine
    for worker, theirs in said.items():
        if isinstance(theirs, ConfigurationError):
            raise another_aborted(worker.initial_rank, reason_of(theirs), "setup")
    endpoints = {worker.initial_rank: theirs for worker, theirs in said.items() if isinstance(theirs, Endpoint)}
    if wrong := unreachable(endpoints):
        raise ConfigurationError(wrong)


def _let_go(error: BaseException | None) -> None:
    """Clear what a traceback's frames hold: a group that one of them knows is not closed when it is destroyed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


class _Process:
    """What belongs to this process, as its default group does."""

    kept: Membership | None = None  # between two Trainers, whose strategies need not be the same


def kept(prefix: str) -> Membership | None:
    """The last membership of this process, if it is of the job whose keys have this prefix."""
    last = _Process.kept
    return last if last is not None and last.prefix == prefix else None


def keep(membership: Membership) -> None:
    """Keep a membership for the next Trainer of this process."""
    _Process.kept = membership
