"""How fast a strategy makes the loss fall, and up to which learning rate it converges: on a quadratic, by strategy.

F(x) = ½ Σ h x² with the spectrum h, learning rate γ of each worker, momentum β, g = γh. What the strategies come to:

| strategy | unit of time | recursion | converges iff |
|---|---|---|---|
| ddp, qsgd, averaging | a round | as dpsgd with w = 1 | g < 2 (1 + β) |
| dpsgd, overlapped | a round | for 1 and every other eigenvalue w of W: z² − (w + β − g) z + βw = 0 | g < (1 + w_min)(1 + β) |
| with outer steps | a step | the round map of second_moments.outer_steps | its spectral radius is below 1 |
| both, with Nesterov's momentum | | z² − (w + β − (1 + β) g) z + β (w − g) = 0 | the same over 1 + 2β |
| apsgd | an update | s + ηh E[e^{−sτ}] = 0 with η = γc/(1 − β), c the server's scale | Re s < 0 |
| adpsgd | a step of every worker | second moments of memoryless workers and exchanges (second_moments.adpsgd) | they shrink |

There τ = staleness + ½, and with momentum as many own steps more as :class:`~lightning_gossip.analysis.Repeated` says.

Synchronous strategies have no delay. Local steps between two averagings leave the mean's recursion as it is, since gradients of
a quadratic are linear. Under ``apsgd`` with memoryless step times the root mean square decides, which decays more slowly than
the mean (second_moments.memoryless); of narrower ones with a coefficient of variation cv it is the part cv⁴, and the limit lies
between the two by as much of its logarithm. Under ``adpsgd`` narrower step times get the part 1 − cv² of the rate of
synchronous ones where that is lower: with momentum.

With the noise of gradients known (:class:`~lightning_gossip.analysis.planning.noisy_loss.Noise`) the mean model has a floor or
falls more slowly, and models that are averaged seldom train apart: see
:mod:`~lightning_gossip.analysis.planning.noisy_loss`.

Idealised: one quadratic and the same on all workers, no error of quantization, workers of equal speed as far as dynamics go
(their times are each worker's own), SGD with or without momentum, a constant learning rate.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from lightning_gossip.algorithm.laws import FloatArray
from lightning_gossip.algorithm.topology.topology import Topology
from lightning_gossip.analysis.delays.combined import Repeated, Sum
from lightning_gossip.analysis.delays.delays import Atoms, constant
from lightning_gossip.analysis.mean.discrete import own_limit
from lightning_gossip.analysis.mean.hitting import LossCurve
from lightning_gossip.analysis.mean.modes import Mode, rightmost_modes
from lightning_gossip.analysis.mean.stability import limit_of, of_staleness, stability_limit
from lightning_gossip.analysis.planning.noisy_loss import Noise, NoisyLoss
from lightning_gossip.analysis.problem import Problem
from lightning_gossip.analysis.second_moments.adpsgd import gossip_rms_decay
from lightning_gossip.analysis.second_moments.gradient_noise import Spread
from lightning_gossip.analysis.second_moments.mean_square import random_staleness_limit
from lightning_gossip.analysis.second_moments.memoryless import server_rms_decay
from lightning_gossip.analysis.second_moments.outer_steps import Rounds

_COARSE = 1.5  # the same for second moments under noise, which are smooth in their logarithm
_GRID = 1.25  # ratio of the dampings at which a slow function is asked; between them its logarithm is interpolated
WORTH = 1.05  # what is predicted to be faster by less is no reason to change anything
_TENTH = 0.1
_WORTH_NOISE = 1.15  # the same of a lower learning rate against noise; chosen on benchmarks.planning
_SMALL = 0.02  # dampings times delay below it: the decay is the damping to some percent
_ATOMS = 24  # of a law of staleness: enough for its transform where roots are
_LARGEST = 3.0  # amplitude: two roots that are close have larger ones, which nearly cancel
# of the coefficient of variation of step times: how much they are like memoryless ones. Chosen by where simulated servers with
# momentum begin to grow: between the two limits for log-normal times, as far as that
_POWER = 4


@dataclass(frozen=True)
class Falling:
    """How an error falls in the long run: amplitude · e^{−decay·t}.

    Args:
        decay: in 1/unit of time; negative if it grows.
        amplitude: at least 1.
    """

    decay: float
    amplitude: float = 1.0


@dataclass(frozen=True)
class Dynamics:
    """What one strategy does to the loss with one number of workers: its rate, its limit and how fast errors fall.

    Args:
        problem: the quadratic.
        rate: units of time in a second: rounds, updates, or steps of every worker.
        limit: learning rates below it converge.
        falling: of a direction with g = γh, per unit of time.
        noise: of one worker's gradients; None for none.
        spread: second moments that noise keeps up, of directions with g = γh; None without noise.
    """

    problem: Problem
    rate: float
    limit: float
    falling: Callable[[float], Falling]
    noise: Noise | None = None
    spread: Callable[[FloatArray], Spread] | None = None

    def with_noise(self, noise: Noise, spread: Callable[[FloatArray], Spread]) -> Dynamics:
        """The dynamics with noisy gradients.

        Args:
            noise: of one worker's gradients.
            spread: second moments that noise keeps up, of directions with g = γh, shape (k,).
        """
        return replace(self, noise=noise, spread=_on_grid(spread))

    def varied(self, *, curvature: float = 1.0, noise: float = 1.0) -> Dynamics:
        """The dynamics with all eigenvalues, and the noise's variance, times a factor each."""
        problem = self.problem
        start = problem.distances / math.sqrt(curvature)  # with the same loss
        varied = Problem(eigenvalues=[curvature * h for h in problem.eigenvalues], start=start.tolist(), noise=problem.noise)
        louder = None if self.noise is None else replace(self.noise, variance=noise * self.noise.variance)
        return replace(self, problem=varied, limit=self.limit / curvature, noise=louder)

    def margin(self, lr: float) -> float:
        """Largest stable learning rate over this one; below 1 it diverges."""
        return self.limit / lr

    def decay(self, lr: float) -> float:
        """Decay rate of the slowest direction, in 1/s; negative if some direction diverges."""
        return min(self.falling(lr * h).decay for h in self.problem.eigenvalues) * self.rate

    def time_s(self, lr: float, share: float) -> float:
        """Seconds until the loss stays below a share of what it was at the beginning; infinite if it never does."""
        if lr >= self.limit:
            return math.inf
        if self.noise is not None:
            return self.noisy(lr, _half_way(share)).hitting_time(share) / self.rate
        each = [self.falling(lr * h) for h in self.problem.eigenvalues]
        own = [(Mode(complex(-one.decay * self.rate), complex(one.amplitude)),) for one in each]
        slowest = min(one.decay for one in each) * self.rate
        losses = self.problem.losses
        return LossCurve(losses, own, np.zeros(len(own)), slowest).hitting_time(share * float(losses.sum()))

    def noisy(self, lr: float, loss: float = 1.0) -> NoisyLoss:
        """The loss with noise, against time in units of 1/rate.

        Args:
            lr: learning rate.
            loss: with whose curvature models are apart, in units of that at the beginning.
        """
        assert self.noise is not None
        assert self.spread is not None
        h = np.asarray(self.problem.eigenvalues)
        mean, curved = self.spread(lr * h).mean, self.noise.falling(loss) * h
        each = [self.falling(float(g)) for g in lr * h]
        amplitudes, decays = (np.array([getattr(one, name) for one in each]) for name in ("amplitude", "decay"))
        losses, shares = self.problem.losses, 0.5 * lr**2 * np.asarray(self.noise.shares)
        apart = float((shares * curved) @ self.spread(lr * curved).apart)
        return NoisyLoss(losses * amplitudes**2 / losses.sum(), decays, shares * h * mean, apart, self.noise)

    def floor(self, lr: float, share: float = 1.0) -> float:
        """The share of the loss at the beginning that noise leaves for ever; infinite if it diverges.

        Args:
            lr, share: as for :meth:`share_apart`.
        """
        return 0.0 if self.noise is None else self.noisy(lr, _half_way(share)).floor

    def share_apart(self, lr: float, share: float) -> float:
        """The share of a worker's own loss that comes from its distance to the mean model, when that is at the target.

        Args:
            lr: learning rate.
            share: of the loss at the beginning that is the target.
        """
        return 0.0 if self.noise is None else self.noisy(lr, _at_first(share)).share_apart(share)

    def consensus_distance(self, lr: float, share: float) -> float | None:
        """(1/n) Σ_i ‖x_i − x̄‖² when the mean model is at the target; infinite if models part for ever, None without noise.

        Args:
            lr, share: as for :meth:`share_apart`.
        """
        if self.noise is None or self.spread is None:
            return None
        loss = self.noisy(lr, _at_first(share))
        if not loss.holds_together:
            return math.inf
        curved = self.noise.falling(_at_first(share)) * np.asarray(self.problem.eigenvalues)
        apart = lr**2 * np.asarray(self.noise.shares) @ self.spread(lr * curved).apart
        return float(apart * loss.variance_at(share) * self.noise.loss)

    def fastest_lr(self, share: float, *, highest: float, near: float, most_apart: float = 1.0) -> float:
        """The learning rate that reaches a share of the loss soonest.

        Args:
            share: of the loss at the beginning.
            highest: that is tried.
            near: of those that are about as fast the one next to this is taken. With noise that is within 15 %: networks
                settle where their noise is bearable, so near to what is not bearable times are predicted too long.
            most_apart: the largest :meth:`share_apart`; the lowest rate that is tried if none has less.
        """
        tried = [float(lr) for lr in highest * np.geomspace(1e-2, 1.0, 17)]
        if self.spread is not None and self.noise is not None:
            factors = (1.0, *(self.noise.falling(loss) for loss in (_half_way(share), _at_first(share))))
            self.spread(np.multiply.outer(np.outer(factors, tried), self.problem.eigenvalues).ravel())  # all at once is quicker
        rates = [lr for lr in tried if self.share_apart(lr, share) <= most_apart] or tried[:1]
        times = {lr: self.time_s(lr, share) for lr in rates}
        worth = WORTH if self.noise is None else _WORTH_NOISE
        good = [lr for lr in rates if times[lr] <= worth * min(times.values())]
        return min(good, key=lambda lr: abs(math.log(lr / near)))


