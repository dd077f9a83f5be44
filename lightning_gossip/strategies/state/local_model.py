"""A worker's own model, set aside while the mean of all is evaluated and saved (``at_rendezvous="evaluate"``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from lightning_gossip.algorithm.tensors.fingerprint import fingerprints
from lightning_gossip.algorithm.tensors.finite import all_finite
from lightning_gossip.algorithm.tensors.flat import LiveTensors
from lightning_gossip.strategies.state.one_model import assign


@dataclass
class _Aside:
    tensors: Sequence[Tensor]
    copies: list[Tensor]
    means: list[int] | None = None  # fingerprints of what took their place


class OwnModel:
    """Stash for the worker's own weights while the mean is validated; empty in training, and with ``at_rendezvous="adopt"``."""

    def __init__(self) -> None:
        self._aside: _Aside | None = None

    def set_aside(self, shared: Sequence[Tensor], rest: Sequence[Tensor] = ()) -> None:
        """Keep a copy of what is about to become the mean; not of a model that is of no use any more.

        Args:
            shared: tensors that are averaged; read anew at each use.
            rest: others that are about to be replaced, in which anything may stand.
        """
        self._aside = None
        if all(all_finite(tensor) for tensor in shared):
            tensors = LiveTensors(lambda: [*shared, *rest])
            self._aside = _Aside(tensors, [tensor.detach().clone() for tensor in tensors])

    def is_replaced(self) -> None:
        """Note that the tensors hold the mean now."""
        if self._aside is not None:
            self._aside.means = fingerprints(list(self._aside.tensors))

    def forget(self) -> None:
        """Drop the model: the worker goes on from what its tensors hold."""
        self._aside = None

    def put_back(self) -> None:
        """Put the model back into the tensors, to train on. One that is not the mean any more somebody has set: it stays."""
        aside, self._aside = self._aside, None
        if aside is not None:
            _put(aside)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the model into the tensors for a while, if there is one, and the mean back afterwards."""
        if self._aside is None:
            yield
            return
        mean = [tensor.detach().clone() for tensor in self._aside.tensors]
        _put(self._aside)
        try:
            yield
        finally:
            for tensor, value in zip(self._aside.tensors, mean, strict=True):
                assign(tensor, value)


def _put(aside: _Aside) -> None:
    tensors = list(aside.tensors)
    now = fingerprints(tensors)
    for tensor, own, is_now, mean in zip(tensors, aside.copies, now, aside.means or now, strict=True):
        if is_now == mean:
            assign(tensor, own)
