"""Local SGD under virtual time: local steps, then one exact average: CPSGD, ADPSGD (arXiv 2007.06134), post-local SGD, DiLoCo.

What a worker does after a step and at an epoch's end is the runtime's protocol,
:mod:`lightning_gossip.algorithm.periodic_averaging.protocol`; here is what it costs. Between two averagings every worker has
its own clock; at one, all wait for the last, and the ring all-reduce takes its time. Overlapped, an averaging begins when the
last worker has come to its step and ends a ring all-reduce later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.compression.error_feedback_mean import CompressedMean, mean_bytes
from lightning_gossip.algorithm.compression.wires import MeanWire
from lightning_gossip.algorithm.effects import perform
from lightning_gossip.algorithm.options import EpochEndOptions
from lightning_gossip.algorithm.outer import DILOCO, Outer
from lightning_gossip.algorithm.periodic_averaging import protocol
from lightning_gossip.algorithm.periodic_averaging.adaptive_period import AdaptivePeriod
from lightning_gossip.algorithm.periodic_averaging.period import PeriodController
from lightning_gossip.algorithm.periodic_averaging.protocol import Averaged, AveragingOptions, AveragingProtocol
from lightning_gossip.algorithm.slow_weights import OuterState
from lightning_gossip.algorithm.tensors.flat import fragment_slices
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.simulation.cluster.collective_costs import all_reduce_bytes, all_reduce_s
from lightning_gossip.simulation.problems.batch_assignment import Task
from lightning_gossip.simulation.run import Process, Run
from lightning_gossip.simulation.strategies.synchronous import Rounds, Synchronous, stall_if_failed, step_times_s


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class PeriodicAveraging(AveragingOptions, EpochEndOptions, Synchronous):
    """Averaging now and then; the options of :class:`~lightning_gossip.strategies.PeriodicAveragingStrategy`."""

    name = "periodic_averaging"

    @override
    def rounds(self, run: Run) -> Rounds:
        return AveragingRounds(self, run)


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class AdaptiveAveraging(PeriodicAveraging):
    """ADPSGD: the period adapts; see :class:`~lightning_gossip.algorithm.AdaptivePeriod`."""

    name = "adaptive_averaging"

    period: int | PeriodController = field(default_factory=AdaptivePeriod)


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class DiLoCo(PeriodicAveraging):
    """DiLoCo: an outer step with Nesterov momentum after each average; see :class:`~lightning_gossip.Outer`."""

    name = "diloco"

    period: int | PeriodController = 50
    outer: Outer | None = DILOCO


class AveragingRounds(Rounds):
    """All workers' local steps of one run.

    They make the same steps, so all decide alike, and one protocol stands for all; each effect is done for all models at once.
    """

    def __init__(self, strategy: PeriodicAveraging, run: Run) -> None:
        self._run = run
        self._protocol = AveragingProtocol(strategy, adopts=strategy.at_rendezvous == "adopt")
        self._strategy = strategy
        self._outer = strategy.outer
        self._outer_state = OuterState(["x"], [run.models.rows[0]])
        self._averaged = [run.models.x]  # the models, and with them the optimizers' states; each of shape (n, k)
        self._parts = self._parts_of(run.models.x)
        self._begun = self._parts  # in the averaging begun last
        self._clocks_s = np.zeros(run.workers)
        self._models = run.models.x  # w, of the averaging begun last
        self._mean = run.models.x  # w̄, of the one completed last, shape (d,)
        self._ends_s = 0.0  # of the averaging begun last
        run.averagings = 0

    @override
    def round(self, epoch: int, tasks: Sequence[Task]) -> Process:
        run, starts_s = self._run, self._clocks_s
        for rank, task in enumerate(tasks):
            run.models.begin(rank, task.batch)
        ends_s = starts_s + np.array(step_times_s(run, starts_s.tolist()))
        if stall_if_failed(run, ends_s.tolist()):
            return
        lr = run.lr
        if run.models.numel:
            run.models.optimizer.step(slice(None), run.models.gradients(), lr)
        for rank, (task, start_s, end_s) in enumerate(zip(tasks, starts_s.tolist(), ends_s.tolist(), strict=True)):
            run.record.compute(rank, start_s, end_s)
            run.record.event(end_s, "step", rank)
            run.count_step(rank, task.size)
        self._clocks_s = ends_s
        self._perform(self._protocol.step(self._protocol.steps + 1, epoch=epoch, progress=run.progress, lr=lr))
        yield run.environment.timeout(max(0.0, float(self._clocks_s.max()) - run.environment.now))
        run.evaluate_if_due(run.workers)

    @override
    def end_session(self) -> Process:
        run = self._run
        self._perform(self._protocol.arrive())
        distance = run.distance(self._models[:, : run.models.numel])
        self._perform(self._protocol.meet())
        for place, means in self._parts:
            means.open(torch.cat(self._averaged, dim=1)[:, place])
        yield run.environment.timeout(max(0.0, float(self._clocks_s.max()) - run.environment.now))
        self._wait_until(np.full(run.workers, run.environment.now))
        run.end_session(distance)

    def _perform(self, effects: protocol.Effects) -> None:
        perform(effects, self._do)
        self._run.averagings = self._protocol.averagings

    def _do(self, effect: protocol.Effect) -> Averaged | None:
        """What the protocol asks for, of all workers; it says what each effect is."""
        match effect:
            case protocol.Begin(fragment):
                self._read()
                self._begun = self._parts if fragment is None else [self._parts[fragment]]
                self._ends_s = float(self._clocks_s.max())
                self._run.record.event(self._ends_s, "average", -1)
                for part in self._begun:
                    self._send(part.means.nbytes)
            case protocol.Complete(lr, arrived):
                self._wait_until(np.maximum(self._clocks_s, self._ends_s))
                self._mean = torch.zeros_like(self._models[0])
                numel = self._run.models.numel
                distances = torch.zeros(self._run.workers, dtype=torch.float64, device=self._mean.device)
                for place, means in self._begun:
                    self._mean[place] = means.of(self._models[:, place])
                    differences = (self._mean[place] - self._models[:, place])[:, :numel]  # states do not count
                    distances += torch.linalg.vector_norm(differences, dim=1, dtype=torch.float64).square()
                return Averaged(float(distances.sum()) / self._run.workers, lr, all_arrived=arrived)
            case protocol.Settle():
                if self._parts[0].means.keeps_back:  # an exact mean follows
                    self._send(sum(part.means.exact_nbytes for part in self._parts))
                    self._wait_until(np.maximum(self._clocks_s, self._ends_s))
                    for place, means in self._parts:
                        self._mean[place] = means.settled(self._mean[place])
            case protocol.OuterStep():
                self._step_outside()
            case protocol.Replace():
                for rows, place in self._places():
                    rows.copy_(self._mean[place])
            case protocol.Correct():
                for rows, place in self._places():
                    rows += self._mean[place] - self._models[:, place]
            case protocol.ResetOptimizer():
                self._run.models.optimizer.reset()
            case protocol.Show():
                pass
        return None

    def _read(self) -> None:
        """w ← the models and what else is averaged; an optimizer's state may be there for the first time."""
        x, states = self._run.models.x, []
        if self._strategy.optimizer_state == "average":
            states = self._run.models.optimizer.states()
        changed = len(states) + 1 != len(self._averaged)
        self._averaged = [x, *states]
        self._models = torch.cat(self._averaged, dim=1)
        if changed:
            self._parts = self._parts_of(self._models)

    def _parts_of(self, models: Tensor) -> list[_Part]:
        """What is averaged, in its fragments; where models have no element their states have as many bytes each."""
        run, strategy = self._run, self._strategy
        vectors = models.shape[1] / run.models.numel if run.models.numel else len(self._averaged)
        parts = fragment_slices(models.shape[1], strategy.fragments)
        sizes = fragment_slices(round(run.nbytes * vectors), strategy.fragments)
        return [
            _Part(part, _Means(strategy.wire, run, models[:, part], size.stop - size.start))
            for part, size in zip(parts, sizes, strict=True)
        ]

    def _places(self) -> Iterator[tuple[Tensor, slice]]:
        """Of the averaging begun last: what it changes, in place, and where that is in w."""
        if len(self._begun) < len(self._parts):  # a fragment, of models alone
            for place, _ in self._begun:
                yield self._run.models.x[:, place], place
            return
        start = 0
        for rows in self._averaged:
            yield rows, slice(start, start + rows.shape[1])
            start += rows.shape[1]

    def _step_outside(self) -> None:
        """w̄ ← w̄ + o."""
        assert self._outer is not None
        state = self._outer_state
        for part, means in self._begun:
            place = slice(part.start, min(part.stop, len(state.slow)))
            mean, slow = self._mean[place], state.slow[place]
            if mean.numel() and self._outer.move([mean], [slow], [state.velocity[place]]):
                mean += slow
                means.moved(slow)
            slow.copy_(mean)

    def _send(self, nbytes: int) -> None:
        """A ring all-reduce of the averaging under way."""
        run = self._run
        self._ends_s += all_reduce_s(run.links, run.living, nbytes, at_s=self._ends_s, seed=run.seed)
        for account in run.record.accounts:
            account.bytes_sent += all_reduce_bytes(run.workers, nbytes)

    def _wait_until(self, clocks_s: np.typing.NDArray[np.float64]) -> None:
        for rank, (before_s, after_s) in enumerate(zip(self._clocks_s.tolist(), clocks_s.tolist(), strict=True)):
            self._run.record.wait(rank, before_s, after_s)
        self._clocks_s = clocks_s


