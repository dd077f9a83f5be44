"""The training side of AD-PSGD under virtual time: a worker, or an island of ranks that train together (island size k).

With compute times c_r of an island's ranks, of them the backward pass for a share β, an all-reduce inside that takes m, and a
hand-round that takes h at every step at which its ranks pull, a step takes

    max( max_r c_r,  (1 − β) max_r c_r + m ) + h           m = h = 0 for a single worker

All ranks have one model. Each gossips its own k-th part of it with the ranks of its index in other islands, as
:mod:`lightning_gossip.algorithm.islands` says; what the gossip sends and what the island reduces inside are not taken to be in
each other's way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simpy.events import Event

from lightning_gossip.algorithm.step_timer import StepTimer
from lightning_gossip.simulation.cluster.collective_costs import all_reduce_s, hand_round_s
from lightning_gossip.simulation.problems.batch_assignment import Session, Task
from lightning_gossip.simulation.run import Process, Run

if TYPE_CHECKING:
    from lightning_gossip.simulation.strategies.adpsgd import Gossip, Worker


class Island:
    """Ranks that make one step after the other together.

    Args:
        gossip: of the run.
        number: of the island.
        workers: its ranks' gossiping sides, by index.
    """

    def __init__(self, gossip: Gossip, number: int, workers: Sequence[Worker]) -> None:
        self._gossip = gossip
        self._run: Run = gossip.run
        self._number = number
        self._workers = workers
        self._ranks = [worker.rank for worker in workers]
        self._pull_every = gossip.pull_every
        self._since_pull = 0
        self._times = StepTimer()
        run = self._run
        self._reduce_s = all_reduce_s(run.links, self._ranks, run.nbytes, seed=run.seed)
        self._hand_round_s = hand_round_s(run.links, self._ranks, run.nbytes, seed=run.seed)

    def train(self) -> Process:
        """All sessions of the run."""
        run, environment = self._run, self._run.environment
        while True:
            session = self._gossip.session
            self._times.begin(environment.now)
            while (task := session.next(self._number, self._times.median_s)) is not None:
                began_s = environment.now
                parts = task.parts or (task,)
                for rank, part in zip(self._ranks, parts, strict=True):
                    run.models.begin(rank, part.batch)
                computes_s = [run.compute_times[rank].next_s() for rank in self._ranks]
                yield environment.timeout(self._step_s(computes_s))
                run.models.step_together(self._ranks, run.lr)
                for worker in self._workers:
                    worker.follow_step()
                self.hand_round()
                self._write_down(session, parts, began_s, computes_s)
                step_s = self._times.tick(environment.now)
                for worker in self._workers:
                    worker.stepped(step_s)
                run.evaluate_if_due(len(parts))
            yield self._arrive()

    def hand_round(self) -> None:
        """Every rank's x takes over the parts of the others."""
        rows = self._run.models.rows
        for owner in self._workers:
            for rank in self._ranks:
                if rank != owner.rank:
                    rows[rank][owner.part] = rows[owner.rank][owner.part]

    def _step_s(self, computes_s: Sequence[float]) -> float:
        longest_s, begins = max(computes_s), 1.0 - self._run.cluster.backward_share
        self._since_pull += 1
        pulls = self._since_pull >= self._pull_every
        if pulls:
            self._since_pull = 0
        return max(longest_s, begins * longest_s + self._reduce_s) + (self._hand_round_s if pulls else 0.0)

    def _write_down(self, session: Session, parts: Sequence[Task], began_s: float, computes_s: Sequence[float]) -> None:
        run, now_s = self._run, self._run.environment.now
        for rank, compute_s in zip(self._ranks, computes_s, strict=True):
            ended_s = now_s if len(parts) == 1 else began_s + compute_s
            run.record.compute(rank, began_s, ended_s)
            run.record.wait(rank, ended_s, now_s)
            run.record.event(now_s, "step", rank)
        session.stepped(self._number)
        for rank, part in zip(self._ranks, parts, strict=True):
            run.count_step(rank, part.size)

    def _arrive(self) -> Event:
        for rank in self._ranks:
            begins = self._gossip.sync_point.arrive(rank)
        return begins
