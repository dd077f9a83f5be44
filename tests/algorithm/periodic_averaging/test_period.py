from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gossip.algorithm.periodic_averaging.adaptive_period import AdaptivePeriod
from lightning_gossip.algorithm.periodic_averaging.period import (
    ConstantPeriod,
    Observation,
    PeriodController,
    PeriodState,
    PostLocal,
)
from lightning_gossip.algorithm.periodic_averaging.piecewise_period import PiecewisePeriod
from lightning_gossip.errors import ConfigurationError

Drift = Callable[[int, float], float]  # S after p steps at learning rate γ


def noise_dominated(p: int, lr: float) -> float:
    """S = p γ² σ², σ² = 3."""
    return p * lr**2 * 3.0


def heterogeneous(p: int, lr: float) -> float:
    """Workers that pull apart by their gradients, not by noise: S = p² γ² G², G² = 3."""
    return p**2 * lr**2 * 3.0


class Run:
    """Drives a controller as a strategy does: one observation a step, and the S of an averaging with the next one.

    Args:
        drift: S of an averaging.
        steps_per_epoch, total_steps: of the run.
        late: "next": S comes with the next step; "overlap": just after the next averaging was asked for.
    """

    def __init__(
        self,
        controller: PeriodController,
        drift: Drift,
        *,
        steps_per_epoch: int = 10,
        total_steps: int = 10**9,
        late: str = "next",
    ) -> None:
        self.controller, self.drift, self.late = controller, drift, late
        self.steps_per_epoch, self.total_steps = steps_per_epoch, total_steps
        self.state = controller.init()
        self.steps = 0
        self.averaged: list[int] = []
        self._since = 0
        self._under_way: tuple[float, float] | None = None
        self._seen: tuple[float | None, float] = (None, 0.0)

    def step(self, lr: float = 0.1) -> bool:
        self.steps, self._since = self.steps + 1, self._since + 1
        epoch = (self.steps - 1) // self.steps_per_epoch
        deviation, lr_then = self._seen
        self._seen = (None, 0.0)
        observation = Observation(self.steps, epoch, self.steps / self.total_steps, deviation, lr_then)
        average_now, self.state = self.controller.update(self.state, observation)
        if average_now:
            ended = (self.drift(self._since, lr), lr)
            self._seen, self._under_way = (ended, None) if self.late == "next" else (self._under_way or (None, 0.0), ended)
            self.averaged.append(self.steps)
            self._since = 0
        return average_now

    def meet(self, lr: float) -> None:
        """A rendezvous, at which all take the mean."""
        self.state = self.controller.restart(self.state, self.drift(self._since, lr), lr)
        self._since = 0

    def until(self, done: Callable[[PeriodState], bool], lr: float = 0.1) -> None:
        while not done(self.state):
            self.step(lr)

    def settle(self, lr: float, *, still: int = 5) -> int:
        """The period after ``still`` averagings in a row that did not move it."""
        unchanged, before = 0, self.state.period
        while unchanged < still:
            if self.step(lr):
                unchanged = unchanged + 1 if self.state.period == before else 0
                before = self.state.period
        return self.state.period


def frozen_at(initial: int, lr: float, drift: Drift, **options: Any) -> Run:
    """A run that has sampled C₂ at this learning rate, and whose period may move from now on."""
    run = Run(AdaptivePeriod(initial=initial, sample=5, **options), drift)
    run.until(lambda state: not state.sampling, lr)
    assert run.state.period == initial
    return run


# -- the theorem: p settles where S/γ = C₂ --------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [2, 4, 8, 16, 32])
def test_from_below_the_period_settles_at_the_lower_end_of_the_band_and_stays(drop: int) -> None:
    run = frozen_at(8, 0.1, noise_dominated)
    settled = math.ceil(0.7 * 8 * drop)
    assert run.settle(0.1 / drop) == settled
    assert run.settle(0.1 / drop, still=20) == settled


@pytest.mark.parametrize("drop", [2, 4, 8, 16, 32])
def test_from_above_the_period_settles_at_the_upper_end_of_the_band_and_stays(drop: int) -> None:
    run = frozen_at(8, 0.1, noise_dominated)
    settled = math.floor(1.3 * 8 * drop)
    run.state = replace(run.state, period=settled + 12)
    assert run.settle(0.1 / drop) == settled
    assert run.settle(0.1 / drop, still=20) == settled


