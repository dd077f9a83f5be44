"""The worker processes of a strategy, whatever a model is to them: how they are started, connected and counted.

:mod:`lightning_gossip.strategies.lightning.replicated_processes` puts a whole model into each, on Lightning's DDPStrategy;
:mod:`lightning_gossip.strategies.lightning.sharded_processes` a shard, on its ModelParallelStrategy.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar, Literal, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from torch._C._distributed_c10d import PrefixStore, Store
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gossip import version
from lightning_gossip.algorithm.islands.places import Islands, Place
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import ConfigurationError, PeerError
from lightning_gossip.runtime import causes, open_files
from lightning_gossip.runtime.group_abort import prepare_nccl
from lightning_gossip.runtime.islands import groups
from lightning_gossip.runtime.islands.groups import IslandGroups
from lightning_gossip.runtime.islands.mates import meet_mates
from lightning_gossip.runtime.membership import uses
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.membership.stores import parse
from lightning_gossip.runtime.process_end import call_at_exit, end_groups_at_exit
from lightning_gossip.runtime.process_groups import (
    default_store,
    make_default_group,
    renew,
    where_collectives_run,
    with_host_backend,
)
from lightning_gossip.runtime.store_client import (
    Space,
    check_answers,
    check_port_is_free,
    client,
    connect,
    end_when_lost,
    store_errors,
    uses_agent_store,
)
from lightning_gossip.runtime.workers import FixedWorkers, Workers
from lightning_gossip.strategies.lightning import fault_tolerance
from lightning_gossip.strategies.lightning.fault_tolerance import Survival
from lightning_gossip.strategies.lightning.launchers import (
    CheckedMultiProcessingLauncher,
    CheckedSubprocessLauncher,
    PatientObserver,
)
from lightning_gossip.strategies.lightning.validation import check_nodes_are_equal, check_plugins, check_trainer
from lightning_gossip.strategies.options import IslandSize, refuse_unknown, seconds_of
from lightning_gossip.strategies.state import checkpoint_contents
from lightning_gossip.strategies.state.atomic_checkpoint_io import WritesWholeFiles
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from lightning_gossip.transport import network_interface
from lightning_gossip.transport.endpoint import Endpoint, advice, endpoint
from lightning_gossip.transport.peer_errors import peer_errors

_STORE_S = 30.0  # that an external store may take to answer
_DEFAULT_TIMEOUT_S = 1800.0  # of torch's process groups


@dataclass(frozen=True)
class BatchesOfRank:
    """The batches that an island takes at once, as one of its ranks sees them.

    Args:
        island: how many they are.
        index: which of them is this rank's.
        leads: whether it claims them for the island; None where it is alone in it.
    """

    island: int
    index: int
    leads: bool | None


class WorkerProcesses(WritesWholeFiles, ParallelStrategy):
    """Starts the workers and connects them. A single worker has no process group.

    To be mixed into one of Lightning's strategies, which comes after it among the bases.

    Args:
        of_base: arguments of Lightning's strategy.
        process_group_backend, timeout: of the default process group, as for DDP. Beside a backend that works on devices only
            there is Gloo for host memory, which makes the average (docs/gpu.md). ``timeout``, in seconds or as a
            timedelta, bounds the wait at a synchronisation point.
        interface: network interface, as ``"eth0"``, on which this job's sockets listen, and no other; None leaves that to torch
            (docs/security.md).

    Raises:
        ConfigurationError: for a value that cannot work, and for an unknown argument.
    """

    survival: Survival | None = None  # where there is a membership: what happens when a worker fails
    has_islands: ClassVar[bool] = False  # whether a worker may be several ranks
    is_sharded: ClassVar[bool] = False  # whether no rank has a whole model

    # what every strategy of Lightning's that starts processes has
    num_nodes: int
    num_processes: int
    _process_group_backend: str | None
    _timeout: timedelta | None
    set_world_ranks: Callable[[], None]

    island: IslandSize | Literal["mesh"] = 1  # ranks of a worker, as the user has written it

    def __init__(
        self,
        of_base: Mapping[str, Any],
        *,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = timedelta(minutes=30),
        interface: str | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        if interface is not None and not isinstance(interface, str):
            raise ConfigurationError(f"interface={interface!r} is not the name of one. Write for example interface='eth0'.")
        super().__init__(
            process_group_backend=process_group_backend,  # type: ignore[call-arg]
            timeout=None if timeout is None else timedelta(seconds=seconds_of("timeout", timeout)),
            **of_base,
        )
        self.groups: IslandGroups | None = None  # of the present use of a Trainer, with islands
        self.interface = interface
        self.launch = 0  # number of the launch that has started these workers, if they are started anew for each fit
        self._environment: dict[str, str | None] = {}
        self._members: Membership | None = None

    def __repr__(self) -> str:
        # Fabric and pytorch_lightning print this when they refuse the object
        name = type(self).__name__
        return f"<{name}, for the Trainer of lightning.pytorch; for Fabric write FabricStrategy({name}(...))>"

    def check(self, workers: int) -> None:
        """Refuse options that do not fit the number of workers.

        Raises:
            ConfigurationError: naming the option.
        """

    @property
    def workers(self) -> int:
        """Ranks that the job is started with; known before there is a process group."""
        return self.num_nodes * self.num_processes

    @property
    def islands(self) -> Islands | None:
        """How the ranks are islands; None where each is a worker."""
        return None

    @property
    def units(self) -> int:
        """Members of the gossip graph that the job is started with: ranks, or islands where ranks are grouped."""
        return self.workers if self.islands is None else self.islands.count(self.workers)

    @property
    def share_of_work(self) -> tuple[int, int]:
        """This worker's place among those that share an epoch's batches, and how many these are: workers, or islands."""
        size = 1 if self.islands is None else self.islands.size
        return self.global_rank // size, self.world_size // size

    @property
    def batches_of_rank(self) -> BatchesOfRank:
        """What this rank trains on of what its island takes at once."""
        if self.islands is None:
            return BatchesOfRank(1, 0, None)
        return BatchesOfRank(self.islands.size, self._index_in_island, self._index_in_island == 0)

    @property
    def _index_in_island(self) -> int:
        """This rank's in its island: for good, while its rank changes, and is never 0 while it is outside."""
        assert self.islands is not None
        return (self.islands.place(self.global_rank) if self.groups is None else self.groups.place).index

    @property
    def collectives_device(self) -> torch.device:
        """Where tensors have to be for collectives of all workers."""
        return where_collectives_run(self.root_device) if self.islands is None else torch.device("cpu")

    @property
    def keys(self) -> str:
        """Prefix of the keys of these workers in a store that others may have used before."""
        return fault_tolerance.keys_of(self.launch)

    @property
    def timeout_s(self) -> float:
        """Seconds that a worker waits for another one that computes."""
        return _DEFAULT_TIMEOUT_S if self._timeout is None else self._timeout.total_seconds()

    def preflight(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        """Check everything that can be checked while there is one process only.

        Raises:
            ConfigurationError: naming the value, what is accepted, and what to write instead.
        """
        check_plugins(callbacks=trainer.callbacks, logger=trainer.loggers)  # type: ignore[attr-defined]
        check_trainer(trainer)
        if self.islands is not None and self.units == 1:
            rank_zero_warn(self._said_of_one_island)
        self.check_processes()

    def check_processes(self) -> None:
        """Check what is to be known of the workers while there is one process only.

        Raises:
            ConfigurationError: naming the value, what is accepted, and what to write instead.
        """
        environment = self.cluster_environment
        if environment is not None and environment.creates_processes_externally and "WORLD_SIZE" in os.environ:
            check_nodes_are_equal(self.num_processes, self.num_nodes, started=os.environ["WORLD_SIZE"])
        self.check(self.units)
        open_files.check(self.workers, connections=self._store_connections, serves=self._may_serve_store)
        if self.survival is not None and self.survival.store is not None:
            check_answers(self.survival.store, timeout_s=min(_STORE_S, self.timeout_s))
        elif self._starts_workers and self._serves_store and "MASTER_PORT" in os.environ:
            check_port_is_free(int(os.environ["MASTER_PORT"]))

    @property
    def _said_of_one_island(self) -> str:
        return (
            f"island={self.island!r} makes one island of all {self.workers} ranks, which has nobody to gossip with:"
            " strategy='ddp' does the same. Write a smaller island."
        )

    @property
    def _starts_workers(self) -> bool:
        """Whether this process will start the workers, and has not yet."""
        environment = self.cluster_environment
        return environment is not None and not environment.creates_processes_externally and not dist.is_initialized()

    @property
    def _store_connections(self) -> int:
        return 1 if self.survival is None else open_files.STORE_CONNECTIONS

    @property
    def _may_serve_store(self) -> bool:
        """Whether a worker of this machine may come to hold the store: who survives failures keeps one in reserve."""
        return self._serves_store or (self.survival is not None and self.survival.store is None and self.workers > 1)

    @property
    def _serves_store(self) -> bool:
        """Whether a worker on this machine holds the store."""
        if self.workers == 1 or uses_agent_store() or (self.survival is not None and self.survival.store is not None):
            return False
        return self.cluster_environment is None or self.cluster_environment.node_rank() == 0

    def signal_started_workers(self, signum: Any) -> None:
        """Pass a signal on to the worker processes that this one has started."""
        if self.launcher is not None:
            self.launcher.kill(signum)

    def tell_once(self, error: BaseException) -> None:
        """Let one worker print the traceback of what ends them, if nobody catches it."""
        if self.members is not None or dist.is_initialized():
            store = default_store() if self.members is None else self.members.store
            causes.tell_once(error, store, f"{self.keys}/use/{uses.number()}", self.global_rank)

    # -- ranks that change ---------------------------------------------------------------------------------------------

    @property
    def members(self) -> Membership | None:
        """The job's membership; None with a single worker, and under strategies that survive no failure."""
        return self._members

    @property
    def all_workers(self) -> Workers:
        """The workers of the job, to gather values from and run collectives with."""
        return FixedWorkers(None if self.groups is None else self.groups.group) if self._members is None else self._members

    @property
    @override
    def global_rank(self) -> int:
        members = self.members
        if members is None:
            return int(super().global_rank)
        return (
            max(1, members.me.initial_rank) if members.outside else members.rank
        )  # rank 0 writes, and a worker outside does not

    @property
    @override
    def world_size(self) -> int:
        members = self.members
        if members is None:
            return int(super().world_size)
        return max(self.workers, members.me.initial_rank + 1) if members.outside else len(members.members)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self.members is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def members_changed(self) -> None:
        """Ranks have changed: what Lightning keeps of them follows."""
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # one object for all of Lightning's packages

    @override
    def _configure_launcher(self) -> None:
        launcher = self._new_launcher()
        launcher.preflight = self.preflight
        launcher.survives = self.survival is not None and self.survival.survives
        self._launcher = launcher

    def _new_launcher(self) -> CheckedSubprocessLauncher | CheckedMultiProcessingLauncher:
        assert self.cluster_environment is not None
        return CheckedSubprocessLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_distributed(self) -> None:
        """Connect the workers, and with islands the ranks of each."""
        if self.interface is not None and self.workers > 1:
            self._environment = self._environment or network_interface.bind(self.interface)
        use, aborted = uses.begin() if self.workers > 1 else (0, False)
        causes.forget()
        open_files.raise_limit()
        if self.workers > 1 and uses_agent_store() and os.environ.get("RANK") == "0":
            open_files.warn_of_agent(self.workers, connections=self._store_connections)
        if self.workers > 1 and self.survival is not None:
            self._connect_members(self.survival, use, aborted)
            if self.islands is not None:
                assert self._members is not None
                self._connect_island(self.islands, self._members.store, use, aborted)
        elif self.workers > 1 and self.islands is not None:
            self._connect_islands(self.islands, use, aborted)
        elif self.workers > 1:
            served = self._serve_store()
            with self._naming_the_address(endpoint()), self.all_workers.answering("setup"):
                if dist.is_initialized():
                    self._process_group_backend = self._get_process_group_backend()
                    renew(f"{self.keys}/use/{use}", self._make_group, aborted=aborted)
                self._connect_all()
            del served  # now torch's own connection keeps the server
        else:  # plain training: no group
            reset_seed()
            self.set_world_ranks()
        PatientObserver.members = self._members
        if self.workers > 1:
            end_groups_at_exit()
            version.check(self.all_workers.gather(version.mine(), kind="the versions"))

    @abstractmethod
    def _connect_all(self) -> None:
        """Make the default group that of all workers, where none of them may fail; Lightning's way."""

    @contextmanager
    def _naming_the_address(self, mine: Endpoint) -> Iterator[None]:
        """Where the workers cannot be connected: say so if this one listens where no other host looks."""
        try:
            yield
        except PeerError as error:
            if self.num_nodes == 1 or not mine.is_loopback:
                raise
            raise PeerError(
                f"{error} {advice(self.global_rank, mine)}", phase=error.phase, seconds=error.seconds, timed_out=error.timed_out
            ) from error

    def _serve_store(self) -> Store | None:
        """Begin to serve the store on one interface: torch, which would on all, takes one that this process serves already."""
        environment = self.cluster_environment
        if self.interface is None or dist.is_initialized() or environment is None or environment.global_rank() != 0:
            return None
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        return connect(None, rank=0, timeout_s=self.timeout_s, interface=self.interface)  # torchrun's agent has its own

    def _get_process_group_backend(self) -> str:
        chosen: str = super()._get_process_group_backend()  # type: ignore[misc]
        return with_host_backend(chosen, self.root_device)

    @property
    def _make_group(self) -> Callable[[Store, int, int], None]:
        assert self._process_group_backend is not None
        # with a device torch connects NCCL at once: where failures are survived, in each group that is made after one
        device = None if self.root_device.type == "cpu" or self.survival is not None else self.root_device
        return make_default_group(self._process_group_backend, self.timeout_s, device=device)

    def _connect_members(self, survival: Survival, use: int, aborted: bool) -> None:
        reset_seed()
        self._members = None  # so that the ranks are those that this process was started with
        self.set_world_ranks()
        assert self.cluster_environment is not None
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        self._process_group_backend = self._get_process_group_backend()
        self._environment = {**prepare_nccl(self._process_group_backend), **self._environment}
        rank = int(self.cluster_environment.global_rank())
        if self.islands is not None:
            self.islands.count(self.workers)
            self.groups = self.groups or IslandGroups(self.islands, rank, self.timeout_s)
        self._members = members = fault_tolerance.begin(
            survival.of_ranks(self.islands) if survival.survives else replace(survival, min_workers=self.workers),
            keys=self.keys,
            initial_rank=rank,
            workers=self.workers,
            make_group=self._make_group if self.groups is None else self.groups.make,
            groups=self.groups,
            timeout_s=self.timeout_s,
            collective_timeout_s=self.collective_timeout_s,
            interface=self.interface,
        )
        try:
            if not members.has_met and not members.outside:  # in a later use the store may be lost by now
                with store_errors():
                    self._check_counts(members.store, f"{self.keys}/members")
        except ConfigurationError as error:  # some are counted twice, and others never come: nobody waits for them
            members.monitor.begin_use(use)
            members.monitor.start()
            members.abort(str(error).removesuffix("."))
            raise
        self._take_groups(members)
        members.changed[:] = [self.members_changed]
        members.hello(use, aborted=aborted, endpoint=_endpoint_or_error())
        self.members_changed()

    def _check_counts(self, store: Store, prefix: str) -> None:
        """Refuse what another process counts otherwise, unless the job has begun and this one comes later.

        Args:
            store: of the job.
            prefix: of its members' keys.
        """
        counted = store.compare_set(f"{prefix}/workers", "", str(self.workers)).decode()
        if counted != str(self.workers) and not store.check([f"{prefix}/members"]):
            check_nodes_are_equal(self.num_processes, self.num_nodes, started=counted)

    def _take_groups(self, members: Membership) -> None:
        """With islands, take over the groups of an earlier Trainer of this process, whose membership goes on."""
        self._check_size(members.groups.islands if isinstance(members.groups, IslandGroups) else None)
        if isinstance(members.groups, IslandGroups):
            self.groups = members.groups
            self.groups.members = lambda: [worker.initial_rank for worker in members.members]

    def _connect_islands(self, islands: Islands, use: int, aborted: bool) -> None:
        """Connect all ranks, which end together if one does, and those of the island."""
        reset_seed()
        self.set_world_ranks()
        environment = self.cluster_environment
        assert environment is not None
        islands.count(self.workers)
        rank = int(environment.global_rank())
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        self._process_group_backend = self._get_process_group_backend()
        with self._naming_the_address(endpoint()), self.all_workers.answering("setup"):
            before = groups.kept(self.keys)
            if before is None:
                store = connect(None, rank=rank, timeout_s=self.timeout_s, interface=self.interface)
                self._check_counts(store, self.keys)
                before = store, IslandGroups(islands, rank, self.timeout_s)
                groups.keep(self.keys, *before)
            store, self.groups = before
            self._check_size(self.groups.islands)
            self.groups.members = lambda: range(self.workers)
            self.groups.make(PrefixStore(f"{self.keys}/use/{use}", store), rank, self.workers)
            self._connect_island(islands, store, use, aborted)

    def _check_size(self, before: Islands | None) -> None:
        if before != self.islands:
            raise ConfigurationError(
                f"An earlier Trainer of this process has connected the ranks with island={before.size if before else 1}, and"
                f" island={self.island!r} is another size. Use one size in a script, or start the script anew."
            )

    def _connect_island(self, islands: Islands, store: Store, use: int, aborted: bool) -> None:
        """Make the default group that of the island, if it is not as it was.

        Where members may fail an island has a store of its own, in its first rank: it ends with the island, and the job's may
        end before.
        """
        assert self.groups is not None
        members, place = self._members, self.groups.place
        serves = members is not None and place.index == 0
        served = self.groups.serve_island(fault_tolerance.own_address(), self.interface) if serves else ""
        said = self.all_workers.gather((place, aborted or not dist.is_initialized(), served), kind="the islands")
        if any(is_broken for theirs, is_broken, _ in said if theirs.island == place.island):
            keys = f"{self.keys}/island/{place.island}/{use}"
            with peer_errors("connecting the island"):
                where = next((address for theirs, _, address in said if theirs == Place(place.island, 0)), "")
                if members is not None and members.outside:  # the others of a job that begins have met already
                    keys, where = meet_mates(
                        store,
                        members.prefix,
                        keys,
                        islands,
                        members.me,
                        served,
                        timeout_s=self.timeout_s,
                        check=members.monitor.raise_failure,
                    )
                if members is not None:
                    host, port = parse(where)
                    store = client(host, port, timeout_s=self.timeout_s)
                    assert self.survival is not None
                    end_when_lost(port, self.survival.peer_timeout_s)
                self.groups.make_island(Space(keys, store), self._make_group)
            call_at_exit(self.groups.drop_all)

    @property
    def is_aborted(self) -> bool:
        """Whether an exception has ended the work of this process, and the others do not come any more."""
        return False

    @property
    def collective_timeout_s(self) -> float:
        """Seconds that one of the algorithm's own collectives may take when all have met, where failures are survived."""
        return self.timeout_s

    @abstractmethod
    def start_equal(self) -> None:
        """Copy rank 0's model to all ranks, or that of its island, shard by shard. Collective."""

    @property
    def group_of_part(self) -> dist.ProcessGroup | None:
        """The ranks that have the same part of a model and of optimizer states, those of rank 0's island first."""
        return self.all_workers.group

    @abstractmethod
    def shared_model(self, module: Module, averaged_buffers: Sequence[str]) -> SharedModel:
        """The model of a fit: what of it this rank shares with other workers or islands."""

    @property
    def own_file(self) -> tuple[int, bool]:
        """The rank that names the file of this worker's own state beside a checkpoint, and whether this one writes it."""
        if self.islands is None:
            return self.global_rank, True
        return self.islands.rank(self.islands.island_of(self.global_rank), 0), self._index_in_island == 0

    def own_state(self) -> dict[str, Any]:
        """What this worker has for itself, for a checkpoint: model, optimizers, gradient scaler."""
        assert self.lightning_module is not None
        return checkpoint_contents.own_state(self.lightning_module.trainer)

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on from a state of :meth:`own_state`."""
        assert self.lightning_module is not None
        checkpoint_contents.load_own_state(self.lightning_module.trainer, state)

    @property
    def writers(self) -> tuple[WorkerId, ...]:
        """Who writes checkpoints, and who would in its place if it failed meanwhile; with islands, of another one."""
        if self.members is None:
            return (WorkerId(0, 1),)
        present, islands = self.members.members, self.islands or Islands(1)
        first = islands.island_of(present[0].initial_rank)
        others = [worker for worker in present if islands.island_of(worker.initial_rank) != first]
        return (present[0], *(others[:1] if self.survival is not None and self.survival.survives else []))

    @property
    def writes(self) -> bool:
        """Whether this worker writes checkpoints, or the island of this rank."""
        return self._is_with(self.writers[:1])

    def _is_with(self, writers: Sequence[WorkerId]) -> bool:
        """Whether this is one of these workers, or this rank's island that of one of them."""
        if self.islands is None:
            return self.is_global_zero if self.members is None else self.members.me in writers
        if self.groups is None:  # the only one
            return True
        return self.groups.place.island in [self.islands.island_of(worker.initial_rank) for worker in writers]

    def keeps_states(self, writers: Sequence[WorkerId]) -> bool:
        """Whether this rank needs the optimizers' states, or its part of them, for what these workers write."""
        return self.is_global_zero if self.members is None else self.members.me in writers

    @abstractmethod
    def mean_optimizer_state(self, optimizer: Optimizer, *, keeps: Callable[[], bool]) -> dict[str, Any]:
        """The state of an optimizer, as Lightning writes it, with the means over all workers in it. Collective.

        Args:
            optimizer: of this worker.
            keeps: whether this rank needs it; the others get an empty one. Asked anew when a worker has failed meanwhile.
        """

    @override
    def teardown(self) -> None:
        members = self.members
        if members is not None:
            members.rest()
        network_interface.restore(self._environment)
        self._environment = {}
        super().teardown()


def processes_of(trainer: pl.Trainer) -> WorkerProcesses:
    """The trainer's strategy, which is one of this package's."""
    return cast(WorkerProcesses, trainer.strategy)


def _endpoint_or_error() -> Endpoint | ConfigurationError:
    try:
        return endpoint()
    except ConfigurationError as error:  # raised when the others have been told, who would wait for this worker
        return error
