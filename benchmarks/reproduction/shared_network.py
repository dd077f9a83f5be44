"""128 workers and ResNet-50's size: under which conditions is an AD-PSGD epoch 4 to 8 times faster than all-reduce's?

Everything here that is not AD-PSGD's own is **calibration**: a step of 0.15 s, 10,000 batches an epoch (ImageNet in batches of
128), the bandwidths, and how often links are slow. What the simulator adds is what follows from them. On three kinds of
network, each swept over its bandwidth b:

- ``uniform``: every worker has a port of b, and nothing else limits;
- ``bottleneck``: ports of 100 Gb/s, and all transfers share 128 b fairly;
- ``random``: ports of b, and in each ten seconds each link is 10 times slower with probability 1 %, independently. What a
  transfer finds when it begins holds until it ends, so where an all-reduce over a slow link takes longer than the link
  is slow (16 s at 1 Gb/s), the simulator makes it too long.

25.6 million float32 parameters are 0.819 Gbit. A ring all-reduce moves 1.626 Gbit a worker and step, an exchange 0.819 a
worker. So where a step takes c seconds, and an exchange just as long, an all-reduce after it makes it 1 + 1.626/0.819 = 2.98
times longer, and one behind the backward pass, 2/3 of the step, 2.32 times: with one exchange a step no uniform network gives
more. Ratios above that come with fewer exchanges, or from waiting for the slowest of 128 links.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from benchmarks.reproduction.report import COLOURS, Report, axes_of, plain_ticks, progress
from lightning_gossip.simulation import (
    ADPSGD,
    APSGD,
    DPSGD,
    AllReduce,
    Cluster,
    Epochs,
    Links,
    RandomSlowdowns,
    Strategy,
    Uniform,
    simulate,
)

WORKERS = 128
PARAMETERS = 25_600_000
MODEL_BYTES = 4 * PARAMETERS
COMPUTE_S = 0.15
BATCHES = 10_000
GBIT = 1e9 / 8  # bytes
LATENCY_S = 50e-6
PORTS = 100.0  # Gb/s, of the network with a bottleneck
BANDWIDTHS = (1.0, 1.55, 3.6, 5.5, 10.0, 15.0, 25.0, 100.0)  # Gb/s a worker
SLOW_LINKS = RandomSlowdowns(probability=0.01, factor=10.0, period_s=10.0)
VARIANTS = {  # of the links that are slow at random, at 10 Gb/s
    "0.1 % of links, 10×": RandomSlowdowns(probability=0.001, factor=10.0, period_s=10.0),
    "1 %, 3×": RandomSlowdowns(probability=0.01, factor=3.0, period_s=10.0),
    "1 %, 10×": SLOW_LINKS,
    "1 %, 10×, for 1 s": RandomSlowdowns(probability=0.01, factor=10.0, period_s=1.0),
    "5 %, 10×": RandomSlowdowns(probability=0.05, factor=10.0, period_s=10.0),
}
KINDS = {
    "uniform": "Uniform links of b",
    "bottleneck": f"A shared bottleneck of 128 b behind ports of {PORTS:g} Gb/s",
    "random": "Links of b, 1 % of them 10× slower in any ten seconds",
}
STRATEGIES: dict[str, Strategy] = {
    "AD-PSGD": ADPSGD(topology="exponential"),
    "D-PSGD": DPSGD(),
    "all-reduce, overlapped": AllReduce(),
    "all-reduce": AllReduce(overlap=False),
    "A-PSGD": APSGD(),
}
SYNCHRONOUS = ("D-PSGD", "all-reduce, overlapped", "all-reduce")
ENOUGH = 0.9  # exchanges a step that count as "about one"


class Outcome(NamedTuple):
    """One run: an epoch's seconds, and exchanges a step."""

    epoch_s: float
    exchanges: float


def links(kind: str, gbits: float, *, workers: int = WORKERS, slowdowns: RandomSlowdowns = SLOW_LINKS) -> Links:
    """A kind of network with so many Gb/s a worker."""
    if kind == "bottleneck":
        return Links(latency_s=LATENCY_S, bandwidth=PORTS * GBIT, shared=gbits * workers * GBIT)
    return Links(latency_s=LATENCY_S, bandwidth=gbits * GBIT, slowdowns=slowdowns if kind == "random" else None)


def epoch(strategy: Strategy, net: Links, *, workers: int = WORKERS, batches: int = BATCHES) -> Outcome:
    """One epoch without gradients; the mean of several where the links are slow at random."""
    cluster, work = Cluster(workers, Uniform(COMPUTE_S, 0.1)), Epochs(batches=batches)
    seeds = 1 if net.slowdowns is None or isinstance(strategy, APSGD) else 2 if isinstance(strategy, ADPSGD) else 20
    results = [simulate(strategy, cluster, work=work, links=net, model_bytes=MODEL_BYTES, seed=seed) for seed in range(seeds)]
    return Outcome(
        statistics.fmean(result.epoch_times_s[0] for result in results),
        statistics.fmean(result.exchanges_per_step or 0.0 for result in results),
    )


