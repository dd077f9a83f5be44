r"""Local SGD between its collectives: what one worker does, and when, without any I/O.

Each worker makes local steps; a :class:`~lightning_gossip.algorithm.PeriodController` says after which of them all average. An
averaging of the models w_i of step t is applied at once, or τ local steps later as a difference:

    x_i ← w̄                            τ = 0
    x_i ← x_i + (w̄ − w_i)              τ > 0,  w̄ = (1/n) Σ_j w_j

With an outer step (:mod:`lightning_gossip.algorithm.outer`; every worker has the same φ, v and o) w̄ is first moved by it, and
the workers go on from φ, with what each has gained meanwhile:

    x_i ← w̄ + o                        τ = 0
    x_i ← x_i + (w̄ + o − w_i)          τ > 0

At its end all learn S_k = (1/n) Σ_i ‖w_i − w̄‖² and γ_k, which the controller sees with the next step.

| state | event | effects | next state |
|---|---|---|---|
| local | a step | | local |
| local | a step, average now | Begin; if τ = 0 also Complete, Replace | under way; local if τ = 0 |
| under way | a step before it is due | | under way |
| under way | the τ-th step after its begin | Complete, Correct | local, and the step's decision |
| under way | a step, average now | Complete, Correct, Begin | under way |
| under way | arrive | Complete, Correct | local, and as there |
| local | arrive | Begin, Complete(arrived): some have not arrived: Replace, and once more; all have: Settle | met |
| met | meet | Replace if the mean is adopted, else Show | local |

With ``optimizer_state="reset"`` ResetOptimizer follows each Replace. With an outer step OuterStep goes before each Replace and
Correct, but for that of *meet*: where all meet the mean is a merge and no end of a round, whose steps stay H (so the stretch
under way is not cut, unless its S_k is asked for).

A model in F > 1 fragments is averaged one fragment at a time, each once in a period. Then *arrive* averages the fragment whose
turn it is as long as some have not arrived, and after that the whole: nobody knows before Complete which of the two it is.

*arrive* is a worker's coming to the synchronisation point. One that has fewer batches than others comes early and takes part in
their averagings, with as many Begin and Complete as they make, until a Complete says that all have arrived. It sees no decision
of the controller meanwhile, so after the synchronisation all go on from the state of a worker that has made the most steps.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from lightning_gossip.algorithm.checks import check_choice, check_integer
from lightning_gossip.algorithm.compression.wires import MeanWire
from lightning_gossip.algorithm.options import Options
from lightning_gossip.algorithm.outer import Outer, check_exact, outer_of
from lightning_gossip.algorithm.periodic_averaging.period import (
    ConstantPeriod,
    Observation,
    PeriodController,
    PeriodState,
    StaggeredPeriod,
)
from lightning_gossip.errors import ConfigurationError

OptimizerStateRule = Literal["keep", "average", "reset"]


@dataclass(frozen=True, kw_only=True)
class AveragingOptions(Options):
    """What periodic averaging is told, in a real run and in a simulated one.

    Args:
        period: steps between two averagings, at least 1, or the controller that decides them.
        optimizer_state: of momentum and the like at an averaging: ``"keep"`` each worker's own, ``"average"``, ``"reset"``.
        overlap: τ, how many local steps an averaging may run behind: ``False`` for none, a number of at least 0, or ``True``
            for as many as there are until the next one.
        wire: how models are sent; see :mod:`lightning_gossip.algorithm.compression.error_feedback_mean`.
        outer: what follows an averaging; see :mod:`lightning_gossip.algorithm.outer`.
        fragments: F, in how many parts the model is averaged, one after the other, each once in ``period`` steps.

    Raises:
        ConfigurationError: if a value is out of its range, an overlap would reset momentum of steps that come later, or there
            are fragments of what is averaged as a whole.
    """

    period: int | PeriodController = 8
    optimizer_state: OptimizerStateRule = "keep"
    overlap: bool | int = False
    wire: MeanWire = "float32"
    outer: Outer | None = None
    fragments: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.period, PeriodController):
            check_integer("period", self.period, example=8, otherwise=", or what decides it, as AdaptivePeriod()")
            object.__setattr__(self, "period", ConstantPeriod(self.period))
        check_choice("optimizer_state", self.optimizer_state, get_args(OptimizerStateRule))
        check_choice("wire", self.wire, get_args(MeanWire))
        object.__setattr__(self, "outer", outer_of(self.outer))
        if self.outer is not None:
            check_exact(self.outer)
        self._check_fragments()
        if not isinstance(self.overlap, int) or self.overlap < 0:
            raise ConfigurationError(
                f"overlap={self.overlap!r} is neither True, False nor a whole number of steps of at least 0."
            )
        if self.overlap is not False and self.optimizer_state == "reset":
            raise ConfigurationError(
                "overlap with optimizer_state='reset' would throw away the momentum of steps that come after the averaging."
                " Use optimizer_state='keep' or 'average'."
            )

    def _check_fragments(self) -> None:
        check_integer("fragments", self.fragments, example=4)
        if self.fragments == 1:
            return
        if not isinstance(self.period, ConstantPeriod):
            raise ConfigurationError(
                f"got fragments={self.fragments} with {self.period}; fragments take turns in a constant period. Write for"
                " example period=50."
            )
        if self.optimizer_state != "keep":
            raise ConfigurationError(
                f"got fragments={self.fragments} with optimizer_state={self.optimizer_state!r}, of a whole model at once."
                " Write optimizer_state='keep'."
            )
        StaggeredPeriod(self.period.period, self.fragments)  # refuses more of them than steps

    @property
    def controller(self) -> PeriodController:
        """The controller of the averagings."""
        assert isinstance(self.period, PeriodController)
        if self.fragments == 1 or not isinstance(self.period, ConstantPeriod):
            return self.period
        return StaggeredPeriod(self.period.period, self.fragments)

    @property
    def overlap_steps(self) -> float:
        """τ; infinite for as many as there are until the next averaging."""
        return math.inf if self.overlap is True else int(self.overlap)


@dataclass(frozen=True)
class Begin:
    """Send w_i ← x_i on its way; x is free to change.

    Args:
        fragment: of which, from 0; None for the whole of it.
    """

    fragment: int | None = None


@dataclass(frozen=True)
class Complete:
    """Wait for w̄, then sum over the workers ‖w_i − w̄‖² and this; resume with :class:`Averaged`.

    Args:
        lr: γ of this worker when the averaging began.
        arrived: at the synchronisation point.
    """

    lr: float
    arrived: bool


@dataclass(frozen=True)
class Averaged:
    """What :class:`Complete` came to, the same on all workers.

    Args:
        deviation: S_k = (1/n) Σ_i ‖w_i − w̄‖².
        lr: γ_k, the mean of the workers'.
        all_arrived: all workers have arrived at the synchronisation point.
    """

    deviation: float
    lr: float
    all_arrived: bool = False


@dataclass(frozen=True)
class OuterStep:
    """w̄ ← w̄ + o of the averaging just completed, the same bits on all workers."""


@dataclass(frozen=True)
class Replace:
    """x_i ← w̄, of a model that has not changed since the averaging began: the same bits on all workers."""


@dataclass(frozen=True)
class Correct:
    """x_i ← x_i + (w̄ − w_i).

    Args:
        forward_passes: of this worker since the averaging began, in which running statistics have forgotten a share of w_i.
    """

    forward_passes: int


@dataclass(frozen=True)
class ResetOptimizer:
    """Forget the state of the optimizers."""


@dataclass(frozen=True)
class Settle:
    """Make the w̄ of the averaging just completed exact, with what rounding has kept back so far."""


@dataclass(frozen=True)
class Show:
    """The model ← w̄, to be looked at; whatever is not the model, and the worker's own model elsewhere, stay."""