def synchronous(
    problem: Problem, rounds_per_s: float, *, momentum: float = 0.0, nesterov: bool = False, smallest_weight: float = 1.0
) -> Dynamics:
    """Dynamics of synchronous strategies, which have no delay: DDP, QSGD, D-PSGD, averaging.

    Args:
        problem: the quadratic.
        rounds_per_s: steps of every worker in a second.
        momentum: β.
        nesterov: whether it is Nesterov's.
        smallest_weight: w_min, the smallest eigenvalue of the mixing matrix of ``dpsgd``; 1 where all models are one.
    """

    def falling(g: float) -> Falling:
        return min((_round(g, momentum, nesterov, w) for w in {1.0, smallest_weight}), key=lambda one: one.decay)

    limit = own_limit(momentum, nesterov=nesterov, smallest_weight=smallest_weight) / max(problem.eigenvalues)
    return Dynamics(problem, rounds_per_s, limit, falling)


def with_outer_steps(
    problem: Problem, steps_per_s: float, rounds: Rounds, *, momentum: float = 0.0, nesterov: bool = False
) -> Dynamics:
    """Dynamics of local steps with an outer step at the end of each round; under gossip as with an exact mean.

    Args:
        problem: the quadratic.
        steps_per_s: of every worker.
        rounds: H and the outer step.
        momentum: β of the inner steps.
        nesterov: whether it is Nesterov's.
    """

    def decay(g: float) -> float:
        return rounds.decay(g, momentum=momentum, nesterov=nesterov)

    limit = rounds.limit(own_limit(momentum, nesterov=nesterov), momentum=momentum, nesterov=nesterov)
    return Dynamics(problem, steps_per_s, limit / max(problem.eigenvalues), lambda g: Falling(decay(g)))


