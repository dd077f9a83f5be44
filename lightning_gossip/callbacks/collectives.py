"""How many collectives training itself makes: the number that an asynchronous strategy keeps at zero."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from typing_extensions import override


class CollectiveCounter(Callback):
    """Counts the collectives of the default process group inside training epochs.

    A process group numbers its collectives, those of DDP's reducer and of Lightning's loop included, so nothing is patched and
    nothing escapes. Counted is from the first to the last ``on_train_batch_start`` between two pauses (an epoch's end, or a
    validation): what workers do together at the end of an epoch is not training. The last batch of such a stretch is
    therefore not counted. Point-to-point messages are not collectives.

    Example::

        counter = CollectiveCounter()
        Trainer(strategy="adpsgd", devices=4, callbacks=[counter]).fit(model)
        counter.count  # 0; under DDP several per batch
    """

    def __init__(self) -> None:
        self._closed = 0
        self._first: int | None = None
        self._last = 0

    @property
    def count(self) -> int:
        """Collectives so far, on this worker, since the beginning of the last fit."""
        return self._closed + (0 if self._first is None else self._last - self._first)

    @override
    def on_train_start(self, *_: Any) -> None:
        self._closed, self._first = 0, None

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._last = _collectives()
        if self._first is None:
            self._first = self._last

    @override
    def on_validation_start(self, *_: Any) -> None:
        self._pause()

    @override
    def on_train_epoch_end(self, *_: Any) -> None:
        self._pause()

    def _pause(self) -> None:
        self._closed, self._first = self.count, None


def _collectives() -> int:
    """The sequence number of the default group: how many collectives it has begun."""
    group: Any = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return 0 if group is None else int(group._get_sequence_number_for_group())  # private, and missing in torch's type stubs
