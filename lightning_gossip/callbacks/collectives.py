"""How many collectives training itself makes: the number that an asynchronous strategy keeps at zero."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_gossip.arguments import clear_arguments


@clear_arguments
class CollectiveCounter(Callback):
    """Counts collectives inside training epochs: those of the default process group, and those of the strategy's algorithm.

    A process group numbers its collectives, those of DDP's reducer and of Lightning's loop included, so nothing is patched and
    nothing escapes. Counted is from the first to the last ``on_train_batch_start`` between two pauses (an epoch's end, or a
    validation): what workers do together at the end of an epoch is not training. The last batch of such a stretch is
    therefore not counted. Point-to-point messages are not collectives.

    Example::

        counter = CollectiveCounter()
        Trainer(strategy="adpsgd", devices=4, callbacks=[counter]).fit(model)
        counter.count  # 0; under DDP several per batch
        counter.of_algorithm  # 0; with periodic averaging two per averaging
    """

    def __init__(self) -> None:
        self._default = _Stretches()
        self._algorithm = _Stretches()

    @property
    def count(self) -> int:
        """Collectives of the default group so far, on this worker, since the beginning of the last fit."""
        return self._default.count

    @property
    def of_algorithm(self) -> int:
        """Collectives of a synchronous algorithm, on a group of its own."""
        return self._algorithm.count

    @override
    def on_train_start(self, *_: Any) -> None:
        self._default, self._algorithm = _Stretches(), _Stretches()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._default.see(_collectives())
        self._algorithm.see(getattr(trainer.strategy, "collectives_made", 0))

    @override
    def on_validation_start(self, *_: Any) -> None:
        self._pause()

    @override
    def on_train_epoch_end(self, *_: Any) -> None:
        self._pause()

    def _pause(self) -> None:
        self._default.pause()
        self._algorithm.pause()


class _Stretches:
    """How far a number has risen between pauses."""

    def __init__(self) -> None:
        self._closed = 0
        self._first: int | None = None
        self._last = 0

    @property
    def count(self) -> int:
        return self._closed + (0 if self._first is None else self._last - self._first)

    def see(self, number: int) -> None:
        self._last = number
        if self._first is None:
            self._first = number

    def pause(self) -> None:
        self._closed, self._first = self.count, None


def _collectives() -> int:
    """The sequence number of the default group: how many collectives it has begun."""
    group: Any = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return 0 if group is None else int(group._get_sequence_number_for_group())  # private, and missing in torch's type stubs
