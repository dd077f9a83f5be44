"""Rounds of local steps of one worker: the dense start, outer steps, a model from others, a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gossip.algorithm.adpsgd.local_steps import LocalSteps
from lightning_gossip.algorithm.adpsgd.options import GossipOptions
from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.algorithm.topology.generators import complete
from lightning_gossip.errors import ConfigurationError

GAIN = Outer(1.0, 0.5)  # a first outer step of a progress δ moves x by δ/2


class Worker:
    """One parameter, changed by 1 in each step; what is published, and how often."""

    def __init__(self, **options: Any) -> None:
        self.x = [torch.zeros(1, dtype=torch.float64)]
        self.local_steps = LocalSteps(GossipOptions(**{"outer": GAIN, "local_steps": 3, "dense_share": 0.0, **options}))
        self.published: list[float] = []
        self.merges = 0.0  # taken over at the next step
        self.given: float | None = None  # by others, at the next step
        self.open()

    def open(self) -> None:
        self.local_steps.open(["x"], self.x, complete(4))

    def step(self, progress: float | None = 0.5) -> float:
        self.x[0] += 1.0
        self.local_steps.step(self.x, progress=progress, push_pull=self._push_pull, publish=self._publish)
        return self.x[0].item()

    def steps(self, count: int, progress: float | None = 0.5) -> list[float]:
        return [self.step(progress) for _ in range(count)]

    def _push_pull(self) -> None:
        if self.given is not None:
            self.x[0].fill_(self.given)
            self.local_steps.begin_anew()
        else:
            self.x[0] += self.merges
        self.given, self.merges = None, 0.0
        self._publish()

    def _publish(self) -> None:
        self.published.append(self.x[0].item())


def test_every_round_ends_in_an_outer_step_that_is_published_at_once() -> None:
    worker = Worker()
    assert worker.steps(6) == [1.0, 2.0, 4.5, 5.5, 6.5, 9.75]  # δ = 3, v = 3; δ = 3, v = 4.5
    assert worker.published == [1.0, 2.0, 3.0, 4.5, 5.5, 6.5, 7.5, 9.75]


@pytest.mark.parametrize(("momentum_of", "end"), [("local", 14.5), ("all", 19.5)])
def test_merges_are_progress_or_not(momentum_of: Any, end: float) -> None:
    worker = Worker(outer=Outer(1.0, 0.5, momentum_of=momentum_of))
    worker.step()
    worker.merges = 10.0
    assert worker.steps(2)[-1] == end


def test_without_an_outer_step_nothing_but_the_rate_changes() -> None:
    worker = Worker(outer=None, dense_share=0.25)
    assert [worker.local_steps.rate(rate) for rate in (0.06, 2.0, 0.0)] == [1.0, 2.0, 0.0]
    assert worker.steps(4, 0.3) == [1.0, 2.0, 3.0, 4.0]
    assert worker.local_steps.rate(0.06) == 0.06
    assert worker.local_steps.state is None


def test_the_first_round_begins_where_the_dense_start_ends() -> None:
    worker = Worker(dense_share=0.25)
    assert worker.steps(4, 0.2) == [1.0, 2.0, 3.0, 4.0]
    assert worker.local_steps.is_dense
    assert worker.local_steps.state is None  # nothing for a checkpoint
    worker.merges = 100.0
    assert worker.step(0.25) == 105.0
    assert not worker.local_steps.is_dense
    assert worker.steps(3, 0.3) == [106.0, 107.0, 109.5]
    worker.step(0.1)  # of a run that has become longer
    assert not worker.local_steps.is_dense


def test_where_nobody_knows_how_long_the_run_is_the_dense_start_is_one_step() -> None:
    worker = Worker(dense_share=0.25)
    worker.step(None)
    assert not worker.local_steps.is_dense


def test_a_model_from_others_begins_a_round_even_in_the_step_that_would_end_one() -> None:
    worker = Worker()
    worker.steps(2)
    worker.given = 50.0
    assert worker.steps(4) == [50.0, 51.0, 52.0, 54.5]


def test_a_model_that_is_not_finite_any_more_leaves_no_trace_in_the_outer_state() -> None:
    worker = Worker()
    worker.steps(2)
    worker.x[0].fill_(float("nan"))
    worker.given = 50.0
    worker.step()
    assert worker.local_steps.state is not None
    assert worker.local_steps.state.slow.tolist() == [50.0]
    assert worker.local_steps.state.velocity.tolist() == [0.0]


def test_a_model_from_others_between_two_sessions_begins_a_round_with_the_next() -> None:
    worker = Worker()
    worker.steps(5)
    worker.local_steps.begin_anew()
    worker.x[0].fill_(50.0)
    worker.open()
    assert worker.steps(3) == [51.0, 52.0, 54.5]


def test_a_session_leaves_a_round_as_it_is() -> None:
    one, other = Worker(), Worker()
    seen = one.steps(7)
    assert other.steps(4) == seen[:4]
    other.open()
    assert other.steps(3) == seen[4:]


def state_of(worker: Worker) -> tuple[dict[str, Tensor], dict[str, Any]]:
    assert worker.local_steps.state is not None
    return worker.local_steps.state.state_dict(), worker.local_steps.state_dict()


def test_it_goes_on_from_a_checkpoint() -> None:
    one = Worker(dense_share=0.25)
    one.steps(6)
    tensors, state = state_of(one)
    other = Worker(dense_share=0.25)
    other.local_steps = LocalSteps(GossipOptions(outer=GAIN, local_steps=3, dense_share=0.25))
    other.local_steps.load_tensors(tensors)
    other.local_steps.load_state_dict(state)
    other.x[0].copy_(one.x[0])
    other.open()
    assert other.steps(5) == one.steps(5)


def test_with_the_tensors_alone_a_round_begins_and_no_dense_start() -> None:
    one = Worker(dense_share=0.25)
    one.steps(6)
    tensors, _ = state_of(one)
    other = LocalSteps(GossipOptions(outer=GAIN, local_steps=3, dense_share=0.25))
    other.load_tensors(tensors)
    other.open(["x"], one.x, complete(4))
    assert not other.is_dense
    assert other.state_dict() == {"is_dense": False, "steps": 0}


OPTIONS: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({}, (1.0, None, 0.0)),
    ({"local_steps": 50}, (0.06, 50, 0.05)),
    ({"outer": Outer()}, (0.06, 50, 0.05)),
    ({"outer": Outer(), "local_steps": 10}, (0.3, 10, 0.05)),
    ({"local_steps": 50, "exchanges_per_step": 0.02, "dense_share": 0.0}, (0.02, 50, 0.0)),
    ({"exchanges_per_step": 0.02, "dense_share": 0.1}, (0.02, None, 0.1)),
]


@pytest.mark.parametrize(("options", "resolved"), OPTIONS)
def test_what_is_not_given_follows_from_the_rest(options: dict[str, Any], resolved: tuple[Any, ...]) -> None:
    made = GossipOptions(**options)
    assert (made.exchanges_per_step, made.local_steps, made.dense_share) == resolved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 0}, "local_steps=0; it must be an integer >= 1"),
        ({"local_steps": 2.5}, "local_steps=2.5"),
        ({"dense_share": 1.0}, r"dense_share=1.0 is not a share of the run in \[0, 1\)"),
        ({"dense_share": -0.1}, "dense_share=-0.1"),
        ({"outer": 0.7}, "outer=0.7 is neither an Outer nor None"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GossipOptions(**options)


def test_the_number_of_workers_and_the_exchanges_of_a_round_decide_what_is_stable() -> None:
    unstable = Outer(0.7, 0.9, nesterov=False, momentum_of="all")
    with pytest.raises(ConfigurationError, match=r"8 workers and 1 exchanges of each in a round"):
        GossipOptions(outer=unstable, exchanges_per_step=0.02).check(8)
    GossipOptions(outer=unstable).check(8)  # three
    GossipOptions(outer=unstable, exchanges_per_step=0.0).check(8)
