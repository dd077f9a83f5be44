"""D-PSGD as a Lightning strategy: every step all workers average with their neighbours (arXiv 1705.09056)."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from lightning_gossip.algorithm.dpsgd import Begin, Complete, NeighbourOptions, RoundsProtocol
from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.topology.mixing import MixingWeights
from lightning_gossip.algorithm.topology.options import TopologySpec
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.dpsgd import NeighbourRounds
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.lightning.replicated_processes import ReplicatedProcesses
from lightning_gossip.strategies.report import WorkerReport
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from lightning_gossip.strategies.synchronous import SynchronousAlgorithm
from lightning_gossip.strategies.worker_algorithm import Algorithm, Step
from lightning_gossip.transport.gloo_group import GlooTransport


@clear_arguments
class DPSGDStrategy(DecentralizedStrategy, ReplicatedProcesses):
    """Decentralized Parallel SGD: every step each worker averages its model with its neighbours', by a mixing matrix W.

    Args:
        topology: who averages with whom: a name of :data:`~lightning_gossip.algorithm.TOPOLOGIES`, a
            :class:`~lightning_gossip.algorithm.Topology`, or the edges as pairs of ranks. Or a graph that changes from round to
            round: a name of :data:`~lightning_gossip.algorithm.SEQUENCES`, such as ``"base_2"``, one peer a round and the exact
            mean after a few; or a :class:`~lightning_gossip.algorithm.TopologySequence`.
        weights: of the mixing matrix of a graph, see :func:`~lightning_gossip.algorithm.mixing_matrix`.
        overlap: ``True``: averages the models of before the step while the gradient is computed, X W − γ G, as in the paper;
            ``False``: those of after it, (X − γ G) W, and the workers wait for the exchange.
        options: see :class:`~lightning_gossip.strategies.DecentralizedStrategy`. ``timeout`` bounds the wait for a neighbour.

    Example::

        Trainer(strategy=DPSGDStrategy(topology="torus"), devices=16)
    """

    name = "dpsgd"
    shares_work: ClassVar[bool] = False

    def __init__(
        self,
        *,
        topology: TopologySpec = "ring",
        weights: MixingWeights = "metropolis",
        overlap: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.neighbour_options = NeighbourOptions(topology=topology, weights=weights, overlap=overlap)
        self.topology = self.neighbour_options.topology

    @override
    def check(self, workers: int) -> None:
        self.neighbour_options.check(workers)

    @override
    def algorithm(self, timeline: Timeline) -> Algorithm:
        return NeighbourAveraging(self, timeline)


class NeighbourAveraging(SynchronousAlgorithm):
    """One worker's steps of D-PSGD during one fit.

    Args:
        strategy: whose options.
        timeline: where waits are recorded.
    """

    def __init__(self, strategy: DPSGDStrategy, timeline: Timeline) -> None:
        super().__init__(strategy.root_device, strategy.timeout_s, timeline)
        options = strategy.neighbour_options
        self._sequence = options.sequence(strategy.workers)
        self._protocol = RoundsProtocol(overlap=options.overlap)
        self._transport: GlooTransport | None = None
        self._rounds: NeighbourRounds | None = None

    @property
    @override
    def waited_s(self) -> float:
        return super().waited_s + self._running.waited_s

    @override
    def start(self) -> None:
        super().start()
        self._transport = GlooTransport(self._timeout_s, listens=False)
        self._rounds = NeighbourRounds(self._transport, self._sequence, timeout_s=self._timeout_s, timeline=self._timeline)

    @override
    def open(self, model: SharedModel) -> None:
        super().open(model)
        self._running.open(self._model.tensors, retention=self._model.retention)

    @override
    def begin_step(self) -> None:
        perform(self._protocol.begin_step(), self._do)

    @override
    def step(self, step: Step) -> None:
        perform(self._protocol.step(step.forward_passes), self._do)
        self._sync_requested = self._running.sync_requested

    @override
    def arrive(self) -> None:
        perform(self._protocol.arrive(), self._do)

    @override
    def close(self, *, together: bool) -> None:
        super().close(together=together)
        if self._transport is not None:
            self._transport.close()

    @override
    def complete(self, report: WorkerReport) -> None:
        report.exchanges = self._running.exchanges
        report.bytes_sent = self._running.bytes_sent

    def _do(self, effect: Begin | Complete) -> bool | None:
        if isinstance(effect, Complete):
            return self._running.complete(forward_passes=effect.forward_passes)
        self._running.begin(arrived=effect.arrived, calling=effect.arrived and self._asks_for_sync)
        return None

    @property
    def _running(self) -> NeighbourRounds:
        assert self._rounds is not None, "start() comes first"
        return self._rounds