Effect = Begin | Complete | OuterStep | Replace | Correct | ResetOptimizer | Settle | Show
Effects = Generator[Effect, Any, None]


class AveragingProtocol:
    """One worker's decisions during one fit; the module says which. Workers that have made the same steps decide alike.

    Args:
        options: of the algorithm.
        adopts: whether all take the mean at a synchronisation point.

    Attributes:
        steps: of this worker since the fit began.
        averagings: that it has begun to apply, those at synchronisation points included if they are adopted.
        control: where the period's controller stands.
        last: S_k and γ_k of the averaging completed last; None before the first.
    """

    def __init__(self, options: AveragingOptions, *, adopts: bool) -> None:
        self._controller = options.controller
        self._overlap = options.overlap_steps
        self._resets = options.optimizer_state == "reset"
        self._adopts = adopts
        self._has_outer = options.outer is not None
        self._fragments = options.fragments
        self.steps = 0
        self.averagings = 0
        self.control: PeriodState = self._controller.init()
        self.last: Averaged | None = None
        self._unseen: Averaged | None = None  # by the controller
        self._met = Averaged(0.0, 0.0)  # of the last synchronisation point
        self._due: float | None = None  # the step after which the averaging under way is applied; None without one
        self._begun_lr = 0.0  # when it began
        self._lr = 0.0  # of the last step
        self._forward_passes = 0  # since it began

    def step(self, number: int, *, epoch: int, progress: float | None, lr: float, forward_passes: int = 1) -> Effects:
        """Follow a step of this worker's optimizers: apply what is due, decide, begin the next averaging.

        Args:
            number: of the step since the fit began, from 1.
            epoch: of the step, from 0.
            progress: share of the run's steps done, in [0, 1]; None if the run's length is unknown.
            lr: that the step was made with.
            forward_passes: that led to it.
        """
        self.steps += 1
        self._lr = lr
        self._forward_passes += forward_passes
        if self._due is not None and number >= self._due:
            yield from self._finish()
        seen, self._unseen = self._unseen, None
        told = (None, 0.0) if seen is None else (seen.deviation, seen.lr)
        average_now, self.control = self._controller.update(self.control, Observation(number, epoch, progress, *told))
        if average_now:
            yield from self._finish()
            self.averagings += 1
            self._due = number + self._overlap
            yield from self._begin(self.control.averagings - 1)
            if self._overlap == 0:
                yield from self._finish()

    def arrive(self) -> Effects:
        """Come to a synchronisation point: take part in averagings until all have come. At the end the exact w̄ is there."""
        yield from self._finish()
        while True:
            yield from self._begin(self.control.averagings)
            averaged = yield from self._complete(arrived=True)
            if averaged.all_arrived:
                if self._fragments > 1:
                    yield Begin()
                    averaged = yield from self._complete(arrived=True)
                self._met = averaged
                yield Settle()
                return
            yield from self._outer_step()
            yield from self._replace()
            self.averagings += 1
            self.control = replace(self.control, since=0, averagings=self.control.averagings + 1)

    def meet(self) -> Effects:
        """Take the mean, or show it, when all workers have arrived."""
        if not self._adopts:
            yield Show()
            return
        self.averagings += 1
        if not self._has_outer or self._controller.needs_deviation:
            self.control = self._controller.restart(self.control, self._met.deviation, self._met.lr)
        yield from self._replace()

    def follow(self, everyones: Sequence[Mapping[str, Any]]) -> None:
        """Begin a session: go on with the decisions of a worker that has missed none.

        Args:
            everyones: :meth:`state_dict` of all workers, by rank.
        """
        ahead = max(everyones, key=lambda state: int(state["steps"]))
        self._go_on(ahead)

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        unseen = self._unseen
        return {
            "control": asdict(self.control),
            "deviation": None if unseen is None else (unseen.deviation, unseen.lr),
            "steps": self.steps,
            "averagings": self.averagings,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._go_on(state)
        self.steps, self.averagings = state["steps"], state["averagings"]

    def _go_on(self, state: Mapping[str, Any]) -> None:
        self.control = PeriodState(**state["control"])
        self._unseen = None if state["deviation"] is None else Averaged(*state["deviation"])

    def _begin(self, averaging: int) -> Effects:
        self._begun_lr = self._lr
        self._forward_passes = 0
        yield Begin(averaging % self._fragments if self._fragments > 1 else None)

    def _finish(self) -> Effects:
        """Apply the averaging under way, if there is one."""
        if self._due is None:
            return
        self._due = None
        yield from self._complete(arrived=False)
        yield from self._outer_step()
        if self._overlap == 0:
            yield from self._replace()
        else:
            yield Correct(self._forward_passes)

    def _complete(self, *, arrived: bool) -> Generator[Effect, Averaged, Averaged]:
        averaged = yield Complete(self._begun_lr, arrived)
        if not averaged.all_arrived:
            self.last = self._unseen = averaged
        return averaged

    def _outer_step(self) -> Effects:
        if self._has_outer:
            yield OuterStep()

    def _replace(self) -> Effects:
        yield Replace()
        if self._resets:
            yield ResetOptimizer()