class _Means:
    """The mean of all workers' models, or of a fragment of them, as it is sent.

    Args:
        wire: see :mod:`lightning_gossip.algorithm.compression.error_feedback_mean`.
        run: whose.
        models: of all workers, shape (n, d).
        nbytes: of one, unrounded.
    """

    def __init__(self, wire: MeanWire, run: Run, models: Tensor, nbytes: int) -> None:
        self._wire = wire
        self._run = run
        self.exact_nbytes = nbytes
        self.keeps_back = False  # what rounding takes from the next mean, which goes as differences to one that all know
        self._codes: list[CompressedMean] = []
        self.open(models)

    @property
    def nbytes(self) -> int:
        """Bytes of the vector that the next mean sends round the ring."""
        nbytes, itemsize = self.exact_nbytes, self._run.models.x.element_size()
        return mean_bytes(self._wire, nbytes // itemsize, self._run.workers) if self.keeps_back else nbytes

    def open(self, models: Tensor) -> None:
        """A session begins: differences refer to the models, if they are equal, else to the first mean, an exact one."""
        self.keeps_back = False
        if bool((models == models[0]).all()):
            self._refer_to(models[0])

    def of(self, models: Tensor) -> Tensor:
        """Shape (d,), from (n, d)."""
        if not self.keeps_back or not models.numel():
            mean = models.sum(0).div_(self._run.workers)
            self._refer_to(mean)
            return mean
        sent = [code.begin(vector) for code, vector in zip(self._codes, models, strict=True)]
        reduced = torch.stack(
            [code.reduce(torch.stack([theirs[owner] for theirs in sent])) for owner, code in enumerate(self._codes)]
        )
        means = [code.end(reduced) for code in self._codes]
        return means[0].clone()

    def moved(self, change: Tensor) -> None:
        """All workers have moved the last mean by this, shape (d,)."""
        for code in self._codes:
            code.moved(change)

    def settled(self, mean: Tensor) -> Tensor:
        """The exact mean, with what rounding has kept back of the one just formed; shapes (d,)."""
        models = mean.repeat(self._run.workers, 1)
        for code, vector in zip(self._codes, models, strict=False):  # times only: there are no codes
            code.settle(vector)
        return models.sum(0).div_(self._run.workers)

    def _refer_to(self, mean: Tensor) -> None:
        self.keeps_back = self._wire != "float32"
        if self.keeps_back and mean.numel():
            n = self._run.workers
            self._codes = [CompressedMean(mean.clone(), workers=n, rank=rank, wire=self._wire) for rank in range(n)]


class _Part(NamedTuple):
    """A fragment: where it is in a model, and its mean."""

    place: slice
    means: _Means
