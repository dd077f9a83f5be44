"""What to run: every strategy on every number of workers, and what is best of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_gossip import ConfigurationError
from lightning_gossip.algorithm.laws import FloatArray
from lightning_gossip.algorithm.outer import Outer
from lightning_gossip.algorithm.periodic_averaging.period import ConstantPeriod
from lightning_gossip.algorithm.topology.generators import make_topology
from lightning_gossip.algorithm.topology.mixing import expected_pair_matrix, mixing_matrix, spectral_gap
from lightning_gossip.analysis.delays.combined import Repeated, Sum
from lightning_gossip.analysis.delays.delays import constant
from lightning_gossip.analysis.mean.stability import of_staleness, stability_limit
from lightning_gossip.analysis.planning.dynamics import WORTH, Dynamics, few, gossip, server, synchronous, with_outer_steps
from lightning_gossip.analysis.second_moments.gradient_noise import (
    Spread,
    gossip_spread,
    neighbours_spread,
    periodic_spread,
    server_spread,
    synchronous_spread,
)
from lightning_gossip.analysis.second_moments.outer_steps import Rounds
from lightning_gossip.simulation import ADPSGD, APSGD, DPSGD, PeriodicAveraging, Strategy
from recipes.planning.known import Known
from recipes.planning.times import ENDLESS, Machines, Times, timed

_ALIKE = 16  # workers: AD-PSGD's decay per step is that of any more to 3 % (measured up to 64), and takes minutes for 64

_STABLE = 0.1  # a margin of 1 is neither stable nor unstable
_HALVINGS = 40  # of the noise, at most
_FAR = 0.1  # of the loss where noise was measured: what a run that got there has borne; noise may have kept others from it
_FOLLOWED = 32  # workers: the same of their distance under noise

MOST_APART = 0.8
"""Of a worker's own loss, the share that may come from its distance to the mean model: its loss is then five times the
mean's. The quadratic's models part for ever at 1; a network's do not, since its loss grows more slowly than the
distance's square. What was recommended for 28 clusters (python -m benchmarks.planning) had up to 0.63 by prediction, 0.78
in the simulator, and trained."""

News = Callable[[float], None]


@dataclass(frozen=True)
class Candidate:
    """A strategy on a number of workers, and what is predicted of it.

    Args:
        name: of the strategy.
        strategy: the simulator's description.
        times: of its steps.
        dynamics: of its loss.
        lr: the learning rate that goes with so many workers: in proportion to them, so that each worker's update counts as
            much as now.
        target: share of the loss at the beginning that is to be reached.
        least_margin: of a recommended learning rate.
        gain_now: of the present setting's outer steps; see :func:`gain_of`.
    """

    name: str
    strategy: Strategy
    times: Times
    dynamics: Dynamics
    lr: float
    target: float
    least_margin: float
    gain_now: float = 1.0

    @property
    def workers(self) -> int:
        """n."""
        return self.times.workers

    @property
    def margin(self) -> float:
        """Largest stable learning rate over this one."""
        return self.dynamics.margin(self.lr)

    @cached_property
    def time_s(self) -> float:
        """Seconds until the target, with this learning rate."""
        return self.dynamics.time_s(self.lr, self.target)

    @cached_property
    def best_lr(self) -> float:
        """The learning rate that reaches the target soonest, with the margin, and not above the present one.

        Noise grows with the learning rate, and the quadratic has none: a higher one would always look faster. An outer step
        counts as what it multiplies progress by.
        """
        highest = min(self.bound, self.lr * self.gain_now / gain_of(self.strategy))
        return self.dynamics.fastest_lr(self.target, highest=highest, near=self.lr, most_apart=MOST_APART)

    @property
    def bound(self) -> float:
        """Learning rates above it have less than the margin."""
        return self.dynamics.limit / self.least_margin

    @cached_property
    def best_time_s(self) -> float:
        """Seconds until the target, with the best learning rate; infinite if the models train apart even so."""
        if self.share_apart > MOST_APART:
            return math.inf
        return self.dynamics.time_s(self.best_lr, self.target)

    @cached_property
    def share_apart(self) -> float:
        """The share of a worker's own loss at the target that its distance to the mean makes, with the best learning rate."""
        return self.dynamics.share_apart(self.best_lr, self.target)

    @cached_property
    def consensus_distance(self) -> float | None:
        """(1/n) Σ_i ‖x_i − x̄‖² then and there."""
        return self.dynamics.consensus_distance(self.best_lr, self.target)

    @cached_property
    def floor(self) -> float:
        """Share of the loss at the beginning that noise leaves for ever, with the best learning rate."""
        return self.dynamics.floor(self.best_lr, self.target)

    @property
    def trains_apart(self) -> bool:
        """Whether the models would be too far from their mean with the present learning rate."""
        return self.dynamics.share_apart(self.lr, self.target) > MOST_APART


