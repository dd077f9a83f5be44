"""What to run on a parameter server: active workers, staleness bound, event threshold, learning rate, against time to a loss.

A prediction has three steps. :func:`~lightning_gossip.analysis.planning.arrivals.arrivals` gives the rate λ and the staleness'
law: the link's queue, and what the bound drops or holds back, are in it. An update moves a direction of eigenvalue h by g = cγh
of the model pulled, with c the server's scale and γ the learning rate. Roots, residues and noise (hitting.py) then say when the
loss is reached. For memoryless step times the root mean square decays more slowly than the mean, and its exact rate
(mean_square.py) is taken.

With an event trigger the time between two updates depends on where the model is: as the gradients shrink it takes more steps
until an update has grown, an unstable direction grows until it takes fewer again, and with noise it happens by chance. There is
no closed form, and the quadratic is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import optimize

from lightning_gossip.algorithm.apsgd.options import OnStale
from lightning_gossip.algorithm.checks import check_integer, check_positive
from lightning_gossip.algorithm.laws import Exponential, Law
from lightning_gossip.analysis.mean.hitting import LossCurve, loss_curve
from lightning_gossip.analysis.mean.modes import Followed, Mode
from lightning_gossip.analysis.planning.arrivals import Arrivals, arrivals, arrivals_of
from lightning_gossip.analysis.planning.settings import Curve, Prediction, Setting
from lightning_gossip.analysis.problem import Problem
from lightning_gossip.analysis.second_moments.mean_square import exact_limit, random_staleness_limit, rms_decay_rate
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import APSGD, SGD, Cluster, Links, Quadratic, Recording, Result, Steps, simulate

_LATEST = 10.0  # times what it takes without a trigger: a run with one that takes longer is given up
_ENDLESS = 1_000_000_000  # steps: the loss or the time ends a run
_RUNS = 9  # with an event trigger; their mean, since a few of them take twice as long


@clear_arguments
class Server:
    """A parameter server and its workers, as far as a schedule is concerned.

    Args:
        problem: quadratic model of the loss around its minimum.
        target: of the loss, above 0.
        compute: law of the workers' step times, seconds, of all or one for each; of N active workers the first N laws count.
        scale: c, of an update at the server; 1/n for n workers is the strategy's default.
        links: between the workers; None for some that take no time.
        model_bytes: of a model on its way.
        updates: that are played through for each law of the staleness.
        seed: of these.
    """

    def __init__(
        self,
        problem: Problem,
        target: float,
        compute: Law | Sequence[Law],
        *,
        scale: float = 1.0,
        links: Links | None = None,
        model_bytes: int = 0,
        updates: int = 4_000,
        seed: int = 0,
    ) -> None:
        check_positive("target", target)
        check_positive("scale", scale)
        check_integer("updates", updates, example=4_000)
        self.problem, self.target, self.compute, self.scale = problem, target, compute, scale
        self.links, self.model_bytes = links, model_bytes
        self._updates, self._seed = updates, seed
        self._played = lru_cache(maxsize=256)(self._play)

    def predict(self, setting: Setting) -> Prediction:
        """Time to the target loss, and what leads there.

        Raises:
            ConfigurationError: for a target that the gradients' noise never lets it reach.
        """
        if setting.event_threshold is not None:
            return self._triggered(setting, setting.event_threshold)
        seen = self.arrivals(setting)
        curve = self._curve(setting, seen)
        return Prediction(
            setting,
            time_s=curve.hitting_time(self.target),
            decay=curve.slowest,
            margin=self.largest_lr(setting) / setting.lr,
            rate=seen.rate,
            staleness=seen.law.mean,
            dropped=seen.dropped,
            computing=seen.computing,
        )

    def arrivals(self, setting: Setting) -> Arrivals:
        """Rate and staleness of a setting's updates, if they are sent after every step."""
        return self._played(setting.active_workers, setting.max_staleness, setting.on_stale)

    def largest_lr(self, setting: Setting) -> float:
        """The learning rate below which every direction converges in the mean square, if updates are sent after every step."""
        law = self._law_of_all(setting.active_workers)
        exact = exact_limit(setting.active_workers, law) if law is not None and self._never_wait(setting) else None
        largest = random_staleness_limit(self.arrivals(setting).law) if exact is None else exact
        return largest / (self.scale * max(self.problem.eigenvalues))

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

    def best_lr(self, setting: Setting) -> Prediction:
        """The learning rate that reaches the target soonest, all else as given; its setting's own is no more than a start."""
        limit = math.log(self.largest_lr(setting))

        def time_s(log_lr: float) -> float:
            try:
                found = self.predict(replace(setting, lr=math.exp(log_lr))).time_s
            except ConfigurationError:  # the noise leaves more than the target
                found = math.inf
            return min(found, 1e300)

        coarse = limit + np.linspace(math.log(1e-3), math.log(0.98), 12)
        times = [time_s(float(value)) for value in coarse]
        top = int(np.argmin(times))
        around = (coarse[max(0, top - 1)], coarse[min(len(coarse) - 1, top + 1)])
        found = optimize.minimize_scalar(time_s, bounds=around, method="bounded", options={"xatol": 0.01})
        best = float(found.x) if found.fun < times[top] else float(coarse[top])
        return self.predict(replace(setting, lr=math.exp(best)))

    def best(self, setting: Setting, workers: Iterable[int], bounds: Iterable[int | None] = (None,)) -> Prediction:
        """Workers, staleness bound and learning rate that reach the target soonest together; the rest as given."""
        bounds = list(bounds)
        candidates = [
            replace(setting, active_workers=number, max_staleness=bound)
            for number in workers
            for bound in bounds
            if bound is None or setting.on_stale == "drop" or bound >= number - 1
        ]
        if not candidates:
            raise ConfigurationError("there is nothing to choose from: no number of workers, or no bound that it allows.")
        return min((self.best_lr(candidate) for candidate in candidates), key=lambda prediction: prediction.time_s)

    # -- details -----------------------------------------------------------------------------------------------------

    def _over(self, knob: str, setting: Setting, values: Iterable[Any]) -> Curve:
        return Curve(knob, [self.predict(replace(setting, **{knob: value})) for value in values])

    def _play(self, workers: int, bound: int | None, on_stale: OnStale) -> Arrivals:
        return arrivals(
            workers,
            self._compute(workers),
            max_staleness=bound,
            on_stale=on_stale,
            links=self.links,
            model_bytes=self.model_bytes,
            updates=self._updates,
            seed=self._seed,
        )

    def _compute(self, workers: int) -> Law | Sequence[Law]:
        """Law of the step times of so many active workers."""
        if isinstance(self.compute, Law):
            return self.compute
        if workers > len(self.compute):
            raise ConfigurationError(
                f"active_workers={workers} of {len(self.compute)} workers, for each of which compute has a law."
            )
        return self.compute[:workers]

    def _law_of_all(self, workers: int) -> Law | None:
        """The law of the step times, if all workers have the same."""
        compute = self._compute(workers)
        laws = [compute] if isinstance(compute, Law) else list(compute)
        return laws[0] if all(law == laws[0] for law in laws) else None

    def _never_wait(self, setting: Setting) -> bool:
        return setting.max_staleness is None and self.links is None

    def _slowed(self, setting: Setting) -> Callable[[float], float] | None:
        """Exact decay of the root mean square per update, where it differs much from the mean's."""
        law = self._law_of_all(setting.active_workers)
        memoryless = isinstance(law, Exponential) and law.spread == 1.0 and self._never_wait(setting)
        return (lambda g: rms_decay_rate(g, setting.active_workers)) if memoryless else None

    def _curve(self, setting: Setting, seen: Arrivals) -> LossCurve:
        curve = loss_curve(self.problem, step_size=setting.lr * self.scale, rate=1.0, delay=seen.delay)
        slowed = self._slowed(setting)
        modes = [
            tuple(_in_seconds(mode, seen.rate, slowed and slowed(setting.lr * self.scale * h)) for mode in own)
            for h, own in zip(self.problem.eigenvalues, curve.modes, strict=True)
        ]
        return LossCurve(curve.parts, modes, curve.floors, min(-own[0].root.real for own in modes))

    def _triggered(self, setting: Setting, threshold: float) -> Prediction:
        """The mean of a few runs on the quadratic; the rest is of the one of median length."""
        without = self.predict(replace(setting, event_threshold=None))
        latest_s = _LATEST * min(without.time_s, self.predict(replace(setting, event_threshold=None, active_workers=1)).time_s)
        if math.isinf(latest_s):
            return Prediction(setting, math.inf, 0.0, without.margin, 0.0, 0.0, 0.0, 1.0)
        if float(self.problem.losses.sum()) <= self.target:
            return replace(without, setting=setting)
        runs = [self._run(setting, threshold, latest_s, seed) for seed in range(self._seed, self._seed + _RUNS)]
        times_s = [run.time_s if run.ended == "target" else math.inf for run in runs]
        seen = arrivals_of(runs[int(np.argsort(times_s)[_RUNS // 2])])
        if not seen.staleness:
            return Prediction(setting, math.inf, 0.0, without.margin, 0.0, 0.0, 0.0, 1.0)
        time_s = math.fsum(times_s) / _RUNS
        decay = 0.5 * math.log(float(self.problem.losses.sum()) / self.target) / time_s
        return Prediction(setting, time_s, decay, without.margin, seen.rate, seen.law.mean, seen.dropped, seen.computing)

    def _run(self, setting: Setting, threshold: float, latest_s: float, seed: int) -> Result:
        problem = self.problem
        return simulate(
            APSGD(max_staleness=setting.max_staleness, on_stale=setting.on_stale, scale=self.scale, event_trigger=threshold),
            Cluster(setting.active_workers, self._compute(setting.active_workers)),
            work=Steps(number=_ENDLESS),
            links=self.links,
            objective=Quadratic(problem.eigenvalues, noise=problem.noise, start_at=problem.distances.tolist()),
            optimizer=SGD(lr=setting.lr),
            model_bytes=self.model_bytes,
            recording=Recording(evaluate_every=1),
            target_loss=self.target,
            until_s=latest_s,
            seed=seed,
        )


def _in_seconds(mode: Mode | Followed, rate: float, rms_decay: float | None) -> Mode | Followed:
    if isinstance(mode, Followed):
        if rms_decay is None:
            return replace(mode, root=mode.root * rate, rate=rate)
        mode = Mode(mode.root, 0.5 + 0.0j if mode.root.imag else 1.0 + 0.0j)  # the mean's early steps are not the mean square's
    decay = -mode.root.real if rms_decay is None else min(-mode.root.real, rms_decay)
    return Mode(complex(-decay, mode.root.imag) * rate, mode.residue)
