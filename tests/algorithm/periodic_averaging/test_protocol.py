"""The protocol of periodic averaging alone: what it answers to each order of events, and n workers that end up together."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.algorithm.periodic_averaging.adaptive_period import AdaptivePeriod
from lightning_gossip.algorithm.periodic_averaging.period import ConstantPeriod, Observation, PeriodState
from lightning_gossip.algorithm.periodic_averaging.protocol import (
    Averaged,
    AveragingOptions,
    AveragingProtocol,
    Begin,
    Complete,
    Correct,
    Effects,
    Replace,
    Show,
)
from lightning_gossip.errors import ConfigurationError


def protocol(*, adopts: bool = True, **options: Any) -> AveragingProtocol:
    return AveragingProtocol(AveragingOptions(**options), adopts=adopts)


AVERAGED, ALL_ARRIVED = Averaged(1.0, 0.1), Averaged(1.0, 0.1, all_arrived=True)


def done(effects: Effects, averaged: Averaged = AVERAGED, *, arrived: Sequence[Averaged] = ()) -> list[Any]:
    """All effects; each Complete comes to ``averaged``, or to the next of ``arrived`` once this worker has arrived."""
    outcomes, seen, outcome = iter(arrived), [], None
    while True:
        try:
            effect = effects.send(outcome)
        except StopIteration:
            return seen
        seen.append(effect)
        outcome = None
        if isinstance(effect, Complete):
            outcome = next(outcomes) if effect.arrived else averaged


def names(effects: list[Any]) -> str:
    return " ".join(type(effect).__name__ for effect in effects)


class Script:
    """Events by letter: s a step; a an arrival with all others, 2 one with two averagings of others to come; m all meet."""

    def __init__(self, worker: AveragingProtocol) -> None:
        self.worker, self.number = worker, 0

    def play(self, event: str) -> str:
        if event == "s":
            self.number += 1
            return names(done(self.worker.step(self.number, epoch=0, progress=None, lr=0.1)))
        if event == "m":
            return names(done(self.worker.meet()))
        others = [AVERAGED] * (2 if event == "2" else 0)
        return names(done(self.worker.arrive(), arrived=[*others, ALL_ARRIVED]))


AT_ONCE = "Begin Complete Replace"
LATER = "Complete Correct"
LAST = "Begin Complete Settle"
OUTER = Outer()
OUTER_AT_ONCE, OUTER_LATER = "Begin Complete OuterStep Replace", "Complete OuterStep Correct"
ORDERS = [
    ({"period": 3}, "ssssss", ["", "", AT_ONCE, "", "", AT_ONCE]),
    ({"period": 1}, "ss", [AT_ONCE, AT_ONCE]),
    ({"period": 1, "optimizer_state": "reset"}, "s", [f"{AT_ONCE} ResetOptimizer"]),
    ({"period": 3, "overlap": 0}, "sss", ["", "", AT_ONCE]),
    ({"period": 3, "overlap": 1}, "sssss", ["", "", "Begin", LATER, ""]),
    # due in the step that asks for the next, and due later than that
    ({"period": 2, "overlap": 2}, "ssssss", ["", "Begin", "", f"{LATER} Begin", "", f"{LATER} Begin"]),
    ({"period": 2, "overlap": 5}, "ssss", ["", "Begin", "", f"{LATER} Begin"]),
    ({"period": 2, "overlap": True}, "sssss", ["", "Begin", "", f"{LATER} Begin", ""]),
    # an averaging is under way when the worker arrives, in the step that began it and later
    ({"period": 2, "overlap": 1}, "ssam", ["", "Begin", f"{LATER} {LAST}", "Replace"]),
    ({"period": 2, "overlap": True}, "sssam", ["", "Begin", "", f"{LATER} {LAST}", "Replace"]),
    # nothing is left under way for the next session, whose stretch begins anew only where the mean is adopted
    ({"period": 2, "overlap": 1}, "sssamsss", ["", "Begin", LATER, LAST, "Replace", "", "Begin", LATER]),
    ({"period": 3}, "ssamss", ["", "", LAST, "Replace", "", ""]),
    ({"period": 3, "adopts": False}, "ssamss", ["", "", LAST, "Show", AT_ONCE, ""]),
    ({"period": 3, "optimizer_state": "reset"}, "am", [LAST, "Replace ResetOptimizer"]),
    # the others average twice more
    ({"period": 3}, "s2m", ["", f"{AT_ONCE} {AT_ONCE} {LAST}", "Replace"]),
    ({"period": 1, "overlap": 1}, "s2", ["Begin", f"{LATER} {AT_ONCE} {AT_ONCE} {LAST}"]),
    # and cut the stretch under way, even if the mean at the end is not adopted
    ({"period": 3, "adopts": False}, "ss2msss", ["", "", f"{AT_ONCE} {AT_ONCE} {LAST}", "Show", "", "", AT_ONCE]),
    ({"period": 3}, "amam", [LAST, "Replace"] * 2),  # a session without a batch
    # an outer step after each averaging but that of the meeting, which does not cut the round under way
    ({"period": 2, "outer": OUTER}, "ssss", ["", OUTER_AT_ONCE, "", OUTER_AT_ONCE]),
    ({"period": 3, "outer": OUTER}, "ssams", ["", "", LAST, "Replace", OUTER_AT_ONCE]),
    ({"period": 3, "outer": OUTER, "adopts": False}, "ssams", ["", "", LAST, "Show", OUTER_AT_ONCE]),
    ({"period": 2, "outer": OUTER, "overlap": 1}, "sss", ["", "Begin", OUTER_LATER]),
    ({"period": 2, "outer": OUTER, "overlap": True}, "sssam", ["", "Begin", "", f"{OUTER_LATER} {LAST}", "Replace"]),
    ({"period": 3, "outer": OUTER}, "s2m", ["", f"{OUTER_AT_ONCE} {OUTER_AT_ONCE} {LAST}", "Replace"]),
    ({"period": 1, "outer": OUTER, "optimizer_state": "reset"}, "s", [f"{OUTER_AT_ONCE} ResetOptimizer"]),
]


@pytest.mark.parametrize(("options", "events", "effects"), ORDERS)
def test_each_order_of_events_has_its_effects(options: dict[str, Any], events: str, effects: list[str]) -> None:
    script = Script(protocol(**options))
    assert [script.play(event) for event in events] == effects


def test_the_learning_rate_is_that_of_the_beginning_and_a_correction_knows_the_passes_since() -> None:
    worker = protocol(period=2, overlap=2)
    seen = []
    for number in range(1, 5):
        seen += done(worker.step(number, epoch=0, progress=None, lr=float(number), forward_passes=number))
    assert seen == [Begin(), Complete(2.0, arrived=False), Correct(3 + 4), Begin()]
    assert done(worker.arrive(), arrived=[ALL_ARRIVED])[:3] == [Complete(4.0, arrived=False), Correct(0), Begin()]


def fragments(effects: list[Any]) -> list[int | None]:
    """Of all averagings that are begun."""
    return [effect.fragment for effect in effects if isinstance(effect, Begin)]


def test_fragments_take_turns_and_the_whole_comes_when_all_have_arrived() -> None:
    worker = protocol(period=4, fragments=2, outer=OUTER)
    seen = [done(worker.step(number, epoch=0, progress=None, lr=0.1)) for number in range(1, 7)]
    assert [fragments(effects) for effects in seen] == [[], [0], [], [1], [], [0]]
    assert names(seen[1]) == OUTER_AT_ONCE
    # the others average the second fragment and the first once more; then nobody does
    arrived = done(worker.arrive(), arrived=[AVERAGED, AVERAGED, ALL_ARRIVED, ALL_ARRIVED])
    assert fragments(arrived) == [1, 0, 1, None]
    assert names(arrived) == f"{OUTER_AT_ONCE} {OUTER_AT_ONCE} Begin Complete Begin Complete Settle"
    assert names(done(worker.meet())) == "Replace"
    assert fragments(done(worker.step(7, epoch=1, progress=None, lr=0.1))) == []
    assert fragments(done(worker.step(8, epoch=1, progress=None, lr=0.1))) == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fragments": 0}, "fragments=0; it must be an integer >= 1"),
        ({"period": 4, "fragments": 5}, r"fragments=5; it must be an integer in \[1, 4\]"),
        ({"period": AdaptivePeriod(), "fragments": 2}, "fragments=2 with AdaptivePeriod.*constant period"),
        ({"fragments": 2, "optimizer_state": "average"}, "fragments=2 with optimizer_state='average'"),
    ],
)
def test_fragments_of_what_is_averaged_as_a_whole_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AveragingOptions(**options)


class Spy(ConstantPeriod):
    """Notes what it is told."""

    def __init__(self, period: int) -> None:
        super().__init__(period)
        object.__setattr__(self, "told", [])

    def update(self, state: PeriodState, observation: Observation) -> tuple[bool, PeriodState]:
        self.told.append((observation.step, observation.deviation, observation.lr))  # type: ignore[attr-defined]
        return super().update(state, observation)

    def restart(self, state: PeriodState, deviation: float, lr: float) -> PeriodState:
        self.told.append(("restart", deviation, lr))  # type: ignore[attr-defined]
        return super().restart(state, deviation, lr)


@pytest.mark.parametrize("adopts", [True, False])
def test_the_controller_sees_each_deviation_once_and_not_that_of_the_synchronisation(adopts: bool) -> None:
    spy = Spy(2)
    worker = protocol(period=spy, adopts=adopts)

    def step(number: int) -> None:
        done(worker.step(number, epoch=0, progress=None, lr=0.1), Averaged(float(number), 0.2))

    for number in range(1, 5):
        step(number)
    done(worker.arrive(), arrived=[Averaged(50.0, 0.3, all_arrived=True)])
    done(worker.meet())
    step(5)
    restart = [("restart", 50.0, 0.3)] if adopts else []
    assert spy.told == [  # type: ignore[attr-defined]
        (1, None, 0.0),
        (2, None, 0.0),
        (3, 2.0, 0.2),
        (4, None, 0.0),
        *restart,
        (5, 4.0, 0.2),
    ]
    assert worker.last == Averaged(4.0, 0.2)


def test_a_worker_that_missed_decisions_goes_on_from_one_that_missed_none() -> None:
    early, late = protocol(period=AdaptivePeriod(warmup_epochs=0)), protocol(period=AdaptivePeriod(warmup_epochs=0))
    for number in range(1, 10):
        done(late.step(number, epoch=0, progress=0.1, lr=0.1))
        if number <= 3:
            done(early.step(number, epoch=0, progress=0.1, lr=0.1))
    everyones = [early.state_dict(), late.state_dict()]
    for worker in (early, late):
        worker.follow(everyones)
    assert early.control == late.control
    assert early.state_dict()["deviation"] == late.state_dict()["deviation"]
    assert (early.steps, late.steps) == (3, 9)
    assert (early.averagings, late.averagings) == (0, 2)


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_a_checkpoint_holds_plain_values_and_all_that_is_decided_by(steps: int) -> None:
    first = protocol(period=AdaptivePeriod(warmup_epochs=0, sample=1))
    for number in range(1, steps + 1):
        done(first.step(number, epoch=0, progress=None, lr=0.1))
    saved = json.loads(json.dumps(first.state_dict()))
    assert set(saved) == {"control", "deviation", "steps", "averagings"}
    second = protocol(period=AdaptivePeriod(warmup_epochs=0, sample=1))
    second.load_state_dict(saved)
    for number in range(steps + 1, 30):
        told = done(first.step(number, epoch=0, progress=None, lr=0.1))
        assert done(second.step(number, epoch=0, progress=None, lr=0.1)) == told
    assert second.state_dict() == first.state_dict()


# -- n workers -----------------------------------------------------------------------------------------------------------


def next_collective(program: Generator[Complete, Averaged, None], outcome: Averaged | None) -> Complete | None:
    """What the worker waits for; None at its end."""
    try:
        return program.send(outcome)  # type: ignore[arg-type]
    except StopIteration:
        return None


class Cluster:
    """n workers with a number for a model, of which each runs until it waits for the others."""

    def __init__(self, steps: list[int], adopts: bool, options: dict[str, Any]) -> None:
        self.x = [float(rank) for rank in range(len(steps))]
        self.sent, self.means = list(self.x), list(self.x)
        self.updates = sum(self.x)
        self.protocols = [protocol(adopts=adopts, **options) for _ in steps]
        self.programs = [self.program(rank, number) for rank, number in enumerate(steps)]

    def program(self, rank: int, steps: int) -> Generator[Complete, Averaged, None]:
        worker = self.protocols[rank]
        for number in range(1, steps + 1):
            self.x[rank] += number + rank
            self.updates += number + rank
            yield from self.do(rank, worker.step(number, epoch=0, progress=None, lr=0.1))
        yield from self.do(rank, worker.arrive())
        yield from self.do(rank, worker.meet())

    def do(self, rank: int, effects: Effects) -> Generator[Complete, Averaged, None]:
        outcome = None
        while True:
            try:
                effect = effects.send(outcome)
            except StopIteration:
                return
            outcome = None
            match effect:
                case Begin():
                    self.sent[rank] = self.x[rank]
                case Complete():
                    outcome = yield effect
                    self.means[rank] = outcome.lr  # carries w̄
                case Replace() | Show():
                    assert self.x[rank] == self.sent[rank]
                    self.x[rank] = self.means[rank]
                case Correct():
                    self.x[rank] += self.means[rank] - self.sent[rank]

    def run(self) -> int:
        averagings, outcome = 0, None
        while True:
            waiting = [next_collective(program, outcome) for program in self.programs]
            if None in waiting:
                assert set(waiting) == {None}  # nobody is left waiting for another
                return averagings
            averagings += 1
            outcome = Averaged(0.0, sum(self.sent) / len(self.sent), all(effect.arrived for effect in waiting))


@given(
    steps=st.lists(st.integers(0, 12), min_size=2, max_size=5),
    period=st.integers(1, 5),
    overlap=st.sampled_from([False, 1, 2, 7, True]),
    adopts=st.booleans(),
)
def test_workers_with_any_number_of_batches_average_equally_often_and_lose_no_update(
    steps: list[int], period: int, overlap: bool | int, adopts: bool
) -> None:
    cluster = Cluster(steps, adopts, {"period": period, "overlap": overlap})
    averagings = cluster.run()
    assert averagings == max(steps) // period + 1
    assert cluster.x == pytest.approx([cluster.updates / len(steps)] * len(steps))
    assert {worker.averagings for worker in cluster.protocols} == {averagings - (not adopts)}
