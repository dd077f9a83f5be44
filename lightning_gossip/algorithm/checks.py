"""What several algorithms, laws and objectives ask of their options."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightning_gossip.errors import ConfigurationError


def is_integer(value: object, at_least: int, at_most: int | None = None) -> bool:
    """Whether this is an integer in range; True and False are none."""
    is_one = isinstance(value, int) and not isinstance(value, bool)
    return is_one and at_least <= value and (at_most is None or value <= at_most)  # type: ignore[operator]


def is_finite(value: object) -> bool:
    """Whether this is a finite real number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_integer(
    name: str, value: object, *, at_least: int = 1, at_most: int | None = None, example: int, otherwise: str = ""
) -> None:
    """Refuse what is not an integer in range.

    Args:
        name: of the option.
        value: that it was given.
        at_least, at_most: the range.
        example: a value that would do.
        otherwise: what else is accepted, as the end of a sentence.

    Raises:
        ConfigurationError: naming the value, the range and the example.
    """
    if not is_integer(value, at_least, at_most):
        accepted = f">= {at_least}" if at_most is None else f"in [{at_least}, {at_most}]"
        raise ConfigurationError(
            f"got {name}={value!r}; it must be an integer {accepted}{otherwise}. Write for example {name}={example}."
        )


def check_positive(name: str, value: object) -> None:
    """Refuse what is not a number above 0.

    Raises:
        ConfigurationError: naming the key and the value.
    """
    if not is_finite(value) or not value > 0.0:  # type: ignore[operator]
        raise ConfigurationError(f"{name}={value!r} is not a number above 0. Write for example {name}=0.1.")


def check_not_negative(name: str, value: object) -> None:
    """Refuse what is not a number of at least 0.

    Raises:
        ConfigurationError: naming the key and the value.
    """
    if not is_finite(value) or not value >= 0.0:  # type: ignore[operator]
        raise ConfigurationError(f"{name}={value!r} is not a number of at least 0. Write for example {name}=0.0.")


def check_choice(name: str, value: object, accepted: Iterable[object]) -> None:
    """Refuse a value that is not one of a few.

    Raises:
        ConfigurationError: naming the key, the value and what is accepted.
    """
    accepted = tuple(accepted)
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in accepted):
        raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(map(repr, accepted))}.")
