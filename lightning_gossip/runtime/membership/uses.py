"""The uses of Trainers by this process (fit, validate, test …), numbered alike on all workers.

An exception that ends one use belongs to it: a script may catch it on every rank, as a search that drops a bad trial does, and
the next use begins as if there had been none. So whatever workers say to each other about a failure names the use.
"""

from __future__ import annotations


class _Process:
    """What this process has done so far."""

    number = 0  # of the present use, or the last one; 0 before the first
    failed = False  # whether it was ended by an exception


def begin() -> tuple[int, bool]:
    """Another use begins; all workers begin it.

    Returns:
        Its number, and whether the one before was ended by an exception on this worker.
    """
    failed = _Process.failed
    _Process.number += 1
    _Process.failed = False
    return _Process.number, failed


def number() -> int:
    """Of the present use, or the last one; 0 before the first."""
    return _Process.number


def fail() -> None:
    """The present use is ended by an exception."""
    _Process.failed = True


def adopt(number: int) -> None:
    """This process came later than the others, who are in this use."""
    _Process.number = number
