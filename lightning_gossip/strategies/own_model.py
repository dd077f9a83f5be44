"""A worker's own model, set aside while the mean of all is evaluated and saved (``at_rendezvous="evaluate"``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_gossip.algorithm.finite import all_finite


class OwnModel:
    """Of one worker; empty while it trains, and where every worker goes on from the mean."""

    def __init__(self) -> None:
        self._aside: list[Tensor] | None = None

    def set_aside(self, shared: Sequence[Tensor]) -> None:
        """Keep a copy of the tensors that are about to become the mean; not of a model that is of no use any more."""
        copies = [tensor.detach().clone() for tensor in shared]
        self._aside = copies if all(all_finite(tensor) for tensor in copies) else None

    def forget(self) -> None:
        """The worker goes on from what its tensors hold."""
        self._aside = None

    def put_back(self, shared: Sequence[Tensor]) -> None:
        """Into the tensors, to train on; they stay as they are if there is none."""
        if self._aside is not None:
            _copy(self._aside, shared)
            self._aside = None

    @contextmanager
    def in_place(self, shared: Sequence[Tensor]) -> Iterator[None]:
        """In the tensors for a while, if there is one."""
        if self._aside is None:
            yield
            return
        mean = [tensor.detach().clone() for tensor in shared]
        _copy(self._aside, shared)
        try:
            yield
        finally:
            _copy(mean, shared)


@torch.no_grad()
def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(targets), list(sources))
