"""When will the loss be reached? Hitting times of delayed SGD on a quadratic, from characteristic roots, residues and noise.

F(x) = ½ Σ_i h_i x_i². From x_i(t) = x_i(0) for t ≤ 0, the mean along an eigenvector with damping a is a sum over the roots s of
s + a·L(s) = 0,

    x(t)/x(0) = Σ_s C_s e^{st},      C_s = −a / (s (1 + a·L'(s)))                                            [derived]

of which modes.py takes the rightmost ones. C_s matters: ln(1/ε)/decay alone is off by more than a third where the decay is
fastest. Gradient noise of variance Σ per coordinate adds a stationary variance,

    Var = (η²λΣ/2π) ∫ dω / |iω + a·L(iω)|²  =  ηΣ (1 + sin aτ) / (2h cos aτ)   for a constant delay            [derived]

below whose loss no target is ever reached. The variance grows to it as (1 − e^{−2·decay·t}).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import integrate, optimize

from lightning_gossip.algorithm.checks import check_positive
from lightning_gossip.algorithm.laws import FloatArray, Law
from lightning_gossip.analysis.delays.conversion import delay_of
from lightning_gossip.analysis.delays.delays import Atoms, Delay
from lightning_gossip.analysis.mean.modes import Followed, Mode, modes
from lightning_gossip.analysis.mean.stability import damping, dominant_root
from lightning_gossip.analysis.problem import Problem
from lightning_gossip.errors import ConfigurationError

_POINTS = 2048  # at which an oscillating loss is looked at


def noise_floor(a: float, delay: Delay | Law) -> float:
    """Stationary variance of x in units of η²λΣ: (1/2π) ∫ dω/|iω + aL(iω)|².

    Args:
        a: damping coefficient, above 0, in 1/time; must be stable.
        delay: law of τ.

    Returns:
        In time: times η²λΣ (step size squared, rate, variance of the gradient) it is a variance. Without delay 1/(2a).

    Raises:
        ConfigurationError: if the mean diverges.
    """
    check_positive("damping", a)
    delay = delay_of(delay)
    root = dominant_root(a, delay)
    decay, resonance = -root.real, abs(root.imag)
    if decay <= 0.0:
        raise ConfigurationError(
            f"damping={a:g} diverges with this delay, so there is no stationary variance. Lower the learning rate."
        )
    if isinstance(delay, Atoms) and delay.constant is not None:
        angle = a * delay.constant
        return (1.0 + math.sin(angle)) / (2.0 * a * math.cos(angle))

    def density(w: float) -> float:
        return 1.0 / abs(1j * w + a * complex(delay.transform(1j * w))) ** 2

    top = 50.0 * max(a, resonance, 1.0 / delay.reach if delay.reach else a)
    peak = [max(0.0, resonance - 3.0 * decay), resonance, resonance + 3.0 * decay]
    decades = np.geomspace(a, top, 2 + int(math.log10(top / a)))  # a may be a millionth of 1/delay
    cuts = sorted({0.0, *peak, *decades.tolist()})
    inner = sum(float(integrate.quad(density, low, high, limit=400)[0]) for low, high in itertools.pairwise(cuts))
    tail = 1.0 / top  # there |iω + aL| is ω to a part in 50
    return (inner + tail) / math.pi


@dataclass(frozen=True)
class LossCurve:
    """The expected loss of delayed SGD on a quadratic, from its modes.

    Args:
        parts: ½ h_i x_i(0)² of each direction.
        modes: of each direction.
        floors: stationary part of the loss of each direction.
        slowest: the smallest decay of all directions, in 1/time.
    """

    parts: FloatArray
    modes: Sequence[tuple[Mode | Followed, ...]]
    floors: FloatArray
    slowest: float

    @property
    def floor(self) -> float:
        """The loss that is left in the end."""
        return float(self.floors.sum())

    def at(self, times: FloatArray | float) -> FloatArray:
        """The expected loss.

        Args:
            times: at least 0, shape (m,).
        """
        times = np.atleast_1d(np.asarray(times, dtype=np.float64))
        total = np.zeros_like(times)
        for part, own, floor in zip(self.parts, self.modes, self.floors, strict=True):
            mean = sum(mode.at(times) for mode in own)
            decay = -own[0].root.real
            # at first the modes that are left out cancel what these have too much
            total += part * np.minimum(mean**2, 1.0) + floor * -np.expm1(-2.0 * decay * times)
        return total

    def envelope(self, times: FloatArray | float) -> FloatArray:
        """An upper bound over time: the values without the oscillation."""
        times = np.atleast_1d(np.asarray(times, dtype=np.float64))
        total = np.full_like(times, self.floor)
        for part, own in zip(self.parts, self.modes, strict=True):
            total += part * sum(mode.envelope(times) for mode in own) ** 2
        return total

    def hitting_time(self, target: float) -> float:
        """The last time that the loss is above a target, in the unit of the delay.

        Args:
            target: of the loss, above :attr:`floor`.

        Returns:
            Infinite if some direction diverges; 0 if the loss is below it from the beginning.

        Raises:
            ConfigurationError: for a target that the gradients' noise never lets it reach.
        """
        check_positive("target", target)
        if self.slowest <= 0.0:
            return math.inf
        if target <= self.floor:
            raise ConfigurationError(
                f"the target loss {target:g} is not above {self.floor:g}, which the gradients' noise leaves for ever at this"
                " step size. Take a higher target, a lower learning rate, or larger batches."
            )
        if float(self.envelope(0.0)[0]) <= target:
            return 0.0
        end = 1.0 / self.slowest
        while float(self.envelope(end)[0]) > target:
            end *= 2.0
        end = float(optimize.brentq(lambda t: float(self.envelope(t)[0]) - target, 0.0, end))
        times = np.linspace(0.0, end, _POINTS)
        above = np.flatnonzero(self.at(times) > target)
        if not above.size:
            return 0.0
        last = int(above[-1])
        if last == _POINTS - 1:
            return end
        return float(optimize.brentq(lambda t: float(self.at(t)[0]) - target, times[last], times[last + 1]))


def loss_curve(problem: Problem, *, step_size: float, rate: float, delay: Delay | Law) -> LossCurve:
    """The expected loss of a quadratic under delayed SGD.

    Args:
        problem: the quadratic.
        step_size: η of one applied update.
        rate: λ, applied updates in a unit of time.
        delay: law of τ in that unit.
    """
    delay = delay_of(delay)
    own, floors = [], []
    for h in problem.eigenvalues:
        a = damping(step_size, rate, h)
        own.append(modes(a, delay))
        stable = own[-1][0].root.real < 0.0
        variance = step_size**2 * rate * problem.noise**2 * noise_floor(a, delay) if stable and problem.noise else 0.0
        floors.append(0.5 * h * variance if stable else math.inf if problem.noise else 0.0)
    slowest = min(-modes_[0].root.real for modes_ in own)
    return LossCurve(problem.losses, own, np.asarray(floors), slowest)


def hitting_time(a: float, delay: Delay | Law, reduction: float) -> float:
    """When the size of the mean error stays below a share of what it was.

    Args:
        a: damping coefficient, in 1/time.
        delay: law of τ.
        reduction: ε in (0, 1).

    Returns:
        In the unit of the delay; infinite if it diverges.
    """
    if not 1e-150 < reduction < 1.0:
        raise ConfigurationError(f"reduction={reduction!r} is not in (1e-150, 1).")
    own = modes(a, delay_of(delay))
    return LossCurve(np.ones(1), [own], np.zeros(1), -own[0].root.real).hitting_time(reduction**2)