@dataclass(frozen=True)
class Planner:
    """Predicts.

    Args:
        known: what the plan starts from.
        target: share of the loss at the beginning that is to be reached.
        margin: of a recommended learning rate.
    """

    known: Known
    target: float
    margin: float

    def candidate(
        self, strategy: Strategy, n: int, *, machines: Machines | None = None, on_progress: News | None = None
    ) -> Candidate:
        """One strategy on n workers.

        Args:
            strategy: the simulator's description.
            n: workers.
            machines: in place of the known ones.
            on_progress: told which share is done.

        Raises:
            ConfigurationError: for a graph that changes from round to round.
        """
        if isinstance(strategy, DPSGD) and len(strategy.sequence(n)) > 1:
            raise ConfigurationError(
                f"topology={strategy.graph_name(n)}: the plan's formulas are of a graph that stays the same. Write for example"
                " topology=ring, or simulate this one with recipes.simulate."
            )
        machines = machines or self.known.machines
        times = timed(strategy, machines, n, on_progress=on_progress)
        islands = strategy.check_on(n, machines.links_of(n))
        dynamics = self.dynamics(strategy, times, island=islands.size)
        lr = self.known.lr.of(self.known.workers) * n / self.known.workers
        gain_now = gain_of(self.known.strategy)
        return Candidate(strategy.name, strategy, times, dynamics, lr, self.target, self.margin, gain_now)

    def dynamics(self, strategy: Strategy, times: Times, *, island: int = 1) -> Dynamics:
        """How a strategy's loss falls; see lightning_gossip.analysis.planning.dynamics.

        Args:
            strategy: the simulator's description.
            times: of its steps.
            island: workers that are one member, whose gradient is the mean of theirs.
        """
        members = times.workers // island
        spread = self._spread(strategy, times, members)

        def of_islands(g: FloatArray) -> Spread:
            alone = spread(g)
            return Spread(alone.mean / island, alone.apart / island)

        return self._quiet(strategy, times, members).with_noise(self.known.noise, spread if island == 1 else of_islands)

    def _spread(self, strategy: Strategy, times: Times, n: int) -> Callable[[FloatArray], Spread]:
        """What noise keeps up; see lightning_gossip.analysis.second_moments.gradient_noise."""
        known, rounds = self.known, rounds_of(strategy, times)
        momentum, nesterov = known.momentum, known.nesterov
        adopts = getattr(strategy, "at_rendezvous", "adopt") == "adopt"
        epoch_steps = known.machines.epoch_steps(times.workers) if adopts else ENDLESS
        if n == 1:
            return lambda g: synchronous_spread(g, 1, momentum=momentum, nesterov=nesterov)
        if isinstance(strategy, APSGD):
            scale = 1.0 / n if strategy.scale is None else strategy.scale
            staleness = few(times.law)
            delay = of_staleness(staleness)
            if momentum:
                delay = Sum(delay, Repeated(Sum(constant(1.0), staleness), momentum, nesterov))
            limit = stability_limit(delay)
            return lambda g: server_spread(g, delay, limit=limit, scale=scale, momentum=momentum)
        if isinstance(strategy, ADPSGD):
            followed = make_topology(strategy.topology, min(n, _FOLLOWED) if isinstance(strategy.topology, str) else n)
            return lambda g: gossip_spread(
                g,
                followed,
                exchanges_per_step=times.exchanges_per_step,
                epoch_steps=epoch_steps,
                momentum=momentum,
                nesterov=nesterov,
                push_every=strategy.push_every,
                rounds=rounds,
            )
        if isinstance(strategy, DPSGD):
            graph, weights = make_topology(strategy.topology, n), strategy.weights
            return lambda g: neighbours_spread(g, graph, weights=weights, momentum=momentum, nesterov=nesterov)
        if isinstance(strategy, PeriodicAveraging):
            controller = strategy.controller
            period = controller.period if isinstance(controller, ConstantPeriod) else max(1, round(times.period or 1))
            late = min(strategy.overlap_steps, period)  # an averaging mends what was there so many steps before
            keeps = strategy.optimizer_state == "keep"
            return lambda g: periodic_spread(
                g,
                n,
                period=period + int(late),
                epoch_steps=epoch_steps,
                momentum=momentum,
                nesterov=nesterov,
                keeps_momentum=keeps,
                rounds=rounds,
            )
        return lambda g: synchronous_spread(g, n, momentum=momentum, nesterov=nesterov)

    def _quiet(self, strategy: Strategy, times: Times, n: int) -> Dynamics:
        """The same without noise."""
        problem, rounds = self.known.problem, rounds_of(strategy, times)
        momentum, nesterov = self.known.momentum, self.known.nesterov
        if rounds is not None and n > 1:
            return with_outer_steps(problem, times.steps_per_s, rounds, momentum=momentum, nesterov=nesterov)
        if isinstance(strategy, APSGD) and n > 1:
            return server(
                problem,
                times.updates_per_s,
                times.law,
                workers=strategy.active_workers or n,
                scale=1.0 / n if strategy.scale is None else strategy.scale,
                momentum=momentum,
                nesterov=nesterov,
                variation=self.known.variation,
                bounded=strategy.max_staleness is not None,
            )
        if isinstance(strategy, ADPSGD) and n > 1:
            few = min(n, _ALIKE) if isinstance(strategy.topology, str) else n
            topology = make_topology(strategy.topology, few)
            exchanges = times.exchanges_per_step
            return gossip(
                problem,
                times.steps_per_s,
                topology,
                exchanges_per_step=exchanges,
                momentum=momentum,
                nesterov=nesterov,
                variation=self.known.variation,
            )
        smallest = 1.0
        if isinstance(strategy, DPSGD) and n > 1 and strategy.overlap:
            matrix = mixing_matrix(make_topology(strategy.topology, n), weights=strategy.weights)
            smallest = float(np.linalg.eigvalsh(matrix)[0])
        return synchronous(problem, times.steps_per_s, momentum=momentum, nesterov=nesterov, smallest_weight=smallest)

    def all(
        self, strategies: Mapping[str, Strategy], workers: Sequence[int], step: Callable[[str], News] = lambda _: lambda _: None
    ) -> list[Candidate]:
        """Every strategy on every number of workers that it can have; one worker only once.

        Raises:
            ConfigurationError: if there is none.
        """
        found, reasons = [], []
        for n in sorted(set(workers)):
            for name, strategy in strategies.items():
                if n == 1 and name != next(iter(strategies)):
                    continue  # all the same
                batches = self.known.machines.epoch_batches
                if batches is not None and batches < n:
                    reasons.append(f"an epoch has {batches} batches, and {n} workers need as many.")
                    continue
                try:
                    self.known.machines.check_nodes(n)
                    strategy.check_on(n, self.known.machines.links_of(n))
                except ConfigurationError as error:
                    reasons.append(str(error))
                    continue
                found.append(self.candidate(strategy, n, on_progress=step(f"{name} × {n}")))
        if not found:
            raise ConfigurationError(f"none of the strategies can have any of the numbers of workers: {reasons[0]}")
        return found


