"""What to run on a parameter server: active workers, staleness bound, event threshold and learning rate against time to a loss.

A prediction has three steps. :func:`~lightning_gossip.analysis.arrivals.arrivals` gives the rate λ and the staleness, the
link's queue and what the bound drops or holds back included. Then the damping: an update of m local steps moves a direction of
eigenvalue h by

    g = c·(1 − (1 − γh)^m)        c the server's scale, γ the learning rate; γ·c·h for m = 1

of the model pulled, exactly. Roots, residues and noise (hitting.py) then say when the loss is reached. For memoryless step
times the root mean square decays more slowly than the mean, and its exact rate (mean_square.py) is taken.

An event trigger sends when ‖u‖ has reached a threshold δ, so m grows as the gradients shrink: with x the distance to the
minimum and σ² the variance of a gradient's coordinate, m is the smallest with Σ_i (1 − (1 − γh_i)^m)² x_i² + mγ²σ²d ≥ δ². The
loss is followed in stages of a tenth of it. Where even u = −x is shorter than δ nothing is sent any more: the loss is never
reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import optimize

from lightning_gossip.algorithm.checks import check_integer, check_positive
from lightning_gossip.algorithm.laws import Law
from lightning_gossip.algorithm.server import OnStale
from lightning_gossip.analysis.arrivals import Arrivals, arrivals
from lightning_gossip.analysis.conversion import delay_of
from lightning_gossip.analysis.hitting import FloatArray, LossCurve, Mode, Problem, loss_curve
from lightning_gossip.analysis.mean_square import largest_shape, mean_square_limit, rms_decay_rate
from lightning_gossip.analysis.play import Link
from lightning_gossip.analysis.settings import Curve, Prediction, Setting
from lightning_gossip.analysis.stability import decay_rate, stability_limit
from lightning_gossip.errors import ConfigurationError

_STAGE = 0.9  # an event trigger's loss is followed down by this factor at a time
_MOST_STEPS = 1_000  # between two pushes that are looked for


class Server:
    """A parameter server and its workers, as far as a schedule is concerned.

    Args:
        problem: quadratic model of the loss around its minimum.
        target: of the loss, above 0.
        compute: law of the workers' step times, seconds.
        scale: c, of an update at the server; 1/n for n workers is the strategy's default.
        link: of the server; None for one that takes no time.
        updates: that are played through for each staleness law.
        seed: of these.
    """

    def __init__(
        self,
        problem: Problem,
        target: float,
        compute: Law,
        *,
        scale: float = 1.0,
        link: Link | None = None,
        updates: int = 4_000,
        seed: int = 0,
    ) -> None:
        check_positive("target", target)
        check_positive("scale", scale)
        check_integer("updates", updates, example=4_000)
        self.problem, self.target, self.compute, self.scale, self.link = problem, target, compute, scale, link
        law = delay_of(compute)
        self._variation = math.sqrt(law.variance) / law.mean
        self._updates, self._seed = updates, seed
        self._played = lru_cache(maxsize=256)(self._play)

    def predict(self, setting: Setting) -> Prediction:
        """Time to the target loss, and what leads there."""
        steps = 1 if setting.event_threshold is None else self._steps_to_send(setting, self.problem.distances)
        if steps is None:
            return Prediction(setting, math.inf, 0.0, math.inf, 0.0, 0.0, 0.0, 1.0)
        seen = self.arrivals(setting, steps)
        decay = min(self._decays(setting, steps, seen))
        time_s = math.inf
        if decay > 0.0 and setting.event_threshold is None:
            time_s = self._curve(setting, seen).hitting_time(self.target)
        elif decay > 0.0:
            time_s = self._staged_time(setting)
        margin = self.largest_lr(setting) / setting.lr
        return Prediction(setting, time_s, decay, margin, seen.rate, seen.law.mean, seen.dropped, seen.computing)

    def arrivals(self, setting: Setting, steps: int = 1) -> Arrivals:
        """Rate and staleness of a setting's updates, of so many local steps each."""
        return self._played(setting.active_workers, setting.max_staleness, setting.on_stale, steps)

    def largest_lr(self, setting: Setting) -> float:
        """The learning rate below which every direction converges, in the mean and, where it is known, in the mean square."""
        largest = stability_limit(self.arrivals(setting).delay)
        if setting.max_staleness is None and self.link is None:
            largest = min(largest, mean_square_limit(setting.active_workers, shape=self._shape(setting)))
        return min(largest, 2.0) / (self.scale * max(self.problem.eigenvalues))

    # -- the knobs ---------------------------------------------------------------------------------------------------

    def over_workers(self, setting: Setting, workers: Iterable[int]) -> Curve:
        """Time against the number of active workers: U-shaped, and in the end it diverges."""
        return self._over("active_workers", setting, workers)

    def over_staleness(self, setting: Setting, bounds: Iterable[int | None]) -> Curve:
        """Time against the staleness bound."""
        return self._over("max_staleness", setting, bounds)

    def over_thresholds(self, setting: Setting, thresholds: Iterable[float | None]) -> Curve:
        """Time against the event threshold."""
        return self._over("event_threshold", setting, thresholds)

    def over_lr(self, setting: Setting, rates: Iterable[float]) -> Curve:
        """Time against the learning rate."""
        return self._over("lr", setting, rates)

    def best_lr(self, setting: Setting) -> Prediction:
        """The learning rate that reaches the target soonest, all else as given."""
        limit = self.largest_lr(setting)

        def time_s(log_lr: float) -> float:
            try:
                found = self.predict(replace(setting, lr=math.exp(log_lr))).time_s
            except ConfigurationError:  # the noise leaves more than the target
                return 1e300
            return min(found, 1e300)

        coarse = np.log(limit) + np.linspace(math.log(1e-3), math.log(0.98), 12)
        times = [time_s(value) for value in coarse]
        top = int(np.argmin(times))
        around = coarse[max(0, top - 1)], coarse[min(len(coarse) - 1, top + 1)]
        found = optimize.minimize_scalar(time_s, bounds=around, method="bounded", options={"xatol": 0.01})
        best = found.x if found.fun < times[top] else coarse[top]
        return self.predict(replace(setting, lr=math.exp(float(best))))

    def best(self, setting: Setting, workers: Iterable[int], bounds: Iterable[int | None] = (None,)) -> Prediction:
        """Workers, staleness bound and learning rate that reach the target soonest together; the rest as given."""
        bounds = list(bounds)
        candidates = [
            replace(setting, active_workers=number, max_staleness=bound)
            for number in workers
            for bound in bounds
            if bound is None or setting.on_stale == "drop" or bound >= number - 1
        ]
        return min((self.best_lr(candidate) for candidate in candidates), key=lambda prediction: prediction.time_s)

    # -- details -----------------------------------------------------------------------------------------------------

    def _over(self, knob: str, setting: Setting, values: Iterable[Any]) -> Curve:
        return Curve(knob, [self.predict(replace(setting, **{knob: value})) for value in values])

    def _play(self, workers: int, bound: int | None, on_stale: OnStale, steps: int) -> Arrivals:
        return arrivals(
            workers,
            self.compute,
            max_staleness=bound,
            on_stale=on_stale,
            steps_per_update=steps,
            link=self.link,
            updates=self._updates,
            seed=self._seed,
        )

    def _shape(self, setting: Setting) -> int | None:
        return largest_shape(setting.active_workers, self._variation)

    def _slowed(self, setting: Setting, steps: int) -> Callable[[float], float] | None:
        """Exact decay of the root mean square per update, where it differs much from the mean's."""
        memoryless = setting.max_staleness is None and self.link is None and steps == 1 and self._shape(setting) == 1
        return (lambda g: rms_decay_rate(g, setting.active_workers)) if memoryless else None

    def _decays(self, setting: Setting, steps: int, seen: Arrivals) -> list[float]:
        """Of every direction, in 1/s."""
        slowed = self._slowed(setting, steps)
        decays = []
        for h in self.problem.eigenvalues:
            g = self.scale * (1.0 - (1.0 - setting.lr * h) ** steps)
            if g <= 0.0:  # the local steps themselves diverge
                return [-math.inf]
            decays.append(seen.rate * (slowed(g) if slowed else decay_rate(g, seen.delay)))
        return decays

    def _curve(self, setting: Setting, seen: Arrivals) -> LossCurve:
        curve = loss_curve(self.problem, step_size=setting.lr * self.scale, rate=1.0, delay=seen.delay)
        slowed = self._slowed(setting, 1)
        modes = [
            tuple(_in_seconds(mode, seen.rate, slowed and slowed(setting.lr * self.scale * h)) for mode in own)
            for h, own in zip(self.problem.eigenvalues, curve.modes, strict=True)
        ]
        return LossCurve(curve.parts, modes, curve.floors, min(-own[0].root.real for own in modes))

    def _steps_to_send(self, setting: Setting, distances: FloatArray) -> int | None:
        """m at the present distances |x_i| to the minimum; None if an update never grows long enough."""
        assert setting.event_threshold is not None
        h = np.asarray(self.problem.eigenvalues)
        for m in range(1, _MOST_STEPS + 1):
            moved = (1.0 - (1.0 - setting.lr * h) ** m) * distances
            noise = m * len(h) * (setting.lr * self.problem.noise) ** 2
            if float(moved @ moved) + noise >= setting.event_threshold**2:
                return m
        return None

    def _staged_time(self, setting: Setting) -> float:
        parts, passed_s = self.problem.losses, 0.0
        h = np.asarray(self.problem.eigenvalues)
        while (loss := float(parts.sum())) > self.target:
            steps = self._steps_to_send(setting, np.sqrt(2.0 * parts / h))
            if steps is None:
                return math.inf
            decays = np.array(self._decays(setting, steps, self.arrivals(setting, steps)))
            if decays.min() <= 0.0:
                return math.inf
            goal = max(self.target, _STAGE * loss)
            stage_s = _time_down_to(goal, parts, decays)
            passed_s += stage_s
            parts = parts * np.exp(-2.0 * decays * stage_s) if goal > self.target else np.zeros_like(parts)
        return passed_s


def _in_seconds(mode: Mode, rate: float, rms_decay: float | None) -> Mode:
    decay = -mode.root.real if rms_decay is None else min(-mode.root.real, rms_decay)
    return Mode(complex(-decay, mode.root.imag) * rate, mode.residue)


def _time_down_to(goal: float, parts: FloatArray, decays: FloatArray) -> float:
    """When Σ parts·e^{−2·decays·t} is down to a goal below its beginning; all decays above 0."""
    latest = math.log(float(parts.sum()) / goal) / (2.0 * float(decays.min()))
    return float(optimize.brentq(lambda t: float((parts * np.exp(-2.0 * decays * t)).sum()) - goal, 0.0, 1.001 * latest))
