"""Numbers as people read them; what is not known is NaN, and a dash."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rich.filesize import decimal

UNKNOWN = "–"
_SPACE = "\u00a0"  # no line break between a number and its unit


class Unit(NamedTuple):
    """A unit of time, and how many seconds it has."""

    name: str
    size: float

    def number(self, seconds: float) -> str:
        """A time as a number of this unit."""
        return digits(seconds / self.size)

    def text(self, seconds: float) -> str:
        """A time as a number of this unit, and the unit."""
        return _with(self.number(seconds), self.name)


def unit_of_time(longest_s: float) -> Unit:
    """The unit in which this time has few digits."""
    return Unit("s", 1.0) if longest_s < 600.0 else Unit("min", 60.0) if longest_s < 4 * 3600.0 else Unit("h", 3600.0)


def digits(value: float) -> str:
    """Three digits, or from 1,000 on all before the point."""
    return _known(value, lambda known: f"{known:,.0f}" if abs(known) >= 99.95 else f"{known:#.3g}")


def percent(value: float, places: int = 1) -> str:
    """A share in [0, 1] in percent; with no places, as few as it needs."""
    return _with(_known(100 * value, lambda share: f"{share:.{places}f}" if places else f"{share:.4g}"), "%")


def points(difference: float) -> str:
    """A difference of shares in points of percent, with its sign."""
    rounded = round(100 * difference, 2)
    return "0" if rounded == 0.0 else f"{rounded:+.2f}".replace("-", "−")


def times(ratio: float) -> str:
    """A ratio."""
    return _with(digits(ratio), "×")


def filesize(count: float) -> str:
    """Bytes."""
    return _known(count, lambda known: decimal(round(known), separator=_SPACE))


def spread(low: float, high: float, text: Callable[[float], str] = digits) -> str:
    """Smallest and largest; empty where there is only one."""
    return f"{text(low)}–{text(high)}" if low < high else ""


def count(number: int, noun: str) -> str:
    """``1 seed``, ``2 seeds``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(words: Iterable[object]) -> str:
    """``a, b and c``."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


def _known(value: float, text: Callable[[float], str]) -> str:
    return UNKNOWN if math.isnan(value) else text(value)


def _with(number: str, unit: str) -> str:
    return number if number == UNKNOWN else f"{number}{_SPACE}{unit}"