@pytest.mark.parametrize("drop", [2, 4, 8, 16, 32])
def test_under_heterogeneous_gradients_the_period_grows_like_the_root_of_the_drop(drop: int) -> None:
    assert frozen_at(8, 0.1, heterogeneous).settle(0.1 / drop) == math.ceil(8 * math.sqrt(0.7 * drop))


@pytest.mark.parametrize("drop", [2, 4, 8, 16])
def test_a_narrow_band_holds_the_period_within_five_percent(drop: int) -> None:
    for start in (1, 12 * drop):  # scripted S, without noise
        run = frozen_at(8, 0.1, noise_dominated, low=0.95, high=1.05)
        run.state = replace(run.state, period=start)
        assert run.settle(0.1 / drop) == pytest.approx(8 * drop, rel=0.05)


def test_a_target_sampled_at_the_new_learning_rate_asks_for_the_initial_period() -> None:
    for lr in (0.1, 0.01):
        assert frozen_at(8, lr, noise_dominated).settle(lr) == 8


def test_a_band_without_a_whole_number_leaves_the_period_between_its_neighbours() -> None:
    run = frozen_at(4, 0.1, noise_dominated)
    lr = 0.1 * 4 / 1.5  # p* = 1.5: the band is 1.05 … 1.95
    run.until(lambda state: state.period <= 2, lr)
    assert {run.state.period for _ in range(40) if run.step(lr)} == {1, 2}


def test_reaching_a_period_takes_half_its_square_in_steps() -> None:
    run = frozen_at(8, 0.1, noise_dominated)
    begun = run.steps
    run.until(lambda state: state.period == 90, 0.1 / 16)
    assert run.steps - begun == pytest.approx((90**2 - 8**2) / 2, rel=0.02)


# -- the same on models: n workers, local SGD with noise on a quadratic --------------------------------------------------


class Quadratic:
    """Local SGD of n workers on ½ Σ_d h_d w_d², each gradient with noise of its own.

    Diagonal: with isotropic noise any quadratic is one after a rotation, which leaves S alone. S is a sum of (n−1)·d squares,
    so its relative spread is about √(2/((n−1)d)), 0.8 % for n = 16, d = 2000: far inside the band, and C₂ is the mean of 20.
    What makes S/γ ∝ p only nearly right is the pull of the curvature over a stretch, a factor (1 − e^(−2γhp))/(2γhp). It
    depends on γp, which is p_init·γ₀ again at p*: so p* is exact, and the ends of the band shift by less than 2 % for
    γ₀ = 0.01, h ≤ 1, p_init = 8.
    """

    def __init__(self, seed: int, *, workers: int = 16, dimension: int = 2000) -> None:
        self._random = np.random.default_rng(seed)
        self._curvature = self._random.uniform(0.0, 1.0, dimension).astype(np.float32)
        self._models = np.tile(self._random.standard_normal(dimension, dtype=np.float32), (workers, 1))
        self._noise = np.empty_like(self._models)

    def drift(self, p: int, lr: float) -> float:
        """Make p local steps, average, and return S."""
        for _ in range(p):
            self._random.standard_normal(out=self._noise, dtype=np.float32)
            self._models -= lr * (self._curvature * self._models + self._noise)
        mean = self._models.mean(axis=0)
        deviation = float(np.square(self._models - mean).sum(axis=1).mean())
        self._models[:] = mean
        return deviation


def settled_on_a_quadratic(seed: int, drop: int, start: int, low: float, high: float) -> list[int]:
    """The periods of 10 averagings after p has once stood still for 5."""
    controller = AdaptivePeriod(initial=8, sample=20, low=low, high=high, warmup_epochs=0)
    run = Run(controller, Quadratic(seed).drift)
    run.until(lambda state: not state.sampling, 0.01)
    run.state = replace(run.state, period=start)
    run.settle(0.01 / drop)
    periods: list[int] = []
    while len(periods) < 10:
        if run.step(0.01 / drop):
            periods.append(run.state.period)
    return periods


@pytest.mark.parametrize(("drop", "start"), [(2, 8), (2, 26), (4, 16), (4, 46)])
def test_on_a_quadratic_the_period_settles_in_the_band(drop: int, start: int) -> None:
    target = 8 * drop
    for period in settled_on_a_quadratic(1, drop, start, 0.7, 1.3):
        assert 0.68 * target - 1 <= period <= 1.32 * target + 1