def gain_of(strategy: Strategy) -> float:
    """How far a strategy's outer steps move the model, over how far its steps alone would; 1 without."""
    outer: Outer | None = getattr(strategy, "outer", None)
    return 1.0 if outer is None else max(1.0, outer.gain)


def rounds_of(strategy: Strategy, times: Times) -> Rounds | None:
    """The rounds of a strategy with outer steps; None without."""
    outer: Outer | None = getattr(strategy, "outer", None)
    if outer is None:
        return None
    if isinstance(strategy, PeriodicAveraging):
        return Rounds(outer, max(1, round(times.period or 1)))
    local_steps = strategy.local_steps if isinstance(strategy, ADPSGD) else None
    return None if local_steps is None else Rounds(outer, local_steps)


def as_it_trained(planner: Planner, now: Candidate) -> tuple[Planner, Candidate]:
    """Where the measured run has trained: with no more curvature and noise than that run can have had.

    Networks move to where their learning rate is stable and their noise bearable, so what was measured at another point says
    less than a loss that has fallen: of the curvature, if it has fallen at all, and of the noise, if it has fallen far. A run
    near its largest stable learning rate says nothing of the noise: there a little less or more of it decides. Beyond that rate
    neither was measured where it trained.

    Args:
        planner: predicts.
        now: the run's own setting.
    """
    run = planner.known.run
    if run is None or not run.trained:
        return planner, now
    known, is_near = planner.known, 1.0 < now.margin < planner.margin
    if now.margin <= 1.0:
        factor = now.margin * (1.0 - _STABLE)
        known = replace(known, curvature=known.curvature.lowered(factor, "lowered to what the measured run trained with"))
        planner = replace(planner, known=known)
        island = now.strategy.check_on(now.workers, known.machines.links_of(now.workers)).size
        now = replace(now, dynamics=planner.dynamics(now.strategy, now.times, island=island))
    if known.loss_is_known and not run.reached(max(now.target, _FAR) * known.noise.loss):
        return planner, now  # it may as well be the noise that has kept it from there
    if is_near:
        return planner, now
    for halvings in range(_HALVINGS):
        calm = 0.5**halvings
        calmer = replace(now, dynamics=now.dynamics.varied(noise=calm))
        if not calmer.trains_apart and math.isfinite(calmer.time_s):
            break
    return replace(planner, known=replace(known, calm=calm)), calmer


def soonest(candidates: Sequence[Candidate], now: Candidate) -> Candidate:
    """The one that reaches the target first with its best learning rate; of those that are about as fast the most like now.

    Raises:
        ConfigurationError: if none ever does.
    """
    best = min((now, *candidates), key=lambda candidate: candidate.best_time_s)
    if math.isinf(best.best_time_s):
        raise ConfigurationError(
            "no strategy reaches the target with any learning rate that was tried: lower the recipe's learning rate or margin,"
            " or take larger batches, if it is the gradients' noise."
        )
    good = [one for one in (now, *candidates) if one.best_time_s <= WORTH * best.best_time_s]
    return min(good, key=lambda one: (one.name != now.name, one.workers != now.workers, one.workers, one.best_time_s))


def gap(strategy: Strategy, n: int) -> float | None:
    """Spectral gap of a gossiping strategy: of one exchange, or of one round; None without a graph."""
    if n == 1:
        return None
    if isinstance(strategy, ADPSGD):
        return spectral_gap(expected_pair_matrix(make_topology(strategy.topology, n)))
    if isinstance(strategy, DPSGD):
        return spectral_gap(mixing_matrix(make_topology(strategy.topology, n), weights=strategy.weights))
    return None
