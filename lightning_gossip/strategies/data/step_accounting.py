"""What one worker does in a fit: its steps, its batches and how long they take, its waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from lightning.pytorch.utilities.data import _extract_batch_size

from lightning_gossip.algorithm.membership.worker_id import WorkerId
from lightning_gossip.algorithm.step_timer import StepTimer
from lightning_gossip.runtime.clock import Timeline, now_s
from lightning_gossip.runtime.usage import Usage
from lightning_gossip.strategies.report import FitReport, WorkerReport
from lightning_gossip.strategies.worker_algorithm import Algorithm, Step


@dataclass(frozen=True)
class _Share:
    """Which share of the run is done: ``done`` at step ``began``, and the rest in the ``left`` steps after it."""

    began: int
    left: int | None
    done: Fraction = Fraction(0)

    def at(self, steps: int) -> Fraction | None:
        """The share at a step, in [0, 1]; None if nobody knows how long the run is."""
        if not self.left:
            return None
        return min(Fraction(1), self.done + (1 - self.done) * Fraction(steps - self.began, self.left))

    def near(self, steps: int) -> float | None:
        """The share :meth:`at` a step, in floating point: this is asked at each."""
        if not self.left:
            return None
        done = float(self.done)
        return min(1.0, done + (1.0 - done) * ((steps - self.began) / self.left))


def samples_in(batch: Any) -> int:
    """How many samples a batch has; 1 where Lightning cannot tell either."""
    return next((size for size in _extract_batch_size(batch) if size is not None), 1)


class Work(Protocol):
    """What a worker has had of the data."""

    samples: int

    @property
    def left_early(self) -> bool:
        """Whether it left the last batches of the epoch to faster ones."""


class Account:
    """Counts and times for one worker, and makes its report.

    Args:
        rank: the worker's.
        timeline: where computing and waiting are recorded.
    """

    def __init__(self, rank: int, timeline: Timeline) -> None:
        self.report = FitReport()
        self.own = WorkerReport(rank=rank)
        self._usage = Usage()
        self.forward_passes = 0  # since the last step
        self.steps = 0  # of this worker; agreed upon at each synchronisation point
        self._timeline = timeline
        self._timer = StepTimer()
        self._step_s: float | None = 0.0  # since the last step; None if not all of it was seen
        self._share = _Share(0, None)
        self._waited_s = 0.0  # of the algorithm's waits, those already accounted for

    @property
    def batch_s(self) -> float | None:
        """Median seconds a batch, if known."""
        return self._timer.median_s

    def begin(self, steps: int, planned: int | None) -> None:
        """Begin the account of a fit.

        Args:
            steps: made before (a resumed fit).
            planned: of the whole run, if known.
        """
        self.steps, self._share = steps, _Share(0, planned)

    def plan_anew(self, left: int | None) -> None:
        """So many steps are left of the run, if known: what has been done stays the share of it that it was."""
        self._share = _Share(self.steps, left, self._share.at(self.steps) or Fraction(0))

    def open_session(self) -> None:
        """Begin to count after a synchronisation point."""
        self.forward_passes, self._step_s = 0, 0.0
        self._timer.begin(now_s())

    def close_session(self) -> None:
        """End a session: what comes next, until another is opened, is no batch."""
        self._timer.begin()

    def end_batch(self, algorithm: Algorithm | None) -> None:
        """Count a batch that has been trained on, and its time."""
        self.forward_passes += 1
        ended_s = now_s()
        batch_s = self._timer.tick(ended_s)
        if batch_s is None:
            self._step_s = None
            return
        if self._step_s is not None:
            self._step_s += batch_s
        waited_s = 0.0 if algorithm is None else algorithm.waited_s - self._waited_s
        self._waited_s += waited_s
        self.own.wait_s += waited_s
        self.own.busy_s += max(0.0, batch_s - waited_s)
        self._timeline.record("compute", ended_s - batch_s, ended_s)

    def count_step(self, *, lr: float, epoch: int) -> Step:
        """The optimizers have stepped; ends the count of forward passes."""
        self.own.steps += 1
        self.steps += 1
        passes, self.forward_passes = self.forward_passes, 0
        seconds, self._step_s = self._step_s, 0.0
        return Step(
            number=self.steps,
            forward_passes=passes,
            seconds=seconds,
            lr=lr,
            epoch=epoch,
            progress=self._share.near(self.steps),
        )

    def waited(self, began_s: float, algorithm: Algorithm) -> None:
        """Count the wait at a synchronisation point, from ``began_s`` until the last worker came."""
        ended_s = now_s()
        self._timeline.record("wait", began_s, ended_s)
        self.own.last_wait_s = ended_s - began_s
        self.own.wait_s += self.own.last_wait_s
        self._waited_s = algorithm.waited_s

    def described(self, work: Work, algorithm: Algorithm | None) -> tuple[int, dict[str, Any]]:
        """What the others are told: the steps that schedules count, and this worker's report."""
        self.own.samples, self.own.left_early, self.own.batch_s = work.samples, work.left_early, self.batch_s
        self.own.describe_usage(self._usage)
        if algorithm is not None:
            algorithm.complete(self.own)
        return self.steps, self.own.as_dict()

    def publish(
        self, everyones: Sequence[tuple[int, dict[str, Any]]], *, lost: Sequence[WorkerId] = (), island: int = 1
    ) -> None:
        """Make the report of all workers at the end of a stretch of training.

        Args:
            everyones: the descriptions of all workers, by rank.
            lost: workers that have failed.
            island: how many ranks, one after the other, are one worker.
        """
        self.steps = round(sum(steps for steps, _ in everyones) / len(everyones))  # schedules by step go on alike
        self.report.workers = _by_island([WorkerReport(**own) for _, own in everyones], island)
        self.report.rendezvous += 1
        self.report.lost = list(dict.fromkeys(worker.initial_rank // island for worker in lost))


def _by_island(ranks: list[WorkerReport], size: int) -> list[WorkerReport]:
    found: dict[int, WorkerReport] = {}
    for of_rank in ranks:
        island = of_rank.rank // size
        if island in found:
            found[island].add(of_rank)
        else:
            found[island] = of_rank
            of_rank.rank = island
    return list(found.values())