@pytest.mark.parametrize("start", [26, 38])
def test_on_a_quadratic_a_narrow_band_holds_the_period_within_five_percent(start: int) -> None:
    for period in settled_on_a_quadratic(1, 4, start, 0.95, 1.05):
        assert period == pytest.approx(32, rel=0.05)


# -- ADPSGD, decision by decision ------------------------------------------------------------------------------------------

FROZEN = PeriodState(period=6, target=2.0, samples=3, sampling=False)


@pytest.mark.parametrize(
    ("deviation", "lr", "period", "moved"),
    [
        # γ C₂ = 1
        (0.69, 0.5, 6, 7),
        (0.70, 0.5, 6, 6),
        (1.00, 0.5, 6, 6),
        (1.30, 0.5, 6, 6),
        (1.31, 0.5, 6, 5),
        (0.0, 0.5, 6, 7),
        # the same S at another learning rate
        (0.69, 0.25, 6, 5),
        (1.31, 1.0, 6, 7),
        # by one step a time, and never below 1
        (1e9, 0.5, 6, 5),
        (1e-9, 0.5, 6, 7),
        (1e9, 0.5, 1, 1),
        (1e-9, 0.5, 9, 9),  # the maximum
        (None, 0.0, 20, 9),  # lowered to 9 since the state was saved
        # nothing to learn
        (None, 0.0, 6, 6),
        (0.0, 0.0, 6, 6),
        (5.0, 0.0, 6, 6),
        (5.0, math.nan, 6, 6),
        (math.nan, 0.5, 6, 6),
        (math.inf, 0.5, 6, 6),
        (1e300, 1e-300, 6, 6),
    ],
)
def test_the_period_moves_by_one_when_the_deviation_leaves_the_band(
    deviation: float | None, lr: float, period: int, moved: int
) -> None:
    controller = AdaptivePeriod(sample=3, maximum=9)
    _, state = controller.update(replace(FROZEN, period=period), Observation(100, 3, 0.5, deviation, lr))
    assert state.period == moved
    assert (state.target, state.samples) == (FROZEN.target, FROZEN.samples)


@pytest.mark.parametrize(("deviation", "averages_at"), [(None, 6), (0.5, 7), (2.0, 5)])
def test_a_new_period_holds_for_the_stretch_under_way(deviation: float | None, averages_at: int) -> None:
    controller, state = AdaptivePeriod(sample=3), replace(FROZEN, since=2)
    steps, average_now = 2, False
    while not average_now:
        average_now, state = controller.update(state, Observation(100, 3, 0.5, deviation, 0.5))
        steps, deviation = steps + 1, None
    assert (steps, state.stretch) == (averages_at, averages_at)


def test_a_stretch_that_is_already_longer_than_the_new_period_ends_at_once() -> None:
    average_now, state = AdaptivePeriod(sample=3).update(replace(FROZEN, since=5), Observation(100, 3, 0.5, 2.0, 0.5))
    assert average_now
    assert (state.period, state.since, state.stretch) == (5, 0, 6)


@pytest.mark.parametrize("late", ["next", "overlap"])
@pytest.mark.parametrize("warmup_epochs", [0, 1, 2])
@pytest.mark.parametrize("initial", [1, 4])
def test_only_stretches_of_the_initial_period_are_sampled(initial: int, warmup_epochs: int, late: str) -> None:
    warmup = 10 * warmup_epochs

    def drift(p: int, lr: float) -> float:  # of the warm-up a hundred times as large: one sample would be seen in C₂
        return noise_dominated(p, lr) * (100 if run.steps <= warmup else 1)

    run = Run(AdaptivePeriod(initial, sample=3, warmup_epochs=warmup_epochs), drift, late=late)
    run.until(lambda state: state.samples == 3)
    assert run.averaged[:warmup] == list(range(1, warmup + 1))
    assert {later - earlier for earlier, later in zip(run.averaged[warmup:], run.averaged[warmup + 1 :], strict=False)} == {
        initial
    }
    assert run.state.target == pytest.approx(noise_dominated(initial, 0.1) / 0.1)
    # the first averaging after the warm-up is a sample already; S comes a step later, or with overlap a stretch later
    behind = 1 if late == "next" else initial + 1
    assert run.steps == warmup + 3 * initial + behind


