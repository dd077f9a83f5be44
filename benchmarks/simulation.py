"""How fast does the simulator simulate?

Three questions, each answered in a fresh process with one thread, so that its memory is its own:

- many workers: 1,024 workers of AD-PSGD, 100 steps each, times only: under 60 s and 2 GB;
- real gradients: 128 workers of AD-PSGD on digits with a hidden layer of 64, 5 epochs: under 60 s;
- does the time grow with the number of events? 64 to 1,024 workers, 100 steps each: without an epoch, and in one epoch that
  they share, at whose end each asks whether it may still claim a batch.

    python -m benchmarks.simulation [--quick]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import sys
import time
from typing import Any

import torch

from benchmarks.harness import RESULTS, against, axes_of, console, print_table, write_results
from lightning_gossip.simulation import (
    ADPSGD,
    SGD,
    Cluster,
    Epochs,
    Links,
    Objective,
    Result,
    Steps,
    Uniform,
    digits,
    mlp,
    simulate,
)

WORKERS = (64, 128, 256, 512, 1024)
STEPS = 100
MODEL_BYTES, LINKS = 1_000, Links(latency_s=0.001, bandwidth=10_000.0)  # a model takes a tenth of a step
AIM_S, AIM_GB = 60.0, 2.0
KINDS = {"steps": "100 steps each", "epoch": "one shared epoch", "digits": "digits, 5 epochs"}


def run(kind: str, workers: int) -> Result:
    """One simulation."""
    work: Steps | Epochs = Steps(number=STEPS)
    objective: Objective | None = None
    if kind == "epoch":
        work = Epochs(batches=STEPS * workers)
    elif kind == "digits":
        work, objective = Epochs(number=5, batch_size=4), mlp(digits())
    return simulate(
        ADPSGD(topology="exponential"),
        Cluster(workers, Uniform(1.0, 0.1)),
        work=work,
        links=LINKS,
        objective=objective,
        optimizer=SGD(lr=0.1),
        model_bytes=MODEL_BYTES,
    )


def measure(kind: str, workers: int, repeats: int) -> dict[str, Any]:
    """In a fresh process; the fastest of several runs, since other jobs only make it slower."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (kind, workers, repeats))


def _measure(kind: str, workers: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    runs = []
    for _ in range(repeats):
        began_s, cpu_s = time.perf_counter(), time.process_time()
        result = run(kind, workers)
        runs.append((time.process_time() - cpu_s, time.perf_counter() - began_s))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    cpu_s, wall_s = min(runs)
    return {
        "kind": kind,
        "workers": workers,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "peak_gb": peak / 1e9,
        "events": result.events,
        "steps": result.steps,
        "virtual_s": result.time_s,
    }


def exponent(measured: list[dict[str, Any]]) -> float:
    """b of cpu ~ events^b, between the fewest and the most workers; 1 for time that grows with the events alone."""
    first, last = measured[0], measured[-1]
    return math.log(last["cpu_s"] / first["cpu_s"]) / math.log(last["events"] / first["events"])


def row(of: dict[str, Any], *, aims: bool) -> list[str]:
    """One line of the table."""
    return [
        f"{of['workers']:,} workers, {KINDS[of['kind']]}",
        f"{of['steps']:,}",
        f"{of['events']:,}",
        against(of["cpu_s"], AIM_S, at_most=True, digits=1) if aims else f"{of['cpu_s']:.2f}",
        f"{1e6 * of['cpu_s'] / of['events']:.1f}",
        against(of["peak_gb"], AIM_GB, at_most=True) if aims else f"{of['peak_gb']:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory of the simulator.")
    parser.add_argument("--quick", action="store_true", help="one run of each instead of three")
    repeats = 1 if parser.parse_args().quick else 3
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for kind, sizes in {"steps": WORKERS, "epoch": WORKERS, "digits": (128,)}.items():
        by_kind[kind] = []
        for workers in sizes:
            with console.status(f"{workers} workers, {KINDS[kind]}"):
                by_kind[kind].append(measure(kind, workers, repeats))
    columns = ("what", "steps", "events", "seconds", "µs an event", "peak GB")
    print_table(
        "Against the aims",
        columns,
        [row(by_kind["steps"][-1], aims=True), row(by_kind["digits"][0], aims=True)],
        caption=f"Seconds of one core; aims: ≤ {AIM_S:g} s and ≤ {AIM_GB:g} GB, what torch takes when it is imported included.",
    )
    exponents = {kind: exponent(by_kind[kind]) for kind in ("steps", "epoch")}
    for kind, value in exponents.items():
        rows = [row(of, aims=False) for of in by_kind[kind]]
        caption = f"Seconds ~ events^{value:.2f}, from the fewest workers to the most."
        print_table(f"Time against events, {KINDS[kind]}", columns, rows, caption=caption)
    path = write_results("simulation", {"repeats": repeats, "exponents": exponents, "runs": by_kind})
    plot(by_kind)
    console.print(f"Written: {path.relative_to(path.parents[2])} and simulation.png beside it")


def plot(by_kind: dict[str, list[dict[str, Any]]]) -> None:
    """Seconds against events."""
    figure, ((axes,),) = axes_of(width=6)
    for kind, colour in {"steps": "#1b7f5c", "epoch": "#c8553d"}.items():
        runs = by_kind[kind]
        axes.loglog([of["events"] for of in runs], [of["cpu_s"] for of in runs], "o-", color=colour, label=KINDS[kind])
    first = by_kind["steps"][0]
    ends = [by_kind["steps"][place]["events"] for place in (0, -1)]
    axes.loglog(ends, [first["cpu_s"] * e / ends[0] for e in ends], ":", color="#444444", label="linear")
    for of in by_kind["steps"]:
        axes.annotate(
            f"{of['workers']:,}", (of["events"], of["cpu_s"]), xytext=(0, -14), textcoords="offset points", fontsize=8
        )
    axes.set(xlabel="events", ylabel="seconds of one core")
    axes.legend(frameon=False)
    figure.savefig(RESULTS / "simulation.png", dpi=150)


if __name__ == "__main__":
    main()
