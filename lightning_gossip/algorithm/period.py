"""When to average: period controllers of local SGD.

n workers make local steps and replace their models w_i by the mean w̄ every p steps.

- CPSGD: p constant, see :class:`ConstantPeriod`.
- ADPSGD (Jiang & Agrawal 2020, arXiv 2007.06134): p follows how far the models drift apart, see :class:`AdaptivePeriod`.
  At averaging k, S_k = (1/n) Σ_i ‖w_i − w̄‖². While it is sampled, C₂ ← mean of S_k/γ_k at p = p_init. After that

      S_k < 0.7 γ_k C₂  ⟹  p ← p + 1 ;      S_k > 1.3 γ_k C₂  ⟹  p ← max(1, p − 1)

  Why: the convergence bound carries Σ_k Var_k of the local models, and Var_k ≈ γ_k C₂ keeps that sum of the order of the noise
  of SGD itself. Where gradient noise dominates, S/γ ≈ p γ σ²: as the learning rate falls, the period may grow.
- Post-local SGD (Lin et al. 2020, arXiv 1808.07217): p = 1 at first, then constant, see :class:`PostLocal`.

| letter | here | what it is |
|---|---|---|
| p | ``period`` | local steps between two averagings |
| p_init | ``initial`` | the period while C₂ is sampled |
| S_k | ``deviation`` | squared distance of the models to their mean, averaged over the workers |
| γ_k | ``lr`` | learning rate at averaging k |
| C₂ | ``target`` | what S_k/γ_k is held at |
| K_s | ``sample`` | how long C₂ is sampled |

Recalled, not verified against the paper: the constants 0.7 and 1.3, p_init = 4, and that K_s = 0.25 of all iterations; whether
the paper counts averagings or iterations is unsure, so both can be given.

A controller is a pair of pure functions: ``init() → state``, ``update(state, observation) → (average now?, state)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from lightning_gossip.errors import ConfigurationError


@dataclass(frozen=True)
class Observation:
    """What a controller is told after each optimizer step.

    Args:
        step: optimizer steps since the fit began, this one included.
        epoch: of this step, from 0.
        progress: share of the run's steps done, in [0, 1]; None if the run's length is unknown.
        deviation: S_k of the averaging that ended since the last update; None if none did.
        lr: γ_k, the learning rate at that averaging.
    """

    step: int
    epoch: int
    progress: float | None
    deviation: float | None = None
    lr: float = 0.0


@dataclass(frozen=True)
class PeriodState:
    """Where a controller stands: plain numbers, for checkpoints.

    Args:
        period: p.
        since: steps since the last averaging began.
        averagings: that it has asked for.
        stretch: steps that led to the last averaging.
        target: C₂, the mean of its samples so far.
        samples: of C₂.
    """

    period: int
    since: int = 0
    averagings: int = 0
    stretch: int = 0
    target: float = 0.0
    samples: int = 0


class PeriodController(ABC):
    """Decides after each optimizer step whether the models are averaged now."""

    @property
    def needs_progress(self) -> bool:
        """Whether it must know the share of the run that is done."""
        return False

    @abstractmethod
    def init(self) -> PeriodState:
        """The state before the first step."""

    @abstractmethod
    def adapted(self, state: PeriodState, observation: Observation) -> PeriodState:
        """The state with the period that holds at this step, given what is observed."""

    def update(self, state: PeriodState, observation: Observation) -> tuple[bool, PeriodState]:
        """Count a step.

        Args:
            state: after the last update; not changed.
            observation: of this step.

        Returns:
            Whether to average now, and the next state.
        """
        state = self.adapted(state, observation)
        since = state.since + 1
        if since < state.period:
            return False, replace(state, since=since)
        return True, replace(state, since=0, stretch=since, averagings=state.averagings + 1)


@dataclass(frozen=True)
class ConstantPeriod(PeriodController):
    """CPSGD, local SGD: an average every ``period`` steps.

    Args:
        period: steps, at least 1.
    """

    period: int = 8

    def __post_init__(self) -> None:
        _check_count("period", self.period)

    def init(self) -> PeriodState:
        """See :class:`PeriodController`."""
        return PeriodState(self.period)

    def adapted(self, state: PeriodState, observation: Observation) -> PeriodState:
        """See :class:`PeriodController`."""
        return state


@dataclass(frozen=True)
class PostLocal(PeriodController):
    """Post-local SGD: an average after every step at first, every ``period`` steps afterwards.

    Args:
        period: steps, at least 1.
        after_epochs, after_steps: how long the first phase is; exactly one of them.
    """

    period: int = 8
    after_epochs: int | None = None
    after_steps: int | None = None

    def __post_init__(self) -> None:
        _check_count("period", self.period)
        if (self.after_epochs is None) == (self.after_steps is None):
            raise ConfigurationError(
                f"PostLocal needs exactly one of after_epochs={self.after_epochs!r} and after_steps={self.after_steps!r}."
                " Write for example PostLocal(after_epochs=1)."
            )
        for name in ("after_epochs", "after_steps"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), least=0)

    def init(self) -> PeriodState:
        """See :class:`PeriodController`."""
        return PeriodState(1)

    def adapted(self, state: PeriodState, observation: Observation) -> PeriodState:
        """See :class:`PeriodController`."""
        if self.after_epochs is not None:
            local = observation.epoch >= self.after_epochs
        else:
            assert self.after_steps is not None
            local = observation.step > self.after_steps
        return replace(state, period=self.period if local else 1)


@dataclass(frozen=True)
class AdaptivePeriod(PeriodController):
    """ADPSGD: the period that keeps the deviation of the models at γ_k C₂.

    Args:
        initial: p_init, the period while C₂ is sampled.
        sample: K_s: a whole number of averagings that go into C₂, or the share of the run, in (0, 1), until which all do. At
            least one does in either case.
        low, high: of the dead band S_k/(γ_k C₂) in which the period stays; low < high.
        warmup_epochs: with period 1 before the sampling. Their deviations stay out of C₂, or p would be pinned at 1.
        maximum: of the period; None for none.
    """

    initial: int = 4
    sample: int | float = 0.25
    low: float = 0.7
    high: float = 1.3
    warmup_epochs: int = 1
    maximum: int | None = None

    def __post_init__(self) -> None:
        _check_count("initial", self.initial)
        _check_count("warmup_epochs", self.warmup_epochs, least=0)
        if self.maximum is not None:
            _check_count("maximum", self.maximum, least=self.initial)
        if isinstance(self.sample, bool) or not isinstance(self.sample, (int, float)):
            raise ConfigurationError(
                f"sample={self.sample!r} is not a number. Write a count such as 20, or a share such as 0.25."
            )
        if isinstance(self.sample, float) and not 0.0 < self.sample < 1.0:
            raise ConfigurationError(
                f"sample={self.sample!r} is a share of the run, and not between 0 and 1. Write a whole number for a count of"
                " averagings."
            )
        if isinstance(self.sample, int):
            _check_count("sample", self.sample)
        if not (0.0 < self.low < self.high < math.inf):
            raise ConfigurationError(f"low={self.low!r} and high={self.high!r}: the thresholds must satisfy 0 < low < high.")

    @property
    def needs_progress(self) -> bool:
        """Whether K_s is a share of the run."""
        return isinstance(self.sample, float)

    def init(self) -> PeriodState:
        """See :class:`PeriodController`."""
        return PeriodState(1 if self.warmup_epochs else self.initial)

    def adapted(self, state: PeriodState, observation: Observation) -> PeriodState:
        """See :class:`PeriodController`."""
        deviation, lr = observation.deviation, observation.lr
        # γ = 0 while the learning rate warms up, a deviation that overflowed: they say nothing
        if deviation is not None and lr > 0 and math.isfinite(deviation):
            if self._sampling(state, observation):
                if state.stretch == self.initial and state.period == self.initial:
                    samples = state.samples + 1
                    target = state.target + (deviation / lr - state.target) / samples
                    state = replace(state, target=target, samples=samples)
            elif deviation < self.low * lr * state.target:
                longer = state.period + 1
                state = replace(state, period=longer if self.maximum is None else min(longer, self.maximum))
            elif deviation > self.high * lr * state.target:
                state = replace(state, period=max(1, state.period - 1))
        if state.samples == 0:
            return replace(state, period=1 if observation.epoch < self.warmup_epochs else self.initial)
        return state

    def _sampling(self, state: PeriodState, observation: Observation) -> bool:
        if state.samples == 0:
            return True
        if isinstance(self.sample, int):
            return state.samples < self.sample
        return observation.progress is None or observation.progress < self.sample


def _check_count(name: str, value: object, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name}={value!r} is not a whole number of at least {least}.")
