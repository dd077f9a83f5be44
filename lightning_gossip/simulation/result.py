"""What a simulated run leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_gossip.algorithm.staleness import StalenessHistogram
from lightning_gossip.simulation.record import EpochRecord, Point, Span, TraceEvent, WorkerAccount

Ending = Literal["done", "target", "diverged", "until", "stalled"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run under virtual time.

    Args:
        strategy: its name.
        topology: of the graph; None without one.
        ended: ``"done"``; ``"target"``: the loss was reached; ``"diverged"``: it was not finite; ``"until"``: the time was
            over; ``"stalled"``: nobody could go on after a failure.
        time_s: virtual seconds.
        workers: each worker's account, by rank.
        epochs: one a session.
        points: the loss and more against virtual time; empty without an objective.
        models: the workers' own at the end, shape (n, d); None without an objective.
        mean: of the models that count at the end, shape (d,); None without an objective.
        model_bytes: of a vector on its way.
        averagings: exact averagings of all models, where the strategy counts them.
        trace: every event, if asked for.
        spans: every worker's activities by rank, if asked for.
        staleness_in_order: of every worker's updates, if asked for.
        events: of the simulation that were processed.
        island: ranks that train together and are one member; 1 without islands.
    """

    strategy: str
    topology: str | None
    ended: Ending
    time_s: float
    workers: Sequence[WorkerAccount]
    epochs: Sequence[EpochRecord]
    points: Sequence[Point]
    models: torch.Tensor | None
    mean: torch.Tensor | None
    model_bytes: int
    averagings: int | None
    trace: Sequence[TraceEvent] | None
    spans: Sequence[Sequence[Span]] | None
    staleness_in_order: Sequence[Sequence[int]] | None
    events: int
    island: int

    @property
    def epoch_times_s(self) -> list[float]:
        """Virtual seconds of each epoch, its synchronisation point included."""
        return [epoch.length_s for epoch in self.epochs]

    @property
    def steps(self) -> int:
        """Optimizer steps of all workers."""
        return sum(worker.steps for worker in self.workers)

    @property
    def exchanges_per_step(self) -> float | None:
        """Exchanges that a worker took part in per step of its own, over all workers; None before the first step."""
        return sum(worker.exchanges for worker in self.workers) / self.steps if self.steps else None

    @property
    def staleness(self) -> StalenessHistogram:
        """Staleness of all workers' updates."""
        total = StalenessHistogram()
        for worker in self.workers:
            total.merge(worker.staleness)
        return total

    @property
    def loss(self) -> float | None:
        """The last point's."""
        return self.points[-1].loss if self.points else None

    def time_to(self, loss: float) -> float | None:
        """Virtual seconds until a point of the loss was no higher than this; None if none was."""
        return next((point.time_s for point in self.points if point.loss <= loss), None)

    def summary(self) -> dict[str, Any]:
        """The run as one JSON object, with the keys of a training run's ``summary.json``; null where there is no such thing."""
        samples = sum(worker.samples for worker in self.workers)
        last = self.points[-1] if self.points else None
        distance = self.epochs[-1].consensus_distance if self.epochs else None
        return {
            "strategy": self.strategy,
            "topology": self.topology,
            "world_size": len(self.workers),
            "island": self.island,
            "epochs": len(self.epochs),
            "train_loss": None if last is None else last.loss,
            "test_acc": None if last is None else last.accuracy,
            "train_s": self.time_s,
            "samples_per_s": samples / self.time_s if self.time_s > 0.0 else None,
            "consensus_distance": last.consensus_distance if distance is None and last is not None else distance,
            "period_mean": self.steps / len(self.workers) / self.averagings if self.averagings else None,
            "averagings": self.averagings,
            "collectives_in_training": None,
            "ended": self.ended,
            "exchanges_per_step": self.exchanges_per_step,
            "workers": [_summary_of(worker) for worker in self.workers],
        }


def _summary_of(worker: WorkerAccount) -> dict[str, Any]:
    has = worker.staleness.count > 0
    return {
        "rank": worker.rank,
        "steps": worker.steps,
        "samples": worker.samples,
        "exchanges": worker.exchanges,
        "bytes_sent": worker.bytes_sent,
        "staleness_mean": worker.staleness.mean if has else None,
        "staleness_p95": worker.staleness.quantile(0.95) if has else None,
        "staleness_max": worker.staleness.max if has else None,
        "dropped": worker.dropped,
        "busy_s": worker.busy_s,
        "wait_s": worker.wait_s,
    }
