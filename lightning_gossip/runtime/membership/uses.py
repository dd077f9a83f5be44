"""The uses of Trainers by this process (fit, validate, test …), numbered alike on all workers.

An exception that ends one use belongs to it: a script may catch it on every rank, as a search that drops a bad trial does, and
the next use begins as if there had been none. So whatever workers say to each other about a failure names the use.
"""

from __future__ import annotations


class _Process:
    """The uses of this process so far."""

    number = 0  # of the present use, or the last one; 0 before the first
    aborted = False  # whether it was ended by an exception


def begin() -> tuple[int, bool]:
    """Begin another use, as all workers do.

    Returns:
        Its number, and whether the one before was ended by an exception on this worker.
    """
    aborted = _Process.aborted
    _Process.number += 1
    _Process.aborted = False
    return _Process.number, aborted


def number() -> int:
    """The number of the present use, or the last one; 0 before the first."""
    return _Process.number


def abort() -> None:
    """Note that the present use is ended by an exception."""
    _Process.aborted = True


def adopt(number: int) -> None:
    """Take over the number of the others' use, since this process came later."""
    _Process.number = number
