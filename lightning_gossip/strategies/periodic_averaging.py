"""Local SGD with an exact average now and then: CPSGD, ADPSGD (arXiv 2007.06134), post-local SGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, get_args

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gossip.algorithm.compression.error_feedback_mean import MeanWire
from lightning_gossip.algorithm.periodic_averaging.adaptive_period import AdaptivePeriod
from lightning_gossip.algorithm.periodic_averaging.period import ConstantPeriod, Observation, PeriodController, PeriodState
from lightning_gossip.algorithm.tensors.flat import LiveTensors
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.periodic_averaging.averager import Averager
from lightning_gossip.runtime.sync_point import SyncPoint
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.options import check_choice
from lightning_gossip.strategies.report import WorkerReport
from lightning_gossip.strategies.state.optimizer_state import OptimizerStateRule, OptimizerStates, Slot
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from lightning_gossip.strategies.synchronous import LockstepAlgorithm
from lightning_gossip.strategies.worker_algorithm import Algorithm, Step


class PeriodicAveragingStrategy(DecentralizedStrategy):
    """Local steps, then one exact average of all models; in between nothing is sent.

    Args:
        period: steps between two averagings, or what decides them: :class:`~lightning_gossip.algorithm.ConstantPeriod`
            (CPSGD, local SGD), :class:`~lightning_gossip.algorithm.AdaptivePeriod` (ADPSGD),
            :class:`~lightning_gossip.algorithm.PostLocal`.
        optimizer_state: what becomes of momentum and the like at an averaging: ``"keep"`` each worker's own, ``"average"`` it
            with the model, ``"reset"`` it.
        overlap: how many local steps an averaging may run behind: ``False`` for none (the workers wait for it), a number, or
            ``True`` for as many as there are until the next one. The result is applied as a difference, exactly so many
            steps later on every worker.
        wire: how models are sent: ``"float32"`` as they are; ``"bfloat16"`` or ``"int8"``: as rounded differences to the last
            mean, in half or a quarter of the bytes. What rounding keeps back is added to the next difference; the mean at a
            rendezvous is exact.
        options: see :class:`~lightning_gossip.strategies.DecentralizedStrategy`.

    Example::

        Trainer(strategy="periodic_averaging", devices=4)                                  # every 8 steps
        Trainer(strategy=PeriodicAveragingStrategy(period=AdaptivePeriod()), devices=4)    # = "adaptive_averaging"
    """

    shares_work: ClassVar[bool] = False

    def __init__(
        self,
        *,
        period: int | PeriodController = 8,
        optimizer_state: OptimizerStateRule = "keep",
        overlap: bool | int = False,
        wire: MeanWire = "float32",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not isinstance(period, PeriodController):
            period = ConstantPeriod(period)
        check_choice("optimizer_state", optimizer_state, get_args(OptimizerStateRule))
        check_choice("wire", wire, get_args(MeanWire))
        if not isinstance(overlap, int) or overlap < 0:
            raise ConfigurationError(f"overlap={overlap!r} is neither True, False nor a whole number of steps of at least 0.")
        if overlap is not False and optimizer_state == "reset":
            raise ConfigurationError(
                "overlap with optimizer_state='reset' would throw away the momentum of steps that come after the averaging."
                " Use optimizer_state='keep' or 'average'."
            )
        self.name = "adaptive_averaging" if isinstance(period, AdaptivePeriod) else "periodic_averaging"
        self.period = period
        self.wire = wire
        self.optimizer_state_rule = optimizer_state
        self.overlap_steps = math.inf if overlap is True else int(overlap)

    @override
    def preflight(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        super().preflight(trainer, model)
        if self.period.needs_progress and trainer.max_epochs == -1 and trainer.max_steps == -1:
            raise ConfigurationError(
                f"{self.period} counts in shares of the run, and max_epochs=-1 gives it no end. Give a number of averagings"
                " (sample=20, say), or an end."
            )

    @override
    def algorithm(self, timeline: Timeline) -> Algorithm:
        return PeriodicAveraging(self, lambda: self.optimizers, timeline)


class PeriodicAveraging(LockstepAlgorithm):
    """One worker's local steps and averagings during one fit.

    Args:
        strategy: whose options.
        optimizers: asked for the worker's optimizers.
        timeline: where waits are recorded.
    """

    def __init__(
        self, strategy: PeriodicAveragingStrategy, optimizers: Callable[[], Sequence[Optimizer]], timeline: Timeline
    ) -> None:
        super().__init__(strategy.root_device, strategy.timeout_s, timeline)
        self._controller = strategy.period
        self._rule = strategy.optimizer_state_rule
        self._overlap = strategy.overlap_steps
        self._wire = strategy.wire
        self._adopts = strategy.fit_options.at_rendezvous == "adopt"
        self._optimizers = optimizers
        self._control: PeriodState = self._controller.init()
        self._averager: Averager | None = None
        self._state_has_grown = False
        self._deviation: tuple[float, float] | None = None  # S_k and γ_k, not yet seen by the controller
        self._last_deviation: float | None = None
        self._slots: set[Slot] = set()  # of the optimizers' state that is averaged
        self._distance = 0.0  # ‖w_i − w̄‖² of the averaging completed last
        self._steps = 0
        self._averagings = 0
        self._lr = 0.0  # at the beginning of the averaging under way
        self._step_lr = 0.0
        self._met = (0.0, 0.0)  # S and γ at the last rendezvous
        self._passes = 0  # forward passes since the averaging under way began
        self._due = math.inf  # the step after which the averaging under way is applied

    @override
    def open(self, model: SharedModel) -> None:
        super().open(model)
        self._averager, self._state_has_grown = None, False
        # a worker that had fewer batches has missed decisions: all go on from the state of one that has missed none
        everyones = self.collectives.gather((self._steps, asdict(self._control), self._deviation))
        _, control, self._deviation = max(everyones, key=lambda theirs: theirs[0])
        self._control = PeriodState(**control)
        if self._wire != "float32" and self._rule != "average":
            self._averager_of_session()  # while the models may still be equal: the first mean refers to them

    @override
    def step(self, step: Step) -> None:
        self._steps += 1
        self._step_lr = step.lr
        self._passes += step.forward_passes
        if step.number >= self._due:
            self._finish()
        deviation, lr = self._deviation or (None, 0.0)
        self._deviation = None
        average_now, self._control = self._controller.update(
            self._control, Observation(step.number, step.epoch, step.progress, deviation=deviation, lr=lr)
        )
        if average_now:
            self._finish()
            self._lr = step.lr
            self._averagings += 1
            if self._state_has_grown:  # on some worker an optimizer has stepped for the first time
                self._averager, self._state_has_grown = None, False
            self._averager_of_session().begin()
            self._passes = 0
            self._due = step.number + self._overlap
            if self._overlap == 0:
                self._finish()

    @override
    def arrive(self) -> None:
        self._finish()
        self._lr = self._step_lr
        averager = self._averager_of_session()
        while True:  # the others may have steps to make and average; this worker's model takes part
            averager.begin()
            self._distance = averager.complete()
            if self._exchange_numbers(arrived=True):
                settled = averager.settle()
                self._distance = self._distance if settled is None else settled
                return  # x̄ is there, for the rendezvous
            self._apply(averager)
            self._averagings += 1
            self._control = replace(self._control, since=0, averagings=self._control.averagings + 1)

    @override
    def average(self, sync_point: SyncPoint) -> float:
        averager = self._averager_of_session()
        if self._adopts:
            self._apply(averager)
            self._averagings += 1
            self._control = self._controller.restart(self._control, *self._met)
        else:
            averager.replace(model_only=True)
        return self._distance

    @override
    def complete(self, report: WorkerReport) -> None:
        super().complete(report)
        report.averagings = self._averagings
        report.period = self._control.period
        report.period_mean = self._steps / self._averagings if self._averagings else None
        report.deviation = self._last_deviation

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "control": asdict(self._control),
            "deviation": self._deviation,
            "steps": self._steps,
            "averagings": self._averagings,
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._control = PeriodState(**state["control"])
        self._deviation = state["deviation"]
        self._steps, self._averagings = state["steps"], state["averagings"]

    # -- details -----------------------------------------------------------------------------------------------------

    def _averager_of_session(self) -> Averager:
        if self._averager is None:
            if self._rule == "average":
                everyones = self.collectives.gather(OptimizerStates(self._optimizers()).slots())
                self._slots = {slot for slots in everyones for slot in slots}
            # S_k is of the parameters: running statistics do not come together as the learning rate falls
            self._averager = Averager(
                self.collectives,
                LiveTensors(self._averaged_tensors),
                model=len(self._model.tensors),
                counted=self._model.parameters,
                retention=self._model.retention,
                wire=self._wire,
            )
        return self._averager

    def _averaged_tensors(self) -> list[Tensor]:
        """The model's, then those of the optimizers' states, as they are now: either may put others in their place."""
        return [*self._model.tensors, *OptimizerStates(self._optimizers()).tensors(sorted(self._slots))]

    def _finish(self) -> None:
        """Apply the averaging under way, if there is one."""
        self._due = math.inf
        averager = self._averager
        if averager is None or not averager.under_way:
            return
        self._distance = averager.complete()
        self._exchange_numbers(arrived=False)
        if self._overlap == 0:
            self._apply(averager)
        else:
            averager.correct(forward_passes=self._passes)

    def _apply(self, averager: Averager) -> None:
        averager.replace()
        if self._rule == "reset":
            OptimizerStates(self._optimizers()).reset()

    def _exchange_numbers(self, *, arrived: bool) -> bool:
        """S_k and γ_k from everybody's, and who has arrived; returns whether all have."""
        n = self.collectives.world_size
        unknown = self._rule == "average" and not set(OptimizerStates(self._optimizers()).slots()) <= self._slots
        distance, lr, waiting, calling, growing = self.collectives.sum_of(
            self._distance, self._lr, arrived, self._asks_for_meeting, unknown
        )
        deviation = (distance / n, lr / n)
        if waiting == n:
            self._met = deviation
            return True
        self._state_has_grown = growing > 0
        self._deviation = deviation
        self._last_deviation = distance / n
        self._meeting_called = self._meeting_called or calling > 0
        return False
