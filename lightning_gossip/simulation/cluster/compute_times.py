"""One stream of compute times a worker, drawn from a law of :mod:`lightning_gossip.algorithm.laws`."""

from __future__ import annotations

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
    """

    def __init__(self, law: Law, factor: float, generator: np.random.Generator) -> None:
        self._law = law
        self._factor = factor
        self._generator = generator
        self._drawn = 0
        self._block: list[float] = []

    def next_s(self) -> float:
        """Seconds that the next step computes.

        Raises:
            ConfigurationError: if the law's draw is not a finite time.
        """
        if not self._block:
            block = self._law.draw(self._generator, _BLOCK, self._drawn) * self._factor
            if not np.isfinite(block).all() or (block < 0.0).any():
                raise ConfigurationError(f"compute={self._law} draws times that are not finite seconds of at least 0.")
            self._drawn += _BLOCK
            self._block = block[::-1].tolist()
        return self._block.pop()


def generator_of(seed: int, stream: int, rank: int) -> np.random.Generator:
    """A random stream of its own for each purpose and worker, independent of all others of the same seed."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, rank))))
