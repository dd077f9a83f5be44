"""A parameter server on the memory transport, its workers as threads, and what they are told."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_gossip.algorithm.apsgd.server import ParameterServer
from lightning_gossip.algorithm.apsgd.worker import Served
from lightning_gossip.runtime.apsgd.client import RemoteServer, ServerLink, Update
from lightning_gossip.runtime.apsgd.server import Server
from lightning_gossip.transport import Kind, Message
from tests.runtime.cluster import PATIENCE_S
from tests.transport.memory import MemoryNetwork, MemoryTransport
from tests.workers import run_threads

N = 4
LAYOUT = 17
EXTRA = 5  # elements after one a rank, in which its updates are counted
SHORT_S = 0.2  # a deadline that is meant to be missed


@dataclass(frozen=True)
class Pulled:
    rank: int
    version: int
    in_flight: int  # with this one


@dataclass(frozen=True)
class Pushed:
    rank: int
    staleness: int
    applied: bool


class Watched(ParameterServer):
    """Writes down what happens to it; the server's condition is held meanwhile."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.events: list[Pulled | Pushed] = []

    def pull(self, rank: int) -> int:
        version = super().pull(rank)
        self.events.append(Pulled(rank, version, len(self.in_flight)))
        return version

    def push(self, rank: int, update: Tensor, *, forward_passes: int = 1) -> int | None:
        staleness = self.version - self.in_flight.get(rank, 0)
        reported = super().push(rank, update, forward_passes=forward_passes)
        self.events.append(Pushed(rank, staleness, reported is not None))
        return reported

    @property
    def pushes(self) -> list[Pushed]:
        return [event for event in self.events if isinstance(event, Pushed)]

    @property
    def most_in_flight(self) -> int:
        return max(event.in_flight for event in self.events if isinstance(event, Pulled))


