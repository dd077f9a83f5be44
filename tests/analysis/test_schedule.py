"""Predicted times to a loss against the simulator: the pictures of the theory, and the best setting in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.reproduction.schedule import BYTES, links_of, softmax_on_digits
from lightning_gossip.algorithm.laws import Constant, Erlang, Exponential, Law, Uniform
from lightning_gossip.analysis.planning.schedule import Server
from lightning_gossip.analysis.planning.settings import Curve, Setting
from lightning_gossip.analysis.problem import Problem
from lightning_gossip.analysis.second_moments.mean_square import rms_decay_rate
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import (
    SGD,
    Cluster,
    Objective,
    Quadratic,
    Recording,
    Steps,
    make_strategy,
    simulate,
)

SPECTRUM, TARGET = [1.0, 0.3, 0.1], 7e-4  # a thousandth of the loss at the beginning


def simulated(
    law: Law | Sequence[Law],
    workers: int,
    lr: float,
    *,
    objective: Objective | None = None,
    target: float = TARGET,
    until_s: float = 150.0,
    transfer_s: float = 0.0,
    batch_size: int = 1,
    seeds: Sequence[int] = (1,),
    first: bool = False,
    **options: Any,
) -> float:
    """Seconds until the loss stays below the target (or first is), in the simulator; the mean over seeds."""
    times = []
    for seed in seeds:
        result = simulate(
            make_strategy("apsgd", scale=1.0, **options),
            Cluster(workers, law),
            work=Steps(number=100_000, batch_size=batch_size),
            objective=Quadratic(SPECTRUM) if objective is None else objective,
            optimizer=SGD(lr=lr),
            links=links_of(transfer_s),
            model_bytes=BYTES,
            recording=Recording(evaluate_every=1 if objective is None else 4),
            target_loss=target if first else None,
            until_s=until_s,
            seed=seed,
        )
        losses = np.array([point.loss for point in result.points])
        above = np.flatnonzero(~(losses <= target))
        last = int(above[-1]) + 1 if above.size else 0
        times.append(result.points[last].time_s if last < len(losses) else math.inf)
    return float(np.mean(times))


def patience_s(predicted_s: float) -> float:
    return min(150.0, 2.0 * predicted_s + 20.0) if predicted_s < math.inf else 40.0


def assert_best_is_nearly_the_simulated_best(curve: Curve, times: Sequence[float]) -> None:
    chosen = times[list(curve.predictions).index(curve.best)]
    assert chosen <= 1.1 * min(times), list(zip(curve.values, times, strict=True))


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("law", "numbers"),
    [
        (Constant(1.0), [8, 16, 24, 28, 64]),
        slow(Constant(1.0), [4, 8, 16, 20, 22, 24, 26, 28, 36, 64]),
        slow(Erlang(1.0, 4), [4, 8, 16, 22, 24, 28, 32, 64]),
    ],
    ids=["constant", "constant, all", "Erlang, all"],
)
def test_time_against_workers_is_u_shaped_and_ends_in_divergence(law: Law, numbers: list[int]) -> None:
    curve = Server(Problem(eigenvalues=SPECTRUM), TARGET, law).over_workers(Setting(lr=0.05, active_workers=1), numbers)
    predicted = [prediction.time_s for prediction in curve.predictions]
    times = [simulated(law, number, 0.05, until_s=patience_s(time)) for number, time in zip(numbers, predicted, strict=True)]
    assert predicted[0] > 2.5 * curve.best.time_s
    assert predicted[-1] == times[-1] == math.inf
    assert curve.predictions[-1].margin < 1.0
    stable = [number for number, prediction in enumerate(curve.predictions) if prediction.margin > 1.6]
    assert [times[number] for number in stable] == pytest.approx([predicted[number] for number in stable], rel=0.1, abs=0.5)
    assert_best_is_nearly_the_simulated_best(curve, times)


def test_time_against_workers_of_which_some_are_slow() -> None:
    """The first N count: adding slow ones costs staleness, and brings few updates."""
    laws = [Erlang(1.0, 4)] * 8 + [Erlang(4.0, 4)] * 16
    server, numbers = Server(Problem(eigenvalues=SPECTRUM), TARGET, laws), [4, 8, 16, 24]
    curve = server.over_workers(Setting(lr=0.05, active_workers=1), numbers)
    predicted = [prediction.time_s for prediction in curve.predictions]
    times = [
        simulated(laws[:number], number, 0.05, until_s=patience_s(time))
        for number, time in zip(numbers, predicted, strict=True)
    ]
    assert times == pytest.approx(predicted, rel=0.15)
    assert [prediction.rate for prediction in curve.predictions] == pytest.approx([4, 8, 10, 12])
    assert [prediction.staleness for prediction in curve.predictions] == pytest.approx([3, 7, 15, 23], rel=0.05)
    with pytest.raises(ConfigurationError, match="active_workers=25 of 24 workers"):
        server.predict(Setting(lr=0.05, active_workers=25))


@pytest.mark.parametrize(
    ("numbers", "seeds"), [([16, 32, 64, 96], (1,)), slow([8, 16, 32, 64, 96, 128], (1, 2, 3, 4, 5))], ids=["few", "all"]
)
def test_time_against_workers_of_memoryless_step_times_flattens(numbers: list[int], seeds: Sequence[int]) -> None:
    law = Exponential(1.0)
    curve = Server(Problem(eigenvalues=SPECTRUM), TARGET, law).over_workers(Setting(lr=0.05, active_workers=1), numbers)
    predicted = [prediction.time_s for prediction in curve.predictions]
    times = [simulated(law, number, 0.05, until_s=60.0, seeds=seeds) for number in numbers]
    assert all(map(math.isfinite, predicted))
    assert 0.4 < predicted[1] / predicted[0] < 0.55
    assert predicted[-1] / predicted[-2] > 0.85
    assert times == pytest.approx(predicted, rel=0.35)


@pytest.mark.parametrize(
    ("bounds", "transfer_s"),
    [
        ([4, 10, 14, 20, None], 0.0),
        slow([4, 8, 10, 12, 14, 16, 20, 28, None], 0.0),
        slow([4, 8, 10, 12, 14, 16, 20, 28, None], 0.1),
    ],
    ids=["ideal", "ideal, all", "limited link, all"],
)
def test_time_against_the_staleness_bound_has_a_best_bound(bounds: list[int | None], transfer_s: float) -> None:
    """24 workers at a learning rate that diverges without a bound."""
    law = Erlang(1.0, 4)
    server = Server(Problem(eigenvalues=SPECTRUM), TARGET, law, links=links_of(transfer_s), model_bytes=BYTES)
    curve = server.over_staleness(Setting(lr=0.12, active_workers=24), bounds)
    predicted = [prediction.time_s for prediction in curve.predictions]
    times = [
        simulated(law, 24, 0.12, max_staleness=bound, transfer_s=transfer_s, until_s=patience_s(time))
        for bound, time in zip(bounds, predicted, strict=True)
    ]
    assert predicted[-1] == times[-1] == math.inf
    assert predicted[:2] == pytest.approx(times[:2], rel=0.15)
    assert 8 <= (curve.best.setting.max_staleness or 0) <= 16
    assert_best_is_nearly_the_simulated_best(curve, times)


@pytest.mark.parametrize(
    ("thresholds", "transfer_s", "seeds"),
    [
        slow([None, 0.008, 0.016, 0.064], 0.1, (1,)),  # tests/recipes/test_plan.py shows the like of the planner
        slow([None, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064], 0.1, range(16)),
        slow([None, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064], 0.3, range(16)),
    ],
    ids=["few", "all", "narrower link, all"],
)
def test_an_event_threshold_pays_on_a_limited_link(
    thresholds: list[float | None], transfer_s: float, seeds: Sequence[int]
) -> None:
    law = Erlang(1.0, 4)
    server = Server(Problem(eigenvalues=SPECTRUM), TARGET, law, links=links_of(transfer_s), model_bytes=BYTES)
    curve = server.over_thresholds(Setting(lr=0.03, active_workers=24), thresholds)
    predicted = [prediction.time_s for prediction in curve.predictions]
    times = [
        simulated(law, 24, 0.03, event_trigger=threshold, transfer_s=transfer_s, until_s=250.0, seeds=seeds, first=True)
        for threshold in thresholds
    ]
    assert curve.best.time_s < 0.6 * predicted[0]
    assert predicted[:2] == pytest.approx(times[:2], rel=0.15)
    assert curve.predictions[1].rate < curve.predictions[0].rate
    chosen = times[list(curve.predictions).index(curve.best)]
    assert chosen <= (1.1 if len(seeds) > 1 else 1.4) * min(times), list(zip(curve.values, times, strict=True))


def test_an_event_threshold_pays_little_where_sending_is_free() -> None:
    server = Server(Problem(eigenvalues=SPECTRUM), TARGET, Erlang(1.0, 4))
    curve = server.over_thresholds(Setting(lr=0.03, active_workers=24), [None, 0.002, 0.008])
    first, *others = (prediction.time_s for prediction in curve.predictions)
    assert all(time > 0.9 * first for time in others)


@pytest.mark.parametrize(
    ("law", "numbers"),
    [
        (Constant(1.0), [16, 28]),
        slow(Constant(1.0), [8, 16, 24, 28, 32, 40, 64]),
        slow(Erlang(1.0, 4), [8, 16, 24, 32, 40, 48, 64, 96]),
    ],
    ids=["constant", "constant, all", "Erlang, all"],
)
def test_softmax_regression_on_digits_has_the_predicted_optimum(law: Law, numbers: list[int]) -> None:
    """Its gradient is bounded, so beyond the limit it swings and gets slower, where the quadratic diverges."""
    objective, problem, target, excess = softmax_on_digits()
    curve = Server(problem, excess, law).over_workers(Setting(lr=0.05, active_workers=1), numbers)
    predicted = [prediction.time_s for prediction in curve.predictions]
    times = [
        simulated(law, number, 0.05, objective=objective, target=target, batch_size=256, until_s=patience_s(time))
        for number, time in zip(numbers, predicted, strict=True)
    ]
    assert predicted[:2] == pytest.approx(times[:2], rel=0.06)
    for number, time in zip(numbers, times, strict=True):
        if number >= 64:
            assert predicted[numbers.index(number)] == math.inf
            assert time > 1.05 * min(times)
    assert_best_is_nearly_the_simulated_best(curve, times)


def test_the_best_learning_rate_is_better_than_its_neighbours() -> None:
    server = Server(Problem(eigenvalues=SPECTRUM), TARGET, Erlang(1.0, 4))
    best = server.best_lr(Setting(lr=1.0, active_workers=8))
    assert best.margin > 1.0
    for factor in (0.7, 1.3):
        other = server.predict(Setting(lr=factor * best.setting.lr, active_workers=8))
        assert other.time_s >= 0.999 * best.time_s


def test_everything_together_is_at_least_as_good_as_each_alone() -> None:
    server = Server(Problem(eigenvalues=[1.0]), TARGET, Uniform(1.0, 0.5), updates=1_000)
    setting = Setting(lr=0.1, active_workers=8)
    best = server.best(setting, [2, 8], [None, 10])
    assert best.time_s <= server.best_lr(setting).time_s


def test_noise_makes_the_best_learning_rate_smaller() -> None:
    quiet = Server(Problem(eigenvalues=[1.0]), 0.01, Constant(1.0)).best_lr(Setting(lr=1.0, active_workers=4))
    noisy = Server(Problem(eigenvalues=[1.0], noise=0.4), 0.01, Constant(1.0)).best_lr(Setting(lr=1.0, active_workers=4))
    assert noisy.setting.lr < 0.9 * quiet.setting.lr
    assert noisy.time_s > quiet.time_s


def test_the_server_s_scale_is_part_of_the_step() -> None:
    full = Server(Problem(eigenvalues=SPECTRUM), TARGET, Constant(1.0)).predict(Setting(lr=0.05, active_workers=8))
    scaled = Server(Problem(eigenvalues=SPECTRUM), TARGET, Constant(1.0), scale=0.125).predict(
        Setting(lr=0.4, active_workers=8)
    )
    assert scaled.time_s == pytest.approx(full.time_s)
    assert scaled.margin == pytest.approx(full.margin)


def test_many_directions_are_grouped_without_losing_the_loss_or_the_largest() -> None:
    rng = np.random.default_rng(0)
    h, x = np.append(rng.lognormal(0.0, 2.0, 500), 0.0), rng.standard_normal(501)
    grouped = Problem.grouped(h, x, groups=12)
    assert len(grouped.eigenvalues) <= 12
    assert max(grouped.eigenvalues) == h.max()
    assert grouped.losses.sum() == pytest.approx(0.5 * (h * x**2).sum(), rel=1e-4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Setting(lr=0.0, active_workers=1), "lr=0.0"),
        (lambda: Setting(lr=0.1, active_workers=0), "active_workers=0"),
        (lambda: Setting(lr=0.1, active_workers=1, event_threshold=-1.0), "event_threshold=-1.0"),
        (lambda: Server(Problem(eigenvalues=[1.0]), 0.0, Constant(1.0)), "target=0.0"),
        (lambda: Server(Problem(eigenvalues=[1.0]), 0.1, Constant(1.0), scale=0.0), "scale=0.0"),
        (
            lambda: Server(Problem(eigenvalues=[1.0]), 0.1, Constant(1.0)).best(Setting(lr=0.1, active_workers=1), []),
            "nothing to choose",
        ),
        (lambda: Problem.grouped([0.0, -1.0], [1.0, 1.0]), "a positive one"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_loss_that_is_low_enough_already_takes_no_time_with_a_trigger_either() -> None:
    server = Server(Problem(eigenvalues=[1.0]), 1.0, Constant(1.0))
    assert server.predict(Setting(lr=0.1, active_workers=2, event_threshold=0.1)).time_s == 0.0


def test_memoryless_workers_are_predicted_by_their_root_mean_square_however_long_the_tail() -> None:
    server = Server(Problem(eigenvalues=[1.0]), TARGET, Exponential(1.0))
    predicted = server.predict(Setting(lr=0.05, active_workers=48))
    assert predicted.decay == pytest.approx(48.0 * rms_decay_rate(0.05, 48))


def test_eigenvalues_may_be_an_array() -> None:
    array, plain = Problem(eigenvalues=np.array([1.0, 0.3])), Problem(eigenvalues=[1.0, 0.3])  # type: ignore[arg-type]
    assert array == plain


def test_a_curve_on_which_nothing_converges_says_so() -> None:
    server = Server(Problem(eigenvalues=[1.0]), 0.01, Constant(1.0))
    with pytest.raises(ConfigurationError, match="no active_workers of"):
        _ = server.over_workers(Setting(lr=1.0, active_workers=1), [8, 16]).best
