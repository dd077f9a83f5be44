"""Arrivals of updates at a server: how near are they to a Poisson process? (The SDDE framework, arXiv 2406.11159, assumes one.)

N workers that pull right after they push are N renewal processes, and their superposition is what the server sees. Beside a
Poisson process of the same rate stand: the law of the time between two arrivals, by the largest difference of the distribution
functions, and how much the number of arrivals in a window varies, by its variance over its mean (Poisson: 1). A window much
shorter than a step sees each worker once at most, and so Poisson arrivals; a much longer one sees each worker's own rhythm,
whose variance over its mean is cv², the squared coefficient of variation of a step (renewal theory).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.reproduction.report import Report, axes_of, progress
from lightning_gossip.simulation import Constant, Erlang, Exponential, Law, LogNormal, Uniform

LAWS: dict[str, tuple[Law, float]] = {
    "exponential": (Exponential(1.0), 1.0),
    "lognormal, cv 1.5": (LogNormal(1.0, float(np.sqrt(np.log(1.0 + 1.5**2)))), 2.25),
    "Erlang-4": (Erlang(1.0, 4), 0.25),
    "uniform ± 30 %": (Uniform(1.0, 0.3), 0.03),
    "constant, in other phases": (Constant(1.0), 0.0),
}
"""The law of a step, and cv²."""
WORKERS = (2, 4, 16, 64, 256)
SHOWN = 16
STEPS, SETTLING = 4_000, 100  # of each worker
WINDOWS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # in steps


def arrivals(law: Law, workers: int, *, steps: int = STEPS, settling: int = SETTLING, seed: int = 0) -> npt.NDArray[np.float64]:
    """When updates arrive, in steps; all workers begin anywhere in a step, and the first ``settling`` steps are left out."""
    generators = np.random.default_rng(seed).spawn(workers)
    times = [generator.random() + np.cumsum(law.draw(generator, steps, 0)) for generator in generators]
    every = np.sort(np.concatenate(times))
    return every[(every > settling) & (every < min(own[-1] for own in times))]


def dispersion(times: npt.NDArray[np.float64], window: float) -> float:
    """Variance over mean of the number of arrivals in windows of this length."""
    counts = np.histogram(times, np.arange(times[0], times[-1], window))[0]
    return float(counts.var() / counts.mean())


def distance(times: npt.NDArray[np.float64], rate: float) -> float:
    """The largest difference of the distribution function of the times between arrivals to the exponential one."""
    gaps = np.sort(np.diff(times))
    exponential, steps = -np.expm1(-rate * gaps), np.arange(len(gaps) + 1) / len(gaps)
    return float(max(np.abs(exponential - steps[1:]).max(), np.abs(exponential - steps[:-1]).max()))


def show(report: Report) -> dict[str, Any]:
    """Run it, and put it on the report."""
    with progress("arrivals"):
        drawn = {
            name: {n: arrivals(law, n, steps=max(400, STEPS * 16 // n)) for n in WORKERS} for name, (law, _) in LAWS.items()
        }
    report.table(
        "Times between two arrivals: largest difference to the exponential distribution function",
        ("step times", *(f"N = {n}" for n in WORKERS)),
        [[name, *(f"{distance(times, n):.3f}" for n, times in by.items())] for name, by in drawn.items()],
        caption="0.009 is what 64,000 draws of an exponential law pass in 1 of 10,000 cases.",
    )
    report.table(
        f"Number of arrivals in a window: variance over mean, {SHOWN} workers",
        ("step times", *(f"{window:g} steps" for window in WINDOWS), "cv²"),
        [
            [name, *(f"{dispersion(drawn[name][SHOWN], window):.2f}" for window in WINDOWS), f"{squared:g}"]
            for name, (_, squared) in LAWS.items()
        ],
        caption="1 for a Poisson process, whatever the window; sampling errors of about 0.1 in the last column but one.",
    )
    report.figure(_figure(drawn))
    return {"workers": WORKERS, "windows": WINDOWS, "steps": STEPS, "settling": SETTLING}


def _figure(drawn: dict[str, dict[int, npt.NDArray[np.float64]]]) -> Any:
    figure, (gaps, windows) = axes_of(2, width=5.6)
    wait = np.linspace(0.0, 5.0, 200)
    for n in WORKERS[:4]:
        between = np.sort(np.diff(drawn["Erlang-4"][n]) * n)
        gaps.plot(wait, 1.0 - np.searchsorted(between, wait) / len(between), label=f"Erlang-4, N = {n}")
    gaps.plot(wait, np.exp(-wait), ":", color="#444444", label="Poisson")
    gaps.set(xlabel="time between two arrivals, times λ", ylabel="share that is longer", yscale="log", ylim=(2e-3, 1.1))
    gaps.legend(frameon=False, fontsize=8)
    for name in LAWS:
        windows.plot(WINDOWS, _dispersions(drawn[name][SHOWN]), "o-", ms=4, label=name)
    windows.axhline(1.0, color="#444444", linestyle=":", label="Poisson")
    windows.set(xlabel=f"window, steps of a worker ({SHOWN} workers)", ylabel="variance / mean of arrivals", xscale="log")
    windows.legend(frameon=False, fontsize=8)
    return figure


def _dispersions(times: npt.NDArray[np.float64]) -> Sequence[float]:
    return [dispersion(times, window) for window in WINDOWS]
