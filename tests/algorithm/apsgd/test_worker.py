"""A worker of the parameter server alone: what it does after each order of events, and n workers whose updates all arrive."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.apsgd.options import EventTrigger
from lightning_gossip.algorithm.apsgd.server import ParameterServer
from lightning_gossip.algorithm.apsgd.worker import Effects, Leave, Measure, Pull, Refused, Served, Take, WorkerProtocol
from lightning_gossip.errors import ConfigurationError

SERVED = Served(version=7, staleness=2, sync_requested=False)
STALE, NOT_FINITE = Served(7, None, False), Served(7, None, False, refused=True)


def done(effects: Effects, *, norm: float = 1.0, served: Served = SERVED) -> list[Any]:
    """All effects, with an update of this norm, of which the server says this."""
    seen: list[Any] = []
    outcome: Any = None
    while True:
        try:
            effect = effects.send(outcome)
        except StopIteration:
            return seen
        seen.append(effect)
        outcome = (norm, 1.0) if isinstance(effect, Measure) else served if isinstance(effect, Pull | Leave) else None


MEASURE, TAKE = Measure(), Take()
ORDERS = [
    # f: a forward pass begins; s: a step of two forward passes; t: one whose update is too small to send; a: arrives
    (None, "fs", [[Pull(0), TAKE], [Pull(2), TAKE]]),
    (None, "ffs", [[Pull(0), TAKE], [], [Pull(2), TAKE]]),
    (None, "fsfsa", [[Pull(0), TAKE], [Pull(2), TAKE], [], [Pull(2), TAKE], [Leave(0)]]),
    (None, "fsafs", [[Pull(0), TAKE], [Pull(2), TAKE], [Leave(0)], [Pull(0), TAKE], [Pull(2), TAKE]]),
    (None, "fa", [[Pull(0), TAKE], [Leave(0)]]),  # it pulled for a step that was not made
    (None, "aa", [[Leave(0)], [Leave(0)]]),  # sessions without a batch
    (0.5, "fs", [[Pull(0), TAKE], [MEASURE, Pull(2), TAKE]]),
    (0.5, "ftts", [[Pull(0), TAKE], [MEASURE], [MEASURE], [MEASURE, Pull(6), TAKE]]),
    (0.5, "ftfa", [[Pull(0), TAKE], [MEASURE], [], [Leave(2)]]),  # what is held back goes when it leaves
    (0.5, "ftafs", [[Pull(0), TAKE], [MEASURE], [Leave(2)], [Pull(0), TAKE], [MEASURE, Pull(2), TAKE]]),
]


@pytest.mark.parametrize(("threshold", "events", "effects"), ORDERS)
def test_each_order_of_events_has_its_effects(threshold: float | None, events: str, effects: list[list[Any]]) -> None:
    worker = WorkerProtocol(EventTrigger.of(threshold))
    told = {
        "f": lambda: done(worker.begin_step()),
        "s": lambda: done(worker.step(2)),
        "t": lambda: done(worker.step(2), norm=0.1),
        "a": lambda: done(worker.arrive()),
    }
    assert [told[event]() for event in events] == effects


@pytest.mark.parametrize("leaves", [False, True])
def test_what_becomes_of_each_update_is_counted_once(leaves: bool) -> None:
    worker = WorkerProtocol(EventTrigger.of(0.5 if leaves else None))
    for served, effects in ((SERVED, []), (STALE, []), (NOT_FINITE, [Refused()])):
        assert done(worker.begin_step(), served=NOT_FINITE)[-1:] in ([TAKE], [])  # there was no update
        if leaves:
            done(worker.step(), norm=0.0)
            assert done(worker.arrive(), served=served) == [Leave(1), *effects]
        else:
            assert done(worker.step(), served=served) == [Pull(1), *effects, TAKE]  # refused before x' is gone
    done(worker.arrive(), served=STALE)
    assert (worker.pushes, worker.dropped, worker.refused) == (3, 1, 1)
    assert worker.staleness.count == 1
    resumed = WorkerProtocol(None)
    resumed.load_state_dict(json.loads(json.dumps(worker.state_dict())))
    assert resumed.state_dict() == worker.state_dict()


def test_a_trigger_is_told_in_three_ways_or_not_at_all() -> None:
    trigger = EventTrigger(threshold=0.1, relative=True)
    assert EventTrigger.of(trigger) is trigger
    assert EventTrigger.of({"threshold": 0.1, "relative": True}) == trigger
    assert EventTrigger.of(0.3) == EventTrigger(threshold=0.3)
    assert EventTrigger.of(None) is None
    with pytest.raises(ConfigurationError, match=r"EventTrigger needs 'threshold'. Write EventTrigger\(threshold="):
        EventTrigger.of({"relative": True})
    with pytest.raises(ConfigurationError, match="EventTrigger has no argument 'level'"):
        EventTrigger.of({"threshold": 0.1, "level": 2})


@given(
    steps=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    threshold=st.sampled_from([None, 0.0, 1.5, 100.0]),
    order=st.randoms(use_true_random=False),
)
def test_with_the_server_s_rule_no_update_is_lost_in_any_order(steps: list[int], threshold: float | None, order: Any) -> None:
    """Each effect is done at once; which worker goes on is drawn."""
    n = len(steps)
    server = ParameterServer(torch.zeros(1, dtype=torch.float64), workers=n, scale=1.0)
    x, pulled = [0.0] * n, [0.0] * n

    def work(rank: int) -> Any:
        worker = WorkerProtocol(EventTrigger.of(threshold))
        for _ in range(steps[rank]):
            yield from do(rank, worker.begin_step())
            x[rank] += 1.0
            yield from do(rank, worker.step())
        yield from do(rank, worker.arrive())

    def do(rank: int, effects: Effects) -> Any:
        outcome: Any = None
        while True:
            try:
                effect = effects.send(outcome)
            except StopIteration:
                return
            yield
            outcome = (x[rank] - pulled[rank], pulled[rank]) if isinstance(effect, Measure) else None
            if isinstance(effect, Pull | Leave):
                update = torch.tensor([x[rank] - pulled[rank]], dtype=torch.float64)
                staleness = server.push(rank, update) if effect.forward_passes else None
                outcome = Served(server.version, staleness, False)
                if isinstance(effect, Leave):
                    server.leave(rank)
                else:
                    server.queue(rank)
                    server.pull(rank)
                    pulled[rank] = float(server.model)
            elif isinstance(effect, Take):
                x[rank] = pulled[rank]

    running = {rank: work(rank) for rank in range(n)}
    while running:
        rank = order.choice(sorted(running))
        if next(running[rank], "ended") == "ended":
            del running[rank]
    assert float(server.model) == sum(steps)
    assert not server.in_flight
