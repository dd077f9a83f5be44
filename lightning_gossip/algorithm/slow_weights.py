"""Slow weights and outer momentum of one worker: the state of outer steps (:mod:`lightning_gossip.algorithm.outer`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from lightning_gossip.algorithm.checks import check_integer
from lightning_gossip.algorithm.outer import Outer, like
from lightning_gossip.algorithm.tensors.flat import common_dtype, host_copy, views_like


class OuterState:
    """φ and v of one worker: two flat vectors of the parameters' size, in float32 at least, where the parameters are.

    Args:
        names: of the parameters, each once, in the order of ``x``.
        x: the parameters; φ begins with them, and v with 0.

    Attributes:
        slow, velocity: φ and v, shape (d,).
        slow_views, velocity_views: the same, shaped like the parameters.
    """

    KINDS: ClassVar = ("slow", "velocity")

    def __init__(self, names: Sequence[str], x: Sequence[Tensor]) -> None:
        self.names = list(names)
        device = x[0].device if x else torch.device("cpu")
        self.slow = torch.empty(sum(t.numel() for t in x), dtype=common_dtype(x), device=device)
        self.velocity = torch.zeros_like(self.slow)
        self.slow_views, self.velocity_views = views_like(self.slow, x), views_like(self.velocity, x)
        self.begin(x)

    def fits(self, x: Sequence[Tensor]) -> bool:
        """Whether these parameters have the shapes and the memory formats of those that it was made of."""
        mine = [(view.shape, view.stride(), view.device) for view in self.slow_views]
        return mine == [(tensor.shape, tensor.stride(), tensor.device) for tensor in x]

    @torch.no_grad()
    def begin(self, x: Sequence[Tensor]) -> None:
        """Begin anew: φ ← x, v ← 0."""
        for view, tensor in zip(self.slow_views, x, strict=True):
            view.copy_(tensor)
        self.velocity.zero_()

    @torch.no_grad()
    def take(self, state: Mapping[str, Tensor]) -> None:
        """Go on from :meth:`state_dict` of another state, for the parameters that both have, in the same shape."""
        for kind, views in zip(self.KINDS, (self.slow_views, self.velocity_views), strict=True):
            for name, view in zip(self.names, views, strict=True):
                saved = state.get(f"{kind}/{name}")
                if saved is not None and saved.shape == view.shape:
                    view.copy_(saved)

    def state_dict(self) -> dict[str, Tensor]:
        """φ and v by kind and parameter, ``"slow/<name>"`` and ``"velocity/<name>"``; no copies."""
        return self.named("slow", self.slow) | self.named("velocity", self.velocity)

    def on_host(self) -> dict[str, Tensor]:
        """:meth:`state_dict` in host memory of its own."""
        return self.named("slow", host_copy(self.slow)) | self.named("velocity", host_copy(self.velocity))

    def named(self, kind: str, flat: Tensor) -> dict[str, Tensor]:
        """A vector like φ and v as tensors shaped like the parameters, views of it, ``"<kind>/<name>"``."""
        views = views_like(flat, self.slow_views)
        return {f"{kind}/{name}": view for name, view in zip(self.names, views, strict=True)}


def outer_state(
    names: Sequence[str], x: Sequence[Tensor], *, before: OuterState | None, restored: Mapping[str, Tensor]
) -> OuterState:
    """φ and v of the parameters that there are now; of those that are new, φ begins with their values, and v with 0.

    Args:
        names, x: of the parameters, as for :class:`OuterState`.
        before: of those that there were; returned if they are the same.
        restored: of a checkpoint, where there was nothing before.
    """
    if before is not None and before.names == list(names) and before.fits(x):
        return before
    state = OuterState(names, x)
    state.take(restored if before is None else before.state_dict())
    return state


class SlowWeights:
    """The outer steps of one worker under gossip, whose clock is its own steps.

    Memory: two vectors of the parameters' size; touched by the training thread only.

    Args:
        outer: the rule.
        local_steps: H, at least 1.
        state: φ and v.

    Attributes:
        steps: c, own steps since the last outer step, in [0, H).

    >>> x = [torch.zeros(1)]
    >>> slow = SlowWeights(Outer(lr=1.0, momentum=0.5), 2, OuterState(["w"], x))
    >>> for _ in range(4):
    ...     x[0] += 1.0  # a local step
    ...     with slow.merging(x):
    ...         x[0] += 0.25  # what others have changed
    ...     stepped = slow.step(x)
    >>> x[0].item(), slow.state.velocity.item()  # 4 + 4/4 + (2/2) + (3/2)
    (7.5, 3.0)
    """

    def __init__(self, outer: Outer, local_steps: int, state: OuterState) -> None:
        check_integer("local_steps", local_steps, example=50)
        self._outer = outer
        self._local_steps = local_steps
        self.state = state
        self.steps = 0

    @contextmanager
    def merging(self, x: Sequence[Tensor]) -> Iterator[None]:
        """Inside, x takes over merges, and nothing else: φ follows them by the rule."""
        if not self._outer.follows_merges:
            yield
            return
        slow = self.state.slow_views
        with torch.no_grad():
            _subtract(slow, x)  # φ − x, which no merge changes
            try:
                yield
            finally:
                _add(slow, x)

    def step(self, x: Sequence[Tensor]) -> bool:
        """Count one own step, after its merges; the H-th of a round ends in the outer step.

        Args:
            x: the parameters, changed in place by an outer step.

        Returns:
            Whether it did.
        """
        self.steps += 1
        if self.steps < self._local_steps:
            return False
        self.steps = 0
        self._outer.step(x, self.state.slow_views, self.state.velocity_views)
        return True

    def begin(self, x: Sequence[Tensor]) -> None:
        """Begin anew from a model that others have given, or that exchanges at every step have made: φ ← x, v ← 0, c ← 0."""
        self.state.begin(x)
        self.steps = 0


@torch.no_grad()
def _subtract(targets: Sequence[Tensor], x: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_sub_(list(targets), like(x, targets))


@torch.no_grad()
def _add(targets: Sequence[Tensor], x: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_add_(list(targets), like(x, targets))
