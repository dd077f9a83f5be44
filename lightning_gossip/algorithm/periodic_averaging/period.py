"""When to average: the period controllers of local SGD.

n workers make local steps, then all of them take the mean of their models, w_i ← w̄. A controller says after which steps.

- :class:`ConstantPeriod`: CPSGD, local SGD. Every p steps.
- :class:`StaggeredPeriod`: the same of a model in fragments, one after the other.
- :class:`PostLocal`: post-local SGD, Lin, Stich, Patel, Jaggi (2020, arXiv 1808.07217). p = 1 at first, then constant.
- :class:`~lightning_gossip.algorithm.periodic_averaging.piecewise_period.PiecewisePeriod`: one p for each part of the run.
- :class:`~lightning_gossip.algorithm.periodic_averaging.adaptive_period.AdaptivePeriod`: ADPSGD. p follows how far the models
  drift apart.

| letter | here | what it is |
|---|---|---|
| p | ``PeriodState.period`` | local steps from one averaging to the next |
| S_k | ``Observation.deviation`` | squared distance of the models to their mean, averaged over the workers |
| γ_k | ``Observation.lr`` | learning rate at averaging k |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from typing_extensions import override

from lightning_gossip.algorithm.checks import check_integer
from lightning_gossip.arguments import clear_arguments
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
        """Whether the controller must know the share of the run that is done."""
        return False

    @property
    def needs_deviation(self) -> bool:
        """Whether it looks at S_k, which is to be of a whole stretch."""
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

    def restart(self, state: PeriodState, deviation: float, lr: float) -> PeriodState:
        """All have taken the mean at a synchronisation: the next stretch begins. Called after the last update.

        Args:
            state: after that; ``since`` steps of the stretch under way were made.
            deviation: S of the models that met.
            lr: γ of the last step.
        """
        return replace(state, since=0)


@clear_arguments
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
        check_integer("period", self.period, example=8)

    @override
    def init(self) -> PeriodState:
        return PeriodState(self.period)

    @override
    def update(self, state: PeriodState, observation: Observation) -> tuple[bool, PeriodState]:
        return count_step(state, self.period)


@dataclass(frozen=True)
class StaggeredPeriod(PeriodController):
    """A model in fragments (Streaming DiLoCo, arXiv 2501.18512): one after the other, each once in ``period`` steps.

    Averaging a is of fragment a mod F. The F averagings of ``period`` steps come as evenly as whole steps allow.

    Args:
        period: steps, at least 1.
        fragments: F, in [1, period].

    Raises:
        ConfigurationError: if a number is out of its range.

    >>> controller, averaged = StaggeredPeriod(10, 4), []
    >>> state = controller.init()
    >>> for step in range(1, 21):
    ...     average_now, state = controller.update(state, Observation(step, epoch=0, progress=None))
    ...     averaged += [step] if average_now else []
    >>> averaged
    [2, 5, 7, 10, 12, 15, 17, 20]
    """

    period: int
    fragments: int

    def __post_init__(self) -> None:
        check_integer("period", self.period, example=50)
        check_integer("fragments", self.fragments, at_most=self.period, example=min(4, self.period))

    @override
    def init(self) -> PeriodState:
        return PeriodState(self._stretch(0))

    @override
    def update(self, state: PeriodState, observation: Observation) -> tuple[bool, PeriodState]:
        return count_step(state, self._stretch(state.averagings % self.fragments))

    def _stretch(self, fragment: int) -> int:
        """Steps from the averaging before to this fragment's."""
        return (fragment + 1) * self.period // self.fragments - fragment * self.period // self.fragments


@clear_arguments
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
        check_integer("period", self.period, example=8)
        if (self.after_epochs is None) == (self.after_steps is None):
            raise ConfigurationError(
                f"got after_epochs={self.after_epochs!r} and after_steps={self.after_steps!r}; exactly one of them says when"
                f" the period becomes {self.period}. Write for example PostLocal({self.period}, after_epochs=1)."
            )
        if self.after_epochs is not None:
            check_integer("after_epochs", self.after_epochs, at_least=0, example=1)
        if self.after_steps is not None:
            check_integer("after_steps", self.after_steps, at_least=0, example=1000)

    @override
    def init(self) -> PeriodState:
        return PeriodState(self._period(step=1, epoch=0))

    @override
    def update(self, state: PeriodState, observation: Observation) -> tuple[bool, PeriodState]:
        return count_step(state, self._period(observation.step, observation.epoch))

    def _period(self, step: int, epoch: int) -> int:
        if self.after_epochs is not None:
            return 1 if epoch < self.after_epochs else self.period
        assert self.after_steps is not None
        return 1 if step <= self.after_steps else self.period


def count_step(state: PeriodState, period: int) -> tuple[bool, PeriodState]:
    """Count one step of the stretch under way, which ends at ``period`` steps."""
    steps = state.since + 1
    if steps < period:
        return False, replace(state, period=period, since=steps)
    return True, replace(state, period=period, since=0, stretch=steps, averagings=state.averagings + 1)
