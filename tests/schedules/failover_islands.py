"""The loss of the job's store where the workers are the ranks of islands of two, on a host each.

The world is that of :mod:`tests.schedules.failover`. A rank whose island is dead ends as its process does; an island comes back
with both its ranks. Faults hit one rank, or both of an island at once, and part hosts, so islands.

| invariant beside those of failover | checked |
|---|---|
| members are whole islands, after each call | at each call |
| no rank ends with its island, unless something has happened to that, or somebody was silent | when it ends |
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_gossip.algorithm.islands.places import Islands
from lightning_gossip.algorithm.membership.rounds import Survivable
from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.errors import PeerError
from tests.schedules.choices import Choices
from tests.schedules.failover import Hosted, InRounds
from tests.schedules.membership import SHORT_S, Worker
from tests.schedules.violation import Violation, judge


class OfIslands(Hosted):
    """A job of islands of two whose store may be lost, under one schedule."""

    islands = Islands(2)
    survivable = Survivable(None, Islands(2))

    @override
    def _drawn_size(self) -> int:
        return 2 * (2 + self.choices.below(3))

    @override
    def _drawn_faults(self) -> list[tuple[float, str, int, Any]]:
        faults: list[tuple[float, str, int, Any]] = []
        kinds = ["kill", "kill", "restart", "freeze", "abort", "fail", "crash", "agent"]
        if not self.one_host:
            kinds += ["part", "part", "power", "power"]
        for _ in range(self.choices.of((1, 0, 1, 2, 3))):
            kind = self.choices.of(kinds)
            at_s = self.choices.of((1.0, 0.0, 0.3, 2.0, 4.0, 9.0, 15.0))
            whom = self.choices.of((0, self.choices.below(self.n)))
            if kind in ("abort", "fail", "crash"):
                use = self.choices.below(len(self.program))
                how: Any = (use, self.choices.below(len(self.program[use])))
            elif kind == "part":
                side = frozenset(island for island in range(self.n // 2) if self.choices.below(2))
                how = (self.choices.of((0.3, SHORT_S, 5.0, 12.0, 30.0, 200.0)), side)
            else:
                how = self.choices.of((0.3, SHORT_S, 5.0, 12.0, 30.0))
                whom += self.n * self.choices.below(2) * (kind in ("kill", "freeze"))  # all ranks of its island
            faults.append((at_s, kind, whom, how))
        return sorted(faults, key=lambda fault: fault[0])

    # -- who is where ----------------------------------------------------------------------------------------------------

    @override
    def _host_of_rank(self, rank: int) -> int:
        return self.islands.island_of(rank)

    @override
    def _ranks_on(self, host: int) -> frozenset[int]:
        return frozenset(self.islands.rank(host, index) for index in range(self.islands.size))

    def _island(self, worker: Worker) -> list[Worker]:
        """A worker and its mates, as far as they have been started."""
        return [each for each in self.workers if each.host == worker.host]

    @override
    def _sees_end(self, worker: Worker, other: Worker) -> bool:
        return not other.alive and (self.one_host or other.host == worker.host)

    @override
    def _is_undisturbed(self, worker: Worker) -> bool:
        return all(super(OfIslands, self)._is_undisturbed(each) for each in self._island(worker))

    # -- faults ----------------------------------------------------------------------------------------------------------

    @override
    def _strike(self) -> None:
        at_s, kind, whom, how = self.faults[0]
        if kind == "restart" or whom >= self.n:
            self.faults.pop(0)
            ranks = sorted(self._ranks_on(self._host_of_rank(whom % self.n)))
            if kind == "restart":
                self._restart(ranks)
                return
            for rank in ranks:
                self.faults.insert(0, (at_s, kind, rank, how))
                super()._strike()
        else:
            super()._strike()

    def _restart(self, ranks: list[int]) -> None:
        """An island comes back whole, by the address of a member on another host."""
        last = [next(each for each in reversed(self.workers) if each.began_as.initial_rank == rank) for rank in ranks]
        others = [each for each in self.workers if each.alive and each not in self._island(last[0])]
        known = [each for each in others if each.job is not None and each.job[0] in self.servers]
        if any(each.end is not None for each in last) or not any(self._outlives(each.job[0], ranks[0]) for each in known):
            return
        for worker in last:
            if worker.alive:
                self._kill(worker)
        if last[0].host in self.ended_s:
            return  # its host has ended
        for rank in ranks:
            me = WorkerId(rank, self._incarnations(rank) + 1)
            self.workers.append(self._started(me, [me], late=True))

    @override
    def _kill(self, worker: Worker) -> None:
        before_s = self.last_loss_s  # whoever waits longer for something else still does
        super()._kill(worker)
        self.last_loss_s = max(before_s, self.last_loss_s)

    @override
    def _end_with_island(self, worker: Worker) -> None:
        # a mate that has come to the job's end, or has been ended by an error, has ended as well
        there = all(each.alive and each.frozen_s <= SHORT_S and each.end is None for each in self._island(worker))
        if there and not self._is_unclear():
            raise Violation(f"{worker.began_as.spoken} ends with its island, which nothing has happened to")
        self._kill(worker)

    @override
    def _may_end_by(self, error: Exception) -> bool:
        if isinstance(error, PeerError) and error.phase == "quorum" and error.rank is not None:
            # nobody can tell that a mate which was last heard between two uses has ended in its work: then that is all it says
            host = self._host_of_rank(error.rank)
            if any(not each.alive for each in self.workers if each.host == host):
                return True
        return super()._may_end_by(error)

    @override
    def _might_admit(self, member: Worker, outside: Worker) -> bool:
        island_of = self.islands.island_of
        mine = island_of(member.began_as.initial_rank)
        mates = {one for one in member.membership.members if island_of(one.initial_rank) == mine}
        alive = {each.membership.me for each in self.workers if each.alive}
        return mates <= alive and super()._might_admit(member, outside)  # what is left of an island ends, too

    @override
    def _check_agreement(self, worker: Worker, where: tuple[int, int, str], got: Any) -> None:
        super()._check_agreement(worker, where, got)
        if self.islands.incomplete(member.initial_rank for member in worker.membership.members):
            raise Violation(f"{worker.began_as.spoken} goes on with {worker.membership.members}")


class InRoundsOfIslands(InRounds, OfIslands):
    """The same with troubles in the middle of rounds."""


def run(choices: Choices, **replacements: Any) -> OfIslands:
    """Run one schedule; an exception of the product is a violation too."""
    world = OfIslands(choices, **replacements)
    judge(world.run)
    return world


def run_in_rounds(choices: Choices, **replacements: Any) -> InRoundsOfIslands:
    """Run one schedule whose troubles come in the middle of rounds."""
    world = InRoundsOfIslands(choices, **replacements)
    judge(world.run)
    return world