def cap(*, overlap: bool, workers: int = WORKERS) -> float:
    """A step with an all-reduce over one without, where an exchange takes just as long as a step."""
    moved = 2 * (workers - 1) / workers  # times the time of an exchange, which is 1
    backward = Cluster(workers, Uniform(1.0)).backward_share
    return max(1.0, 1.0 - backward + moved) if overlap else 1.0 + moved


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    swept: dict[str, list[dict[str, Outcome]]] = {}
    for kind in KINDS:
        swept[kind] = []
        for gbits in BANDWIDTHS:
            with progress(f"{kind}, {gbits:g} Gb/s"):
                swept[kind].append({name: epoch(strategy, links(kind, gbits)) for name, strategy in STRATEGIES.items()})
        report.table(
            f"{KINDS[kind]}: seconds an epoch, and times AD-PSGD's",
            ("b, Gb/s", "AD-PSGD", "exchanges a step", *(name for name in STRATEGIES if name != "AD-PSGD")),
            [_row(gbits, outcomes) for gbits, outcomes in zip(BANDWIDTHS, swept[kind], strict=True)],
        )
    report.table(
        f"The largest ratio to all-reduce with at least {ENOUGH} exchanges a step",
        ("network", "overlapped", "at b", "not overlapped", "at b"),
        [
            [
                f"bound, uniform links, 1 exchange: c + m over c, n = {WORKERS}",
                f"{cap(overlap=True):.2f}",
                "–",
                f"{cap(overlap=False):.2f}",
                "–",
            ],
            *([KINDS[kind], *_largest(swept[kind])] for kind in KINDS),
        ],
    )
    with progress("other slow links"):
        _variants(report)
    _plot(report, swept)
    return {"workers": WORKERS, "parameters": PARAMETERS, "compute_s": COMPUTE_S, "batches": BATCHES, "latency_s": LATENCY_S}


def _row(gbits: float, outcomes: dict[str, Outcome]) -> list[str]:
    gossip = outcomes["AD-PSGD"]
    others = [
        f"{outcome.epoch_s:.0f} ({outcome.epoch_s / gossip.epoch_s:.2f}×)"
        for name, outcome in outcomes.items()
        if name != "AD-PSGD"
    ]
    return [f"{gbits:g}", f"{gossip.epoch_s:.1f}", f"{gossip.exchanges:.2f}", *others]


def _largest(outcomes: list[dict[str, Outcome]]) -> list[str]:
    """The largest ratio where there are enough exchanges, overlapped and not, each with its bandwidth."""
    cells = []
    for name in ("all-reduce, overlapped", "all-reduce"):
        ratios = [
            (of[name].epoch_s / of["AD-PSGD"].epoch_s, gbits)
            for gbits, of in zip(BANDWIDTHS, outcomes, strict=True)
            if of["AD-PSGD"].exchanges >= ENOUGH
        ]
        ratio, gbits = max(ratios)
        cells += [f"{ratio:.2f}", f"{gbits:g} Gb/s"]
    return cells


def _variants(report: Report) -> None:
    rows = []
    for what, slowdowns in VARIANTS.items():
        net = links("random", 10.0, slowdowns=slowdowns)
        outcomes = {name: epoch(STRATEGIES[name], net) for name in ("AD-PSGD", *SYNCHRONOUS)}
        rows.append([what, *_row(10.0, outcomes)[1:]])
    report.table(
        "Links of 10 Gb/s that are slow at random in other ways: seconds an epoch, and times AD-PSGD's",
        ("slow links", "AD-PSGD", "exchanges a step", *SYNCHRONOUS),
        rows,
        caption="For 10 s where nothing is said.",
    )


def _plot(report: Report, swept: dict[str, list[dict[str, Outcome]]]) -> None:
    figure, axes = axes_of(3, width=4.6)
    for place, (panel, (kind, outcomes)) in enumerate(zip(axes, swept.items(), strict=True)):
        panel.axhspan(4, 8, color="#e8e2c8", zorder=0, label="paper: 4–8×" if not place else None)
        for name in SYNCHRONOUS:
            ratios = [of[name].epoch_s / of["AD-PSGD"].epoch_s for of in outcomes]
            panel.loglog(BANDWIDTHS, ratios, "-", color=COLOURS[name], label=name if not place else None)
            enough = [of["AD-PSGD"].exchanges >= ENOUGH for of in outcomes]
            for gbits, ratio, full in zip(BANDWIDTHS, ratios, enough, strict=True):
                panel.plot(gbits, ratio, "o", color=COLOURS[name], markerfacecolor=COLOURS[name] if full else "white")
        panel.set(title=KINDS[kind], xlabel="b, Gb/s a worker", ylim=(0.9, 25))
        panel.title.set_fontsize(9)
        plain_ticks(panel.xaxis, BANDWIDTHS)
        plain_ticks(panel.yaxis, (1, 2, 3, 4, 8, 16))
    axes[0].set_ylabel("epoch time / AD-PSGD's")
    axes[0].plot([], [], "o", color="#444444", label=f"≥ {ENOUGH} exchanges a step")
    axes[0].plot([], [], "o", color="#444444", markerfacecolor="white", label="fewer")
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    report.figure(figure)
