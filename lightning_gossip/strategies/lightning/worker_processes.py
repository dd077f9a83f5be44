"""The worker processes of a strategy: a DDPStrategy without DDP, or, with islands, with DDP inside each.

Lightning treats its DDPStrategy specially (samplers, launchers, compiled models), so ours is one. It wraps nothing, unless
workers are islands: then the default group is the island's, and Lightning's own wrapping trains on that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.nn import Module
from typing_extensions import override

from lightning_gossip import version
from lightning_gossip.algorithm.checks import check_choice
from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.errors import ConfigurationError, PeerError
from lightning_gossip.runtime import causes, open_files
from lightning_gossip.runtime.group_abort import prepare_nccl
from lightning_gossip.runtime.islands import groups as island_groups
from lightning_gossip.runtime.islands.groups import IslandGroups
from lightning_gossip.runtime.membership import uses
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.process_end import call_at_exit, end_groups_at_exit
from lightning_gossip.runtime.process_groups import (
    default_store,
    make_default_group,
    renew,
    where_collectives_run,
    with_host_backend,
)
from lightning_gossip.runtime.store_client import check_answers, check_port_is_free, connect, meet, uses_agent_store
from lightning_gossip.runtime.workers import FixedWorkers, Workers
from lightning_gossip.strategies.islands.flat_parameters import FlatParameters
from lightning_gossip.strategies.islands.island_model import ReplicatedModel
from lightning_gossip.strategies.lightning import fault_tolerance
from lightning_gossip.strategies.lightning.fault_tolerance import Survival
from lightning_gossip.strategies.lightning.launchers import (
    CheckedMultiProcessingLauncher,
    CheckedSubprocessLauncher,
    PatientObserver,
)
from lightning_gossip.strategies.lightning.validation import check_model, check_plugins, check_trainer
from lightning_gossip.strategies.options import (
    DDP_OPTIONS,
    IslandSize,
    StartMethod,
    check_island,
    refuse_unknown,
    seconds_of,
)
from lightning_gossip.strategies.state.atomic_checkpoint_io import WholeFiles
from lightning_gossip.strategies.state.shared_tensors import SharedModel, start_equal
from lightning_gossip.transport import network_interface
from lightning_gossip.transport.endpoint import Endpoint, advice, endpoint
from lightning_gossip.transport.peer_errors import peer_errors

_STORE_S = 30.0  # that an external store may take to answer
_DEFAULT_TIMEOUT_S = 1800.0  # of torch's process groups


class WorkerProcesses(DDPStrategy):
    """Starts the workers, connects them, and gives them equal models. A single worker has no process group.

    Args:
        start_method: how Lightning starts the workers: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        process_group_backend, timeout: of the default process group, as for DDP. Beside a backend that works on devices only
            there is Gloo for host memory, which makes the average (docs/gpu.md). ``timeout``, in seconds or as a
            timedelta, bounds the wait at a synchronisation point.
        island: ranks that train together as one worker: a number, or ``"node"`` for all of a node. They are a
            DistributedDataParallel group of their own, whose options are accepted then, too (docs/islands.md).
        interface: network interface, as ``"eth0"``, on which this job's sockets listen, and no other; None leaves that to torch
            (docs/security.md).
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for every Lightning strategy.

    Raises:
        ConfigurationError: for a value that cannot work, and for an unknown argument.
    """

    survival: Survival | None = None  # where there is a membership: what happens when a worker fails
    has_islands: ClassVar[bool] = False  # whether a worker may be several ranks

    def __init__(
        self,
        *,
        start_method: StartMethod = "popen",
        island: IslandSize = 1,
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = timedelta(minutes=30),
        interface: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **unknown: Any,
    ) -> None:
        check_island(type(self), island, allowed=self.has_islands)
        of_ddp = {name: unknown.pop(name) for name in DDP_OPTIONS.intersection(unknown)} if island != 1 else {}
        refuse_unknown(type(self), unknown)
        check_choice("start_method", start_method, get_args(StartMethod))
        if island != 1 and start_method != "popen":
            raise ConfigurationError(
                f"start_method={start_method!r} with island={island!r} is not possible yet. Leave it out ('popen'), or start"
                " the ranks with torchrun or srun."
            )
        check_plugins(
            accelerator=accelerator,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=None if timeout is None else timedelta(seconds=seconds_of("timeout", timeout)),
            start_method=start_method,
            **of_ddp,
        )
        self.island = island
        self.groups: IslandGroups | None = None  # of the present use of a Trainer, with islands
        self.interface = interface
        self.launch = 0  # number of the launch that has started these workers, if they are started anew for each fit
        self.flat: FlatParameters | None = None  # of the present fit, with islands
        self._environment: dict[str, str | None] = {}
        self._members: Membership | None = None

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFiles()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def __repr__(self) -> str:
        # Fabric and pytorch_lightning print this when they refuse the object
        return f"<{type(self).__name__}, for the Trainer of lightning.pytorch only>"

    def check(self, workers: int) -> None:
        """Refuse options that do not fit the number of workers.

        Raises:
            ConfigurationError: naming the option.
        """

    @property
    def workers(self) -> int:
        """How many there will be; known before there is a process group."""
        return self.num_nodes * self.num_processes

    @property
    def islands(self) -> Islands | None:
        """How the ranks are islands; None where each is a worker."""
        size = self.num_processes if self.island == "node" else self.island
        return None if size == 1 else Islands(size)

    @property
    def units(self) -> int:
        """How many there will be that gossip: workers, or islands of them."""
        return self.workers if self.islands is None else self.islands.count(self.workers)

    @property
    def share_of_work(self) -> tuple[int, int]:
        """This worker's place among those that share an epoch's batches, and how many these are: workers, or islands."""
        size = 1 if self.islands is None else self.islands.size
        return self.global_rank // size, self.world_size // size

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
        if self.islands is None:
            check_model(model, sync_batchnorm=self._layer_sync is not None)
        else:
            self._warn_of_islands()
        self.check(self.units)
        open_files.check(self.workers, connections=self._store_connections, serves=self._may_serve_store)
        if self.survival is not None and self.survival.store is not None:
            check_answers(self.survival.store, timeout_s=min(_STORE_S, self.timeout_s))
        elif self._starts_workers and self._serves_store and "MASTER_PORT" in os.environ:
            check_port_is_free(int(os.environ["MASTER_PORT"]))

    def _warn_of_islands(self) -> None:
        if self.units == 1:
            rank_zero_warn(
                f"island={self.island!r} makes one island of all {self.workers} ranks, which has nobody to gossip with:"
                " strategy='ddp' does the same. Write a smaller island."
            )
        elif self.survival is not None and self.survival.survives and self.survival.store is None and not uses_agent_store():
            rank_zero_warn(
                "The store of this job is in rank 0. With islands it has no successor: if rank 0's island fails, all end. The"
                " others go on if store='tcp://host:port' names one of its own (python -m lightning_gossip.store)."
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
        """Who is in the job, where that may change."""
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
        assert self.cluster_environment is not None
        launcher: CheckedSubprocessLauncher | CheckedMultiProcessingLauncher
        if self._start_method == "popen":
            launcher = CheckedSubprocessLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            launcher = CheckedMultiProcessingLauncher(self, start_method=self._start_method)
        launcher.preflight = self.preflight
        launcher.survives = self.survival is not None and self.survival.survives
        self._launcher = launcher

    @override
    def setup_distributed(self) -> None:
        if self.interface is not None and self.workers > 1:
            self._environment = self._environment or network_interface.bind(self.interface)
        use, aborted = uses.begin() if self.workers > 1 else (0, False)
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
                super().setup_distributed()
            del served  # now torch's own connection keeps the server
        else:  # plain training: no group
            reset_seed()
            self.set_world_ranks()
        PatientObserver.members = self._members
        if self.workers > 1:
            end_groups_at_exit()
            version.check(self.all_workers.gather(version.mine(), kind="the versions"))

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

    @override
    def _get_process_group_backend(self) -> str:
        return with_host_backend(super()._get_process_group_backend(), self.root_device)

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
        self._take_groups(members)
        members.changed[:] = [self.members_changed]
        members.hello(use, aborted=aborted, endpoint=_endpoint_or_error())
        self.members_changed()

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
            before = island_groups.kept(self.keys)
            if before is None:
                store = connect(None, rank=rank, timeout_s=self.timeout_s, interface=self.interface)
                before = store, IslandGroups(islands, rank, self.timeout_s)
                island_groups.keep(self.keys, *before)
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
        """Make the default group that of the island, if it is not as it was."""
        assert self.groups is not None
        members = self._members
        said = self.all_workers.gather((self.groups.place.island, aborted or not dist.is_initialized()), kind="the islands")
        if any(is_broken for island, is_broken in said if island == self.groups.place.island):
            life = 1 if members is None else members.me.incarnation
            store = PrefixStore(f"{self.keys}/island/{self.groups.place.island}/{life}/{use}", store)
            with peer_errors("connecting the island"):
                if members is not None and members.outside:
                    meet(store, islands.size)  # the others of a job that begins have met already
                self.groups.make_island(store, self._make_group)
            call_at_exit(self.groups.drop_all)

    @property
    def collective_timeout_s(self) -> float:
        """Seconds that one of the algorithm's own collectives may take when all have met, where failures are survived."""
        return self.timeout_s

    @override
    def teardown(self) -> None:
        members = self.members
        if members is not None:
            members.rest()
        network_interface.restore(self._environment)
        self._environment = {}
        super().teardown()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.workers > 1:
            super().setup(trainer)
            if self.islands is not None and trainer.state.fn != TrainerFn.FITTING:
                assert self.model is not None
                start_equal(self.model, self.all_workers)  # DDP has done so inside the island only
        else:
            super(DDPStrategy, self).setup(trainer)  # DDP's would broadcast on a group that does not exist

    @override
    def _setup_model(self, model: Module) -> Module:  # type: ignore[override]
        return model if self.islands is None else super()._setup_model(model)

    @override
    def configure_ddp(self) -> None:
        assert isinstance(self.model, pl.LightningModule)
        start_equal(self.model, self.all_workers)
        if self.islands is not None:
            self.flat = FlatParameters(self.model, self.islands.size)  # before DDP looks at the parameters
            super().configure_ddp()

    def shared_model(self, module: Module, averaged_buffers: Sequence[str]) -> SharedModel:
        """The model of a fit: what of it this rank shares with other workers or islands."""
        if self.islands is None:
            return SharedModel(module, averaged_buffers)
        assert self.groups is not None

        def flat() -> FlatParameters:
            assert self.flat is not None
            return self.flat

        return ReplicatedModel(module, averaged_buffers, flat=flat, place=self.groups.place, size=self.islands.size)


def _endpoint_or_error() -> Endpoint | ConfigurationError:
    try:
        return endpoint()
    except ConfigurationError as error:  # raised when the others have been told, who would wait for this worker
        return error
