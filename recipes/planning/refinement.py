"""The other options of what is best: graph, islands, outer steps, rarer pushes; active workers and a staleness bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_gossip import ConfigurationError
from lightning_gossip.algorithm.outer import FEWEST_ROUNDS, Outer
from lightning_gossip.algorithm.topology.generators import TOPOLOGIES, make_topology
from lightning_gossip.analysis.planning.dynamics import WORTH
from lightning_gossip.simulation import ADPSGD, APSGD, PeriodicAveraging, Strategy
from recipes.planning.choice import Candidate, News, Planner, gap, rounds_of

WORTH_ROUNDS = 1.15
"""What outer steps have to gain: as much as a lower learning rate, which is what they come to on a quadratic."""

_FEW = 0.5  # exchanges a step: with more outer steps and rarer pushes are of no use
_LOCAL_STEPS = (10, 50)
_RAREST_PUSH = 16  # steps
_NO_LOSS = 1.01  # times as long: what rarer pushes may cost, whose gain, fewer copies of the model, is not simulated


def refined(planner: Planner, best: Candidate, step: Callable[[str], News]) -> Candidate:
    """The best candidate with its other options, where they are predicted to pay.

    Args:
        planner: predicts.
        best: of the candidates.
        step: begins a new part of the work.
    """
    if best.workers == 1:
        return best
    if isinstance(best.strategy, APSGD):
        return _with_bounds(planner, best, best.strategy, step)
    if isinstance(best.strategy, ADPSGD):
        best = _with_graph(planner, best, best.strategy, step)
        for islands in _islands(planner, best):
            best = _better(best, _tried(planner, best, islands, f"islands of {islands.island}", step), WORTH)
    for strategy in _with_rounds(best):
        rounds = _tried(planner, best, strategy, "outer steps", step)
        if rounds is not None and _enough_rounds(rounds):
            best = _better(best, rounds, WORTH_ROUNDS)
    return _with_rare_pushes(planner, best, step)


def _tried(planner: Planner, best: Candidate, strategy: Strategy, name: str, step: Callable[[str], News]) -> Candidate | None:
    """None if it cannot be."""
    try:
        return planner.candidate(strategy, best.workers, on_progress=step(name))
    except ConfigurationError:
        return None


def _better(best: Candidate, other: Candidate | None, worth: float) -> Candidate:
    return other if other is not None and other.best_time_s * worth < best.best_time_s else best


def _islands(planner: Planner, best: Candidate) -> Iterator[ADPSGD]:
    """Of all ranks of a node; on another graph where the present one does not fit so many islands."""
    size, strategy = planner.known.machines.node_size, best.strategy
    if not isinstance(strategy, ADPSGD) or strategy.island != 1 or size is None or not 1 < size < best.workers:
        return
    members = best.workers // size
    yield replace(strategy, island=size)
    graph = _graph(strategy, members)
    if graph is not None:
        yield replace(strategy, island=size, topology=graph)


def _with_rounds(best: Candidate) -> Iterator[ADPSGD | PeriodicAveraging]:
    """Outer steps, where workers are averaged seldom."""
    strategy = best.strategy
    if isinstance(strategy, ADPSGD) and strategy.outer is None and best.times.exchanges_per_step < _FEW:
        for local_steps in _LOCAL_STEPS:
            # the share of a dense start is that of local steps, where none is given
            dense: float = None if strategy.dense_share == 0.0 else strategy.dense_share  # type: ignore[assignment]
            yield replace(strategy, local_steps=local_steps, outer=Outer(), dense_share=dense)
    if isinstance(strategy, PeriodicAveraging) and strategy.outer is None and (best.times.period or 0.0) * _FEW > 1.0:
        yield replace(strategy, outer=Outer())


def _enough_rounds(one: Candidate) -> bool:
    """Whether training to the target has as many rounds as outer steps have paid with."""
    rounds = rounds_of(one.strategy, one.times)
    assert rounds is not None
    return one.best_time_s * one.times.steps_per_s >= FEWEST_ROUNDS * rounds.local_steps


def _with_rare_pushes(planner: Planner, best: Candidate, step: Callable[[str], News]) -> Candidate:
    """Where exchanges are rarer than steps a push in each step copies the model for nothing."""
    strategy, rate = best.strategy, best.times.exchanges_per_step
    if not isinstance(strategy, ADPSGD) or strategy.push_every > 1 or not 0.0 < rate < _FEW:
        return best
    every = min(round(1.0 / rate), _RAREST_PUSH)
    rare = _tried(planner, best, replace(strategy, push_every=every), f"a push in {every} steps", step)
    return rare if rare is not None and rare.best_time_s <= _NO_LOSS * best.best_time_s else best


def _with_graph(planner: Planner, best: Candidate, strategy: ADPSGD, step: Callable[[str], News]) -> Candidate:
    graph = _graph(strategy, best.workers)
    if graph is None:
        return best
    mixing = _tried(planner, best, replace(strategy, topology=graph), graph, step)
    return mixing if mixing is not None and mixing.best_time_s <= WORTH * best.best_time_s else best


def _with_bounds(planner: Planner, best: Candidate, strategy: APSGD, step: Callable[[str], News]) -> Candidate:
    n = best.workers
    for active in counts(n):
        free = replace(strategy, active_workers=None if active == n else active, max_staleness=None, on_stale="drop")
        for other in (free, *(replace(free, max_staleness=bound) for bound in bounds(active))):
            candidate = planner.candidate(other, n, on_progress=step(f"{active} active, bound {other.max_staleness}"))
            best = _better(best, candidate, WORTH)
    return best


def _graph(strategy: ADPSGD, n: int) -> str | None:
    """The graph of the lowest degree that mixes half as well as any; None if the present one does.

    How well the models come together does not show on one quadratic that all workers share: there the mean is as fast on any
    graph. It is what keeps noisy gradients and workers' own data from pulling the models apart.
    """
    gaps = {name: gap(replace(strategy, topology=name), n) or 0.0 for name in graphs(n)}
    enough = 0.5 * max(gaps.values())
    present = gap(strategy, n) or 0.0
    return None if present >= enough else next(name for name, value in gaps.items() if value >= enough)


def counts(n: int) -> list[int]:
    """Numbers of active workers up to n that are tried."""
    return sorted({*range(1, min(n, 4) + 1), *(2**k for k in range(2, n.bit_length()) if 2**k < n), 3 * n // 4 or 1, n})


def bounds(active: int) -> list[int]:
    """Staleness bounds that are tried."""
    return sorted({round(active * factor) for factor in (1.0, 1.5, 2.0, 4.0)})


def graphs(n: int) -> list[str]:
    """Names of the graphs that n workers can have, one of each shape; by the neighbours of the busiest worker."""
    found: dict[tuple[tuple[int, int], ...], str] = {}
    for name in TOPOLOGIES:
        try:
            topology = make_topology(name, n)
        except ConfigurationError:
            continue
        found.setdefault(topology.edges, name)

    def load(name: str) -> tuple[int, int]:
        topology = make_topology(name, n)
        return max(topology.degree(rank) for rank in range(n)), len(topology.edges)

    return sorted(found.values(), key=load)
