"""Numbers as people read them; one unit for all values of a column or an axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

UNKNOWN = "–"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SPACE = "\u00a0"  # no line break between a number and its unit


@dataclass(frozen=True)
class Unit:
    """A unit and how many of the basic one it is."""

    name: str
    size: float

    def number(self, value: float | None) -> str:
        """Two or three digits."""
        return UNKNOWN if value is None else digits(value / self.size)

    def text(self, value: float | None) -> str:
        """The same, and the unit."""
        return UNKNOWN if value is None else f"{self.number(value)}{_SPACE}{self.name}"


def unit_of_time(seconds: Iterable[float]) -> Unit:
    """In which the longest of these times has few digits."""
    longest = max(seconds, default=0.0)
    return Unit("s", 1.0) if longest < 600.0 else Unit("min", 60.0) if longest < 4 * 3600.0 else Unit("h", 3600.0)


def unit_of_bytes(counts: Iterable[float]) -> Unit:
    """In which the largest of these counts has few digits."""
    largest = max(counts, default=0.0)
    return Unit("GB", 1e9) if largest >= 2e9 else Unit("MB", 1e6) if largest >= 2e6 else Unit("kB", 1e3)


def digits(value: float | None) -> str:
    """Two or three digits, none after the point from 100 on, thousands set apart."""
    if value is None:
        return UNKNOWN
    size = abs(value)
    if 0.0 < size < 0.001:
        factor, _, power = f"{value:.1e}".partition("e")
        return f"{factor}·10{str(int(power)).translate(_RAISED)}"
    if 0.0 < size < 0.1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def percent(value: float | None, places: int = 1) -> str:
    """Of a share in [0, 1]; with no places, as few as it needs."""
    return UNKNOWN if value is None else f"{100 * value:.{places}f}{_SPACE}%" if places else f"{100 * value:.4g}{_SPACE}%"


def points(difference: float) -> str:
    """Of a difference of shares, with its sign."""
    rounded = round(100 * difference, 2)
    return "0" if rounded == 0.0 else f"{rounded:+.2f}".replace("-", "−")


def times(ratio: float | None) -> str:
    """A ratio."""
    return UNKNOWN if ratio is None else f"{digits(ratio)}{_SPACE}×"


def count(number: int, noun: str) -> str:
    """``1 seed``, ``2 seeds``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def spread(values: Sequence[float], text: Callable[[float], str] = digits) -> str:
    """Smallest and largest; empty for a single one."""
    return f"{text(min(values))}–{text(max(values))}" if len(values) > 1 else ""


def listed(words: Iterable[str]) -> str:
    """``a, b and c``."""
    *first, last = list(words) or ["none"]
    return f"{', '.join(first)} and {last}" if first else last
