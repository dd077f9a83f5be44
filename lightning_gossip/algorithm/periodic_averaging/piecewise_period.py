"""A period for each part of a run: averaging often early and seldom late, or the reverse, on one budget of averagings.

Averaging early matters more than averaging late (Jiang, Agrawal 2020, arXiv 2007.06134); AdaComm (Wang, Joshi 2019) does the
reverse. ``python -m benchmarks.reproduction budget`` compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from typing_extensions import override

from lightning_gossip.algorithm.checks import check_integer, is_finite, is_integer
from lightning_gossip.algorithm.periodic_averaging.period import Observation, PeriodController, PeriodState, count_step
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError


@clear_arguments
@dataclass(frozen=True)
class PiecewisePeriod(PeriodController):
    """A constant period in each part of the run.

    The default averages often early: every 4 steps in the first third, every 16 later on, as often in all as every 8 steps.

    Args:
        periods: steps, at least 1 each, in the order of the parts.
        milestones: where the next part begins, one less than periods, ascending: shares of the run in (0, 1), or whole numbers
            of optimizer steps.

    Raises:
        ConfigurationError: if a number is out of its range, or their numbers do not fit.

    >>> late = PiecewisePeriod((16, 4), milestones=(2 / 3,))
    >>> PiecewisePeriod().mean_period, late.mean_period
    (8.0, 8.0)
    """

    periods: Sequence[int] = (4, 16)
    milestones: Sequence[float] = (1.0 / 3.0,)

    def __post_init__(self) -> None:
        for name in ("periods", "milestones"):
            value = getattr(self, name)
            if not isinstance(value, Sequence) or isinstance(value, str):
                raise ConfigurationError(
                    f"got {name}={value!r}; it is a list. Write for example periods=(4, 16), milestones=(0.5,)."
                )
            object.__setattr__(self, name, tuple(value))
        if not self.periods or len(self.milestones) != len(self.periods) - 1:
            raise ConfigurationError(
                f"got {len(self.periods)} periods and {len(self.milestones)} milestones; one part less ends at a milestone than"
                " there are periods. Write for example periods=(4, 16), milestones=(0.5,)."
            )
        for period in self.periods:
            check_integer("periods", period, example=8)
        in_steps = all(is_integer(milestone, 1) for milestone in self.milestones)
        in_shares = all(isinstance(m, float) and is_finite(m) and 0.0 < m < 1.0 for m in self.milestones)
        if not (in_steps or in_shares) or any(first >= second for first, second in pairwise(self.milestones)):
            raise ConfigurationError(
                f"got milestones={self.milestones!r}; they ascend, all as shares of the run between 0 and 1, or all as whole"
                " numbers of steps. Write for example milestones=(0.25, 0.5), or milestones=(1000, 2000)."
            )

    @property
    @override
    def needs_progress(self) -> bool:
        return any(isinstance(milestone, float) for milestone in self.milestones)

    @property
    def mean_period(self) -> float | None:
        """Steps of the run over its averagings: the constant period of the same budget; None for milestones in steps."""
        if not self.needs_progress and self.milestones:
            return None
        edges = (0.0, *self.milestones, 1.0)
        return round(1.0 / sum((end - begin) / p for (begin, end), p in zip(pairwise(edges), self.periods, strict=True)), 9)

    @override
    def init(self) -> PeriodState:
        return PeriodState(self.periods[0])

    @override
    def update(self, state: PeriodState, observation: Observation) -> tuple[bool, PeriodState]:
        """Count the step and decide.

        Raises:
            ConfigurationError: for milestones in shares of a run whose length is unknown.
        """
        at: float | None = observation.progress if self.needs_progress else observation.step
        if at is None:
            raise ConfigurationError(
                f"got milestones={self.milestones!r}, shares of the run, in a run of unknown length. Write whole numbers of"
                " steps, such as milestones=(1000,), or give the run a length."
            )
        return count_step(state, self.periods[sum(at > milestone for milestone in self.milestones)])
