"""The exact mean of a vector over all workers, at once or behind the next local steps.

An averaging of the models w_i of step t is applied as a difference:

    x_i ← x_i + (w̄ − w_i),     w̄ = (1/n) Σ_j w_j

Σ_i (w̄ − w_i) = 0, so the mean of the models changes by local updates only, whenever each worker applies it; what x_i has
gained since step t survives. Applied at once x_i still is w_i, and becomes w̄, the same bits on all workers. With an outer step
w̄ + o stands in place of w̄.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gossip.algorithm.compression.wires import MeanWire
from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.algorithm.slow_weights import OuterState
from lightning_gossip.algorithm.tensors.flat import FlatModel, fading, fragment_slices
from lightning_gossip.errors import ProtocolError
from lightning_gossip.runtime.collectives import Collectives
from lightning_gossip.runtime.periodic_averaging.mean_reducers import ExactMean, PendingMean, WiredMean


class Averager:
    """Averages one worker's tensors with everybody's. Memory: two flat vectors of their size.

    Args:
        collectives: of all workers; each calls the same methods in the same order.
        tensors: x, the same in the same order on all workers; read anew at each use
            (:class:`~lightning_gossip.algorithm.tensors.flat.LiveTensors`).
        model: how many of them, from the first, are the model's; None for all.
        counted: how many of them, from the first, count for the distance to the mean; None for the model's.
        retention: of these, per tensor; see :func:`~lightning_gossip.algorithm.tensors.flat.fading`.
        fragments: in how many parts of equal length the vector may be averaged.
        wire: how the vectors are sent; other than ``"float32"`` a mean is exact only up to rounding, whose errors are fed back,
            until :meth:`settle`, and creating an averager is collective.
    """

    def __init__(
        self,
        collectives: Collectives,
        tensors: Sequence[Tensor],
        *,
        model: int | None = None,
        counted: int | None = None,
        retention: Sequence[float] | None = None,
        fragments: int = 1,
        wire: MeanWire = "float32",
    ) -> None:
        self._tensors = tensors
        device = self._tensors[0].device if self._tensors else None
        self._mean = FlatModel(self._tensors, device=device)
        self._own = torch.empty_like(self._mean.flat)
        self._model = len(self._tensors) if model is None else model
        self._counted = sum(tensor.numel() for tensor in self._tensors[: self._model if counted is None else counted])
        self._fading = fading(self._tensors[: self._model], retention)
        self._parts = fragment_slices(self._mean.flat.numel(), fragments)
        whole = self._mean.read(self._tensors)
        self._means: list[ExactMean | WiredMean] = [
            ExactMean(collectives) if wire == "float32" else WiredMean(collectives, whole[part], wire) for part in self._parts
        ]
        self._begun: list[int] = []  # the fragments of the averaging begun last
        self._pending: list[PendingMean] = []

    def begin(self, fragment: int | None = None) -> None:
        """Send w_i ← x_i on its way; x is free to change.

        Args:
            fragment: of which, from 0; None for the whole of it.

        Raises:
            ProtocolError: if one is under way.
        """
        if self._pending:
            raise ProtocolError("An averaging begins while another one is under way.")
        self._own.copy_(self._mean.read(self._tensors))
        self._begun = list(range(len(self._parts))) if fragment is None else [fragment]
        if len(self._begun) < len(self._parts):
            part = self._parts[self._begun[0]]
            self._own[: part.start].zero_()  # w̄ − w_i of what is not averaged
            self._own[part.stop :].zero_()
        self._pending = [self._means[number].start(self._mean.flat[self._parts[number]]) for number in self._begun]

    def complete(self) -> float:
        """Wait for w̄, and leave it to :meth:`replace`, :meth:`correct` or nobody.

        Returns:
            This worker's ‖w_i − w̄‖².
        """
        if not self._pending:
            raise ProtocolError("There is no averaging to complete.")
        for pending in self._pending:
            pending.wait()
        self._pending = []
        for number in self._begun:
            part = self._parts[number]
            torch.sub(self._mean.flat[part], self._own[part], out=self._own[part])
        return self._distance()

    @torch.no_grad()
    def outer_step(self, outer: Outer, state: OuterState) -> None:
        """w̄ ← w̄ + o, and φ ← w̄, of the averaging just completed; the same bits on all workers.

        Args:
            outer: the rule.
            state: φ and v of the first elements of w̄, the parameters, as flat vectors.
        """
        for number in self._begun:
            part = self._parts[number]
            place = slice(part.start, max(part.start, min(part.stop, state.slow.numel())))
            mean, slow = self._mean.flat[place], state.slow[place]
            if mean.numel() and outer.move([mean], [slow], [state.velocity[place]]):
                mean += slow
                self._own[place] += slow  # w̄ − w_i
                self._means[number].moved(slow)
            slow.copy_(mean)

    def settle(self) -> float | None:
        """Make the w̄ of the averaging just completed, of the whole, exact, with all that rounding has kept back. Collective.

        Returns:
            As :meth:`complete`; None where there was nothing to settle.
        """
        if not any(means.keeps_back for means in self._means):
            return None
        before = self._mean.flat.clone()
        for part, means in zip(self._parts, self._means, strict=True):
            means.settle(self._mean.flat[part])
        self._own.add_(before.neg_().add_(self._mean.flat))
        return self._distance()

    def _distance(self) -> float:
        """‖w_i − w̄‖² of what counts."""
        return float(torch.linalg.vector_norm(self._own[: self._counted], dtype=torch.float64)) ** 2

    def replace(self, *, model_only: bool = False) -> None:
        """x_i ← w̄, where x_i has not changed since the averaging began.

        Args:
            model_only: leave alone what is not the model's.
        """
        self._mean.write(self._tensors, only=self._model if model_only else None)

    def correct(self, *, forward_passes: int = 0) -> None:
        """x_i ← x_i + (w̄ − w_i).

        Args:
            forward_passes: in training mode since the averaging began.
        """
        self._mean.flat.copy_(self._own)
        for place, share in self._fading:
            self._mean.flat[place] *= share**forward_passes
        self._mean.add_to(self._tensors)
