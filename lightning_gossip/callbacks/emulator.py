"""Slower workers on one machine, so that experiments about heterogeneous clusters mean something there.

Each batch is padded by a sleep just before its backward pass: after the strategy has let the worker read its model, before
any all-reduce of DDP, and before the strategy measures and pushes the step. So a slow step is slow in the way a slow device
makes it: its gradient is stale when it is applied, under DDP everybody waits for it, and the last batch of an epoch is as slow
as the others.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_choice, check_not_negative, check_positive, is_finite
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError

Jitter = Literal["exponential", "uniform"]

_WINDOW = 9  # batches; the shortest of the last few is work without waiting for anybody
_SLACK = 0.25  # of a period. A batch that is later than that has waited for somebody: the time is not made up for


@clear_arguments
class ClusterEmulator(Callback):
    """Makes chosen workers slower, by a constant or a random factor.

    With ``period_s`` every batch of worker r lasts ``period_s · slowdown[r] · jitter`` seconds from the end of the batch before
    to its own end, whatever it really takes, Lightning's loop included. Ends are deadlines, so that errors of single batches do
    not add up. Without ``period_s`` a slowed worker sleeps ``(slowdown · jitter − 1)`` times what its batch really takes.

    Args:
        slowdown: factor ≥ 1 for each rank that is to be slow; others have 1.
        period_s: seconds a batch of a worker that is not slowed; more than a batch really takes. None to measure it.
        jitter: law of a random factor of mean 1, drawn anew for each batch: ``"exponential"`` (memoryless compute times) or
            ``"uniform"``. None for a constant pace.
        spread: in (0, 1], how much of the factor is random: 1 + spread · z, where z has mean 0 and is at least −1.
        seed: of the jitter; each rank has a stream of its own.

    Raises:
        ConfigurationError: for a value out of range; before training, for a rank that does not exist.

    Example::

        Trainer(devices=4, strategy="adpsgd", callbacks=[ClusterEmulator({3: 10.0}, period_s=0.05)])
    """

    def __init__(
        self,
        slowdown: Mapping[int, float] | None = None,
        period_s: float | None = None,
        *,
        jitter: Jitter | None = None,
        spread: float = 1.0,
        seed: int = 0,
    ) -> None:
        slowdown = dict(slowdown or {})
        for rank, factor in slowdown.items():
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
                raise ConfigurationError(f"slowdown: {rank!r} is not a rank. Write for example slowdown={{3: 10.0}}.")
            if not is_finite(factor) or factor < 1.0:
                raise ConfigurationError(f"slowdown of rank {rank}={factor!r} is not a number of at least 1.")
        if period_s is not None:
            check_positive("period_s", period_s)
        check_not_negative("seed", seed)
        check_choice("jitter", jitter, (None, *get_args(Jitter)))
        check_positive("spread", spread)
        if spread > 1:
            raise ConfigurationError(f"spread={spread!r} is not in (0, 1]: batches would take negative time.")
        self.slowdown = slowdown
        self.period_s = period_s
        self.jitter = jitter
        self.spread = spread
        self._seed = seed
        self._factor = 1.0
        self._random = random.Random()
        self._end_s: float | None = None  # of the last batch, as it should have been
        self._due_s = 0.0
        self._padded_s: float | None = None  # when the sleep of this batch ended
        self._slept_s = 0.0
        self._began_s = 0.0
        self._tails: deque[float] = deque(maxlen=_WINDOW)  # seconds from the end of the sleep to the end of the batch
        self._works: deque[float] = deque(maxlen=_WINDOW)  # seconds a batch without the sleep

    @classmethod
    def one_slow(cls, rank: int, factor: float, period_s: float | None = None, **options: Any) -> ClusterEmulator:
        """An emulator that slows one worker down.

        Args:
            rank: which.
            factor: how many times slower, ≥ 1.
            period_s, options: as for the class.
        """
        return cls({rank: factor}, period_s, **options)

    def check(self, world_size: int) -> None:
        """Refuse ranks that do not exist.

        Raises:
            ConfigurationError: naming them.
        """
        missing = sorted(rank for rank in self.slowdown if rank >= world_size)
        if missing:
            raise ConfigurationError(
                f"slowdown names the ranks {missing}, and there are {world_size} workers: ranks are 0 … {world_size - 1}."
            )

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.check(trainer.world_size)
            self._factor = float(self.slowdown.get(trainer.global_rank, 1.0))
            self._random = random.Random(f"{self._seed}/{trainer.global_rank}")

    @override
    def on_train_epoch_start(self, *_: Any) -> None:
        self._end_s = None  # the time of a synchronisation point is not a batch's

    @override
    def on_validation_end(self, *_: Any) -> None:
        self._end_s = None

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        if self._end_s is None:
            self._end_s = self._began_s = time.monotonic()
        if self.period_s is not None:
            self._due_s = self._end_s + self.period_s * self._factor * self._multiplier()
        self._padded_s = None

    @override
    def on_before_backward(self, *_: Any) -> None:
        self._pad()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._pad()  # only if this batch had no backward pass
        assert self._padded_s is not None
        ended_s = time.monotonic()
        self._tails.append(ended_s - self._padded_s)
        self._works.append(ended_s - self._began_s - self._slept_s)
        on_schedule = self.period_s is not None and ended_s - self._due_s < _SLACK * self.period_s
        self._end_s = self._due_s if on_schedule else ended_s
        self._began_s = ended_s

    def _pad(self) -> None:
        """Sleep, once a batch."""
        if self._padded_s is not None:
            return
        started_s = time.monotonic()
        until_s = started_s
        if self.period_s is not None:
            until_s = self._due_s - min(self._tails, default=0.0)
        elif self._factor > 1.0:
            until_s += max(0.0, self._factor * self._multiplier() - 1.0) * min(self._works, default=0.0)
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self._padded_s = time.monotonic()
        self._slept_s = self._padded_s - started_s

    def _multiplier(self) -> float:
        """The random factor of one batch, of mean 1."""
        if self.jitter is None:
            return 1.0
        z = self._random.expovariate(1.0) - 1.0 if self.jitter == "exponential" else self._random.uniform(-1.0, 1.0)
        return 1.0 + self.spread * z
