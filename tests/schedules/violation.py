"""What a schedule has broken."""

from __future__ import annotations

from collections.abc import Callable


class Violation(AssertionError):
    """An invariant does not hold."""


def judge(run: Callable[[], None]) -> None:
    """Run a schedule; an exception of the product is a violation too."""
    try:
        run()
    except Violation:
        raise
    except Exception as error:
        raise Violation(f"{type(error).__name__}: {error}") from error
