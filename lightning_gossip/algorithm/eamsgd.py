r"""EASGD and EAMSGD: workers that an elastic force ties to a centre (Zhang, Choromanska, LeCun 2015, arXiv 1412.6651).

Each worker trains its own model x. After every τ-th of its own steps, at its own pace, it and the centre x̃ move towards each
other:

    c = α (x̃ − x)
    x ← x + c
    x̃ ← x̃ − c

α is small, so that workers stay apart and explore; the centre follows their mean. With momentum in the local steps (Nesterov's,
EAMSGD) or without any (EASGD) the rule is the same.

What holds (tests/algorithm/test_eamsgd.py):

- Σ_i x_i + x̃ changes by local steps only: both ends use the same c.
- An exchange multiplies x − x̃ by 1 − 2α, so α = ½ makes both their mean, and a larger one steps past it.
- n exchanges, one of each worker, move the centre by 1 − (1 − α)ⁿ of the way to the workers. So α = β/n, here with β = 0.9.
- α = 0: every worker trains alone.
- One worker, on a quadratic of curvature h, without momentum: a round of τ steps and an exchange multiplies (x, x̃) by
  [[(1−α) r, α], [α r, 1−α]], r = (1 − ηh)^τ.

(The published order is exchange, then step, both from the same x; so an exchange of ours is that before the next step.)

What a worker does, without any I/O:

| event | effects |
|---|---|
| a step before the τ-th | |
| the τ-th step since the last exchange | Exchange, Move |
| the same, where the server refuses the model as not finite | Exchange, Refused, Follow |
| the mean of all models is taken over | the next exchange is after τ more steps |
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.apsgd.server import ServerRule
from lightning_gossip.algorithm.apsgd.worker import Served
from lightning_gossip.algorithm.staleness import StalenessHistogram


class ElasticCentre(ServerRule):
    """The centre x̃, which any worker may exchange with at any time.

    Args:
        model: x̃, shape (d,); the centre's own from now on, changed in place.
        alpha: α.

    Attributes:
        version: exchanges so far.
    """

    def __init__(self, model: Tensor, *, alpha: float) -> None:
        self.model = model
        self.version = 0
        self._alpha = alpha
        self._seen: dict[int, int] = {}  # the version after a worker's last exchange, by rank
        self._changes: dict[int, Tensor] = {}  # c, of workers that have not asked for it yet

    @override
    def queue(self, rank: int) -> None:
        return

    @override
    def may_pull(self, rank: int) -> bool:
        return True

    @override
    def pull(self, rank: int) -> int:
        return self.version

    @override
    def answer(self, rank: int) -> Tensor:
        """c of the exchange that this worker has just begun; x̃ where its model was refused."""
        return self._changes.pop(rank, self.model)

    @override
    def may_push(self, rank: int) -> bool:
        return True

    @override
    @torch.no_grad()
    def push(self, rank: int, update: Tensor, *, forward_passes: int = 1) -> int:
        """x̃ ← x̃ − c.

        Args:
            rank: the worker's.
            update: its model x, shape (d,); overwritten by c = α (x̃ − x).
            forward_passes: of no use: at an exchange a worker waits, and its running statistics with it.

        Returns:
            The exchanges of others since this worker's last, or since the session began.
        """
        change = update.neg_().add_(self.model).mul_(self._alpha)
        self.model.sub_(change)
        self._changes[rank] = change
        staleness = self.version - self._seen.get(rank, 0)
        self.version += 1
        self._seen[rank] = self.version
        return staleness

    @override
    def refuse(self, rank: int) -> None:
        self._changes.pop(rank, None)

    @override
    def leave(self, rank: int) -> None:
        self._changes.pop(rank, None)


@dataclass(frozen=True)
class Exchange:
    """Send x to the centre, receive c; resume with :class:`~lightning_gossip.algorithm.apsgd.worker.Served`."""


@dataclass(frozen=True)
class Move:
    """x ← x + c."""


@dataclass(frozen=True)
class Refused:
    """The model was not finite, and the centre has not taken it in: fail, or begin anew from the centre."""


@dataclass(frozen=True)
class Follow:
    """x ← x̃, which was received."""


Effect = Exchange | Move | Refused | Follow
Effects = Generator[Effect, Any, None]


class ElasticProtocol:
    """One worker's decisions during one fit; the module says which.

    Args:
        period: τ.

    Attributes:
        exchanges: with the centre.
        refused: of them, those of a model that was not finite.
        staleness: of the others: how many exchanges other workers made since this one's last.
        since: own steps since the last exchange, in [0, τ).
    """

    def __init__(self, period: int) -> None:
        self.exchanges = self.refused = self.since = 0
        self.staleness = StalenessHistogram()
        self._period = period

    def step(self) -> Effects:
        """Take note of an optimizer step; exchanges where it is due."""
        self.since += 1
        if self.since < self._period:
            return
        self.since = 0
        served: Served = yield Exchange()
        self.exchanges += 1
        if served.refused:
            self.refused += 1
            yield Refused()
            yield Follow()
            return
        if served.staleness is not None:
            self.staleness.record(served.staleness)
        yield Move()

    def restart(self) -> None:
        """Begin to count steps anew: all workers and the centre have taken over one model."""
        self.since = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "staleness": self.staleness.state_dict(),
            "exchanges": self.exchanges,
            "refused": self.refused,
            "since": self.since,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.staleness.load_state_dict(state["staleness"])
        self.exchanges, self.refused, self.since = state["exchanges"], state["refused"], state["since"]
