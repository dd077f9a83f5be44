"""What is written down while a run goes on: each worker's account, the loss against virtual time, who did what when."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_gossip.algorithm.checks import check_integer
from lightning_gossip.algorithm.staleness import StalenessHistogram
from lightning_gossip.algorithm.step_timer import Activity
from lightning_gossip.arguments import clear_arguments


class Span(NamedTuple):
    """One stretch of one activity of a worker, in virtual seconds; the shape of the spans of a recipe's ``record.json``."""

    activity: Activity
    start_s: float
    end_s: float
    peer: int | None


class TraceEvent(NamedTuple):
    """An event of a run under virtual time.

    Args:
        time_s: virtual.
        kind: for example ``"step"``, ``"request"``, ``"snapshot"``, ``"merge"``, ``"meet"``.
        rank: whom it happened to; −1 for all.
        peer: with whom; −1 for nobody.
    """

    time_s: float
    kind: str
    rank: int
    peer: int = -1


class Point(NamedTuple):
    """The run at a moment.

    Args:
        time_s: virtual.
        steps: of all workers together.
        samples: of all workers together.
        loss: of the mean of all models; of the server's model under ``apsgd``.
        consensus_distance: (1/n) Σ ‖x_i − x̄‖².
        accuracy: of the same model on test samples; None if there are none.
    """

    time_s: float
    steps: int
    samples: int
    loss: float
    consensus_distance: float
    accuracy: float | None


Distances = tuple[float, ...]
"""‖x_i − x̄‖² of each worker, by rank; NaN of one that has failed."""


class EpochRecord(NamedTuple):
    """A session of a run, from one synchronisation point to the next.

    Args:
        start_s, end_s: virtual; the synchronisation's average counts.
        distances: of the models to their mean (to the server's under ``apsgd``) just before the averaging; None without
            models, and where all are equal at any time.
    """

    start_s: float
    end_s: float
    distances: Distances | None

    @property
    def consensus_distance(self) -> float | None:
        """(1/n) Σ ‖x_i − x̄‖² over the workers that are left."""
        if self.distances is None:
            return None
        living = [distance for distance in self.distances if not math.isnan(distance)]
        return math.fsum(living) / len(living) if living else None

    @property
    def length_s(self) -> float:
        """Seconds."""
        return self.end_s - self.start_s


@dataclass
class WorkerAccount:
    """What one worker has done.

    Args:
        rank: whose.
        steps, samples: trained on.
        exchanges: averagings with a peer that it took part in; pushes under ``apsgd``.
        refused: requests of its own that a busy peer refused.
        dropped: updates that the server dropped as too stale.
        bytes_sent: without the averaging at a synchronisation point.
        staleness: of its steps; empty where the algorithm has no such thing.
        busy_s, wait_s: computing, and waiting for others.
        failed_s: when it stopped for good; None if it did not.
    """

    rank: int
    steps: int = 0
    samples: int = 0
    exchanges: int = 0
    refused: int = 0
    dropped: int = 0
    bytes_sent: int = 0
    staleness: StalenessHistogram = field(default_factory=StalenessHistogram)
    busy_s: float = 0.0
    wait_s: float = 0.0
    failed_s: float | None = None


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class Recording:
    """What to write down besides the accounts.

    Args:
        trace: every event; about 100 bytes each.
        spans: every worker's activities, for a time line.
        staleness: every update's staleness in order, by worker, beside the histograms.
        evaluate_every: steps of all workers between two points of the loss; None: a hundred points in the run.
    """

    trace: bool = False
    spans: bool = False
    staleness: bool = False
    evaluate_every: int | None = None

    def __post_init__(self) -> None:
        if self.evaluate_every is not None:
            check_integer("evaluate_every", self.evaluate_every, example=100, otherwise=", or None for a hundred points in all")


class Recorder:
    """Writes a run down.

    Args:
        workers: n.
        recording: what of it.
    """

    def __init__(self, workers: int, recording: Recording) -> None:
        self.accounts = [WorkerAccount(rank) for rank in range(workers)]
        self.points: list[Point] = []
        self.epochs: list[EpochRecord] = []
        self.trace: list[TraceEvent] | None = [] if recording.trace else None
        self.spans: list[list[Span]] | None = [[] for _ in range(workers)] if recording.spans else None
        self.staleness: list[list[int]] | None = [[] for _ in range(workers)] if recording.staleness else None

    def event(self, time_s: float, kind: str, rank: int, peer: int = -1) -> None:
        """Something happened."""
        if self.trace is not None:
            self.trace.append(TraceEvent(time_s, kind, rank, peer))

    def compute(self, rank: int, start_s: float, end_s: float) -> None:
        """Write down that a worker has computed."""
        self.accounts[rank].busy_s += end_s - start_s
        if self.spans is not None:
            self.spans[rank].append(Span("compute", start_s, end_s, None))

    def wait(self, rank: int, start_s: float, end_s: float, peer: int | None = None) -> None:
        """Write down that a worker has waited for others."""
        if end_s > start_s:
            self.accounts[rank].wait_s += end_s - start_s
            if self.spans is not None:
                self.spans[rank].append(Span("wait", start_s, end_s, peer))

    def exchange(self, rank: int, start_s: float, end_s: float, peer: int, nbytes: int) -> None:
        """Write down that a worker has averaged its model with a peer's, and the bytes that it has sent."""
        account = self.accounts[rank]
        account.exchanges += 1
        account.bytes_sent += nbytes
        if self.spans is not None:
            self.spans[rank].append(Span("exchange", start_s, end_s, peer))

    def stale(self, rank: int, staleness: int) -> None:
        """Write down how stale a worker's update was when it was applied."""
        self.accounts[rank].staleness.record(staleness)
        if self.staleness is not None:
            self.staleness[rank].append(staleness)
