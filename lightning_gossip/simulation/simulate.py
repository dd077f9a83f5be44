"""One call, one run under virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import simpy

from lightning_gossip.algorithm.checks import check_integer, is_finite
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation.cluster.cluster import Cluster
from lightning_gossip.simulation.cluster.links import Links
from lightning_gossip.simulation.problems.objectives import Objective
from lightning_gossip.simulation.problems.optimizers import InnerOptimizer
from lightning_gossip.simulation.problems.sgd import SGD
from lightning_gossip.simulation.problems.work import Epochs, Steps
from lightning_gossip.simulation.record import Recording
from lightning_gossip.simulation.result import Ending, Result
from lightning_gossip.simulation.run import Run, Strategy
from lightning_gossip.simulation.strategies.registry import make_strategy

_EVENTS_BETWEEN_NEWS = 2_000  # some tens of milliseconds without an objective
_NEWS = 200  # at least, in a run


def simulate(
    strategy: Strategy | str,
    cluster: Cluster,
    *,
    work: Epochs | Steps,
    links: Links | None = None,
    objective: Objective | None = None,
    optimizer: InnerOptimizer | None = None,
    model_bytes: int | None = None,
    seed: int = 0,
    recording: Recording | None = None,
    target_loss: float | None = None,
    until_s: float | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Result:
    """Run a strategy on a cluster under virtual time.

    The same arguments give the same result to the bit.

    Args:
        strategy: a description (:class:`ADPSGD` and its like), or a name with default options.
        cluster: the workers.
        work: what they train on.
        links: between them; default: what is sent takes no time.
        objective: what they minimise, with real gradients; None for times only.
        optimizer: of each worker; default: SGD with lr 0.1.
        model_bytes: of a model or gradient on its way; default: the objective's size, 0 without one. A small objective may
            stand for a large model.
        seed: of compute times, batches, noise, partners and slow links.
        recording: what to write down besides the accounts.
        target_loss: end when a point of the loss is no higher.
        until_s: end at this virtual time.
        on_progress: told now and then which share of the run's steps is done, in [0, 1].

    Raises:
        ConfigurationError: naming the key, for arguments that are out of their range or do not fit each other.

    >>> from lightning_gossip.simulation import Cluster, Constant, Epochs, simulate
    >>> cluster = Cluster.one_slow(16, Constant(1.0), factor=10.0)
    >>> epochs = Epochs(number=2, batches=1600)
    >>> [round(simulate(name, cluster, work=epochs).epoch_times_s[-1]) for name in ("adpsgd", "ddp")]
    [106, 1000]
    """
    if isinstance(strategy, str):
        strategy = make_strategy(strategy)
    _check_type("strategy", strategy, Strategy)
    _check_type("cluster", cluster, Cluster)
    if not isinstance(work, (Epochs, Steps)):
        raise ConfigurationError(f"work={work!r} is neither Epochs nor Steps. Write for example work=Steps(number=100).")
    links = Links() if links is None else links
    _check_type("links", links, Links)
    if objective is not None:
        _check_type("objective", objective, Objective)
    optimizer = SGD() if optimizer is None else optimizer
    _check_type("optimizer", optimizer, InnerOptimizer)
    recording = Recording() if recording is None else recording
    _check_type("recording", recording, Recording)
    check_integer("seed", seed, at_least=0, example=0)
    for name, value in (("target_loss", target_loss), ("until_s", until_s)):
        if value is not None and not is_finite(value):
            raise ConfigurationError(f"{name}={value!r} is not a finite number.")
    if target_loss is not None and objective is None:
        raise ConfigurationError("target_loss needs an objective: without one there is no loss.")
    if model_bytes is None:
        model_bytes = 0 if objective is None else objective.numel * objective.dtype.itemsize
    check_integer("model_bytes", model_bytes, at_least=0, example=100_000_000)
    links.check(cluster.workers)
    sharing = getattr(strategy, "work_sharing", "auto")
    if sharing is True and work.skew is not None:
        raise ConfigurationError(
            f"work_sharing=True hands each batch to whoever is free, and with skew={work.skew!r} each worker has samples of its"
            " own. Leave one of them away."
        )
    run = Run(
        strategy=strategy,
        cluster=cluster,
        links=links,
        work=work,
        objective=objective,
        optimizer=optimizer,
        model_bytes=model_bytes,
        shares_work=strategy.shares_work and sharing is not False and work.skew is None,
        seed=seed,
        recording=recording,
        target_loss=target_loss,
    )
    run.evaluate()
    strategy.start(run)
    events = _advance(run, math.inf if until_s is None else until_s, on_progress or (lambda share: None))
    return _result(strategy, run, events)


def _advance(run: Run, until_s: float, on_progress: Callable[[float], None]) -> int:
    """Process events until the run ends; returns how many they were."""
    environment, events = run.environment, 0
    news = max(1, run.plan.steps // _NEWS)
    due = news
    try:
        while run.ended is None:
            if environment.peek() > until_s:
                run.finish("until" if environment.peek() < math.inf else "stalled")
                break
            environment.step()
            events += 1
            if events % _EVENTS_BETWEEN_NEWS == 0 or run.steps >= due:
                on_progress(run.progress)
                due = run.steps + news
    except simpy.core.EmptySchedule:
        run.finish("stalled")
    return events


def _result(strategy: Strategy, run: Run, events: int) -> Result:
    record = run.record
    has_models = run.models.numel > 0
    return Result(
        strategy=strategy.name,
        topology=strategy.graph_name(run.workers),
        ended=cast("Ending", run.ended),
        time_s=run.environment.now,
        workers=record.accounts,
        epochs=record.epochs,
        points=record.points,
        models=run.models.x if has_models else None,
        mean=run.mean() if has_models else None,
        model_bytes=run.nbytes,
        averagings=run.averagings,
        trace=None if record.trace is None else sorted(record.trace, key=lambda event: event.time_s),
        spans=record.spans,
        staleness_in_order=record.staleness,
        events=events,
        island=run.islands.size,
    )


def _check_type(name: str, value: Any, expected: type) -> None:
    if not isinstance(value, expected):
        raise ConfigurationError(f"{name}={value!r} is not a {expected.__name__} of lightning_gossip.simulation.")
