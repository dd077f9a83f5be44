"""Which runs there are, in the order in which they are made; what was found so far says what comes next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.time_to_loss.contenders import CONTENDERS, GRID, KNOWN, REFERENCE
from benchmarks.time_to_loss.results import Results
from benchmarks.time_to_loss.runs import TUNING_SEED, Run
from benchmarks.time_to_loss.task import Condition, Task

SEEDS = (0, 1, 2)
HOSTS = (4, 8)
LONGER = 2.0
SHOWN, SHOWN_MBIT = "adpsgd_int8", 200  # in the first picture
TUNED_AT = Condition(HOSTS[0], SHOWN_MBIT, "equal")


def ddp_lr(results: Results) -> float | None:
    """The one with which DDP ends at the least loss; None before any was tried."""
    lr: float | None = results.best(lambda run: run["lr"], contender=REFERENCE, seed=TUNING_SEED, length=1.0)
    return lr


def tuned_lr(results: Results, contender: str) -> float | None:
    """A contender's own best learning rate at `TUNED_AT`, of those that were tried; None before any was."""
    contender = KNOWN[contender].like or contender
    condition = {"hosts": TUNED_AT.hosts, "rate_mbit": TUNED_AT.rate_mbit, "scenario": TUNED_AT.scenario}
    lr: float | None = results.best(lambda run: run["lr"], contender=contender, seed=TUNING_SEED, length=1.0, **condition)
    return lr


def tuned_diloco(results: Results) -> tuple[str, float] | None:
    """The best of the grid, the recommended settings at another learning rate among them: a contender, its learning rate."""
    found = [(name, tuned_lr(results, name)) for name in ("diloco", *GRID)]
    tried = [(name, lr) for name, lr in found if lr is not None]
    if not tried:
        return None
    wanted = {"seed": TUNING_SEED, "hosts": TUNED_AT.hosts, "rate_mbit": TUNED_AT.rate_mbit, "scenario": TUNED_AT.scenario}
    losses = {
        (name, lr): results.of(contender=name, lr=lr, length=1.0, **wanted)[-1]["curve"]["loss"][-1] for name, lr in tried
    }
    return min(losses, key=lambda pair: losses[pair])


def planned(results: Results, task: Task, *, seeds: tuple[int, ...] = SEEDS) -> Iterator[Run]:
    """All runs, as far as what is known says them.

    Args:
        results: so far.
        task: that is trained.
        seeds: that are reported.
    """
    few = HOSTS[0]
    yield from (Run(REFERENCE, lr, 1.0, TUNED_AT, TUNING_SEED) for lr in task.lrs)
    lr = ddp_lr(results)
    if lr is None:
        return
    for name, contender in KNOWN.items():
        if contender.like is None and name != REFERENCE and contender.factors:
            for factor in contender.factors:
                yield Run(name, lr * factor, 1.0, TUNED_AT, TUNING_SEED)
    diloco = tuned_diloco(results)
    if diloco is None:
        return
    rows = [*((name, tuned_lr(results, name) or lr) for name in CONTENDERS), diloco]
    asynchronous = [(name, rate) for name, rate in rows if not KNOWN[name].waits]
    first = [row for row in rows if not KNOWN[row[0]].second]
    unseen = [row for row in rows if not results.of(contender=row[0], hosts=few)]
    shown = [row for row in rows if row[0] == SHOWN]
    yield from (Run(REFERENCE, lr, 1.0, TUNED_AT, seed) for seed in seeds)
    yield from _on_links(shown, LONGER, few, "slow_worker", seeds[0], [SHOWN_MBIT])
    for seed in seeds:
        for length in (1.0, LONGER):
            yield from _on_links(shown, length, few, "equal", seed, [SHOWN_MBIT])
    yield from _on_links(rows[:1], LONGER, few, "equal", seeds[0], [SHOWN_MBIT])
    for seed in seeds:
        yield from _on_links([*unseen, *first, *rows], 1.0, few, "equal", seed, [SHOWN_MBIT])
        yield from _on_links(shown, LONGER, few, "slow_worker", seed, [SHOWN_MBIT])
    for seed in seeds:
        yield from _on_links(shown, LONGER, few, "equal", seed, task.rates_mbit)
        yield from _on_links(rows[:1], LONGER, few, "equal", seed, [SHOWN_MBIT])
    for seed in seeds:
        yield from _on_links(asynchronous, 1.0, few, "equal", seed, task.rates_mbit)
        yield from _on_links(asynchronous, 1.0, few, "slow_worker", seed, task.rates_mbit)
        yield from _on_links(asynchronous, 1.0, few, "slow_link", seed, task.rates_mbit)
    for seed in seeds:
        yield from _on_links(rows, LONGER, few, "equal", seed, [SHOWN_MBIT])
    for seed in seeds:
        yield from _on_links(rows, 1.0, HOSTS[1], "equal", seed, task.rates_mbit)
        yield from _on_links(asynchronous, 1.0, HOSTS[1], "slow_worker", seed, task.rates_mbit)


def _on_links(
    rows: Sequence[tuple[str, float]], length: float, hosts: int, scenario: str, seed: int, rates_mbit: Sequence[float]
) -> Iterator[Run]:
    for name, lr in rows:
        for rate_mbit in rates_mbit[:1] if KNOWN[name].waits else rates_mbit:
            yield Run(name, lr, length, Condition(hosts, rate_mbit, scenario), seed)
