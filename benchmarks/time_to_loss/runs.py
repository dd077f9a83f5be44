"""One run: the models that it makes, and when; of contenders whose models no link changes, the same models under each clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from benchmarks.time_to_loss.contenders import KNOWN
from benchmarks.time_to_loss.hooks import Compressed
from benchmarks.time_to_loss.task import SCENARIOS, Condition, Task
from lightning_gossip.algorithm.periodic_averaging.period import Observation, PeriodController, PeriodState, count_step
from lightning_gossip.simulation import (
    PeriodicAveraging,
    Quadratic,
    Recording,
    Result,
    Strategy,
    simulate,
)
from lightning_gossip.simulation.cluster.collective_costs import all_reduce_bytes

POINTS = 32
TUNING_SEED = 100  # none of those that are reported


@dataclass(frozen=True)
class Run:
    """What a single run is told by.

    Args:
        contender: a name in KNOWN.
        lr: peak of the schedule.
        length: samples over DDP's.
        condition: where; of a contender that waits all of its hosts' conditions follow.
        seed: of everything.
    """

    contender: str
    lr: float
    length: float
    condition: Condition
    seed: int

    @property
    def waits(self) -> bool:
        """Whether its models are the same on all links."""
        return KNOWN[self.contender].waits

    def described(self) -> dict[str, Any]:
        """As it is in the file."""
        condition = self.condition
        return {
            "contender": self.contender,
            "lr": self.lr,
            "length": self.length,
            "hosts": condition.hosts,
            "rate_mbit": condition.rate_mbit,
            "scenario": condition.scenario,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Replayed(PeriodController):
    """Averages after the steps at which another run did.

    Args:
        steps: of these.
    """

    steps: frozenset[int]

    @override
    def init(self) -> PeriodState:
        return PeriodState(1)

    @override
    def update(self, state: PeriodState, observation: Observation) -> tuple[bool, PeriodState]:
        return count_step(state, state.since + 1 if observation.step in self.steps else state.since + 2)


def execute(run: Run, task: Task) -> Iterator[dict[str, Any]]:
    """Its entries for the file: one, or one for each condition of so many hosts."""
    strategy = KNOWN[run.contender].strategy(task)
    if not run.waits:
        yield {**run.described(), **_measures(_simulated(run, task, run.condition, strategy), run.condition, task)}
        return
    free = replace(run.condition, rate_mbit=math.inf, scenario="equal")
    learned = _simulated(run, task, free, strategy)
    if isinstance(strategy, PeriodicAveraging):
        strategy = replace(strategy, period=Replayed(_averaged(learned)))
    elif isinstance(strategy, Compressed):
        strategy = Compressed(share=strategy.share)
    for rate_mbit in task.rates_mbit:
        for scenario in SCENARIOS:
            condition = Condition(run.condition.hosts, rate_mbit, scenario)
            timed = _simulated(run, task, condition, strategy, learns=False)
            assert [point.steps for point in timed.points[: len(learned.points)]] == [point.steps for point in learned.points]
            points = [now._replace(loss=then.loss) for now, then in zip(timed.points, learned.points, strict=False)]
            result = replace(timed, points=points, ended=learned.ended)
            yield {**run.described(), **condition_of(condition), **_measures(result, condition, task)}


def condition_of(condition: Condition) -> dict[str, Any]:
    """As it is in the file."""
    return {"rate_mbit": condition.rate_mbit, "scenario": condition.scenario}


def _simulated(run: Run, task: Task, condition: Condition, strategy: Strategy, *, learns: bool = True) -> Result:
    hosts, steps = condition.hosts, round(task.steps * run.length)
    trained, optimizer = task.problem(lr=run.lr, steps=steps, hosts=hosts)
    # a quadratic of one coordinate: the same points in time, and nothing to learn
    objective = trained if learns else Quadratic([0.0])
    return simulate(
        strategy,
        condition.cluster(task.step_s),
        work=task.work(steps=steps, hosts=hosts, samples=trained.samples),
        links=condition.links,
        objective=objective,
        optimizer=optimizer if learns else None,
        model_bytes=task.model_bytes,
        seed=run.seed,
        recording=Recording(trace=True, evaluate_every=hosts * steps // POINTS),
    )


def _averaged(result: Result) -> frozenset[int]:
    """The steps after which the controller asked for an averaging; at the end all meet, whatever it says."""
    steps, found = 0, Counter[int]()
    assert result.trace is not None
    for event in result.trace:
        steps += event.kind == "step"
        found[steps // len(result.workers)] += event.kind == "average"
    found[result.steps // len(result.workers)] -= 1
    return frozenset(+found)


def _sent(result: Result) -> Sequence[tuple[float, float]]:
    """When a worker had sent how many bytes, on the average of all."""
    assert result.trace is not None
    workers = len(result.workers)
    kinds = {event.kind for event in result.trace}
    of = "merge" if "merge" in kinds else "average" if "average" in kinds else "step"
    times = [event.time_s for event in result.trace if event.kind == of]
    total = sum(worker.bytes_sent for worker in result.workers) / workers
    return [(time_s, total * number / len(times)) for number, time_s in enumerate(times, start=1)]


def _measures(result: Result, condition: Condition, task: Task) -> dict[str, Any]:
    sent = _sent(result)
    steps = [round(point.steps / condition.hosts, 2) for point in result.points]
    sent_by = [max((nbytes for time_s, nbytes in sent if time_s <= point.time_s), default=0.0) for point in result.points]
    asynchronous = result.topology is not None
    if asynchronous:  # the mean at the end is not in a worker's account
        sent_by[-1] += all_reduce_bytes(condition.hosts, task.model_bytes)
    return {
        "ended": result.ended,
        "topology": result.topology,
        "exchanges_per_step": result.exchanges_per_step,
        "averagings": result.averagings,
        "curve": {
            "s": [round(point.time_s, 1) for point in result.points],
            "steps": steps,
            "loss": [round(point.loss, 5) for point in result.points],
            "gb": [round(nbytes / 1e9, 3) for nbytes in sent_by],
        },
    }
