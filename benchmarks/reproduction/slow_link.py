"""One link of 16 workers is 2 to 100 times slower: who notices? (AD-PSGD: only the workers at its two ends.)

A model takes a tenth of a step on a link that is not slow. Times are those of an epoch without gradients. How far the models
are from their mean is measured with real ones: a quadratic whose gradients are all noise, so that the distances settle where
averaging balances the noise; at the end of each epoch nobody takes the mean over (``at_rendezvous="evaluate"``).

The epoch's end is the only place where AD-PSGD waits for a slow link: for an exchange that is under way on it, and for the
rendezvous' all-reduce, which goes over it. The second table has both beside the growth of the epoch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.reproduction.report import COLOURS, Report, axes_of, plain_ticks, progress
from lightning_gossip.simulation import (
    ADPSGD,
    DPSGD,
    SGD,
    AllReduce,
    Cluster,
    Epochs,
    Links,
    Quadratic,
    Result,
    Strategy,
    Uniform,
    simulate,
)
from lightning_gossip.simulation.cluster.collective_costs import ring_all_reduce_s

WORKERS = 16
STEPS = 200
FACTORS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
LAW = Uniform(1.0, 0.1)
MODEL_BYTES, BANDWIDTH = 1_000, 10_000.0  # a model takes 0.1 s, a step 1 s
ENDS = (0, 1)  # neighbours on both graphs
TIMED: dict[str, Strategy] = {
    "AD-PSGD": ADPSGD(topology="exponential"),
    "AD-PSGD, ring": ADPSGD(),
    "D-PSGD": DPSGD(),
    "all-reduce, overlapped": AllReduce(),
    "all-reduce": AllReduce(overlap=False),
}
DRIFT_STEPS, DRIFT_EPOCHS, DRIFT_DISCARDED = 50, 14, 4
SEEDS = (0, 1)


def links(factor: float) -> Links:
    """All equal but the one between the two ends."""
    return Links.one_slow(*ENDS, factor, bandwidth=BANDWIDTH)


@cache
def timed(strategy: Strategy, factor: float, *, workers: int = WORKERS, steps: int = STEPS) -> Result:
    """Two epochs without gradients."""
    work = Epochs(number=2, batches=steps * workers)
    return simulate(strategy, Cluster(workers, LAW), work=work, links=links(factor), model_bytes=MODEL_BYTES)


def epoch_s(strategy: Strategy, factor: float, *, workers: int = WORKERS, steps: int = STEPS) -> float:
    """Seconds of the second epoch."""
    return timed(strategy, factor, workers=workers, steps=steps).epoch_times_s[1]


def exchanges(strategy: Strategy, factor: float, *, workers: int = WORKERS) -> tuple[float, float]:
    """Exchanges a step: of the two ends, and of the others."""
    accounts = timed(strategy, factor, workers=workers).workers
    rates = np.array([account.exchanges / account.steps for account in accounts])
    return float(rates[list(ENDS)].mean()), float(np.delete(rates, ENDS).mean())


def ends_cost_s(factor: float, *, workers: int = WORKERS) -> tuple[float, float]:
    """Seconds at an epoch's end: of an exchange over the slow link, and of the rendezvous' all-reduce."""
    return factor * MODEL_BYTES / BANDWIDTH, ring_all_reduce_s(links(factor), workers, MODEL_BYTES)


def drift(strategy: ADPSGD, factor: float, *, workers: int = WORKERS, epochs: int = DRIFT_EPOCHS) -> tuple[float, float]:
    """Mean squared distance to the mean of all models: of the two ends, and of the others."""
    squares = []
    for seed in SEEDS:
        result = simulate(
            replace(strategy, at_rendezvous="evaluate"),
            Cluster(workers, LAW),
            work=Epochs(number=epochs, batches=DRIFT_STEPS * workers),
            links=links(factor),
            objective=Quadratic([0.1] * 50, noise=1.0, start_at=0.0),
            optimizer=SGD(lr=0.1),
            model_bytes=MODEL_BYTES,
            seed=seed,
        )
        squares += [epoch.distances for epoch in result.epochs[DRIFT_DISCARDED:]]
    by_rank = np.array(squares).mean(0)
    return float(by_rank[list(ENDS)].mean()), float(np.delete(by_rank, ENDS).mean())


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    times = {name: [epoch_s(strategy, factor) for factor in FACTORS] for name, strategy in TIMED.items()}
    drifts: dict[str, list[tuple[float, float]]] = {}
    for name in ("AD-PSGD", "AD-PSGD, ring"):
        strategy = TIMED[name]
        assert isinstance(strategy, ADPSGD)
        with progress(f"the models' drift, {name}"):
            drifts[name] = [drift(strategy, factor) for factor in FACTORS]
    report.table(
        f"Epoch time over that with equal links; {WORKERS} workers, {STEPS * WORKERS:,} batches",
        ("strategy", *(f"{factor:g}×" for factor in FACTORS[1:])),
        [[name, *(f"{value / values[0]:.3f}" for value in values[1:])] for name, values in times.items()],
        caption="AD-PSGD on the exponential graph where nothing is said; D-PSGD on the ring, overlapped.",
    )
    growth = [value - times["AD-PSGD"][0] for value in times["AD-PSGD"]]
    costs = [ends_cost_s(factor) for factor in FACTORS]
    report.table(
        "AD-PSGD, exponential: where the epoch's growth comes from, seconds",
        ("", *(f"{factor:g}×" for factor in FACTORS)),
        [
            ["epoch's growth", *(f"{value:.2f}" for value in growth)],
            ["growth of the rendezvous' all-reduce", *(f"{cost - costs[0][1]:.2f}" for _, cost in costs)],
            ["one exchange over the link", *(f"{cost:.2f}" for cost, _ in costs)],
        ],
    )
    rates = {name: [exchanges(TIMED[name], factor) for factor in FACTORS] for name in drifts}
    report.table(
        "AD-PSGD: exchanges a step",
        ("graph", *(f"{factor:g}×" for factor in FACTORS)),
        _of_ends_and_others(rates, "{:.2f}", ratio=False),
    )
    report.table(
        "AD-PSGD: squared distance to the mean model",
        ("graph", *(f"{factor:g}×" for factor in FACTORS)),
        _of_ends_and_others(drifts, "{:.3f}", ratio=True),
        caption=f"Means over {len(SEEDS)} seeds and {DRIFT_EPOCHS - DRIFT_DISCARDED} epochs of {DRIFT_STEPS} steps each.",
    )
    figure, (left, right) = axes_of(2)
    for name, values in times.items():
        left.loglog(FACTORS, [value / values[0] for value in values], "o-", color=COLOURS[name], label=name)
    left.set(xlabel="slowness of one link of 16 workers", ylabel="epoch time / with equal links")
    plain_ticks(left.yaxis, (1, 2, 5, 10, 20))
    left.legend(frameon=False, fontsize=8)
    for name, pairs in drifts.items():
        right.loglog(FACTORS, [ends for ends, _ in pairs], "o-", color=COLOURS[name], label=f"{name}: two ends")
        right.loglog(FACTORS, [others for _, others in pairs], "o:", color=COLOURS[name], label=f"{name}: others")
    right.set(xlabel="slowness of one link of 16 workers", ylabel="squared distance to the mean model")
    plain_ticks(right.yaxis, (0.5, 1, 2, 4))
    right.set_ylim(0.5, 5.0)
    right.legend(frameon=False, fontsize=8)
    for panel in (left, right):
        plain_ticks(panel.xaxis, FACTORS, suffix="×")
    report.figure(figure)
    return {"workers": WORKERS, "steps": STEPS, "law": repr(LAW), "model_over_step": MODEL_BYTES / BANDWIDTH, "seeds": SEEDS}


def _of_ends_and_others(values: dict[str, list[tuple[float, float]]], how: str, *, ratio: bool) -> list[list[str]]:
    rows = []
    for name, pairs in values.items():
        graph = "ring" if "ring" in name else "exponential"
        rows.append([f"{graph}: two ends", *(how.format(ends) for ends, _ in pairs)])
        rows.append([f"{graph}: the {WORKERS - len(ENDS)} others", *(how.format(others) for _, others in pairs)])
        if ratio:
            rows.append([f"{graph}: ends / others", *(f"{ends / others:.2f}" for ends, others in pairs)])
    return rows
