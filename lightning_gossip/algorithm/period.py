r"""When to average: the period controllers of local SGD.

n workers make local steps, then all of them take the mean of their models, w_i ← w̄. A controller says after which steps.

- :class:`ConstantPeriod`: CPSGD, local SGD. Every p steps.
- :class:`AdaptivePeriod`: ADPSGD, Jiang & Agrawal (2020, arXiv 2007.06134). p follows how far the models drift apart.
- :class:`PostLocal`: post-local SGD, Lin, Stich, Patel, Jaggi (2020, arXiv 1808.07217). p = 1 at first, then constant.

ADPSGD, at averaging k, after the all-reduce gave w̄:

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

Where this goes beyond the recursion above, or departs from it (all in ``tests/algorithm/test_period.py``):

- Averagings of the first epochs, at p = 1, stay out of C₂, and so does whichever had a stretch of another length than p_init.
  Otherwise C₂ would be near that of p = 1, and p pinned there (``test_only_stretches_of_the_initial_period_are_sampled``).
- At least one averaging is sampled before p moves, and C₂ is frozen for good once p may move, even if a resumed run is longer,
  so that its share of K_s lies ahead again (``test_a_frozen_target_stays_frozen_in_a_longer_run``).
- γ_k = 0 (the learning rate warms up) and an S_k that is not finite say nothing: no sample, no move.
- S_k = 0 while C₂ is sampled means equal models (one worker; steps skipped by a gradient scaler): there is no noise to measure.
  It is no sample, so C₂ is never 0, which would drive p to 1 forever; p stays at p_init until a sample comes. Later on
  S_k = 0 is below the band, as any small S_k.
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
        step: optimizer steps made since the fit began, this one included; 1 for the first.
        epoch: of this step, from 0.
        progress: share of the run's steps done, in [0, 1]; None if the run's length is unknown.
        deviation: S_k of the averaging that ended since the last update; None if none did. Averagings end in the order in
            which they were asked for. An overlapped one may end some steps later: its S_k comes no later than in the update
            after the one that asks for the next.
        lr: γ_k, the learning rate at that averaging.
    """

    step: int
    epoch: int
    progress: float | None
    deviation: float | None = None
    lr: float = 0.0


@dataclass(frozen=True)
class PeriodState:
    """Where a controller stands. Plain numbers: ``asdict(state)`` goes into a checkpoint, ``PeriodState(**saved)`` comes out.

    Args:
        period: p, steps; what the stretch under way has to reach.
        since: steps since the last averaging began, in [0, period).
        averagings: asked for so far.
        stretch: steps that led to the last averaging; 0 before the first, and if its S_k must not be sampled (ADPSGD).
        earlier_stretch: of the averaging before.
        awaited: of these two averagings, how many S_k have not come yet (ADPSGD).
        target: C₂, the mean of its samples so far; 0.0 before the first.
        samples: of C₂.
        sampling: C₂ is not frozen yet.
    """

    period: int
    since: int = 0
    averagings: int = 0
    stretch: int = 0
    earlier_stretch: int = 0
    awaited: int = 0
    target: float = 0.0
    samples: int = 0
    sampling: bool = True


class PeriodController(ABC):
    """Decides after each optimizer step whether the models are averaged now.

    Controllers are values without state of their own; everything that changes is in the state. Each worker runs one on the
    same observations, so all decide alike and nobody has to ask.

    >>> controller, averaged = ConstantPeriod(3), []
    >>> state = controller.init()
    >>> for step in range(1, 8):
    ...     average_now, state = controller.update(state, Observation(step, epoch=0, progress=None))
    ...     averaged += [step] if average_now else []
    >>> averaged, state.since, state.averagings
    ([3, 6], 1, 2)
    """

    @property
    def needs_progress(self) -> bool:
        """Whether it must know the share of the run that is done."""
        return False

    @abstractmethod
    def init(self) -> PeriodState:
        """The state before the first step."""

    @abstractmethod
    def update(self, state: PeriodState, observation: Observation) -> tuple[bool, PeriodState]:
        """Take in the S_k that has come, if one has; then count the step and decide. Called once after each optimizer step.

        A new period holds for the stretch under way, whose steps so far count.

        Args:
            state: from the last update, or :meth:`init`; not changed.
            observation: of this step.

        Returns:
            Whether to average now, and the next state.
        """


@dataclass(frozen=True)
class ConstantPeriod(PeriodController):
    """CPSGD, local SGD: an average after every ``period`` steps.

    Args:
        period: steps, at least 1.

    Raises:
        ConfigurationError: if it is not.
    """

    period: int = 8

    def __post_init__(self) -> None:
        _check_count("period", self.period, example=8)

    def init(self) -> PeriodState:
        """See :meth:`PeriodController.init`."""
        return PeriodState(self.period)

    def update(self, state: PeriodState, observation: Observation) -> tuple[bool, PeriodState]:
        """See :meth:`PeriodController.update`."""
        return _count_step(state, self.period)


