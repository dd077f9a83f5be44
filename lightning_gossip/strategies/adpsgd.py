"""AD-PSGD as a Lightning strategy: asynchronous pairwise gossip behind the training thread (arXiv 1710.06952)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from typing_extensions import override

from lightning_gossip.algorithm.adpsgd.local_steps import LocalSteps
from lightning_gossip.algorithm.adpsgd.options import GossipOptions
from lightning_gossip.algorithm.adpsgd.partner_sampler import PartnerChoice, PartnerPicker, Roles
from lightning_gossip.algorithm.adpsgd.peer_selection import ChangingPeers
from lightning_gossip.algorithm.adpsgd.repair import topology_for
from lightning_gossip.algorithm.adpsgd.replica import PublishedModel
from lightning_gossip.algorithm.checks import check_not_negative
from lightning_gossip.algorithm.compression.wires import Wire
from lightning_gossip.algorithm.islands.places import pull_every
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.algorithm.outer import Outer, warnings_of
from lightning_gossip.algorithm.tensors.finite import all_finite
from lightning_gossip.algorithm.tensors.flat import host_copy
from lightning_gossip.algorithm.topology.edge_order import edge_order
from lightning_gossip.algorithm.topology.generators import ring
from lightning_gossip.algorithm.topology.options import TopologySpec
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError, NonFiniteError
from lightning_gossip.runtime.adpsgd.cuda_replica import replica_of
from lightning_gossip.runtime.adpsgd.gossip import Gossip
from lightning_gossip.runtime.adpsgd.nonfinite_guard import GossipCounters, OnNonFinite, Reaction
from lightning_gossip.runtime.clock import Timeline, now_s
from lightning_gossip.runtime.membership.membership import Membership
from lightning_gossip.runtime.store_client import another
from lightning_gossip.runtime.sync_point import SyncPoint
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.lightning.fault_tolerance import JoinerOptimizer, OnPeerFailure, Survival
from lightning_gossip.strategies.lightning.replicated_processes import ReplicatedProcesses
from lightning_gossip.strategies.lightning.sharded_processes import ShardedProcesses
from lightning_gossip.strategies.options import check_nonfinite, seconds_of
from lightning_gossip.strategies.report import WorkerReport
from lightning_gossip.strategies.state.nonfinite import error_of, mean_of_healthy
from lightning_gossip.strategies.state.optimizer_state import OptimizerStates
from lightning_gossip.strategies.state.outer_warnings import (
    say_once,
    warn_of_few_rounds,
    warn_of_slow_exchanges,
    warn_of_statistics,
)
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from lightning_gossip.strategies.worker_algorithm import Algorithm, Step
from lightning_gossip.transport.gloo_group import FOREVER
from lightning_gossip.transport.pairwise_groups import CONNECT_S, REPLY_S, Connections, EdgeTransport

_SEED_STRIDE = 1_000_003


class GossipStrategy(DecentralizedStrategy):
    """Options and partner choice of AD-PSGD, of replicated and sharded models. :class:`ADPSGDStrategy` describes them."""

    has_islands = True

    def __init__(
        self,
        *,
        topology: TopologySpec = "auto",
        roles: Roles = "auto",
        exchanges_per_step: float | None = None,
        local_steps: int | None = None,
        outer: Outer | None = None,
        dense_share: float | None = None,
        a2cid2: bool = False,
        push_every: int = 1,
        exchange_timeout_s: float = 120.0,
        seed: int = 0,
        on_peer_failure: OnPeerFailure = "continue",
        min_workers: int | None = None,
        max_workers: int | None = None,
        peer_timeout_s: float = 30.0,
        joiner_optimizer: JoinerOptimizer = "copy",
        refuse_nonfinite: bool = True,
        on_nonfinite: OnNonFinite = "raise",
        wire: Wire = "float32",
        partner_choice: PartnerChoice = "uniform",
        store: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.survival: Survival = Survival(on_peer_failure, min_workers, max_workers, peer_timeout_s, joiner_optimizer, store)
        self.gossip_options = GossipOptions(
            topology=topology,
            roles=roles,
            exchanges_per_step=exchanges_per_step,  # type: ignore[arg-type]
            push_every=push_every,
            wire=wire,
            partner_choice=partner_choice,
            local_steps=local_steps,
            outer=outer,
            dense_share=dense_share,  # type: ignore[arg-type]
            a2cid2=a2cid2,
        )
        check_not_negative("seed", seed)
        self.refuse_nonfinite, self.on_nonfinite = check_nonfinite(refuse_nonfinite, on_nonfinite)
        self.topology = self.gossip_options.topology
        self.exchanges_per_step = self.gossip_options.exchanges_per_step
        self.outer = self.gossip_options.outer
        self._exchange_timeout_s = seconds_of("exchange_timeout_s", exchange_timeout_s)
        self._seed = seed

    @property
    @override
    def name(self) -> str:
        if self.outer is not None:
            return "noloco"
        if self.is_sharded:
            return "adpsgd_sharded"
        return "adpsgd" if self.island == 1 else "adpsgd_islands"

    @property
    @override
    def collective_timeout_s(self) -> float:
        return min(self._exchange_timeout_s, self.timeout_s)

    @override
    def check(self, workers: int) -> None:
        self.gossip_options.check(workers)
        if self.survival.least > workers:
            raise ConfigurationError(f"min_workers={self.survival.min_workers} is more than the {workers} workers of the job.")

    @override
    def preflight(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        super().preflight(trainer, model)
        if self.gossip_options.dense_share and trainer.max_epochs == -1 and trainer.max_steps == -1:
            raise ConfigurationError(
                f"dense_share={self.gossip_options.dense_share!r} is a share of the run, and max_epochs=-1 gives it no end."
                " Write dense_share=0.0, or give an end."
            )
        if self.outer is not None and self.workers > 1:
            for warning in warnings_of(self.outer):
                say_once("momentum of all", warning)
            warn_of_statistics(model)

    @override
    def algorithm(self, timeline: Timeline) -> Algorithm:
        return GossipAlgorithm(self, timeline, self._exchange_timeout_s)

    def picker(self) -> tuple[Topology, PartnerPicker]:
        """The graph of the present workers, and this one's partners in it."""
        members = self.members
        assert members is not None
        place, gossipers = self.gossipers
        size, index = (1, 0) if self.groups is None else (self.groups.islands.size, self.groups.place.index)
        options = self.gossip_options
        numbers = [worker.initial_rank // size for worker in gossipers]
        topology = topology_for(self.topology, numbers, self.units, options.roles)
        seed = self._seed + _SEED_STRIDE * members.generation  # ranks change, and two of them must not repeat one stream
        choice = options.partner_choice
        return topology, PartnerPicker(topology, place, roles=options.roles, seed=seed, choice=choice, part=index)

    @property
    def gossipers(self) -> tuple[int, Sequence[WorkerId]]:
        """This worker's place among those that it gossips with, and these: all members, or those of its index in islands."""
        members = self.members
        assert members is not None
        if self.groups is None:
            return members.rank, members.members
        islands, index = self.groups.islands, self.groups.place.index
        peers = [worker for worker in members.members if islands.place(worker.initial_rank).index == index]
        return peers.index(members.me), peers


@clear_arguments
class ADPSGDStrategy(GossipStrategy, ReplicatedProcesses):
    """Asynchronous Decentralized Parallel SGD: each worker trains on its own model and averages it, in the background, with a
    random neighbour's.

    Args:
        topology: who averages with whom: ``"auto"`` (a ring below 8 workers, the exponential graph from 8 on), another
            name of :data:`~lightning_gossip.algorithm.TOPOLOGIES`, a :class:`~lightning_gossip.algorithm.Topology`, or the
            edges as pairs of ranks.
        roles: ``"bipartite"`` as in the paper (one side initiates, the other responds), ``"symmetric"`` (everybody does both; a
            busy worker refuses), or ``"auto"``: bipartite where the graph allows it.
        exchanges_per_step: averagings that a worker takes part in per step of its neighbourhood (on a regular
            graph); 0 for none. Default: 1, and 3/``local_steps`` where these are given.
        local_steps: own steps of a round: between two outer steps, and what few exchanges are counted by. Default: 50 with
            ``outer``.
        outer: an :class:`~lightning_gossip.Outer` step at the end of each round of own steps (docs/outer.md); None for none.
        dense_share: share of the run at whose beginning there is an exchange in every step and no outer step. Default: 0.05
            where ``local_steps`` are given, else 0.
        a2cid2: accelerate the averaging by a second copy of the model (arXiv 2306.08289), for slow graphs such as a ring where
            workers have unlike data; not with ``local_steps``.
        push_every: steps between two pushes of this worker's model. Between them a step costs nothing, neighbours see the model
            without its last updates, and theirs come later. For links on which exchanges are rarer than steps.
        exchange_timeout_s: deadline, in seconds, of an answer and of each chunk of a model.
        seed: of the partner choice.
        on_peer_failure: ``"continue"``: a worker whose process ends without a word (killed, machine gone) is excluded, and the
            others go on; ``"raise"``: all end. An exception in a worker's code ends all either way.
        min_workers: with fewer left the job ends, with a PeerError; None: 1, and, where the store is not one of its own, more
            than half of the members if the others may be alive behind a network that is cut (docs/survival.md).
        max_workers: how many may be in the job when workers come later; as many as it began with, if None.
        peer_timeout_s: time without a heartbeat, in seconds, after which a worker has failed although no connection was lost.
        joiner_optimizer: a worker that comes later begins with a ``"copy"`` of another one's optimizer state, or ``"fresh"``.
        refuse_nonfinite: keep NaN and infinities out: an exchange that would bring them into a healthy model is refused and
            counted, and the mean at a synchronisation point is never made with one.
        wire: how a model is sent: ``"float32"`` as it is; ``"int8"`` or ``"int16"`` in a quarter or half of the bytes, as the
            last digits of each element, in a unit that follows the difference of the two models; ``"bfloat16"`` rounded.
            Whatever the rounding, what one end adds the other subtracts.
        partner_choice: ``"uniform"`` among a worker's neighbours, or ``"fast_links"``: with at most a quarter of the exchange
            time on links that are more than twice as slow as the worker's median.
        on_nonfinite: what a worker does whose own model is not finite: ``"raise"`` ends the job with a NonFiniteError;
            ``"adopt"`` makes it go on from a neighbour's model (at a synchronisation point, the mean of the healthy ones) with
            a fresh optimizer state.
        store: ``"tcp://host:port"``, where the workers meet, if it is to outlive rank 0 (``python -m lightning_gossip.store``).
        options: see :class:`~lightning_gossip.strategies.DecentralizedStrategy`.

    Example::

        import lightning_gossip
        trainer = Trainer(strategy="adpsgd", devices=4)                                # a ring; from 8 on exponential
        trainer = Trainer(strategy=ADPSGDStrategy(topology="torus"), devices=16)
        trainer = Trainer(strategy=ADPSGDStrategy(local_steps=50, outer=Outer(), wire="int8"), devices=8)    # = "noloco"
    """


@clear_arguments
class ShardedADPSGDStrategy(GossipStrategy, ShardedProcesses):
    """AD-PSGD between islands of ranks that have one model in shards (FSDP2, tensor parallelism): for models that fit no rank.

    Inside an island this is Lightning's ModelParallelStrategy: the same ``configure_model``, with ``self.device_mesh`` of the
    island. Each rank averages its own shards with those of the same rank in other islands (docs/islands.md).

    Args:
        data_parallel_size: ranks of an island that train on batches of their own; ``"auto"``: those of a node, divided by
            ``tensor_parallel_size``.
        tensor_parallel_size: ranks that compute one batch together.
        save_distributed_checkpoint: each rank of one island writes its shard, into a folder; otherwise one file is written.
        options: of :class:`ADPSGDStrategy`, counted in islands. Every ``start_method`` but ``"popen"`` is refused.

    Example::

        trainer = Trainer(strategy="adpsgd_sharded", devices=8, num_nodes=4)    # 4 islands of 8
        trainer = Trainer(strategy=ShardedADPSGDStrategy(data_parallel_size=2, tensor_parallel_size=4), devices=8, num_nodes=4)
    """


class GossipAlgorithm(Algorithm):
    """AD-PSGD on one worker during one fit: its gossip.

    Args:
        strategy: whose options; asked for ``exchanges_per_step`` at the beginning of each session.
        timeline: where exchanges are recorded.
        timeout_s: the longest deadline of an answer and of each chunk.
    """

    def __init__(self, strategy: GossipStrategy, timeline: Timeline, timeout_s: float) -> None:
        self._strategy = strategy
        self._timeline = timeline
        self._timeout_s = timeout_s
        self._gossip: Gossip | None = None
        self._peers: ChangingPeers[WorkerId] | None = None
        self._counters = GossipCounters()
        self._failed = 0
        self._replica: PublishedModel | None = None
        self._replacements = 0  # of x by a model that the replica was given
        self._model = SharedModel(nn.Module())
        self._layout = 0  # of the replica
        self._session = 0
        self._restored_picker: dict[str, Any] | None = None
        self._topology = ring(1)  # until the members are connected
        self._has_averaged = False  # since this worker has settled
        self._local_steps = LocalSteps(strategy.gossip_options)
        self._is_given = False  # the mean of a synchronisation point is one of other workers' models
        self._restored: dict[str, Tensor] = {}  # outer state of a checkpoint, until the model is known
        self._steps, self._steps_s = 0, 0.0  # of which the time is known
        self._pull_every: int | None = None  # steps, with islands; else the replica decides
        self._since_pull = 0
        self._pulled = False  # in the last step

    @override
    def start(self) -> None:
        transport = self._members.attempt(self._connect)
        assert self._peers is not None
        self._gossip = Gossip(
            transport,
            self._peers,
            timeline=self._timeline,
            counters=self._counters,
            refuse_nonfinite=self._strategy.refuse_nonfinite,
            on_nonfinite=self._reaction,
            wire=self._strategy.gossip_options.wire,
            survives_store=self._members.survives_store,
        )
        self._members.looked.append(self._gossip.look)
        self._gossip.start()

    def _end_gossip(self) -> None:
        if self._gossip is not None:
            if self._gossip.look in self._members.looked:
                self._members.looked.remove(self._gossip.look)
            self._gossip.close()

    @property
    def _reaction(self) -> Reaction:
        """To a model of this rank's that is not finite. An island is ill as a whole, and gets a whole model: where all meet."""
        adopts_together = self._strategy.groups is not None and self._strategy.on_nonfinite == "adopt"
        return "meet" if adopts_together else self._strategy.on_nonfinite

    def _connect(self) -> EdgeTransport:
        """Connect with the present members, and draw partners among them. Collective; new keys each time."""
        members = self._members
        place, gossipers = self._strategy.gossipers
        self._topology, picker = self._strategy.picker()
        topology = self._topology
        if self._restored_picker is not None:
            picker.load_state_dict(self._restored_picker)
        self._session = max(self._session, members.generation << 20)  # the same on all, joiners included
        self._peers = ChangingPeers(
            members.monitor,
            place,
            gossipers,
            topology,
            roles=self._strategy.gossip_options.roles,
            picker=picker,
            ceiling_s=self._timeout_s,
            now_s=now_s,
            connect_s=CONNECT_S,
            reply_s=REPLY_S,
            raises=not self._strategy.survival.survives,
        )
        neighbours = [gossipers[rank] for rank in topology.neighbours(place)]
        members.monitor.watch([*self._mates, *neighbours])
        transport = EdgeTransport(
            Connections(
                training=members.store,
                listener=another(members.store, timeout_s=FOREVER.total_seconds()),
                connector=another(members.store),
                initiator=another(members.store),
            ),
            # a worker outside is its own first member
            f"{self._strategy.keys}/gossip/{gossipers[0]}/{members.generation}/{members.round}",
            rank=place,
            world_size=len(gossipers),
            timeout_s=self._timeout_s,
        )
        transport.make_edges(edge_order(topology, place))
        return transport

    @property
    def _mates(self) -> list[WorkerId]:
        """The other ranks of this one's island."""
        groups, me = self._strategy.groups, self._members.me
        mates = [] if groups is None else groups.islands.mates(me.initial_rank)
        return [worker for worker in self._members.members if worker.initial_rank in mates]

    @override
    def follow_members(self) -> None:
        self._end_gossip()
        if self._peers is not None:
            self._failed += self._peers.failed_exchanges
        self._restored_picker = None  # of the ranks before
        self.start()

    @override
    def open(self, model: SharedModel) -> None:
        before, self._layout = self._layout, model.layout
        self._model = model
        if self._restored:
            self._local_steps.load_tensors(model.part(self._restored))
            self._restored = {}
        self._local_steps.open(model.names[: model.parameters], self._parameters, self._topology)
        if self._replica is None or self._layout != before:
            push_every = 1 if self._strategy.groups is not None else self._strategy.gossip_options.push_every
            self._replica = replica_of(list(self._model.tensors), retention=self._model.retention, push_every=push_every)
            self._replacements = 0
            self._replica.followers = self._local_steps.followers
        else:
            self._replica.followers = self._local_steps.followers
            self._replica.push_pull(self._model.tensors)
        self._session += 1
        self._since_pull = 0
        layout = _with_wire(self._layout, self._strategy.gossip_options.wire)
        self._running.open(self._replica, session=self._session, layout=layout, exchanges_per_step=self._new_rate())

    @override
    def step(self, step: Step) -> None:
        self._count(step)
        replica, was_dense = self._replica, self._local_steps.is_dense
        assert replica is not None
        options = self._strategy.gossip_options
        x = self._parameters if options.outer is not None or options.a2cid2 else []
        with self._watching_health():
            self._local_steps.step(
                x,
                progress=step.progress,
                push_pull=lambda: self._push_pull(step),
                publish=lambda: self._publish(replica),
            )
        if self._running.is_ill and not self._running.sync_requested:
            self._running.request_sync()
        if was_dense and not self._local_steps.is_dense:
            replica.followers = self._local_steps.followers
            self._running.exchanges_per_step = self._new_rate()

    def _push_pull(self, step: Step) -> None:
        self._running.step(
            self._model.tensors, step_s=step.seconds, forward_passes=step.forward_passes, pulls=self._is_to_pull()
        )
        if self._pulled:
            self._model.hand_round()
        self._note_replacement()  # before an outer step

    def _publish(self, replica: PublishedModel) -> None:
        """After an outer step, which each rank of an island has made of its own part."""
        replica.publish(self._model.tensors)
        self._model.hand_round()

    def _is_to_pull(self) -> bool:
        """Whether this is a step at which the ranks of an island pull and hand round: all know it by counting."""
        self._since_pull += 1
        self._pulled = self._pull_every is not None and self._since_pull >= self._pull_every
        if self._pulled:
            self._since_pull = 0
        return self._pulled or self._pull_every is None

    def _note_replacement(self) -> None:
        """After another model has been taken over, momentum is of no use any more."""
        assert self._replica is not None
        if self._replica.replacements != self._replacements:
            self._replacements = self._replica.replacements
            OptimizerStates(self._strategy.optimizers).reset()
            self._local_steps.begin_anew()

    def _count(self, step: Step) -> None:
        if step.seconds is not None:
            self._steps, self._steps_s = self._steps + 1, self._steps_s + step.seconds
        options = self._strategy.gossip_options
        if options.outer is not None and options.local_steps is not None and step.progress:
            warn_of_few_rounds(step.number / step.progress * (1.0 - options.dense_share), options.local_steps)

    def _new_rate(self) -> float:
        """Exchanges per step from now on; ranks of an island pull as often from now on."""
        rate = self._local_steps.rate(self._strategy.exchanges_per_step)
        options = self._strategy.gossip_options
        if self._strategy.groups is not None:  # a second copy moves x at each step
            self._pull_every = 1 if options.a2cid2 else pull_every(rate, options.push_every)
        return rate

    @property
    def _parameters(self) -> list[Tensor]:
        """The parameters that this session averages, looked up now."""
        return list(self._model.tensors[: self._model.parameters])

    @override
    def settle(self) -> None:
        self._has_averaged = False
        with self._watching_health(), self._local_steps.merging(self._parameters):
            self._running.drain(self._model.tensors)

    @contextmanager
    def _watching_health(self) -> Iterator[None]:
        """Say which tensor is not finite, or that another model has been taken over."""
        try:
            yield
        except NonFiniteError as error:
            raise error_of(self._strategy.global_rank, self._model.names, self._model.tensors) from error
        self._note_replacement()

    @override
    def average(self, sync_point: SyncPoint) -> float:
        replica = self._replica
        assert replica is not None
        if self._has_averaged:  # a worker failed in the middle: y is half averaged, and x still is what it was
            replica.push_pull(self._model.tensors, forward_passes=0)
        self._has_averaged = True
        distance = sync_point.average(replica.settle())
        # of a mean that is not finite every worker's distance is not; else a distance that is not has overflowed
        ill = not (math.isfinite(distance) or all_finite(replica.settle()))
        if self._strategy.groups is not None:  # an island is ill if one of its parts is, and all hear of it
            ill = any(sync_point.workers.gather(ill, kind="whose mean is finite"))
        if self._strategy.refuse_nonfinite and ill:
            distance, was_finite = mean_of_healthy(
                sync_point,
                replica,
                self._model.names,
                self._model.tensors,
                self._strategy.on_nonfinite,
                self._strategy.global_rank,
                unit=self._strategy.share_of_work[0],
            )
            if not was_finite:
                self._counters.adopted += 1
                OptimizerStates(self._strategy.optimizers).reset()
                self._is_given = True
        return distance

    @override
    def adopt(self) -> None:
        assert self._replica is not None
        if self._adopts:
            with self._local_steps.adopting(self._parameters):
                self._replica.copy_out(self._model.tensors)
        else:  # to be looked at
            self._replica.copy_out(self._model.tensors)
        if self._is_given:
            self._local_steps.begin_anew()
        self.was_given, self._is_given = self._is_given, False

    @property
    def _adopts(self) -> bool:
        return self._strategy.fit_options.at_rendezvous == "adopt"

    @override
    def close(self, *, together: bool) -> None:
        self._end_gossip()

    @override
    def request_sync(self) -> None:
        self._running.request_sync()

    @override
    def sync_requested(self) -> bool:
        return self._running.sync_requested or self.lost_store

    @property
    @override
    def lost_store(self) -> bool:
        return self._gossip is not None and self._gossip.is_cut_off

    @override
    def complete(self, report: WorkerReport) -> None:
        counters = self._running.counters
        report.exchanges = counters.exchanges
        report.refused = counters.refused
        report.refused_nonfinite = counters.refused_nonfinite
        report.adopted = counters.adopted
        report.bytes_sent = counters.bytes_sent
        report.failed = self._failed + (self._peers.failed_exchanges if self._peers is not None else 0)
        report.describe_staleness(counters.staleness)
        options = self._strategy.gossip_options
        if options.outer is not None and options.local_steps is not None and counters.exchanges and self._steps:
            exchange_s, step_s = counters.exchange_s / counters.exchanges, self._steps_s / self._steps
            warn_of_slow_exchanges(exchange_s, step_s, options.local_steps)

    @override
    def state_dict(self) -> dict[str, Any]:
        assert self._peers is not None
        return {
            "picker": self._peers.picker.state_dict(),
            "staleness": self._counters.staleness.state_dict(),
            "local_steps": self._local_steps.state_dict(),
            "island": self._island_size,
        }

    @property
    def _island_size(self) -> int:
        return 1 if self._strategy.groups is None else self._strategy.groups.islands.size

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counters.staleness.load_state_dict(state["staleness"])
        if state.get("island", 1) != self._island_size:
            return  # it drew among others, and ranks that are mates now may have counted their steps alone
        self._restored_picker = state["picker"]
        if "local_steps" in state:  # an earlier version has written none
            self._local_steps.load_state_dict(state["local_steps"])

    @override
    def common_tensors(self, sync_point: SyncPoint, *, adopts: bool, keeps: Callable[[], bool]) -> dict[str, Tensor]:
        if self._strategy.gossip_options.outer is None:
            return {}  # at all
        state = self._local_steps.state
        part = 0 if self._strategy.groups is None else self._strategy.groups.place.index
        mine = part, None if state is None else state.slow.numel()
        everyones = set(sync_point.workers.gather(mine, kind="the outer state"))
        if state is None or any(numel is None for _, numel in everyones) or len(dict(everyones)) < len(everyones):
            return {}  # no outer steps, or a worker has just come and has none yet
        tensors: dict[str, Tensor] = {}
        for kind, vector in (("slow", state.slow), ("velocity", state.velocity)):

            def mean(vector: Tensor = vector) -> Tensor:
                host = host_copy(vector)
                sync_point.average(host)
                return host

            found = sync_point.workers.attempt(mean)
            if adopts:
                vector.copy_(found)
            if keeps():
                tensors |= state.named(kind, found)
        return self._model.whole(tensors, state.KINDS if keeps() else ())

    @override
    def own_tensors(self) -> dict[str, Tensor]:
        return {} if self._local_steps.state is None else self._local_steps.state.on_host()

    @override
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self._restored = tensors
        self._local_steps.load_tensors(tensors)

    @override
    def begin_anew(self) -> None:
        self._local_steps.begin_anew()

    @property
    def _members(self) -> Membership:
        assert self._strategy.members is not None
        return self._strategy.members

    @property
    def _running(self) -> Gossip:
        assert self._gossip is not None, "start() comes first"
        return self._gossip


def _with_wire(layout: int, wire: Wire) -> int:
    """A fingerprint that workers have in common if they publish the same tensors and write them alike, 63 bits."""
    return layout ^ zlib.crc32(wire.encode())
