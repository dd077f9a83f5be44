"""Several slow links and ports, by who is at their ends."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_gossip.algorithm.checks import check_integer, is_finite
from lightning_gossip.errors import ConfigurationError

Slow = Mapping[int | tuple[int, int], float]
"""Factor ≥ 1 of a link, by the pair of its ends in ascending order, or of one end's port."""


def slow_links(name: str, slow: object) -> Slow:
    """The factors, checked.

    Args:
        name: of the option, for what is refused.
        slow: that it was given; a pair may be in any order.

    Raises:
        ConfigurationError: naming the key.

    >>> slow_links("slow", {(3, 1): 10, 2: 4})
    {(1, 3): 10.0, 2: 4.0}
    """
    if not isinstance(slow, Mapping):
        raise ConfigurationError(f"{name}={slow!r} is not a mapping. Write for example {name}={{(0, 1): 10.0}}.")
    checked: dict[int | tuple[int, int], float] = {}
    for key, factor in slow.items():
        if not is_finite(factor) or factor < 1.0:
            raise ConfigurationError(f"{name}[{key!r}]={factor!r} is not a factor of at least 1.")
        checked[_ordered(name, key)] = float(factor)
    return checked


def _ordered(name: str, key: object) -> int | tuple[int, int]:
    ends = tuple(key) if isinstance(key, (tuple, list)) else (key,)
    for end in ends:
        check_integer(f"an end in {name}", end, at_least=0, example=0)
    if len(ends) == 1:
        return int(ends[0])
    if len(ends) != 2 or ends[0] == ends[1]:
        raise ConfigurationError(
            f"{name} names {key!r}, which is neither one end nor a pair of ends. Write for example (0, 1)."
        )
    return (min(ends), max(ends))
