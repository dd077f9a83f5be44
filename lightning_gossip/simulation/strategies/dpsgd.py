"""D-PSGD under virtual time: every step all workers average with their neighbours (Lian et al. 2017, arXiv 1705.09056).

Nobody waits for all, but everybody for its neighbours. With s_i the beginning of worker i's round, c_i its compute time, and
T_ij the time of a model from j to i, the round ends at

    s_i' = max( s_i + c_i,  max_j ( max(s_i, s_j) + T_ij ) )         overlap: X W − γ G, as in the paper
    s_i' = max_j ( max(s_i + c_i, s_j + c_j) + T_ij )                without: (X − γ G) W

with j the peers of the round, so a delay spreads by one edge a round. What the models become depends on the rounds alone
and not on the times; so one process makes all rounds, in order, and one protocol (:mod:`lightning_gossip.algorithm.dpsgd`)
stands for all workers. A port divides its bandwidth equally among the models of a round; on a bottleneck all models of a
round are taken to be under way at once. The last swap of an epoch over each edge, in which neighbours learn of each other
that they have arrived, is not reckoned; the rounds that a directed graph makes until all know it are, since they average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from lightning_gossip.algorithm.dpsgd import Begin, Complete, NeighbourOptions, RoundsProtocol, StackedCorrection
from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.laws import FloatArray
from lightning_gossip.algorithm.options import EpochEndOptions
from lightning_gossip.algorithm.topology.sequence import TopologySequence
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.simulation.cluster.collective_costs import all_reduce_s, transfer_s
from lightning_gossip.simulation.cluster.node_collectives import at_once_s
from lightning_gossip.simulation.problems.batch_assignment import Task
from lightning_gossip.simulation.run import Process, Run
from lightning_gossip.simulation.strategies.synchronous import Rounds, Synchronous, stall_if_failed, step_times_s

_STATUS = 2  # elements that go with a model, as in the runtime


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class DPSGD(NeighbourOptions, EpochEndOptions, Synchronous):
    """Synchronous averaging with the neighbours; the options of :class:`~lightning_gossip.strategies.DPSGDStrategy`."""

    name = "dpsgd"

    @override
    def rounds(self, run: Run) -> Rounds:
        return NeighbourRounds(self, run)


class Peers(NamedTuple):
    """Who swaps with whom in one round, by worker.

    Args:
        sources: from whom models come, shape (n, most of any); padded by the worker itself.
        received, sent: how many models.
    """

    sources: npt.NDArray[np.intp]
    received: list[int]
    sent: list[int]


class NeighbourRounds(Rounds):
    """All workers' rounds of one run."""

    def __init__(self, strategy: DPSGD, run: Run) -> None:
        sequence = strategy.sequence(run.workers)
        self._run = run
        self._protocol = RoundsProtocol(overlap=strategy.overlap)
        self._correction_of = StackedCorrection(sequence)
        self._correction = run.models.x  # of the models of the round begun last
        self._adopts = strategy.at_rendezvous == "adopt"
        self._sequence = sequence
        self._peers = [_peers(sequence, number) for number in range(len(sequence))]
        self._begun = 0  # rounds of this session
        self._nbytes = run.nbytes + _STATUS * run.models.x.element_size()
        self._clocks_s = self._sent_s = np.zeros(run.workers)
        self._transfers_s = [self._transfer_times(peers, 0.0) for peers in self._peers]

    @override
    def round(self, number: int, tasks: Sequence[Task]) -> Process:
        run = self._run
        starts_s = self._clocks_s
        for rank, task in enumerate(tasks):
            run.models.begin(rank, task.batch)
        computed_s = starts_s + np.array(step_times_s(run, starts_s.tolist()))
        if stall_if_failed(run, computed_s.tolist()):
            return
        if run.links.slowdowns is not None:
            number = self._begun % len(self._peers)
            self._transfers_s[number] = self._transfer_times(self._peers[number], float(starts_s.max()))
        perform(self._protocol.begin_step(), self._do)
        self._clocks_s = computed_s
        if run.models.numel:
            run.models.optimizer.step(slice(None), run.models.gradients(), run.lr)
        perform(self._protocol.step(), self._do)
        yield run.environment.timeout(max(0.0, float(self._clocks_s.max()) - run.environment.now))
        self._write_down(tasks, starts_s, computed_s, self._clocks_s)

    def _do(self, effect: Begin | Complete) -> None:
        """What the protocol asks for, of all workers."""
        x = self._run.models.x
        if isinstance(effect, Begin):
            self._sent_s = self._clocks_s
            if x.numel():  # models, and not times only
                self._correction = self._correction_of(x, number=self._begun)
            self._begun += 1
            return
        sent_s, number = self._sent_s, (self._begun - 1) % len(self._peers)
        arrivals_s = np.maximum(sent_s[:, None], sent_s[self._peers[number].sources]) + self._transfers_s[number]
        self._count(number)
        self._clocks_s = np.maximum(self._clocks_s, arrivals_s.max(axis=1, initial=-np.inf))
        if x.numel():
            x.add_(self._correction)

    @override
    def end_session(self) -> Process:
        run = self._run
        came_s = self._clocks_s
        if not self._sequence.is_symmetric:
            for _ in range(self._sequence.spread):
                self._do(Begin(arrived=True))
                self._do(Complete())
        self._begun = 0
        cost_s = all_reduce_s(run.links, run.living, run.nbytes, at_s=run.environment.now, seed=run.seed)
        yield run.environment.timeout(max(0.0, float(self._clocks_s.max()) + cost_s - run.environment.now))
        for rank, at_s in enumerate(came_s.tolist()):
            run.record.wait(rank, at_s, run.environment.now)
        self._clocks_s = np.full(run.workers, run.environment.now)
        distance = run.distance(run.models.x)
        if self._adopts and run.models.numel:
            run.models.x.copy_(run.models.x.sum(0).div_(run.workers))
        run.end_session(distance)

    def _write_down(self, tasks: Sequence[Task], starts_s: FloatArray, computed_s: FloatArray, ends_s: FloatArray) -> None:
        record = self._run.record
        rows = zip(tasks, starts_s.tolist(), computed_s.tolist(), ends_s.tolist(), strict=True)
        for rank, (task, start_s, stop_s, end_s) in enumerate(rows):
            record.compute(rank, start_s, stop_s)
            record.wait(rank, stop_s, end_s)
            record.event(end_s, "step", rank)
            self._run.count_step(rank, task.size)
        self._run.evaluate_if_due(len(tasks))

    def _count(self, number: int) -> None:
        """The models of a round."""
        peers = self._peers[number]
        for account, received, sent in zip(self._run.record.accounts, peers.received, peers.sent, strict=True):
            account.exchanges += received
            account.bytes_sent += sent * self._nbytes

    def _transfer_times(self, peers: Peers, at_s: float) -> FloatArray:
        """T_ij by worker and source, shape as ``peers.sources``; where padded, less than any time."""
        run = self._run
        times_s = np.full(peers.sources.shape, -np.inf)
        places = [(rank, place) for rank, count in enumerate(peers.received) for place in range(count)]
        if run.links.nodes is not None:
            transfers = [(int(peers.sources[rank, place]), rank) for rank, place in places]
            each_s = at_once_s(run.links, transfers, self._nbytes, at_s=at_s, seed=run.seed)
            for (rank, place), seconds in zip(places, each_s, strict=True):
                times_s[rank, place] = seconds
            return times_s
        known: dict[tuple[int, int], float] = {}  # the same both ways
        for rank, count in enumerate(peers.received):
            for place in range(count):
                source = int(peers.sources[rank, place])
                ends = min(rank, source), max(rank, source)
                if ends not in known:
                    known[ends] = transfer_s(
                        run.links,
                        *ends,
                        self._nbytes,
                        flows=sum(peers.sent),
                        at_s=at_s,
                        seed=run.seed,
                        sharing=max(count, peers.sent[source]),
                    )
                times_s[rank, place] = known[ends]
        return times_s


def _peers(sequence: TopologySequence, number: int) -> Peers:
    ranks = range(sequence.n)
    received = [len(sequence.row(number, rank)) for rank in ranks]
    sources = np.arange(sequence.n)[:, None].repeat(max(received), axis=1)
    for rank in ranks:
        sources[rank, : received[rank]] = [peer for peer, _ in sequence.row(number, rank)]
    return Peers(sources, received, [len(sequence.receivers(number, rank)) for rank in ranks])