def _round(g: float, momentum: float, nesterov: bool, weight: float = 1.0) -> Falling:
    half = 0.5 * (weight + momentum - g * (1.0 + momentum if nesterov else 1.0))
    root = cmath.sqrt(half**2 - momentum * (weight - g if nesterov else weight))
    factor = max(abs(half + root), abs(half - root), 1e-12)
    return Falling(-math.log(factor))


def server(
    problem: Problem,
    updates_per_s: float,
    staleness: Atoms,
    *,
    workers: int,
    scale: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    variation: float = 0.0,
    bounded: bool = False,
) -> Dynamics:
    """Dynamics of a parameter server (A-PSGD).

    Args:
        problem: the quadratic.
        updates_per_s: applied updates in a second.
        staleness: law of the applied updates' staleness.
        workers: N in flight.
        scale: c, of an update at the server.
        momentum: β of the workers' optimizers.
        nesterov: whether it is Nesterov's.
        variation: standard deviation over mean of the step times.
        bounded: whether a staleness bound or a slow link changes the order of the updates.
    """
    delay = of_staleness(few(staleness))
    if momentum:
        delay = Sum(delay, Repeated(Sum(constant(1.0), few(staleness)), momentum, nesterov))
    per_g = scale / (1.0 - momentum)
    memoryless = min(1.0, variation**_POWER)
    if bounded:
        workers = max(1, round(staleness.mean) + 1)  # with these the mean staleness is what the bound leaves

    def rms_decay(g: float) -> float:
        return server_rms_decay(g, workers, scale=scale, momentum=momentum, nesterov=nesterov)

    def exact(g: float) -> Falling:
        if memoryless == 1.0:
            return Falling(rms_decay(g))
        found = rightmost_modes(g * per_g, delay)[0]
        amplitude = 2.0 * abs(found.residue) if found.root.imag else 1.0
        decay = memoryless * rms_decay(g) - (1.0 - memoryless) * found.root.real
        return Falling(decay, memoryless + (1.0 - memoryless) * min(max(amplitude, 1.0), _LARGEST))

    def first_order(g: float) -> Falling | None:
        small = g * per_g * delay.mean < _SMALL
        return Falling(g * per_g * (1.0 + g * per_g * delay.mean)) if small else None

    limit = limit_of(rms_decay, 2.0 / scale)
    if memoryless < 1.0:
        narrow = min(2.0 / scale, stability_limit(delay) / per_g)
        narrow = min(narrow, random_staleness_limit(staleness, momentum=momentum, nesterov=nesterov) / scale)
        limit = narrow ** (1.0 - memoryless) * limit**memoryless
    return Dynamics(problem, updates_per_s, limit / max(problem.eigenvalues), _tabulated(exact, first_order))