def test_a_stretch_that_straddles_the_end_of_the_warm_up_is_not_sampled() -> None:
    controller = AdaptivePeriod(initial=4, sample=2)
    # two steps are left over from before a resume in the warm-up: the first stretch is one step, 3 in all
    average_now, state = controller.update(PeriodState(1, since=2), Observation(9, 0, None))
    assert average_now
    _, state = controller.update(state, Observation(10, 1, None, deviation=50.0, lr=0.1))
    assert (state.samples, state.sampling, state.period) == (0, True, 4)
    # and a stretch longer than p_init is none either
    average_now, state = controller.update(replace(state, since=6), Observation(11, 1, None))
    assert average_now
    _, state = controller.update(state, Observation(12, 1, None, deviation=50.0, lr=0.1))
    assert (state.samples, state.sampling, state.period) == (0, True, 4)


@pytest.mark.parametrize("late", ["next", "overlap"])
@pytest.mark.parametrize("lost_at", [{10}, {3, 5}, {3, 5, 10}, set(range(1, 11))])
def test_lost_deviations_of_the_warm_up_cost_one_sample_and_spoil_none(lost_at: set[int], late: str) -> None:
    def drift(p: int, lr: float) -> float:
        return noise_dominated(p, lr) * (100 if run.steps <= 10 else 1)

    run = Run(AdaptivePeriod(initial=4, sample=3), drift, late=late)
    while run.state.samples < 3:
        run.step()
        if run.steps in lost_at:
            run._seen = (None, 0.0)
    assert run.state.target == pytest.approx(noise_dominated(4, 0.1) / 0.1)
    assert run.state.averagings <= 10 + 3 + 1 + (late == "overlap")


def sampled(controller: AdaptivePeriod, ratios: Sequence[float], total_steps: int, lr: float = 0.5) -> Run:
    """As many averagings after the warm-up as there are ratios S/γ; the S of the last one is seen."""
    script = iter(ratios)
    run = Run(controller, lambda p, lr: next(script) * lr, steps_per_epoch=10, total_steps=total_steps)
    while run.state.averagings < len(ratios):
        run.step(lr)
    run.step(lr)
    return run


@pytest.mark.parametrize(
    ("sample", "ratios", "samples", "target", "period"),
    [
        # a number of averagings; 50.0 is far above the band, 0.1 far below
        (1, [2.0], 1, 2.0, 4),
        (1, [2.0, 50.0], 1, 2.0, 3),
        (1, [2.0, 0.1], 1, 2.0, 5),
        (3, [1.0, 2.0, 6.0], 3, 3.0, 4),
        (3, [1.0, 2.0, 6.0, 50.0, 50.0], 3, 3.0, 2),
        (3, [1.0, 2.0, 6.0, 0.1, 3.0, 0.1], 3, 3.0, 6),
        # what is no number, and equal models, are no samples
        (2, [math.nan, 2.0, math.inf, 4.0, 0.1], 2, 3.0, 5),
        (2, [0.0, 0.0, 2.0, 0.0, 4.0, 0.1], 2, 3.0, 5),
        (2, [0.0] * 10, 0, 0.0, 4),
        # a share of 80 steps: S is seen at steps 5, 9, 13, 17, 21, …, the first four of them in time for 0.25
        (0.25, [1.0, 3.0, 1.0, 3.0], 4, 2.0, 4),
        (0.25, [1.0, 3.0, 1.0, 3.0, 50.0], 4, 2.0, 3),
        (0.25, [1.0, 3.0, 1.0, 3.0, 0.1, 0.1], 4, 2.0, 6),
        # at least one
        (0.01, [2.0], 1, 2.0, 4),
        (0.01, [2.0, 0.1], 1, 2.0, 5),
        (0.25, [math.nan] * 6 + [5.0], 1, 5.0, 4),
        (0.25, [math.nan] * 6 + [5.0, 0.1], 1, 5.0, 5),
    ],
)
def test_the_target_is_the_mean_of_its_samples_and_frozen_afterwards(
    sample: int | float, ratios: list[float], samples: int, target: float, period: int
) -> None:
    run = sampled(AdaptivePeriod(initial=4, sample=sample, warmup_epochs=0), ratios, total_steps=80)
    assert (run.state.samples, run.state.period) == (samples, period)
    assert run.state.target == pytest.approx(target)


