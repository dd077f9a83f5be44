"""Local SGD with an exact average now and then: CPSGD, ADPSGD (arXiv 2007.06134), post-local SGD, DiLoCo, SlowMo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gossip.algorithm.compression.wires import MeanWire
from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.algorithm.periodic_averaging import protocol
from lightning_gossip.algorithm.periodic_averaging.adaptive_period import AdaptivePeriod
from lightning_gossip.algorithm.periodic_averaging.period import ConstantPeriod, PeriodController
from lightning_gossip.algorithm.periodic_averaging.protocol import (
    Averaged,
    AveragingOptions,
    AveragingProtocol,
    OptimizerStateRule,
)
from lightning_gossip.algorithm.slow_weights import OuterState, outer_state
from lightning_gossip.algorithm.tensors.flat import LiveTensors
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.runtime.clock import Timeline
from lightning_gossip.runtime.periodic_averaging.averager import Averager
from lightning_gossip.runtime.sync_point import SyncPoint
from lightning_gossip.strategies.base import DecentralizedStrategy
from lightning_gossip.strategies.islands.flat_parameters import FlatStates
from lightning_gossip.strategies.lightning.replicated_processes import ReplicatedProcesses
from lightning_gossip.strategies.report import WorkerReport
from lightning_gossip.strategies.state.optimizer_state import OptimizerStates, Slot
from lightning_gossip.strategies.state.outer_warnings import warn_of_few_rounds, warn_of_statistics
from lightning_gossip.strategies.state.shared_tensors import SharedModel
from lightning_gossip.strategies.synchronous import SynchronousAlgorithm
from lightning_gossip.strategies.worker_algorithm import Algorithm, Step


@clear_arguments
class PeriodicAveragingStrategy(DecentralizedStrategy, ReplicatedProcesses):
    """Local steps, then one exact average of all models; in between nothing is sent.

    Args:
        period: steps between two averagings, or what decides them: :class:`~lightning_gossip.algorithm.ConstantPeriod`
            (CPSGD, local SGD), :class:`~lightning_gossip.algorithm.AdaptivePeriod` (ADPSGD),
            :class:`~lightning_gossip.algorithm.PostLocal`, :class:`~lightning_gossip.algorithm.PiecewisePeriod`.
        optimizer_state: what becomes of momentum and the like at an averaging: ``"keep"`` each worker's own, ``"average"`` it
            with the model, ``"reset"`` it.
        overlap: how many local steps an averaging may run behind: ``False`` for none (the workers wait for it), a number, or
            ``True`` for as many as there are until the next one. The result is applied as a difference, exactly so many
            steps later on every worker.
        wire: how models are sent: ``"float32"`` as they are; ``"bfloat16"`` or ``"int8"``: as rounded differences to the last
            mean, in half or a quarter of the bytes. What rounding keeps back is added to the next difference; the mean at a
            synchronisation point is exact.
        outer: an :class:`~lightning_gossip.Outer` step after each averaging: DiLoCo with Nesterov's form, SlowMo with the heavy
            ball; None for none. A mean at a synchronisation point is a merge and not the end of a round.
        fragments: in how many parts the model is averaged, one after the other, each once in ``period`` steps, so that at no
            time more than such a part is sent (Streaming DiLoCo, with an ``overlap`` and an ``outer`` step).
        options: see :class:`~lightning_gossip.strategies.DecentralizedStrategy`.

    Example::

        Trainer(strategy="periodic_averaging", devices=4)                                  # every 8 steps
        Trainer(strategy=PeriodicAveragingStrategy(period=AdaptivePeriod()), devices=4)    # = "adaptive_averaging"
        Trainer(strategy=PeriodicAveragingStrategy(period=50, outer=Outer()), devices=4)
    """

    shares_work: ClassVar[bool] = False
    has_islands: ClassVar[bool] = True

    def __init__(
        self,
        *,
        period: int | PeriodController = 8,
        optimizer_state: OptimizerStateRule = "keep",
        overlap: bool | int = False,
        wire: MeanWire = "float32",
        outer: Outer | None = None,
        fragments: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.averaging = AveragingOptions(
            period=period,
            optimizer_state=optimizer_state,
            overlap=overlap,
            wire=wire,
            outer=outer,
            fragments=fragments,
        )
        assert isinstance(self.averaging.period, PeriodController)
        self.period = self.averaging.period
        self.outer = self.averaging.outer

    @property
    @override
    def name(self) -> str:
        if isinstance(self.period, AdaptivePeriod):
            return "adaptive_averaging"
        return "periodic_averaging" if self.outer is None else "diloco"

    @override
    def preflight(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        super().preflight(trainer, model)
        if self.islands is not None and self.root_device.type != "cpu" and self.averaging.wire != "float32":
            raise ConfigurationError(
                f"wire={self.averaging.wire!r} with island={self.island!r} is written in host memory, and the parameters would"
                f" be on {self.root_device}: that is not made yet. Leave wire out, or use ADPSGDStrategy with it."
            )
        if self.period.needs_progress and trainer.max_epochs == -1 and trainer.max_steps == -1:
            raise ConfigurationError(
                f"{self.period} counts in shares of the run, and max_epochs=-1 gives it no end. Give whole numbers in"
                " their place (sample=20 averagings, milestones=(1000,) steps), or an end."
            )
        if self.outer is not None and self.workers > 1:
            warn_of_statistics(model)

    @override
    def algorithm(self, timeline: Timeline) -> Algorithm:
        return PeriodicAveraging(self, lambda: self.optimizers, timeline)


class PeriodicAveraging(SynchronousAlgorithm):
    """One worker's local steps and averagings during one fit.

    Args:
        strategy: whose options.
        optimizers: asked for the worker's optimizers.
        timeline: where waits are recorded.
    """

    reads_lr = True

    def __init__(
        self, strategy: PeriodicAveragingStrategy, optimizers: Callable[[], Sequence[Optimizer]], timeline: Timeline
    ) -> None:
        groups = None if strategy.groups is None else strategy.groups.further
        super().__init__(strategy.root_device, strategy.timeout_s, timeline, groups)
        self._island = 1 if strategy.groups is None else strategy.groups.islands.size
        options = strategy.averaging
        self.protocol = AveragingProtocol(options, adopts=strategy.fit_options.at_rendezvous == "adopt")
        self._averages_state = options.optimizer_state == "average"
        self._wire = options.wire
        self._fragments = options.fragments
        self._optimizers = optimizers
        self._averager: Averager | None = None
        self._state_has_grown = False
        self._slots: set[Slot] = set()  # of the optimizers' state that is averaged
        self._place = None if strategy.groups is None else strategy.groups.place
        self._states: FlatStates | None = None  # of these slots, with islands
        self._distance = 0.0  # ‖w_i − w̄‖² of the averaging completed last
        self._period = options.period
        self._outer = options.outer
        self._outer_state: OuterState | None = None  # of the session's parameters, the same on all workers
        self._restored: dict[str, Tensor] = {}

    @override
    def open(self, model: SharedModel) -> None:
        super().open(model)
        if self._outer is not None:
            names, parameters = model.names[: model.parameters], model.tensors[: model.parameters]
            restored = model.part(self._restored) if self._outer_state is None else {}
            self._outer_state = outer_state(names, parameters, before=self._outer_state, restored=restored)
        self._averager, self._state_has_grown = None, False
        self.protocol.follow(self.of_all.gather(self.protocol.state_dict()))
        if self._wire != "float32" and not self._averages_state:
            self._averager_of_session()  # while the models may still be equal: the first mean refers to them

    @override
    def step(self, step: Step) -> None:
        if self._outer is not None and isinstance(self._period, ConstantPeriod) and step.progress:
            warn_of_few_rounds(step.number / step.progress, self._period.period)
        effects = self.protocol.step(
            step.number, epoch=step.epoch, progress=step.progress, lr=step.lr, forward_passes=step.forward_passes
        )
        perform(effects, self._do)

    @override
    def arrive(self) -> None:
        perform(self.protocol.arrive(), self._do)

    @override
    def average(self, sync_point: SyncPoint) -> float:
        perform(self.protocol.meet(), self._do)
        return self._distance

    @override
    def complete(self, report: WorkerReport) -> None:
        super().complete(report)
        own = self.protocol
        report.averagings = own.averagings
        report.period = own.control.period
        report.period_mean = own.steps / own.averagings if own.averagings else None
        report.deviation = None if own.last is None else own.last.deviation

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.protocol.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.protocol.load_state_dict(state)

    @override
    def common_tensors(self, sync_point: SyncPoint, *, adopts: bool, keeps: Callable[[], bool]) -> dict[str, Tensor]:
        if not keeps():
            return {}
        return self._restored if self._outer_state is None else self._model.whole(self._outer_state.on_host(), OuterState.KINDS)

    @override
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self._restored = tensors if self._outer is not None else {}

    # -- details -----------------------------------------------------------------------------------------------------

    def _do(self, effect: protocol.Effect) -> Averaged | None:
        """What the protocol asks for; it says what each effect is."""
        if isinstance(effect, protocol.Begin) and self._state_has_grown:
            self._averager, self._state_has_grown = None, False  # on some worker an optimizer has stepped for the first time
        averager = self._averager_of_session()
        match effect:
            case protocol.Begin(fragment):
                if self._states is not None:
                    self._states.read()
                averager.begin(fragment)
            case protocol.Complete():
                self._distance = averager.complete()
                return self._sum_over_workers(effect)
            case protocol.OuterStep():
                assert self._outer is not None
                assert self._outer_state is not None
                averager.outer_step(self._outer, self._outer_state)
            case protocol.Replace():
                averager.replace()
                self._hand_round()
            case protocol.Correct(forward_passes):
                if self._states is not None:
                    self._states.read()
                averager.correct(forward_passes=forward_passes)
                self._hand_round()
            case protocol.ResetOptimizer():
                OptimizerStates(self._optimizers()).reset()
            case protocol.Settle():
                settled = averager.settle()
                self._distance = self._distance if settled is None else settled
            case protocol.Show():
                averager.replace(model_only=True)
        return None

    def _hand_round(self) -> None:
        """Let the ranks of the island have what each of them has got of its part."""
        self._model.hand_round()
        if self._states is not None:
            self._states.hand_round()

    def _sum_over_workers(self, effect: protocol.Complete) -> Averaged:
        """S_k, γ_k and who has arrived; on the way, who calls for a synchronisation, and whose optimizer's state has grown."""
        n = self.of_all.world_size
        unknown = self._averages_state and not set(OptimizerStates(self._optimizers()).slots()) <= self._slots
        distance, lr, arrived, calling, growing = self.of_all.sum_of(
            self._distance, effect.lr, effect.arrived, self._asks_for_sync, unknown
        )
        self._state_has_grown = growing > 0
        self._sync_requested = self._sync_requested or calling > 0
        return Averaged(distance * self._island / n, lr / n, all_arrived=arrived == n)  # each rank has a part of a distance

    def _averager_of_session(self) -> Averager:
        if self._averager is None:
            if self._averages_state:
                everyones = self.of_all.gather(OptimizerStates(self._optimizers()).slots())
                self._slots = {slot for slots in everyones for slot in slots}
                if self._place is not None:
                    self._states = FlatStates(LiveTensors(self._state_tensors), self._place.index, self._island)
                    self._states.read()
            # S_k is of the parameters: running statistics do not come together as the learning rate falls
            self._averager = Averager(
                self.collectives,
                LiveTensors(self._averaged_tensors),
                model=len(self._model.tensors),
                counted=self._model.parameters,
                retention=self._model.retention,
                fragments=self._fragments,
                wire=self._wire,
            )
        return self._averager

    def _averaged_tensors(self) -> list[Tensor]:
        """The model's, then those of the optimizers' states, as they are now: either may put others in their place."""
        return [*self._model.tensors, *(self._state_tensors() if self._states is None else [self._states.share])]

    def _state_tensors(self) -> list[Tensor]:
        return OptimizerStates(self._optimizers()).tensors(sorted(self._slots))
