"""What several options of a simulation are asked."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_gossip.algorithm.checks import is_finite
from lightning_gossip.errors import ConfigurationError


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
