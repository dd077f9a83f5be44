"""One stream of compute times a worker, drawn from a law of :mod:`lightning_gossip.algorithm.laws`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lightning_gossip.algorithm.laws import Law
from lightning_gossip.errors import ConfigurationError

_BLOCK = 128  # draws at once: a call of numpy costs as much as a hundred draws


class ComputeTimes:
    """Compute times of one worker, one after the other.

    Args:
        law: of them.
        factor: what every one of them is multiplied by (a slow worker).
        generator: the worker's own.
        slow_s: periods (from, until, factor) in which it computes slower, in ascending order, without overlaps.
        now_s: the virtual time.
    """

    def __init__(
        self,
        law: Law,
        factor: float,
        generator: np.random.Generator,
        *,
        slow_s: Sequence[tuple[float, float, float]] = (),
        now_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._law = law
        self._factor = factor
        self._generator = generator
        self._slow_s = slow_s
        self._now_s = now_s
        self._drawn = 0
        self._block: list[float] = []

    def next_s(self, at_s: float | None = None) -> float:
        """Seconds that the next step computes.

        Args:
            at_s: when it begins; None for now.

        Raises:
            ConfigurationError: if the law's draw is not a finite time.
        """
        if not self._block:
            block = self._law.draw(self._generator, _BLOCK, self._drawn) * self._factor
            if not np.isfinite(block).all() or (block < 0.0).any():
                raise ConfigurationError(f"compute={self._law} draws times that are not finite seconds of at least 0.")
            self._drawn += _BLOCK
            self._block = block[::-1].tolist()
        work_s = self._block.pop()
        return self._slowed(work_s, self._now_s() if at_s is None else at_s) if self._slow_s else work_s

    def _slowed(self, work_s: float, at_s: float) -> float:
        """How long so much work takes that begins then."""
        reached_s, left_s = at_s, work_s
        for from_s, until_s, factor in self._slow_s:
            if until_s <= reached_s:
                continue
            before_s = max(0.0, from_s - reached_s)
            if left_s <= before_s:
                break
            reached_s, left_s = reached_s + before_s, left_s - before_s
            meanwhile_s = (until_s - reached_s) / factor  # of work
            if left_s <= meanwhile_s:
                return reached_s + left_s * factor - at_s
            reached_s, left_s = until_s, left_s - meanwhile_s
        return reached_s + left_s - at_s


def generator_of(seed: int, stream: int, rank: int) -> np.random.Generator:
    """A random stream of its own for each purpose and worker, independent of all others of the same seed."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, rank))))