def test_the_share_is_over_at_the_step_that_reaches_it() -> None:
    run = sampled(AdaptivePeriod(initial=4, sample=0.25, warmup_epochs=0), [2.0] * 5, total_steps=84)  # seen at step 21 of 84
    assert (run.steps, run.state.samples, run.state.sampling) == (21, 4, False)


def test_a_learning_rate_of_zero_gives_no_sample() -> None:
    run = sampled(AdaptivePeriod(initial=4, sample=1, warmup_epochs=0), [2.0] * 5, 80, lr=0.0)
    assert (run.state.samples, run.state.period, run.state.sampling) == (0, 4, True)


def test_a_share_that_ends_within_the_warm_up_still_samples_once_at_the_initial_period() -> None:
    run = Run(AdaptivePeriod(initial=4, sample=0.05, warmup_epochs=1), noise_dominated, steps_per_epoch=10, total_steps=100)
    run.until(lambda state: not state.sampling)
    assert run.averaged == [*range(1, 11), 14, 18]
    assert run.state.samples == 1


def test_a_frozen_target_stays_frozen_in_a_longer_run() -> None:
    controller = AdaptivePeriod(sample=0.25)
    _, state = controller.update(replace(FROZEN, stretch=4), Observation(100, 3, 0.1, deviation=0.5, lr=0.5))
    assert state == replace(FROZEN, stretch=4, since=1, period=7)


# -- how many averagings a run takes ------------------------------------------------------------------------------------


def averaged_at(controller: PeriodController, steps: int, **options: Any) -> list[int]:
    run = Run(controller, noise_dominated, total_steps=steps, **options)
    for _ in range(steps):
        run.step()
    return run.averaged


def test_a_constant_period_averages_at_its_multiples() -> None:
    assert averaged_at(ConstantPeriod(), 30) == [8, 16, 24]
    assert averaged_at(ConstantPeriod(1), 5) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("controller", "averaged"),
    [
        (PostLocal(8, after_steps=3), [1, 2, 3, 11, 19, 27]),
        (PostLocal(8, after_steps=0), [8, 16, 24]),
        (PostLocal(8, after_epochs=1), [*range(1, 11), 18, 26]),
        (PostLocal(8, after_epochs=0), [8, 16, 24]),
    ],
)
def test_post_local_averages_every_step_and_then_every_period(controller: PostLocal, averaged: list[int]) -> None:
    assert averaged_at(controller, 30, steps_per_epoch=10) == averaged


@pytest.mark.parametrize(
    ("controller", "averaged"),
    [
        (PiecewisePeriod((2, 5), (0.2,)), [2, 4, 6, 11, 16, 21, 26]),
        (PiecewisePeriod((5, 2), (0.5,)), [5, 10, 15, 17, 19, 21, 23, 25, 27, 29]),
        (PiecewisePeriod((3, 1, 10), (6, 8)), [3, 6, 7, 8, 18, 28]),
        (PiecewisePeriod((8,), ()), [8, 16, 24]),
    ],
)
def test_a_piecewise_period_averages_by_the_part_of_the_run(controller: PiecewisePeriod, averaged: list[int]) -> None:
    assert averaged_at(controller, 30) == averaged


@pytest.mark.parametrize("steps", [240, 960, 1600])
def test_early_constant_and_late_averagings_have_one_budget(steps: int) -> None:
    early, late = PiecewisePeriod(), PiecewisePeriod((16, 4), (2.0 / 3.0,))
    assert early.mean_period == late.mean_period == 8.0
    counts = [len(averaged_at(c, steps)) for c in (early, ConstantPeriod(8), late)]
    assert max(counts) - min(counts) <= 1
    assert PiecewisePeriod((4, 16), (100,)).mean_period is None


