"""The mean error of delayed gradient descent from the beginning: its rightmost modes, or the recursion itself.

Of the sum over all roots, x(t)/x(0) = Σ_s C_s e^{st} with C_s = −a / (s (1 + a·L'(s))), the rightmost root, or pair, is left
after a few delays; where two real roots are close, both are taken. Of a law with a long tail many roots lie close to each other
and none has much of the error: such a staleness is followed step by step. (Delays that are no staleness are not: of a wide
log-normal law in seconds the early part is too fast.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_gossip.algorithm.laws import FloatArray, Law
from lightning_gossip.analysis.delays.conversion import delay_of
from lightning_gossip.analysis.delays.delays import Atoms, Delay
from lightning_gossip.analysis.mean.roots import real_roots
from lightning_gossip.analysis.mean.stability import dominant_root, staleness_of

_ENOUGH = 0.9  # of the error at the beginning, in the rightmost modes
_FOLLOWED = 20_000  # steps at most
_CLOSE = 1e-4  # two real roots, relatively: at one double root there is no residue of this kind


@dataclass(frozen=True)
class Mode:
    """C·e^{st}, and with s not real its conjugate.

    Args:
        root: s, in 1/time.
        residue: C.
    """

    root: complex
    residue: complex

    def at(self, times: FloatArray) -> FloatArray:
        """The mode's share of x(t)/x(0), shape of ``times``."""
        factor = 1.0 if self.root.imag == 0.0 else 2.0
        values: FloatArray = factor * np.real(self.residue * np.exp(self.root * times))
        return values

    def envelope(self, times: FloatArray) -> FloatArray:
        """The mode's largest size, without the oscillation."""
        factor = 1.0 if self.root.imag == 0.0 else 2.0
        return factor * abs(self.residue) * np.exp(self.root.real * times)


@dataclass(frozen=True, eq=False)
class Followed:
    """The mean error itself, x_{k+1} = x_k − a Σ_j p_j x_{k−j}, where it begins far above its rightmost modes.

    Args:
        root: the rightmost one, in 1/time; the error falls as it says after the steps that were followed.
        values: x_k/x_0, shape (steps + 1,).
        rate: steps in a unit of time.
    """

    root: complex
    values: FloatArray
    rate: float = 1.0

    def at(self, times: FloatArray) -> FloatArray:
        """The mode's share of the mean error at some times, shape of ``times``."""
        return self._of(self.values, times)

    def envelope(self, times: FloatArray) -> FloatArray:
        """The largest size from then on."""
        return self._of(np.maximum.accumulate(np.abs(self.values)[::-1])[::-1], times)

    def _of(self, values: FloatArray, times: FloatArray) -> FloatArray:
        steps = np.asarray(times) * self.rate
        beyond = np.maximum(steps - (len(values) - 1), 0.0) / self.rate
        found: FloatArray = np.interp(steps, np.arange(len(values)), values) * np.exp(self.root.real * beyond)
        return found


def follow(step: float, staleness: Atoms, root: complex) -> Followed:
    """The mean error of delayed gradient descent until a millionth is left of it.

    Args:
        step: g = ηh.
        staleness: its law, on whole steps.
        root: the rightmost one, in 1/steps.
    """
    delays = staleness.times.astype(int)
    before = int(delays[-1])
    x = np.ones(before + _FOLLOWED + 1)
    last = before + _FOLLOWED
    for k in range(before, before + _FOLLOWED):
        x[k + 1] = x[k] - step * float(staleness.weights @ x[k - delays])
        if k % 256 == 0 and not 1e-6 < np.abs(x[max(before, k - before - 255) : k + 2]).max() < 1e6:
            last = k + 1
            break
    return Followed(root, x[before : last + 1])


def rightmost_modes(a: float, delay: Delay | Law) -> tuple[Mode, ...]:
    """What is left of the mean error in the end: the rightmost pair of roots, or the real ones.

    Args:
        a: damping coefficient, above 0, in 1/time.
        delay: law of τ.
    """
    delay = delay_of(delay)
    roots: Sequence[complex] = [complex(root) for root in real_roots(a, delay)] or [dominant_root(a, delay)]
    if len(roots) == 2 and abs(roots[0] - roots[1]) < _CLOSE * abs(roots[0]):
        a *= 1.0 - 1e-9  # two roots nearby, whose sum is the double root's
        roots = [complex(root) for root in real_roots(a, delay)]
    if any(root.real <= delay.left for root in roots):
        return (Mode(roots[0], 1.0 + 0.0j),)  # the law's own tail
    return tuple(Mode(root, complex(-a / (root * (1.0 + a * delay.slope(root))))) for root in roots)


def modes(a: float, delay: Delay) -> tuple[Mode | Followed, ...]:
    """The mean error from the beginning: :func:`rightmost_modes` where they have most of it, else followed step by step."""
    found, law = rightmost_modes(a, delay), staleness_of(delay)
    beginning = float(np.sum([mode.envelope(np.zeros(1)) for mode in found]))
    return found if law is None or beginning > _ENOUGH else (follow(a, law, found[0].root),)