class Service:
    """A server on one rank, and a link to it on every rank.

    Args:
        n: workers.
        rank: the server's.
        transports: by rank, in place of the ones that work.
    """

    def __init__(
        self,
        *,
        n: int = N,
        rank: int = 0,
        transports: Mapping[int, Callable[[MemoryNetwork, int], MemoryTransport]] | None = None,
    ) -> None:
        self.n, self.rank, self.session = n, rank, 0
        network = MemoryNetwork(n)
        self.transports = [(transports or {}).get(r, MemoryTransport)(network, r) for r in range(n)]
        deadlines = {"timeout_s": PATIENCE_S, "turn_timeout_s": PATIENCE_S}
        self.server = Server(self.transports[rank], **deadlines)
        self.links: list[ServerLink] = [
            self.server if r == rank else RemoteServer(self.transports[r], rank, **deadlines) for r in range(n)
        ]
        self.remote = [r for r in range(n) if r != rank]
        self.out = [torch.zeros(n + EXTRA, dtype=torch.float64) for _ in range(n)]
        self.model = Watched(self.start(), workers=n)

    def start(self) -> Tensor:
        return torch.cat([torch.zeros(self.n), torch.arange(float(EXTRA))]).double()

    def hurry(self, rank: int) -> None:
        """From now on its deadlines are short; what came before was to succeed on a busy machine too."""
        link: Any = self.links[rank]
        link._timeout_s = link._turn_timeout_s = SHORT_S

    def open(self, **options: Any) -> Watched:
        """The next session, with a new model."""
        self.session += 1
        self.model = Watched(self.start(), workers=self.n, **options)
        self.server.open(self.session, LAYOUT, self.model)
        return self.model

    def pull(self, rank: int, update: Tensor | None = None, *, session: int | None = None, layout: int = LAYOUT) -> Served:
        wrapped = None if update is None else Update(update)
        return self.links[rank].pull(self.session if session is None else session, layout, self.out[rank], wrapped)

    def leave(self, rank: int, update: Tensor | None = None) -> Served:
        return self.links[rank].leave(self.session, None if update is None else Update(update))

    def run(self, script: Callable[[int], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """On these ranks at once, default all."""
        return run_threads([partial(script, rank) for rank in (range(self.n) if ranks is None else ranks)], PATIENCE_S)

    def close_together(self) -> None:
        """As the strategies do."""
        self.transports[(self.rank + 1) % self.n].post(self.rank, Message(Kind.STOP))
        began_s = time.monotonic()
        self.server.close(together=True)
        assert time.monotonic() - began_s < 8
        assert not self.alive

    def abandon(self) -> None:
        """The end after a failure; closing the transport ends the listener as the end of the process would."""
        self.server.close(together=False)
        for transport in self.transports:
            transport.close()
        for thread in self.server._threads:
            if thread.is_alive():
                thread.join(PATIENCE_S)

    @property
    def alive(self) -> list[str]:
        return [thread.name for thread in self.server._threads if thread.is_alive()]

    @contextlib.contextmanager
    def running(self, *, together: bool = True) -> Iterator[Service]:
        """Started; closed together at the end, or abandoned if that is meant, or something went wrong."""
        self.server.start()
        try:
            yield self
            if together:
                self.close_together()
        finally:
            self.abandon()


@dataclass
class Account:
    """What one worker has seen in a session."""

    applied: Tensor  # the sum of its updates that were
    versions: list[int] = field(default_factory=list)  # that it pulled
    staleness: list[int] = field(default_factory=list)  # that it was told
    dropped: int = 0


class Progress:
    """Updates that all workers have made, and a point at which all begin."""

    def __init__(self, workers: int) -> None:
        self.updates = 0
        self._lock = threading.Lock()
        self.began_s = time.monotonic()
        self._begin = threading.Barrier(workers, action=self._note_start)

    def begin(self) -> None:
        self._begin.wait(PATIENCE_S)

    def count(self) -> None:
        with self._lock:
            self.updates += 1

    def _note_start(self) -> None:
        self.began_s = time.monotonic()


def train(
    service: Service,
    compute_s: Callable[[int], Callable[[], float]],
    goes_on: Callable[[int, int, Progress], bool],
    *,
    together: bool = True,
) -> list[Account]:
    """All workers pull, compute, push and pull …, and leave, as the strategy does.

    Args:
        service: with an open session.
        compute_s: by rank, what draws the seconds of a step.
        goes_on: whether a rank makes another step after so many.
        together: all pull before the first one computes; not possible if only some may hold a model.
    """
    progress = Progress(service.n)

    def script(rank: int) -> Account:
        generator = torch.Generator().manual_seed(rank)
        draw, account = compute_s(rank), Account(torch.zeros(service.n + EXTRA, dtype=torch.float64))
        account.versions.append(service.pull(rank).version)
        if together:
            progress.begin()
        number = 0
        while goes_on(rank, number, progress):
            time.sleep(draw())
            update = step(service, rank, generator)
            served = service.pull(rank, update.clone())
            progress.count()
            number += 1
            account.versions.append(served.version)
            if served.staleness is None:
                account.dropped += 1
            else:
                account.staleness.append(served.staleness)
                account.applied += update
        service.leave(rank)
        return account

    return service.run(script)


def step(service: Service, rank: int, generator: torch.Generator) -> Tensor:
    """Whole numbers, whose sums have no rounding: one for the count of this rank's updates, and others."""
    update = torch.zeros(service.n + EXTRA, dtype=torch.float64)
    update[rank] = 1.0
    update[service.n :] = torch.randint(-50, 50, (EXTRA,), generator=generator)
    return update


LAWS: dict[str, Callable[[random.Random, float], float]] = {
    "constant": lambda _, mean_s: mean_s,
    "uniform": lambda draw, mean_s: draw.uniform(0.5, 1.5) * mean_s,
    "exponential": lambda draw, mean_s: draw.expovariate(1.0 / mean_s),
}


def law(name: str, mean_s: float, slow: Mapping[int, float] | None = None) -> Callable[[int], Callable[[], float]]:
    """By rank, what draws the seconds of a step; some ranks so many times slower."""

    def of(rank: int) -> Callable[[], float]:
        draw, factor = random.Random(rank), (slow or {}).get(rank, 1.0)
        return lambda: LAWS[name](draw, mean_s * factor)

    return of


def up_to(updates: int) -> Callable[[int, int, Progress], bool]:
    """Until all workers together have made so many updates."""
    return lambda _, __, progress: progress.updates < updates