@pytest.mark.parametrize("drop", [1, 2, 3, 4, 6, 8, 16])
def test_adaptive_averages_less_than_constant_8_if_its_mean_period_is_long_enough(drop: int) -> None:
    """E steps of p = 1, p_init = 4 until K_s = K/4, and p̄ afterwards: at most K/8 averagings iff p̄ ≥ 12/(1 − 12 E/K)."""
    K, E = 8000, 200
    run = Run(AdaptivePeriod(), noise_dominated, steps_per_epoch=E, total_steps=K)
    for step in range(K):
        run.step(0.1 if step < K // 4 else 0.1 / drop)
    sampling = [step for step in run.averaged if step <= K // 4]
    assert len(sampling) == E + (K // 4 - E) // 4
    mean_period = 0.75 * K / (len(run.averaged) - len(sampling))
    assert (len(run.averaged) <= K / 8) == (mean_period >= 12 / (1 - 12 * E / K))
    assert (len(run.averaged) <= K / 8) == (drop >= 8)  # both sides of the formula are met here


@given(
    initial=st.integers(1, 6),
    room=st.integers(0, 4),
    sample=st.one_of(st.integers(1, 4), st.floats(0.05, 0.95)),
    seen=st.lists(st.tuples(st.floats(0.0), st.sampled_from([0.0, 1e-3, 0.1])), min_size=20, max_size=60),
)
def test_the_adaptive_period_stays_between_1_and_the_maximum(
    initial: int, room: int, sample: int | float, seen: list[tuple[float, float]]
) -> None:
    controller = AdaptivePeriod(initial, sample, maximum=initial + room)
    state, script = controller.init(), iter(seen)
    deviation, lr = None, 0.0
    for step in range(1, len(seen) + 1):
        average_now, state = controller.update(state, Observation(step, step // 7, step / len(seen), deviation, lr))
        assert 1 <= state.period <= initial + room
        deviation, lr = next(script) if average_now else (None, 0.0)


# -- what every controller promises --------------------------------------------------------------------------------------

CONTROLLERS = {
    "constant": ConstantPeriod(8),
    "every step": ConstantPeriod(1),
    "post-local, steps": PostLocal(5, after_steps=13),
    "post-local, epochs": PostLocal(5, after_epochs=2),
    "piecewise, shares": PiecewisePeriod((2, 7, 3), (0.25, 0.7)),
    "piecewise, steps": PiecewisePeriod((6, 2), (31,)),
    "adaptive, share": AdaptivePeriod(initial=3, sample=0.3),
    "adaptive, count": AdaptivePeriod(initial=2, sample=4, maximum=9),
    "adaptive, no warm-up": AdaptivePeriod(initial=1, sample=2, warmup_epochs=0),
}
every_controller = pytest.mark.parametrize("controller", CONTROLLERS.values(), ids=CONTROLLERS)


def observations(seed: int = 0, steps: int = 120) -> list[Observation]:
    """S at random steps, late or never, over five decades, now and then no number; a learning rate that falls."""
    random = np.random.default_rng(seed)
    seen: list[Observation] = []
    for step in range(1, steps + 1):
        deviation = float(random.choice([10 ** random.uniform(-5, 0), math.nan, 0.0], p=[0.9, 0.05, 0.05]))
        has_come = random.random() < 0.6
        lr = 0.1 * 0.5 ** (step // 30) if random.random() < 0.95 else 0.0
        seen.append(Observation(step, step // 10, step / steps, deviation if has_come else None, lr))
    return seen


@every_controller
def test_the_first_state_says_the_period_of_the_first_step(controller: PeriodController) -> None:
    _, state = controller.update(controller.init(), Observation(1, 0, 0.01))
    assert state.period == controller.init().period


@every_controller
@pytest.mark.parametrize("seed", range(3))
def test_updates_are_pure(controller: PeriodController, seed: int) -> None:
    state = controller.init()
    assert state == controller.init()
    for observation in observations(seed):
        before = asdict(state)
        first = controller.update(state, observation)
        assert controller.update(state, observation) == first
        assert asdict(state) == before
        state = first[1]


@every_controller
@pytest.mark.parametrize("seed", range(3))
def test_the_state_counts_averagings_and_steps_since_the_last(controller: PeriodController, seed: int) -> None:
    state = controller.init()
    averagings = since = 0
    for observation in observations(seed):
        average_now, state = controller.update(state, observation)
        averagings, since = averagings + average_now, 0 if average_now else since + 1
        assert (state.averagings, state.since) == (averagings, since)
        assert 0 <= state.since < state.period
    assert averagings > 0


@every_controller
def test_a_run_that_is_cut_anywhere_goes_on_as_if_it_had_not_been(controller: PeriodController) -> None:
    seen = observations()
    states, decisions = [controller.init()], []
    for observation in seen:
        average_now, state = controller.update(states[-1], observation)
        states.append(state)
        decisions.append(average_now)
    for cut in range(len(seen)):
        state = PeriodState(**json.loads(json.dumps(asdict(states[cut]))))
        assert state == states[cut]
        for place in range(cut, len(seen)):
            average_now, state = controller.update(state, seen[place])
            assert average_now == decisions[place]
        assert state == states[-1]


@every_controller
def test_controllers_states_and_observations_cannot_be_changed(controller: PeriodController) -> None:
    for value, name in ((controller, "period"), (controller.init(), "period"), (Observation(1, 0, None), "step")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, 3)


@every_controller
def test_a_controller_that_needs_no_progress_goes_without(controller: PeriodController) -> None:
    assert controller.needs_progress == (controller in (CONTROLLERS["adaptive, share"], CONTROLLERS["piecewise, shares"]))
    if controller.needs_progress:
        return
    with_it = without = controller.init()
    for observation in observations():
        _, with_it = controller.update(with_it, observation)
        _, without = controller.update(without, replace(observation, progress=None))
    assert with_it == without


@pytest.mark.parametrize("after", [ConstantPeriod(5), PostLocal(5, after_steps=0)])
def test_a_state_of_another_period_is_taken_over_by_the_controller(after: PeriodController) -> None:
    _, state = after.update(PeriodState(8, since=1), Observation(50, 3, None))
    assert (state.period, state.since) == (5, 2)


# -- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConstantPeriod(0), r"period=0; it must be an integer >= 1\. Write for example period=8"),
        (lambda: ConstantPeriod(True), r"period=True; it must be an integer >= 1"),
        (lambda: ConstantPeriod(2.0), r"period=2\.0; it must be an integer >= 1"),  # type: ignore[arg-type]
        (lambda: ConstantPeriod("8"), r"period='8'; it must be an integer >= 1"),  # type: ignore[arg-type]
        (lambda: PostLocal(0, after_steps=1), r"period=0; it must be an integer >= 1"),
        (lambda: PostLocal(8), r"after_epochs=None and after_steps=None; exactly one.*PostLocal\(8, after_epochs=1\)"),
        (lambda: PostLocal(8, after_epochs=1, after_steps=9), r"after_epochs=1 and after_steps=9; exactly one"),
        (lambda: PostLocal(8, after_epochs=-1), r"after_epochs=-1; it must be an integer >= 0"),
        (lambda: PostLocal(8, after_steps=True), r"after_steps=True; it must be an integer >= 0"),
        (lambda: PiecewisePeriod(4), r"periods=4; it is a list.*periods=\(4, 16\)"),  # type: ignore[arg-type]
        (lambda: PiecewisePeriod((4, 0)), r"periods=0; it must be an integer >= 1"),
        (lambda: PiecewisePeriod((4, 8, 16)), r"3 periods and 1 milestones; one part less.*milestones=\(0\.5,\)"),
        (lambda: PiecewisePeriod((), ()), r"0 periods and 0 milestones"),
        (lambda: PiecewisePeriod((4, 8, 16), (0.5, 0.5)), r"milestones=\(0\.5, 0\.5\); they ascend"),
        (lambda: PiecewisePeriod((4, 8), (1.0,)), r"milestones=\(1\.0,\); they ascend.*between 0 and 1"),
        (lambda: PiecewisePeriod((4, 8, 16), (0.5, 100)), r"milestones=\(0\.5, 100\).*all as whole numbers"),
        (lambda: AdaptivePeriod(initial=0), r"initial=0; it must be an integer >= 1"),
        (lambda: AdaptivePeriod(warmup_epochs=-1), r"warmup_epochs=-1; it must be an integer >= 0"),
        (lambda: AdaptivePeriod(maximum=0), r"maximum=0; it must be an integer >= 1"),
        (lambda: AdaptivePeriod(initial=8, maximum=4), r"maximum=4 and initial=8.*Write maximum=8 or more, or None"),
        (lambda: AdaptivePeriod(sample=0), r"sample=0; it must be an integer >= 1 of averagings, or a share.*sample=20"),
        (lambda: AdaptivePeriod(sample=True), r"sample=True; it must be an integer >= 1 of averagings"),
        (lambda: AdaptivePeriod(sample="0.25"), r"sample='0\.25'; it must be"),  # type: ignore[arg-type]
        (lambda: AdaptivePeriod(sample=0.0), r"sample=0\.0; as a float it is a share of the run, between 0 and 1.*Write 0\.25"),
        (lambda: AdaptivePeriod(sample=1.0), r"sample=1\.0; as a float"),
        (lambda: AdaptivePeriod(sample=math.nan), r"sample=nan; as a float"),
        (lambda: AdaptivePeriod(low=1.3, high=0.7), r"low=1\.3 and high=0\.7.*0 < low < high must hold.*low=0\.7, high=1\.3"),
        (lambda: AdaptivePeriod(low=1.0, high=1.0), r"low=1\.0 and high=1\.0"),
        (lambda: AdaptivePeriod(low=0.0), r"low=0\.0 and high=1\.3"),
        (lambda: AdaptivePeriod(low=math.nan), r"low=nan and high=1\.3"),
        (lambda: AdaptivePeriod(low=True), r"low=True and high=1\.3"),
        (lambda: AdaptivePeriod(high=math.inf), r"low=0\.7 and high=inf"),
        (lambda: AdaptivePeriod(low="0.7"), r"low='0\.7' and high=1\.3"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_refused_with_the_value_its_range_and_what_to_write(
    make: Callable[[], PeriodController], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_share_of_a_run_of_unknown_length_is_refused_at_the_first_step() -> None:
    controller = AdaptivePeriod(sample=0.25)
    with pytest.raises(ConfigurationError, match=r"sample=0\.25, a share of the run, in a run of unknown length.*sample=20"):
        controller.update(controller.init(), Observation(1, 0, None))


def test_milestones_in_shares_of_a_run_of_unknown_length_are_refused_too() -> None:
    with pytest.raises(ConfigurationError, match=r"shares of the run, in a run of unknown length.*milestones=\(1000,\)"):
        PiecewisePeriod().update(PiecewisePeriod().init(), Observation(1, 0, None))


def test_the_defaults_are_those_of_the_paper_as_recalled() -> None:
    assert AdaptivePeriod() == AdaptivePeriod(initial=4, sample=0.25, low=0.7, high=1.3, warmup_epochs=1, maximum=None)
    assert ConstantPeriod() == ConstantPeriod(period=8)


# -- a rendezvous in the middle of a stretch -------------------------------------------------------------------------------


def meet_every(run: Run, steps: int, lr: float, *, times: int) -> None:
    """Epochs of so many steps, at whose end all take the mean."""
    for _ in range(times):
        for _ in range(steps):
            run.step(lr)
        run.meet(lr)


def test_a_period_longer_than_an_epoch_is_found_at_the_rendezvous() -> None:
    run = frozen_at(4, 0.1, noise_dominated)
    meet_every(run, 8, 0.01, times=200)
    assert run.state.period == math.ceil(0.7 * 40)
    meet_every(run, 8, 0.02, times=200)  # where the learning rate rises again, it comes down
    assert run.state.period == math.floor(1.3 * 20)


def test_a_rendezvous_just_after_an_averaging_tells_nothing() -> None:
    run = frozen_at(4, 0.1, noise_dominated)
    before = replace(run.state, since=0)
    assert run.controller.restart(before, 0.0, 0.1) == before


@pytest.mark.parametrize(("deviation", "lr"), [(math.nan, 0.1), (math.inf, 0.1), (1.0, 0.0)])
def test_a_rendezvous_whose_deviation_says_nothing_moves_no_period(deviation: float, lr: float) -> None:
    state = replace(frozen_at(4, 0.1, noise_dominated).state, since=3)
    assert AdaptivePeriod(initial=4, sample=5).restart(state, deviation, lr) == replace(state, since=0)


def test_a_rendezvous_while_the_target_is_sampled_is_no_sample() -> None:
    run = Run(AdaptivePeriod(initial=4, sample=5, warmup_epochs=0), noise_dominated)
    run.step()
    run.meet(0.1)
    assert (run.state.samples, run.state.period, run.state.since) == (0, 4, 0)


def test_a_constant_period_begins_anew_at_a_rendezvous() -> None:
    run = Run(ConstantPeriod(4), noise_dominated)
    meet_every(run, 3, 0.1, times=5)
    assert run.averaged == []
