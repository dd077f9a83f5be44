"""The loss of the job's store at the moment in which one worker has acted by a result, and the others have not.

The world is that of :mod:`tests.schedules.failover`. Now and then the first that reads a result runs alone for as long as it
can: until it waits for others, or has acted. Then the store is lost, and that worker, too, if others are left that know the
result by the rule; or the network is cut, with the two on one side.
"""

from __future__ import annotations

import math
from typing import Any

from typing_extensions import override

from lightning_gossip.algorithm.membership.store import Decide
from tests.schedules.choices import Choices
from tests.schedules.failover import PRIMARY, Hosted
from tests.schedules.membership import Thread, Worker
from tests.schedules.violation import judge

_LOSSES = ("kill", "power", "part")


class AsOneActs(Hosted):
    """Troubles come when one worker has acted by a result, as the first."""

    @override
    def __init__(self, choices: Choices, **replacements: Any) -> None:
        self.acts = 0  # results by which somebody has acted
        self.due: list[int] = []  # at which of them the troubles come
        self._alone: Thread | None = None  # that runs, and no other does
        self._actor: Worker | None = None  # that has just acted
        super().__init__(choices, **replacements)

    @override
    def _drawn_faults(self) -> list[tuple[float, str, int, Any]]:
        calls = sum(call != "epoch" for use in self.program for call in use)
        self.due = sorted(self.choices.below(calls) for _ in range(self.choices.of((1, 1, 2))))
        losses = _LOSSES[:1] if self.one_host else _LOSSES
        return [(math.inf, "act", 0, (self.choices.of(losses), self.choices.of((12.0, 5.0, 30.0, 200.0)))) for _ in self.due]

    @property
    def _has_come(self) -> bool:
        return bool(self.due) and self.due[0] <= self.acts

    @override
    def _asked(self, thread: Thread) -> Any:
        effect, outcome = thread.effect, super()._asked(thread)
        if self._has_come and type(effect) is Decide and "/result/" in effect.key and outcome == effect.value:
            self._alone = thread
        return outcome

    @override
    def _check_agreement(self, worker: Worker, where: tuple[int, int, str], got: Any) -> None:
        is_first = where not in self.said
        super()._check_agreement(worker, where, got)
        if is_first and self._has_come:
            self._actor = worker
        self.acts += is_first

    @override
    def _advance(self) -> None:
        if self._actor is not None:
            self._strike()
            self._stale = True
            return
        if self._alone is not None:
            self._look_who_may_run()
            if self._alone in self._enabled:
                self.events += 1
                self._resume(self._alone)
                return
            self._alone = None
        super()._advance()

    @override
    def _strike(self) -> None:
        if self._actor is None:
            super()._strike()
            return
        actor, self._actor, self._alone = self._actor, None, None
        self.due.pop(0)
        fault = self.faults.pop(0)
        losses = self._losses(actor, *fault[3])
        place = self._all_faults.index(fault)
        self._all_faults[place : place + 1] = losses
        for loss in losses:
            self.faults.insert(0, loss)
            super()._strike()

    def _losses(self, actor: Worker, kind: str, length_s: float) -> list[tuple[float, str, int, Any]]:
        """What happens to the store, and to the worker that has acted: unless nobody might be left who knows the result."""
        if actor.job is None:
            return []
        address, me = actor.job[0], actor.began_as.initial_rank
        holder = self._host_of(address)
        if kind == "part":
            return [(self.now_s, "part", me, (length_s, frozenset({holder, actor.host})))]
        of_agent = kind == "kill" and address == PRIMARY and self.agent
        first = (self.now_s, "agent" if of_agent else kind, holder, length_s)
        dead = {me} if of_agent else {holder, me}
        if me == holder and not of_agent:
            return [first]
        members = len(actor.membership.members)
        return [first, (self.now_s, "kill", me, length_s)] if len(dead) <= members // 2 else [first]


def run(choices: Choices, **replacements: Any) -> AsOneActs:
    """Run one schedule; an exception of the product is a violation too."""
    world = AsOneActs(choices, **replacements)
    judge(world.run)
    return world
