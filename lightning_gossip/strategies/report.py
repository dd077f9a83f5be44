"""What a run says about its workers. Plain values: they cross process borders and go into summary.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import lightning.pytorch as pl

from lightning_gossip.algorithm.staleness import StalenessHistogram
from lightning_gossip.runtime.usage import Usage, peak_device_memory_bytes, peak_memory_bytes


@dataclass
class WorkerReport:
    """One worker's account since the beginning of the fit, or that of an island.

    ``None`` where the strategy has no such thing. Of an island, steps are those that all its ranks make together, samples,
    exchanges and bytes are the sums over them.

    Args:
        rank: whose: the one that it was started with, also when ranks have changed since; of an island its number.
        steps: optimizer steps, its own.
        samples: samples it trained on.
        exchanges: completed exchanges, started or answered.
        refused: requests of its own that a busy worker refused.
        failed: exchanges, begun or asked for, that ended with the partner's failure.
        refused_nonfinite: exchanges refused because the partner's model was not finite; with a parameter server, its own
            updates that the server refused because they were not.
        adopted: times that its own model was not finite and it went on from another one.
        bytes_sent: payload of its exchanges.
        staleness_mean, staleness_p95, staleness_max: changes of its published model (of the server's, with a parameter server)
            between pull and push of a step.
        staleness_counts: the whole histogram: pairs of a staleness and the number of steps that had it, in ascending order.
        dropped: updates that came too late and were thrown away (parameter server).
        averagings: exact averages of all models; those of the synchronisation point too, where they are adopted.
        period: steps between two averagings, at present.
        period_mean: steps divided by averagings.
        deviation: S_k = (1/n) Σ ‖w_i − w̄‖² of the parameters at the last averaging.
        busy_s: seconds in training steps.
        wait_s: seconds at synchronisation points before the last worker came.
        last_wait_s: the same, at the last one.
        left_early: whether it left the last batches of the epoch to faster workers.
        batch_s: its median time a batch, in seconds.
        distance: ‖x_i − x̄‖² of its model just before the last synchronisation point averaged the models.
        cores: of the CPU that its process kept busy since the synchronisation point before, on average.
        memory_bytes: the most of its host's memory that its process has had so far.
        device_memory_bytes: the most of its CUDA device's memory that PyTorch has had so far.
    """

    rank: int
    steps: int = 0
    samples: int = 0
    exchanges: int | None = None
    refused: int | None = None
    failed: int | None = None
    refused_nonfinite: int | None = None
    adopted: int | None = None
    bytes_sent: int | None = None
    staleness_mean: float | None = None
    staleness_p95: float | None = None
    staleness_max: int | None = None
    staleness_counts: list[tuple[int, int]] | None = None
    dropped: int | None = None
    averagings: int | None = None
    period: int | None = None
    period_mean: float | None = None
    deviation: float | None = None
    busy_s: float = 0.0
    wait_s: float = 0.0
    last_wait_s: float = 0.0
    left_early: bool = False
    batch_s: float | None = None
    distance: float | None = None
    cores: float | None = None
    memory_bytes: int | None = None
    device_memory_bytes: int | None = None

    def describe_staleness(self, histogram: StalenessHistogram) -> None:
        """Fill in what is said about staleness."""
        self.staleness_mean = histogram.mean
        self.staleness_p95 = float(histogram.quantile(0.95))
        self.staleness_max = histogram.max
        self.staleness_counts = list(histogram.counts().items())

    def add(self, mate: WorkerReport) -> None:
        """Add the report of another rank of the same island: both make the same steps, each on its own samples and part."""
        self.samples += mate.samples
        for name in (
            "exchanges",
            "refused",
            "failed",
            "refused_nonfinite",
            "adopted",
            "bytes_sent",
            "distance",
            "cores",
            "memory_bytes",
            "device_memory_bytes",
        ):
            mine, theirs = getattr(self, name), getattr(mate, name)
            setattr(self, name, theirs if mine is None else mine if theirs is None else mine + theirs)
        self.wait_s, self.last_wait_s = max(self.wait_s, mate.wait_s), max(self.last_wait_s, mate.last_wait_s)
        self.left_early |= mate.left_early
        if self.staleness_counts is not None and mate.staleness_counts is not None:
            histogram, of_mate = StalenessHistogram(), StalenessHistogram()
            histogram.load_state_dict({"counts": self.staleness_counts})
            of_mate.load_state_dict({"counts": mate.staleness_counts})
            histogram.merge(of_mate)
            self.describe_staleness(histogram)

    def describe_usage(self, usage: Usage) -> None:
        """Fill in what this process uses of its host."""
        self.cores = usage.cores()
        self.memory_bytes, self.device_memory_bytes = peak_memory_bytes(), peak_device_memory_bytes()

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return asdict(self)


@dataclass
class FitReport:
    """What all workers know after a synchronisation point.

    Args:
        workers: one account each, by rank.
        consensus_distance: (1/n) Σ ‖x_i − x̄‖² just before the last synchronisation point averaged the models.
        rendezvous: how many synchronisation points there have been.
        lost: ranks of the workers that the job has lost and went on without, in that order.
    """

    workers: list[WorkerReport] = field(default_factory=list)
    consensus_distance: float | None = None
    rendezvous: int = 0
    lost: list[int] = field(default_factory=list)


def report(trainer: pl.Trainer) -> FitReport | None:
    """What the workers of the last fit did, whatever its strategy.

    Args:
        trainer: after, or in, a fit.

    Returns:
        ``trainer.strategy.report`` under a strategy of this package. Under another one, such as Lightning's DDP, that of a
        :class:`~lightning_gossip.callbacks.FitReporter` among the callbacks; None without one.

    Example::

        for name in ("ddp", "adpsgd"):
            trainer = Trainer(strategy=name, devices=4, callbacks=[FitReporter()])
            trainer.fit(model)
            print([worker.samples for worker in lightning_gossip.report(trainer).workers])
    """
    holders = (trainer.strategy, *trainer.callbacks)  # type: ignore[attr-defined]
    kept = (getattr(holder, "report", None) for holder in holders)
    return next((found for found in kept if isinstance(found, FitReport)), None)
