"""How stale the steps are.

Staleness of a step = changes made to the published model between the pull that the step computed its gradient from
and the push that ends it: τ_k of X̂_k = X_{k−τ_k} in AD-PSGD (Lian et al. 2018, arXiv 1710.06952), counted on one
worker's model; on a parameter server, the updates of others between a worker's pull and its push. Zero if nothing was
merged meanwhile.

Neither class locks. Whoever owns the published model guards both with the lock that guards the model.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from lightning_gossip.errors import ConfigurationError, ProtocolError


class VersionCounter:
    """Counts the changes of one published model.

    The reader keeps the version it pulled, so one counter serves one worker (gossip) or many (a parameter server).

    Attributes:
        version: changes so far.

    >>> counter = VersionCounter()
    >>> pulled = counter.version
    >>> counter.changed(), counter.changed()
    (1, 2)
    >>> counter.staleness(pulled)
    2
    """

    def __init__(self) -> None:
        self.version = 0

    def changed(self) -> int:
        """Count one change of the published model, a merge or a push; returns the new version."""
        self.version += 1
        return self.version

    def staleness(self, pulled: int) -> int:
        """The staleness of a step that ends now. Ask before its own push is counted.

        Args:
            pulled: `version` at the pull that the step started from.

        Raises:
            ProtocolError: if `pulled` lies in the future, as after a counter was reset under its readers.
        """
        if pulled > self.version:
            raise ProtocolError(
                f"a step says that it pulled version {pulled} of a model that is at version {self.version}; "
                "pull again after a reset."
            )
        return self.version - pulled

    def state_dict(self) -> dict[str, int]:
        """The count, as a plain value for a checkpoint."""
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved count.

        Raises:
            ConfigurationError: if it holds no version >= 0.
        """
        self.version = _natural(state.get("version"), "version")


class StalenessHistogram:
    """How often each staleness occurred. Memory grows with the distinct values, not with the steps.

    An empty histogram has count 0, mean 0.0, and 0 for each quantile and the maximum: a worker without a step has not
    been stale.

    >>> histogram = StalenessHistogram()
    >>> for value in (0, 0, 1, 3):
    ...     histogram.record(value)
    >>> histogram.count, histogram.mean, histogram.quantile(0.5), histogram.max
    (4, 1.0, 0, 3)
    >>> histogram.counts()
    {0: 2, 1: 1, 3: 1}
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def record(self, value: int) -> None:
        """Count the staleness of one step.

        Args:
            value: its staleness in changes, an integer >= 0.

        Raises:
            ConfigurationError: for any other value.
        """
        value = _natural(value, "staleness")
        self._counts[value] = self._counts.get(value, 0) + 1

    @property
    def count(self) -> int:
        """Number of steps recorded."""
        return sum(self._counts.values())

    @property
    def mean(self) -> float:
        """The mean staleness; 0.0 if empty."""
        count = self.count
        return sum(value * times for value, times in self._counts.items()) / count if count else 0.0

    @property
    def max(self) -> int:
        """The largest staleness; 0 if empty."""
        return max(self._counts, default=0)

    def quantile(self, q: float) -> int:
        """The smallest recorded value that at least a share q of the steps does not exceed; 0 if empty.

        Args:
            q: in [0, 1]; 0 gives the minimum, 1 the maximum.

        Returns:
            A value that occurred (no interpolation).

        Raises:
            ConfigurationError: if q is outside [0, 1].
        """
        if not 0.0 <= q <= 1.0:
            raise ConfigurationError(f"got the quantile q={q!r}; it is a share in [0, 1]. Write 0.95 for the 95th percentile.")
        # Rounded first: 0.07 * 100 is 7.000000000000001, whose ceiling would be one step too far.
        needed = math.ceil(round(q * self.count, 9))
        seen = 0
        for value, times in self.counts().items():
            seen += times
            if seen >= needed:
                return value
        return 0

    def counts(self) -> dict[int, int]:
        """Staleness → number of steps, in ascending order; a copy."""
        return dict(sorted(self._counts.items()))

    def merge(self, other: StalenessHistogram) -> None:
        """Add the steps of another histogram (of another worker, or of an earlier part of the run) to this one."""
        for value, times in other.counts().items():
            self._counts[value] = self._counts.get(value, 0) + times

    def state_dict(self) -> dict[str, list[list[int]]]:
        """The counts as [value, times] pairs: plain, and unlike integer keys the same after a way through JSON."""
        return {"counts": [[value, times] for value, times in self.counts().items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the counts by saved ones.

        Raises:
            ConfigurationError: if they are not pairs of integers >= 0; the histogram is then unchanged.
        """
        try:
            pairs = [(value, times) for value, times in state["counts"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the staleness state cannot be read ({error!r}); pass what state_dict() returned, or none."
            ) from error
        self._counts = {_natural(value, "staleness"): _natural(times, "number of steps") for value, times in pairs}


def _natural(value: Any, what: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigurationError(f"got the {what} {value!r}; it must be an integer >= 0. Pass a count.")
    return number
