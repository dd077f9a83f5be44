"""The rightmost root of s + a·L(s) = 0, for a > 0 and the transform L of any law of delays.

Three facts make the search safe. Let σ be real, right of where L ends.

1. |L(s)| ≤ L(σ) for Re s ≥ σ, since |e^{−sτ}| ≤ e^{−στ}. So every root with Re s ≥ σ has |s| ≤ a·L(σ): the search is over a
   bounded part of the plane.
2. g(σ) = σ + a·L(σ) is convex with g(0) = a > 0, so it has no real root, or two (or a double one), all left of 0. If it has
   some, the right one is the rightmost of *all* roots: between the two real ones −σ > a·L(σ) ≥ |a·L(s)| on the whole line
   Re s = σ, so by Rouché's theorem as many roots lie right of it as s itself has: one.
3. Otherwise the number of roots right of Re s = σ is the winding number of s + a·L(s) around that part of the plane. On the arc
   |s| = R > a·L(σ) it is s(1 + aL/s) with |aL/s| < 1, so its argument is known exactly, and only the line remains to be
   followed. Bisection over σ encloses the rightmost pair, Newton's method ends it, and the count is taken once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize

from lightning_gossip.analysis.delays.delays import ComplexArray, Delay

_TURN = 0.5  # radians: the argument is followed in steps no larger
_MOST = 20_000  # places at first
_REFINEMENTS = 40  # halvings of a step at most
_EPS = 4.0 * float(np.finfo(np.float64).eps)  # the smallest that brentq takes


def real_roots(a: float, delay: Delay) -> tuple[float, ...]:
    """The real roots, the rightmost first: none, or two (one, where the law's transform ends before the second).

    Args:
        a: damping coefficient, above 0, in 1/time.
        delay: its law.
    """

    def value(x: float) -> float:
        return x + a * float(delay.transform(x).real)

    def slope(x: float) -> float:
        return 1.0 + a * float(delay.slope(x).real)

    if delay.mean == 0.0:
        return (-a,)
    if slope(0.0) <= 0.0:
        return ()  # g falls at 0, so it is above a > 0 on the left
    low = _left_of(slope, delay)
    lowest = optimize.brentq(slope, low, 0.0, xtol=1e-15 * abs(low), rtol=_EPS) if slope(low) < 0.0 else low
    if value(lowest) > 0.0:
        return ()
    right = optimize.brentq(value, lowest, 0.0, xtol=1e-300, rtol=_EPS) if value(lowest) < 0.0 else lowest
    left = lowest
    while value(left) <= 0.0:
        further = _further(left, delay)
        if further == left:
            return (right,)
        left = further
    return (right, optimize.brentq(value, left, lowest, xtol=1e-300, rtol=_EPS) if left < lowest else lowest)


def rightmost_root(a: float, delay: Delay) -> complex | None:
    """The root with the largest real part, imaginary part at least 0.

    Args:
        a: damping coefficient, above 0, in 1/time.
        delay: its law.

    Returns:
        None if there is no root right of where the transform ends.
    """
    real = real_roots(a, delay)
    if real:
        return complex(real[0])
    low = _left_bound(a, delay)
    if low is None:
        return None
    high = a  # |s| ≤ a for Re s ≥ 0
    root = _polished(_enclosed(low, high, 1e-3, a, delay), a, delay)
    # another one may lie a little further to the right
    while count_right_of(low := root.real + 1e-9 * (a + abs(root)), a, delay) > 0:
        further = _polished(_enclosed(low, high, 1e-7, a, delay), a, delay)
        if further.real <= root.real:
            break
        root = further
    return root


def _enclosed(low: float, high: float, width: float, a: float, delay: Delay) -> float:
    """A line that has roots on its right, the rightmost one within a relative width: bisection."""
    while high - low > width * (a + abs(low)):
        middle = 0.5 * (low + high)
        if count_right_of(middle, a, delay) > 0:
            low = middle
        else:
            high = middle
    return low


def count_right_of(sigma: float, a: float, delay: Delay) -> int:
    """How many roots have a real part above sigma, with their multiplicity; no real root may be among them.

    Args:
        sigma: in 1/time; on no root.
        a: damping coefficient.
        delay: its law.
    """
    radius = 1.01 * max(a * float(delay.transform(sigma).real), abs(sigma)) + 1e-12 * a
    s, values = _along(radius, sigma, a, delay)
    turned = float(np.unwrap(np.angle(values))[-1] - np.angle(values[0]))
    arc = float(np.angle(s[-1]) + np.angle(values[-1] / s[-1]))
    return round((arc - turned) / math.pi)


def _along(height: float, sigma: float, a: float, delay: Delay) -> tuple[ComplexArray, ComplexArray]:
    """Places on the line, from the real axis up, between which the function's argument turns by little, and its values."""
    count = int(height * max(delay.reach, 1.0 / (a + abs(sigma))) / 0.4) + 16
    s = np.linspace(complex(sigma), complex(sigma, height), min(count, _MOST), dtype=np.complex128)
    values = s + a * delay.transform(s)
    for _ in range(_REFINEMENTS):
        wide = np.flatnonzero(np.abs(np.angle(values[1:] * values[:-1].conj())) > _TURN)
        if not wide.size:
            break
        between: ComplexArray = 0.5 * (s[wide] + s[wide + 1])
        s = np.insert(s, wide + 1, between)
        values = np.insert(values, wide + 1, between + a * delay.transform(between))
    return s, values


def _left_bound(a: float, delay: Delay) -> float | None:
    """A line that has roots on its right; None if there is none."""
    step = 1.0 / max(delay.mean, 1e-300)
    low = -step / 64.0
    for _ in range(200):
        if low <= delay.left:
            low = delay.left + 1e-9 * step
            return low if count_right_of(low, a, delay) > 0 else None
        if count_right_of(low, a, delay) > 0:
            return low
        low *= 1.5
    return None


def _polished(sigma: float, a: float, delay: Delay) -> complex:
    """The rightmost root that Newton's method reaches from the deepest dips of |s + a L(s)| on a line close to it."""
    radius = a * float(delay.transform(sigma).real)
    s, values = _along(1.01 * radius, sigma, a, delay)
    size = np.abs(values)
    dips = np.flatnonzero((size[1:-1] <= size[:-2]) & (size[1:-1] <= size[2:])) + 1
    near_axis = sigma + 1j * radius * np.array([1e-6, 1e-3, 0.1])  # on it Newton's method would stay there
    starts = [*near_axis, *s[dips[np.argsort(size[dips])][:8]]]
    found = [root for start in starts if (root := _newton(complex(start), a, delay)) is not None]
    if not found:
        raise ArithmeticError(
            f"Newton's method found no root of s + {a:g} L(s) near Re s = {sigma:g}; {delay}. Please report it."
        )
    return max(found, key=lambda root: root.real)


@np.errstate(over="ignore", invalid="ignore")  # far to the left, where no root is sought
def _newton(start: complex, a: float, delay: Delay) -> complex | None:
    s = complex(start)
    for _ in range(60):
        if s.real <= delay.left:
            return None
        slope = complex(1.0 + a * delay.slope(s))
        if slope == 0.0:
            return None
        step = complex(s + a * delay.transform(s)) / slope
        s -= step
        if abs(step) <= 4e-16 * abs(s):
            break
    error = abs(s + a * complex(delay.transform(s))) if s.real > delay.left else math.inf
    return complex(s.real, abs(s.imag)) if error <= 1e-10 * (abs(s) + a) else None


def _left_of(slope: Callable[[float], float], delay: Delay) -> float:
    """A place where g falls, or the last one before the transform ends."""
    x = _further(-0.5 / delay.mean, delay)
    while slope(x) > 0.0 and (further := _further(x, delay)) < x:
        x = further
    return x


def _further(x: float, delay: Delay) -> float:
    """Twice as far to the left, or as far as the transform goes."""
    return max(2.0 * x, delay.left * (1.0 - 1e-12))
