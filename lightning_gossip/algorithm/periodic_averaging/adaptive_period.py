r"""ADPSGD: the averaging period that follows how far the models drift apart.

Jiang & Agrawal (2020, arXiv 2007.06134). At averaging k, after the all-reduce gave w̄:

    S_k = (1/n) Σ_i ‖w_i − w̄‖²
    while k < K_s (p = p_init):    C₂ ← running mean of S_k / γ_k
    after that:                    S_k < 0.7 γ_k C₂  ⟹  p ← p + 1
                                   S_k > 1.3 γ_k C₂  ⟹  p ← max(1, p − 1)

| letter | here | what it is |
|---|---|---|
| p | ``PeriodState.period`` | local steps from one averaging to the next |
| p_init | ``initial`` | the period while C₂ is sampled |
| S_k | ``Observation.deviation`` | squared distance of the models to their mean, averaged over the workers |
| γ_k | ``Observation.lr`` | learning rate at averaging k |
| C₂ | ``PeriodState.target`` | what S_k/γ_k is held at |
| K_s | ``sample`` | how long C₂ is sampled |
| 0.7, 1.3 | ``low``, ``high`` | the band around γ_k C₂ in which p stays |

Why: the convergence bound carries Σ_k Var_k, the variance of the local models; S_k measures it. Var_k ≈ γ_k C₂ keeps that
sum of the order of the noise term of SGD itself. So rare averaging costs little where γ is small, and much where it is large.

How S depends on γ: p steps of noise of variance σ² (summed over the parameters), each times γ, drift apart by S ≈ p γ² σ², so
S/γ ≈ p γ σ². With C₂ frozen at γ₀ the rule asks for p* = p_init · γ₀/γ. It stops at the near end of the band: at
⌈low · p*⌉ if p came from below, at ⌊high · p*⌋ from above. (A C₂ sampled anew at each γ would ask for p_init always.) Workers
whose gradients differ by more than their noise drift by S ∝ p² γ², and p grows like γ^(−½) only. p moves by 1 an averaging,
so reaching P takes about P²/2 steps: a schedule needs room. A band without a whole number in it (p* below about
1/(high − low)) leaves p going to and fro between its neighbours.

Not sure: the constants 0.7, 1.3, p_init = 4 and K_s = 0.25 of all iterations are recalled, not verified against the paper.
Whether K_s counts averagings or iterations is not known here, so ``sample`` takes a number of averagings or a share of the run.

Where this goes beyond the recursion above, or departs from it (all in ``tests/algorithm/periodic_averaging/test_period.py``):

- Averagings of the first epochs, at p = 1, stay out of C₂, and so does whichever had a stretch of another length than p_init.
  Otherwise C₂ would be near that of p = 1, and p pinned there (``test_only_stretches_of_the_initial_period_are_sampled``).
- At least one averaging is sampled before p moves, and C₂ is frozen for good once p may move, even if a resumed run is longer,
  so that its share of K_s lies ahead again (``test_a_frozen_target_stays_frozen_in_a_longer_run``).
- γ_k = 0 (the learning rate warms up) and an S_k that is not finite say nothing: no sample, no move.
- A synchronisation whose mean all take cuts a stretch short, after s < p steps. Its S counts as that of p steps, S · p/s
  (the drift by noise), so that p may exceed an epoch (``test_a_period_longer_than_an_epoch_is_found_at_the_rendezvous``).
- S_k = 0 while C₂ is sampled means equal models (one worker; steps skipped by a gradient scaler): there is no noise to measure.
  It is no sample, so C₂ is never 0, which would drive p to 1 forever; p stays at p_init until a sample comes. Later on
  S_k = 0 is below the band, as any small S_k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from typing_extensions import override

from lightning_gossip.algorithm.checks import check_integer, is_finite
from lightning_gossip.algorithm.periodic_averaging.period import Observation, PeriodController, PeriodState, count_step
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError


@clear_arguments
@dataclass(frozen=True)
class AdaptivePeriod(PeriodController):
    """ADPSGD (Jiang & Agrawal 2020): the period that keeps S_k near γ_k C₂. The module says how, and what is recalled only.

    Args:
        initial: p_init, steps, at least 1: the period while C₂ is sampled.
        sample: K_s. An int: so many averagings go into C₂, at least 1. A float in (0, 1): all go into it until this share of
            the run, the first epochs included, is done; at least one does.
        low: above 0: p grows where S_k is below ``low`` · γ_k C₂.
        high: above ``low``: p shrinks where S_k is above ``high`` · γ_k C₂.
        warmup_epochs: with p = 1, before the sampling; at least 0.
        maximum: the largest p, at least ``initial``; None for no bound.

    Raises:
        ConfigurationError: if a value is out of its range.

    An S_k that was lost (a run interrupted between an averaging and its S_k) costs at most one sample.
    """

    initial: int = 4
    sample: int | float = 0.25
    low: float = 0.7
    high: float = 1.3
    warmup_epochs: int = 1
    maximum: int | None = None

    def __post_init__(self) -> None:
        check_integer("initial", self.initial, example=4)
        check_integer("warmup_epochs", self.warmup_epochs, at_least=0, example=1)
        if self.maximum is not None:
            check_integer("maximum", self.maximum, example=64)
            if self.maximum < self.initial:
                raise ConfigurationError(
                    f"got maximum={self.maximum} and initial={self.initial}; the period starts at initial and stays <= maximum."
                    f" Write maximum={self.initial} or more, or None for no bound."
                )
        if not isinstance(self.sample, float):
            check_integer("sample", self.sample, example=20, otherwise=" of averagings, or a share of the run such as 0.25")
        elif not 0.0 < self.sample < 1.0:
            raise ConfigurationError(
                f"got sample={self.sample!r}; as a float it is a share of the run, between 0 and 1 and neither of them."
                " Write 0.25 for a quarter of the run, or an integer such as 20 for a number of averagings."
            )
        if not (is_finite(self.low) and is_finite(self.high) and 0.0 < self.low < self.high):
            raise ConfigurationError(
                f"got low={self.low!r} and high={self.high!r}; they bound S/(γ C₂), and 0 < low < high must hold."
                " Write for example low=0.7, high=1.3."
            )

    @property
    def needs_progress(self) -> bool:
        """Whether K_s is a share of the run."""
        return isinstance(self.sample, float)

    @property
    @override
    def needs_deviation(self) -> bool:
        return True

    @override
    def init(self) -> PeriodState:
        return PeriodState(1 if self.warmup_epochs else self.initial)

    @override
    def update(self, state: PeriodState, observation: Observation) -> tuple[bool, PeriodState]:
        """Take in the S_k that has come, if one has; then count the step and decide.

        Raises:
            ConfigurationError: if K_s is a share of the run, and the run's length is unknown.
        """
        state = self._take_in(state, observation)
        warming_up = observation.epoch < self.warmup_epochs
        period = 1 if warming_up else self.initial if state.sampling else state.period
        average_now, counted = count_step(state, period if self.maximum is None else min(period, self.maximum))
        if average_now:
            counted = replace(
                counted,
                stretch=0 if warming_up else counted.stretch,
                earlier_stretch=state.stretch,
                awaited=min(2, state.awaited + 1),
            )
        return average_now, counted

    @override
    def restart(self, state: PeriodState, deviation: float, lr: float) -> PeriodState:
        # S · p/s is as good an S_k as any, but no sample
        if state.since and not state.sampling and lr > 0.0:
            state = self._moved(state, deviation * state.period / state.since / lr)
        return super().restart(state, deviation, lr)

    def _take_in(self, state: PeriodState, observation: Observation) -> PeriodState:
        """C₂ and p after the S_k that has come, if one has."""
        done = self._sampling_is_over(state, observation.progress)  # asked at every step: a run without length fails at once
        if observation.deviation is None:
            return state
        # overlapped until the next one: S_k of the last averaging of the warm-up comes after the next was asked for
        stretch = state.earlier_stretch if state.awaited == 2 else state.stretch
        state = replace(state, awaited=max(0, state.awaited - 1), sampling=state.sampling and not done)
        if not observation.lr > 0.0:
            return state
        ratio = observation.deviation / observation.lr
        if not state.sampling:
            return self._moved(state, ratio)
        if 0.0 < ratio < math.inf and stretch == self.initial:
            samples = state.samples + 1
            state = replace(state, samples=samples, target=state.target + (ratio - state.target) / samples)
        return state

    def _moved(self, state: PeriodState, ratio: float) -> PeriodState:
        """p after S/γ = ``ratio`` of a stretch of p steps."""
        if not math.isfinite(ratio):
            return state
        if ratio < self.low * state.target:
            return replace(state, period=state.period + 1)
        if ratio > self.high * state.target:
            return replace(state, period=max(1, state.period - 1))
        return state

    def _sampling_is_over(self, state: PeriodState, progress: float | None) -> bool:
        if isinstance(self.sample, int):
            over = state.samples >= self.sample
        elif progress is None:
            raise ConfigurationError(
                f"got sample={self.sample!r}, a share of the run, in a run of unknown length. Write an integer such as"
                " sample=20 for a number of averagings, or give the run a length."
            )
        else:
            over = progress >= self.sample
        return over and state.samples > 0
