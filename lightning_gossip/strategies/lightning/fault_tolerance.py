"""Fault tolerance of a strategy: the options, and the start of the membership."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_gossip import version
from lightning_gossip.algorithm.checks import check_integer
from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.monitor import hosts_key, hosts_of
from lightning_gossip.algorithm.membership.rounds import Survivable
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import now_s
from lightning_gossip.runtime.islands.groups import IslandGroups
from lightning_gossip.runtime.membership import membership
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.membership.monitor import HeartbeatMonitor
from lightning_gossip.runtime.membership.stores import Stores, address_text, ask
from lightning_gossip.runtime.process_end import call_at_exit
from lightning_gossip.runtime.store_client import another, connect, look_up, parse_address, store_errors
from lightning_gossip.strategies.options import check_choice, seconds_of
from lightning_gossip.transport.endpoint import endpoint

log = logging.getLogger(__name__)

OnPeerFailure = Literal["continue", "raise"]
JoinerOptimizer = Literal["copy", "fresh"]
_FIRST_ANSWER_S = 30.0  # of a member's store: it looks the names of its clients up, and its host's network may come up just now
_LOST = 4.0  # times peer_timeout_s: a worker whose network comes back sooner joins again, one that waits longer ends


@dataclass(frozen=True)
class Survival:
    """Options: what happens when a worker fails.

    Args:
        on_peer_failure: ``"continue"``: the others go on without it; ``"raise"``: all end.
        min_workers: with fewer left the job ends; None: 1, and where the network is cut in two, more than half of the members.
        max_workers: workers that may be in the job, those that come later included; None for as many as it began with.
        peer_timeout_s: time without a heartbeat, in seconds, after which a worker has failed although nothing else says so.
        joiner_optimizer: what a worker that comes later begins with: a ``"copy"`` of rank 0's optimizer state, or ``"fresh"``.
        store: where the workers meet, ``tcp://host:port``, if not in rank 0 or torchrun's agent.
    """

    on_peer_failure: OnPeerFailure = "continue"
    min_workers: int | None = None
    max_workers: int | None = None
    peer_timeout_s: float = 30.0
    joiner_optimizer: JoinerOptimizer = "copy"
    store: str | None = None

    def __post_init__(self) -> None:
        check_choice("on_peer_failure", self.on_peer_failure, get_args(OnPeerFailure))
        check_choice("joiner_optimizer", self.joiner_optimizer, get_args(JoinerOptimizer))
        object.__setattr__(self, "peer_timeout_s", seconds_of("peer_timeout_s", self.peer_timeout_s))
        if self.min_workers is not None:
            check_integer("min_workers", self.min_workers, example=2)
        if self.max_workers is not None:
            check_integer("max_workers", self.max_workers, at_least=self.least, example=max(8, self.least))
        if self.store is not None:
            parse_address(self.store)
            if not self.survives:
                raise ConfigurationError("store=... is for on_peer_failure='continue'. Leave it out, or write that.")

    @property
    def least(self) -> int:
        """The fewest workers with which the job goes on."""
        return 1 if self.min_workers is None else self.min_workers

    def most(self, workers: int) -> int:
        """How many workers there may be in a job that began with so many."""
        return workers if self.max_workers is None else max(self.max_workers, workers)

    def of_ranks(self, islands: Islands | None) -> Survival:
        """Options as these are, counted in ranks, where workers are islands of them."""
        if islands is None:
            return self
        least, most = (None if count is None else count * islands.size for count in (self.min_workers, self.max_workers))
        return replace(self, min_workers=least, max_workers=most)

    @property
    def survives(self) -> bool:
        """Whether the job survives the failure of a worker."""
        return self.on_peer_failure == "continue"

    @property
    def survives_store(self) -> bool:
        """Whether it survives the loss of its store, which is in a worker then, and each keeps one in reserve."""
        return self.survives and self.store is None


def begin(
    survival: Survival,
    *,
    keys: str,
    initial_rank: int,
    workers: int,
    make_group: Callable[[Store, int, int], None],
    timeout_s: float,
    collective_timeout_s: float,
    interface: str | None = None,
    groups: IslandGroups | None = None,
) -> Membership:
    """Prepare to meet the other workers of the job, which :meth:`Membership.hello` does, or to join if they have begun.

    Args:
        survival: the options.
        keys: prefix of the job's keys.
        initial_rank: the rank that this worker was started with.
        workers: how many were started together.
        make_group: makes the default process group.
        timeout_s: how long to wait for them.
        collective_timeout_s: how long one of the algorithm's own collectives may take.
        interface: on which a store that this process serves listens.
        groups: what ``make_group`` makes with islands; the default group if None.

    Raises:
        ConfigurationError: if there may not be so many, or this one comes later and is of another version.

    Returns:
        The membership; after the first of its rounds it is ``outside`` if this worker has to join by its
        :meth:`Membership.join`.
    """
    prefix = f"{keys}/members"
    kept = membership.kept(prefix)
    if kept is not None:
        return kept
    if initial_rank >= survival.most(workers):
        raise ConfigurationError(
            f"This worker was started as rank {initial_rank} of a job that began with {workers} workers, and"
            f" max_workers={survival.max_workers}. Pass a max_workers of at least {initial_rank + 1} to all workers."
        )
    islands = None if groups is None else groups.islands
    with store_errors():
        store, stores = _find_store(survival, initial_rank, timeout_s, interface)
        entry = _enter(store, stores, prefix, initial_rank, workers, timeout_s)
    monitor = HeartbeatMonitor(
        entry.second,
        prefix,
        entry.me,
        fail_after_s=survival.peer_timeout_s,
        stores=stores,
        islands=islands,
    )
    monitor.protocol.hosts |= entry.hosts
    members = [entry.me] if entry.late else [WorkerId(rank, 1) for rank in range(workers)]
    made = Membership(
        entry.store,
        monitor,
        prefix,
        members,
        make_group=make_group,
        groups=groups,
        min_workers=survival.least,
        timeout_s=timeout_s,
        collective_timeout_s=collective_timeout_s,
        late=entry.late,
        survivable=Survivable(survival.min_workers, islands) if survival.survives_store else None,
    )
    membership.keep(made)
    monitor.observe(members, outside=entry.late)
    call_at_exit(made.rest)  # a script may let all meet after its last fit: rank 0 does not leave while others still read
    if entry.late:
        log.warning("Rank %d comes later than the others: it will be admitted at the beginning of an epoch.", initial_rank)
    return made


def _find_store(survival: Survival, initial_rank: int, timeout_s: float, interface: str | None) -> tuple[Store, Stores | None]:
    """A connection with the store of the job, which rank 0 may serve from here on.

    Returns:
        The connection, and all stores that this worker knows; None where the job ends with its store.
    """
    connect_first = partial(connect, survival.store, rank=initial_rank, timeout_s=timeout_s, interface=interface)
    if not survival.survives_store:
        return connect_first(lost_s=_LOST * survival.peer_timeout_s), None
    lost_s, first = survival.peer_timeout_s, _first_address()
    # who gives up too soon takes itself for one of the first
    where, others = ask(first, answer_s=_FIRST_ANSWER_S, host_s=min(_FIRST_ANSWER_S, timeout_s))
    if where is None:
        store = connect_first(lost_s=lost_s)
        return store, Stores(first, own_address(), interface=interface, lost_s=lost_s)
    view, address = where
    stores = Stores(address, own_address(), interface=interface, lost_s=lost_s, view=view)
    stores.others = others
    return stores.follow(first, timeout_s=timeout_s), stores


class _Entry(NamedTuple):
    """What a worker knows when the job knows it.

    Attributes:
        me: its identity.
        late: whether the others have begun without it.
        store, second: connections with the store of the job, for the training thread and the failure detector's.
        hosts: addresses of the stores that members keep; of one that comes later.
    """

    me: WorkerId
    late: bool
    store: Store
    second: Store
    hosts: dict[WorkerId, str]


def _enter(store: Store, stores: Stores | None, prefix: str, initial_rank: int, workers: int, timeout_s: float) -> _Entry:
    """Take an identity in the store of the job, and follow the job if that store is lost meanwhile."""
    hosts: dict[WorkerId, str] = {}
    while True:
        try:
            if stores is not None:  # with the first answer, since the store may be lost before the next one
                hosts |= hosts_of(look_up(store, hosts_key(prefix)))
                stores.others = list(hosts.values()) or stores.others
            me, late = _introduced(store, prefix, initial_rank, workers)
            began_s = now_s()
            second = another(store)
            if stores is not None:
                stores.patience.took(now_s() - began_s)
            return _Entry(me, late, store, second, hosts)
        except dist.DistError:  # noqa: PERF203 - a store is lost seldom
            if stores is None or not stores.others:
                raise
            store = stores.follow(_first_address(), timeout_s=timeout_s)


def _first_address() -> str:
    """Where this worker was told that the store is: rank 0's, or that of any member, for one that comes later."""
    return address_text(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _introduced(store: Store, prefix: str, initial_rank: int, workers: int) -> tuple[WorkerId, bool]:
    """The identity of this worker in a store of the job, and whether the others have begun without it."""
    me = WorkerId(initial_rank, store.add(f"{prefix}/incarnation/{initial_rank}", 1))
    late = initial_rank >= workers or me.incarnation > 1 or store.check([f"{prefix}/members"])
    theirs = store.compare_set(f"{prefix}/version", "", version.mine()).decode()
    if late or not version.understands(theirs):  # else all hear of it in the first round
        version.check([theirs, version.mine()], ["the job", f"rank {initial_rank}"])
    return me, late


def own_address() -> str:
    """The address at which others reach this worker."""
    try:
        return endpoint().address
    except ConfigurationError:  # all hear of it when they meet
        return "127.0.0.1"


def keys_of(launch: int) -> str:
    """Prefix of the keys of one job among those that use one store one after the other.

    Args:
        launch: number of the launch, where workers are started anew for each.
    """
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    # an agent that starts its only worker again brings back a member of the same job
    several = os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if several else ""
    return f"lightning_gossip/{run}/{restarts}/{launch}"
