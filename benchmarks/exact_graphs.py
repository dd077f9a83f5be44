"""How many rounds and bytes until all models are their mean? Graphs that change from round to round beside those that do not.

Independent standard normal models; a fixed graph never gets there, so for it the rounds count until the consensus distance is
10⁻⁶ of what it was. And one exact average over slow links: the rounds of an exact graph beside a ring all-reduce, in the
simulator's costs.

    python -m benchmarks.exact_graphs
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, axes_of, console, print_table, write_results
from lightning_gossip.algorithm.topology.exact_graphs import SEQUENCES
from lightning_gossip.algorithm.topology.generators import make_sequence
from lightning_gossip.algorithm.topology.mixing import consensus_distance, spectral_gap
from lightning_gossip.algorithm.topology.sequence import TopologySequence
from lightning_gossip.errors import ConfigurationError
from lightning_gossip.simulation import Links
from lightning_gossip.simulation.cluster.collective_costs import ring_all_reduce_s, transfer_s

FIXED = ("ring", "torus", "exponential", "complete")
SIZES = (6, 8, 25, 32, 64)
FIGURES = (25, 32)
NEAR = 1e-6
ROUNDS = 24
COORDINATES = 256
WIDE = {
    "50 ms, 1 Gbit/s": Links(latency_s=0.05, bandwidth=1.25e8),
    "50 ms, 100 Mbit/s": Links(latency_s=0.05, bandwidth=1.25e7),
}
MODELS = {"1 MB": 1e6, "10 MB": 1e7, "100 MB": 1e8}


def distances(sequence: TopologySequence, rounds: int) -> Iterator[float]:
    """Consensus distance before the first round and after each, over what it was."""
    x = np.random.default_rng(0).standard_normal((sequence.n, COORDINATES))
    first = consensus_distance(x)
    yield 1.0
    for number in range(rounds):
        x = sequence.matrix(number) @ x
        yield consensus_distance(x) / first


def rounds_until_near(sequence: TopologySequence) -> int:
    """Rounds until the consensus distance is :data:`NEAR` of what it was."""
    for number, distance in enumerate(distances(sequence, 10_000)):
        if distance <= NEAR:
            return number
    raise RuntimeError(f"{sequence} does not come near the mean")


def row(name: str, n: int) -> dict[str, Any] | None:
    """What a graph comes to; None where it does not take so many workers."""
    try:
        sequence = make_sequence(name, n)
    except ConfigurationError:
        return None
    rounds = len(sequence) if sequence.is_exact else rounds_until_near(sequence)
    return {
        "graph": name,
        "workers": n,
        "peers": sequence.degree,
        "exact": sequence.is_exact,
        "rounds": rounds,
        "models_sent": rounds * sequence.sends_per_round,
        "deviation": float(np.abs(sequence.product() - 1.0 / n).max()) if sequence.is_exact else None,
        "spectral_gap": spectral_gap(sequence.matrix(0)) if len(sequence) == 1 else None,
    }


def average_s(sequence: TopologySequence, links: Links, nbytes: float) -> float:
    """One exact average by the rounds of a sequence, one after the other."""
    total_s = 0.0
    for number in range(len(sequence)):
        sends = max(len(sequence.receivers(number, rank)) for rank in range(sequence.n))
        total_s += transfer_s(links, 0, 1, nbytes, sharing=max(1, sends))
    return total_s


def slow_links(n: int) -> list[dict[str, Any]]:
    """Seconds of one exact average of n workers."""
    return [
        {
            "links": where,
            "model": size,
            "all_reduce_s": ring_all_reduce_s(links, n, nbytes),
            **{name: average_s(make_sequence(name, n), links, nbytes) for name in ("base_2", "base_3")},
        }
        for where, links in WIDE.items()
        for size, nbytes in MODELS.items()
    ]


def draw() -> None:
    """Consensus distance over rounds."""
    figure, panels = axes_of(1, len(FIGURES), sharey=True)
    for axes, n in zip(panels.flat, FIGURES, strict=True):
        for name in (*FIXED[:3], *SEQUENCES):
            try:
                sequence = make_sequence(name, n)
            except ConfigurationError:
                continue
            values = [max(value, 1e-33) for value in distances(sequence, ROUNDS)]
            label = f"{name}, {sequence.degree} peer{'s' if sequence.degree > 1 else ''} a round"
            axes.semilogy(values, "-" if name in SEQUENCES else "--", lw=1.6, label=label)
        axes.set(title=f"{n} workers", xlabel="round", ylim=(1e-34, 3.0))
        axes.legend(fontsize=7)
    panels.flat[0].set_ylabel("consensus distance, over the first")
    figure.savefig(RESULTS / "exact_graphs.png", dpi=150)


def main() -> None:
    rows = [of for n in SIZES for name in (*FIXED, *SEQUENCES) if (of := row(name, n)) is not None]
    print_table(
        "Rounds and models until all are the mean",
        ("graph", "workers", "peers", "rounds", "models sent by a worker", "spectral gap"),
        [
            [
                of["graph"],
                str(of["workers"]),
                str(of["peers"]),
                f"{of['rounds']}{'' if of['exact'] else ' *'}",
                f"{of['models_sent']:.1f}",
                "" if of["spectral_gap"] is None else f"{of['spectral_gap']:.3f}",
            ]
            for of in rows
        ],
        caption="* to a millionth of the first consensus distance; without it exact to rounding",
    )
    averages = slow_links(32)
    print_table(
        "Seconds of one exact average of 32 workers",
        ("links, each way", "model", "ring all-reduce", "base_2", "base_3"),
        [[of["links"], of["model"], *(f"{of[key]:.3g}" for key in ("all_reduce_s", "base_2", "base_3"))] for of in averages],
    )
    draw()
    worst = max(of["deviation"] for of in rows if of["deviation"] is not None)
    path = write_results("exact_graphs", {"rounds": rows, "averages": averages, "largest_deviation": worst})
    console.print(
        f"Largest deviation of a product from 11ᵀ/n: {worst:.1g} ({math.log2(worst or 1e-300):.0f} bits). Wrote {path}"
    )


if __name__ == "__main__":
    main()