def gossip(
    problem: Problem,
    steps_per_s: float,
    topology: Topology,
    *,
    exchanges_per_step: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    variation: float = 1.0,
) -> Dynamics:
    """Dynamics of asynchronous gossip (AD-PSGD).

    Args:
        problem: the quadratic.
        steps_per_s: steps of every worker in a second.
        topology: who averages with whom.
        exchanges_per_step: averagings that a worker takes part in per own step.
        momentum: β.
        nesterov: whether it is Nesterov's.
        variation: standard deviation over mean of the step times.
    """
    if topology.n == 1:
        return synchronous(problem, steps_per_s, momentum=momentum, nesterov=nesterov)

    random = min(1.0, variation**2)

    def decay(g: float) -> float:
        memoryless = gossip_rms_decay(g, topology, exchanges_per_step=exchanges_per_step, momentum=momentum, nesterov=nesterov)
        return min(memoryless, (1.0 - random) * _round(g, momentum, nesterov).decay + random * memoryless)

    def first_order(g: float) -> Falling | None:
        return _round(g, momentum, nesterov) if g < min(2.0 * _SMALL, 0.5 * (1.0 - math.sqrt(momentum)) ** 2) else None

    limit = limit_of(decay, own_limit(momentum, nesterov=nesterov))
    return Dynamics(
        problem, steps_per_s, limit / max(problem.eigenvalues), _tabulated(lambda g: Falling(decay(g)), first_order)
    )


def _at_first(share: float) -> float:
    """The loss with whose curvature models are apart: that of the target, or of the first tenth of a longer way there, on which
    they have to hold together as well."""
    return max(share, _TENTH)


def _half_way(share: float) -> float:
    """The loss after half of the time until then: what is left in flat directions falls about as 1/time."""
    share = _at_first(share)
    return 2.0 * share / (1.0 + share)


def _on_grid(spread: Callable[[FloatArray], Spread]) -> Callable[[FloatArray], Spread]:
    """The function at the places of a grid, all that are asked for at once, and in between by interpolation."""
    known: dict[int, tuple[float, float]] = {}

    def at(g: FloatArray) -> Spread:
        place = np.log(g) / math.log(_COARSE)
        low = np.floor(place).astype(int)
        wanted = sorted({int(number) for number in (*low, *(low + 1))} - known.keys())
        if wanted:
            found = spread(_COARSE ** np.array(wanted, dtype=np.float64))
            known.update({number: (float(found.mean[i]), float(found.apart[i])) for i, number in enumerate(wanted)})
        below, above = (np.array([known[int(number)] for number in low + more]) for more in (0, 1))
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 where all are one model, infinite beyond the limit
            logs = np.log(below) + (place - low)[:, None] * (np.log(above) - np.log(below))
        values = np.where(np.isfinite(logs), np.exp(np.where(np.isfinite(logs), logs, 0.0)), np.maximum(below, above))
        return Spread(values[:, 0], values[:, 1])

    return at


def few(staleness: Atoms) -> Atoms:
    """About the same law of the staleness with few atoms: neighbours become one at their mean."""
    if len(staleness.times) <= _ATOMS:
        return staleness
    number = np.minimum((np.cumsum(staleness.weights) - 0.5 * staleness.weights) * _ATOMS, _ATOMS - 1).astype(int)
    weights, times = np.zeros(_ATOMS), np.zeros(_ATOMS)
    np.add.at(weights, number, staleness.weights)
    np.add.at(times, number, staleness.weights * staleness.times)
    some = weights > 0.0
    return Atoms(times[some] / weights[some], weights[some])


def _tabulated(exact: Callable[[float], Falling], first_order: Callable[[float], Falling | None]) -> Callable[[float], Falling]:
    """The function at the places of a grid, and in between by interpolation."""

    @lru_cache(maxsize=1024)
    def at(number: int) -> Falling:
        return exact(_GRID**number)

    @lru_cache(maxsize=1024)
    def falling(g: float) -> Falling:
        small = first_order(g)
        if small is not None:
            return small
        place = math.log(g) / math.log(_GRID)
        low = math.floor(place)
        share, below, above = place - low, at(low), at(low + 1)
        return Falling(
            below.decay + share * (above.decay - below.decay), below.amplitude + share * (above.amplitude - below.amplitude)
        )

    return falling
