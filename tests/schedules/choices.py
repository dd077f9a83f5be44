"""Where a schedule's choices come from, and which they were."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Numbers from a seed, or those that were recorded; after the last of these, zeros.

    Args:
        seed: of the random numbers, where nothing is recorded.
        recorded: choices to make again.

    Attributes:
        made: all choices so far.
    """

    def __init__(self, seed: int = 0, recorded: Sequence[int] | None = None) -> None:
        self.made: list[int] = []
        self._recorded = recorded
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        """One of 0 … n − 1; the first of them is what a shrunk schedule has."""
        if n <= 1:
            return 0
        if self._recorded is None:
            chosen = int(self._random() * n)
        else:
            number = len(self.made)
            chosen = self._recorded[number] % n if number < len(self._recorded) else 0
        self.made.append(chosen)
        return chosen

    def of(self, options: Sequence[T]) -> T:
        """One of several; the harmless ones come first."""
        return options[self.below(len(options))]