@dataclass(frozen=True)
class PostLocal(PeriodController):
    """Post-local SGD (Lin et al. 2020): an average after every step at first, after every ``period`` steps later on.

    Args:
        period: steps, at least 1; of the second phase.
        after_epochs: the first phase lasts so many epochs, at least 0.
        after_steps: or so many optimizer steps, at least 0. Exactly one of the two.

    Raises:
        ConfigurationError: if a number is out of its range, or not exactly one of the two is given.
    """

    period: int = 8
    after_epochs: int | None = None
    after_steps: int | None = None

    def __post_init__(self) -> None:
        _check_count("period", self.period, example=8)
        if (self.after_epochs is None) == (self.after_steps is None):
            raise ConfigurationError(
                f"got after_epochs={self.after_epochs!r} and after_steps={self.after_steps!r}; exactly one of them says when"
                f" the period becomes {self.period}. Write for example PostLocal({self.period}, after_epochs=1)."
            )
        if self.after_epochs is not None:
            _check_count("after_epochs", self.after_epochs, at_least=0, example=1)
        if self.after_steps is not None:
            _check_count("after_steps", self.after_steps, at_least=0, example=1000)

    def init(self) -> PeriodState:
        """See :meth:`PeriodController.init`."""
        return PeriodState(self._period(step=1, epoch=0))

    def update(self, state: PeriodState, observation: Observation) -> tuple[bool, PeriodState]:
        """See :meth:`PeriodController.update`."""
        return _count_step(state, self._period(observation.step, observation.epoch))

    def _period(self, step: int, epoch: int) -> int:
        if self.after_epochs is not None:
            return 1 if epoch < self.after_epochs else self.period
        assert self.after_steps is not None
        return 1 if step <= self.after_steps else self.period


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
        _check_count("initial", self.initial, example=4)
        _check_count("warmup_epochs", self.warmup_epochs, at_least=0, example=1)
        if self.maximum is not None:
            _check_count("maximum", self.maximum, example=64)
            if self.maximum < self.initial:
                raise ConfigurationError(
                    f"got maximum={self.maximum} and initial={self.initial}; the period starts at initial and stays <= maximum."
                    f" Write maximum={self.initial} or more, or None for no bound."
                )
        if not isinstance(self.sample, float):
            _check_count("sample", self.sample, example=20, otherwise=" of averagings, or a share of the run such as 0.25")
        elif not 0.0 < self.sample < 1.0:
            raise ConfigurationError(
                f"got sample={self.sample!r}; as a float it is a share of the run, between 0 and 1 and neither of them."
                " Write 0.25 for a quarter of the run, or an integer such as 20 for a number of averagings."
            )
        if not (_is_number(self.low) and _is_number(self.high) and 0.0 < self.low < self.high < math.inf):
            raise ConfigurationError(
                f"got low={self.low!r} and high={self.high!r}; they bound S/(γ C₂), and 0 < low < high must hold."
                " Write for example low=0.7, high=1.3."
            )

    @property
    def needs_progress(self) -> bool:
        """Whether K_s is a share of the run."""
        return isinstance(self.sample, float)

    def init(self) -> PeriodState:
        """See :meth:`PeriodController.init`."""
        return PeriodState(1 if self.warmup_epochs else self.initial)

    def update(self, state: PeriodState, observation: Observation) -> tuple[bool, PeriodState]:
        """See :meth:`PeriodController.update`.

        Raises:
            ConfigurationError: if K_s is a share of the run, and the run's length is unknown.
        """
        state = self._take_in(state, observation)
        warming_up = observation.epoch < self.warmup_epochs
        period = 1 if warming_up else self.initial if state.sampling else state.period
        average_now, counted = _count_step(state, period if self.maximum is None else min(period, self.maximum))
        if average_now:
            counted = replace(
                counted,
                stretch=0 if warming_up else counted.stretch,
                earlier_stretch=state.stretch,
                awaited=min(2, state.awaited + 1),
            )
        return average_now, counted

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
        if not math.isfinite(ratio):
            return state
        if state.sampling:
            if ratio > 0.0 and stretch == self.initial:
                samples = state.samples + 1
                state = replace(state, samples=samples, target=state.target + (ratio - state.target) / samples)
        elif ratio < self.low * state.target:
            state = replace(state, period=state.period + 1)
        elif ratio > self.high * state.target:
            state = replace(state, period=max(1, state.period - 1))
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


def _count_step(state: PeriodState, period: int) -> tuple[bool, PeriodState]:
    """Count one step of the stretch under way, which ends at ``period`` steps."""
    steps = state.since + 1
    if steps < period:
        return False, replace(state, period=period, since=steps)
    return True, replace(state, period=period, since=0, stretch=steps, averagings=state.averagings + 1)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_count(name: str, value: object, *, at_least: int = 1, example: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigurationError(
            f"got {name}={value!r}; it must be an integer >= {at_least}{otherwise}. Write for example {name}={example}."
        )
