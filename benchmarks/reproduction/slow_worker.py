"""One worker of 16 computes 2, 10 and 100 times slower: how much longer does an epoch take? (AD-PSGD's table, ResNet-20.)

With shared work the ideal is n / (n − 1 + 1/s): nobody waits, and the slow worker takes what it can. The epoch has
``STEPS`` batches for each of the equal workers. Its end: a worker claims another batch only if it would be done with it
no later than all that still claim could be done with the rest; the last to claim never leaves; each is sure of one batch.
So an epoch that is shorter than one step of the slow worker waits for that step, which the second table shows.
"""

from __future__ import annotations

import statistics
from functools import cache
from typing import Any

from benchmarks.reproduction.report import COLOURS, Report, axes_of, plain_ticks
from lightning_gossip.simulation import (
    ADPSGD,
    APSGD,
    DPSGD,
    QSGD,
    AdaptiveAveraging,
    AllReduce,
    Cluster,
    Epochs,
    Law,
    PeriodicAveraging,
    Strategy,
    Uniform,
    simulate,
)

WORKERS = 16
STEPS = 200
SLOWDOWNS = (1.0, 2.0, 10.0, 100.0)
LENGTHS = (25, 50, 100, 200, 400)  # steps of an equal worker; 25: CIFAR-10 in batches of 128 on 16 workers
LAW = Uniform(1.0, 0.1)
SLOW_RANKS = (4, 5)  # on a ring the even ranks start exchanges and the odd ones answer
SEEDS = (0, 1)
STRATEGIES: dict[str, Strategy] = {
    "AD-PSGD": ADPSGD(),
    "A-PSGD": APSGD(),
    "D-PSGD": DPSGD(),
    "all-reduce (DDP)": AllReduce(),
    "QSGD": QSGD(),
    "constant period 8": PeriodicAveraging(period=8),
    "adaptive period": AdaptiveAveraging(),
}


def ideal(workers: int, slowdown: float) -> float:
    """The epoch's time over that without a slow worker, if nobody ever waits."""
    return workers / (workers - 1 + 1.0 / slowdown)


@cache
def epoch_s(
    strategy: Strategy,
    slowdown: float,
    *,
    rank: int = 5,
    workers: int = WORKERS,
    steps: int = STEPS,
    law: Law = LAW,
    seed: int = 0,
) -> float:
    """Seconds of the second epoch, in which every worker's step time is known; what is sent takes no time."""
    cluster = Cluster.one_slow(workers, law, rank=rank, factor=slowdown)
    return simulate(strategy, cluster, work=Epochs(number=2, batches=steps * workers), seed=seed).epoch_times_s[1]


def ratios(strategy: Strategy, slowdown: float, *, steps: int = STEPS) -> list[float]:
    """Over the epoch's time without a slow worker, for each seed and rank of the slow worker."""
    return [
        epoch_s(strategy, slowdown, rank=rank, steps=steps, seed=seed) / epoch_s(strategy, 1.0, steps=steps, seed=seed)
        for seed in SEEDS
        for rank in SLOW_RANKS
    ]


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    slow = SLOWDOWNS[1:]
    all_ratios = {name: [ratios(strategy, s) for s in slow] for name, strategy in STRATEGIES.items()}
    rows = [["ideal, shared work", *(f"{ideal(WORKERS, s):.3f}" for s in slow), "–"]]
    rows += [
        [name, *(f"{statistics.fmean(values):.3f}" for values in of), f"{max(of[-1]):.3f}"] for name, of in all_ratios.items()
    ]
    report.table(
        f"Epoch time over that without a slow worker; {WORKERS} workers, {STEPS * WORKERS:,} batches an epoch",
        ("strategy", *(f"{s:g}×" for s in slow), f"worst at {slow[-1]:g}×"),
        rows,
        caption=f"Second epoch; means over {len(SEEDS)} seeds and slow ranks {SLOW_RANKS}; steps 1 s ± 10 %; free links.",
    )
    by_length = {steps: [statistics.fmean(ratios(STRATEGIES["AD-PSGD"], s, steps=steps)) for s in slow] for steps in LENGTHS}
    report.table(
        "AD-PSGD: the same for other lengths of the epoch",
        ("steps of an equal worker", "batches", *(f"{s:g}×" for s in slow)),
        [[f"{steps}", f"{steps * WORKERS:,}", *(f"{value:.3f}" for value in values)] for steps, values in by_length.items()],
    )
    figure, (left, right) = axes_of(2)
    colours = {"AD-PSGD": "AD-PSGD", "A-PSGD": "A-PSGD", "D-PSGD": "D-PSGD", "all-reduce (DDP)": "all-reduce, overlapped"}
    for name, colour in colours.items():
        dashed = "--" if name in ("all-reduce (DDP)", "A-PSGD") else "-"
        values = [1.0, *(statistics.fmean(of) for of in all_ratios[name])]
        left.loglog(SLOWDOWNS, values, "o", linestyle=dashed, color=COLOURS[colour], label=name)
    left.set(xlabel="slowdown of one worker of 16", ylabel="epoch time / without a slow worker")
    plain_ticks(left.xaxis, SLOWDOWNS, suffix="×")
    plain_ticks(left.yaxis, (1, 2, 5, 10, 20, 50, 100))
    left.legend(frameon=False)
    for place, s in enumerate(slow):
        right.semilogx(
            LENGTHS,
            [of[place] for of in by_length.values()],
            "o-",
            color=COLOURS["AD-PSGD"],
            alpha=1 - 0.3 * place,
            label=f"{s:g}×",
        )
        right.axhline(ideal(WORKERS, s), color=COLOURS["ideal"], linestyle=":", linewidth=1)
    right.set(xlabel="epoch's length, steps of an equal worker", ylabel="AD-PSGD (dotted: ideal)", ylim=(1.0, 1.5))
    plain_ticks(right.xaxis, LENGTHS)
    right.legend(frameon=False, title="slowdown")
    report.figure(figure)
    return {"workers": WORKERS, "steps": STEPS, "law": repr(LAW), "seeds": SEEDS, "slow_ranks": SLOW_RANKS, "lengths": LENGTHS}
