"""Asynchronous SGD with a server: how stale are the updates? (The SDDE framework, arXiv 2406.11159, as derived in the project.)

In full asynchrony the mean staleness is N − 1 for every law of the compute times: between a worker's pull and its push every
other worker pushes once on the average. The spread depends on the law. N = 16 and free links; the first rounds, in which the
workers still are in the phase in which they started, are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.reproduction.report import Report, axes_of
from lightning_gossip.simulation import Cluster, Constant, Erlang, Exponential, Law, Recording, Steps, Uniform, simulate

WORKERS = 16
ROUNDS, DISCARDED = 3_500, 300
LAWS: dict[str, tuple[Law, float]] = {
    "exponential": (Exponential(1.0), 15.5),
    "Erlang-4": (Erlang(1.0, 4), 7.9),
    "uniform ± 10 %": (Uniform(1.0, 0.1), 1.3),
    "constant": (Constant(1.0), 0.0),
}
"""The law, and the standard deviation that theory gives for N = 16 (papers of the SDDE framework, derived)."""


def staleness(law: Law, *, workers: int = WORKERS, rounds: int = ROUNDS, discarded: int = DISCARDED, seed: int = 0) -> Any:
    """Of every update after the discarded rounds, as an array of numpy."""
    # so much more work than time that no worker is done first: the last ones would meet fewer others
    work, recording = Steps(number=2 * rounds), Recording(staleness=True)
    result = simulate("apsgd", Cluster(workers, law), work=work, recording=recording, seed=seed, until_s=float(rounds))
    assert result.staleness_in_order is not None
    return np.concatenate([np.asarray(values[discarded:]) for values in result.staleness_in_order])


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    drawn = {name: staleness(law) for name, (law, _) in LAWS.items()}
    rows, updates = [], len(drawn["constant"])
    for name, values in drawn.items():
        expected, deviation = LAWS[name][1], float(values.std())
        off = f"{100 * (deviation / expected - 1):+.1f} %" if expected else "–"
        rows.append(
            [
                name,
                f"{values.mean():.3f}",
                f"{deviation:.2f}",
                f"{expected:g}",
                off,
                f"{np.quantile(values, 0.95):.0f}",
                f"{values.max()}",
            ]
        )
    report.table(
        f"Staleness of A-PSGD, {WORKERS} workers; N − 1 = {WORKERS - 1}",
        ("compute times", "mean", "spread", "expected spread", "off by", "95 %", "largest"),
        rows,
        caption=f"About {ROUNDS:,} steps of each worker, the first {DISCARDED} discarded; {updates:,} updates are left.",
    )
    figure, (axes,) = axes_of(1, width=7.0)
    for name, values in drawn.items():
        counts = np.bincount(values, minlength=61)[:61] / len(values)
        axes.step(range(61), np.maximum(counts, 1e-5), where="mid", label=name)
    axes.axvline(WORKERS - 1, color="#444444", linestyle=":", label="N − 1")
    axes.set(xlabel="staleness of an update", ylabel="share of updates", yscale="log", ylim=(1e-4, 1.5))
    axes.legend(frameon=False)
    report.figure(figure)
    return {"workers": WORKERS, "rounds": ROUNDS, "discarded": DISCARDED}
