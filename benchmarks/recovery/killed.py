"""What each kill has cost, and what has become of the samples."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from typing import Any

from benchmarks.common import console, print_table
from benchmarks.recovery.runs import run
from benchmarks.recovery.work import STEP_S, WORKERS, Plan, Step, steps_of

CALM, KILLS = Plan(), Plan(kills={3: 4, 6: 7})


def measure(strategy: str) -> dict[str, Any]:
    """Undisturbed, and with two killed."""
    results = {}
    for name, plan in (("undisturbed", CALM), ("two killed", KILLS)):
        console.print(f"{strategy}, {name} …")
        with run(strategy, plan) as folder:
            killed_s = {rank: float((folder / f"killed-{rank}").read_text()) for rank in plan.kills}
            found = account(strategy, steps_of(folder), plan, killed_s)
            results[name] = {**json.loads((folder / "result").read_text()), **found}
    return results


def account(strategy: str, steps: dict[int, list[Step]], plan: Plan, killed_s: dict[int, float]) -> dict[str, Any]:
    """What became of the samples, and what each kill cost."""
    taken = [
        Counter(i for own in steps.values() for step in own if step.epoch == epoch for i in step.samples)
        for epoch in range(plan.epochs)
    ]
    padding = 0 if strategy == "adpsgd" else -plan.samples % WORKERS  # torch's sampler repeats a few
    lengths = []
    for epoch in range(plan.epochs):
        at_s = [step.at_s for own in steps.values() for step in own if step.epoch == epoch]
        lengths.append(max(at_s) - min(at_s))
    costs = []
    for rank, epoch in plan.kills.items():
        nexts = [_next_s(own, killed_s[rank], anew=strategy == "ddp") for own in steps.values()]
        costs.append(
            {
                "rank": rank,
                "next_step_s": round(max(next_s - killed_s[rank] for next_s in nexts if next_s is not None), 3),
                "epoch_longer_s": round(lengths[epoch] - statistics.median(lengths[1:epoch]), 3),
            }
        )
    return {
        "samples_missing": sum(plan.samples - len(counts) for counts in taken),
        "samples_again": sum(max(0, counts.total() - len(counts) - padding) for counts in taken),
        "workers_at_the_end": sum(any(step.epoch == plan.epochs - 1 for step in own) for own in steps.values()),
        "epoch_s": round(statistics.median(lengths), 3),
        "kills": costs,
    }


def _next_s(own: list[Step], killed_s: float, *, anew: bool) -> float | None:
    """A worker's first step after a kill; None for the killed one, which makes no more."""
    before = [step.process for step in own if step.at_s <= killed_s]
    return next((step.at_s for step in own if step.at_s > killed_s and not (anew and step.process == before[-1])), None)


def show(results: dict[str, Any]) -> None:
    rows = []
    for strategy, runs in results.items():
        calm, killed = runs["undisturbed"], runs["two killed"]
        rows.append(
            (
                strategy,
                ", ".join(f"{cost['next_step_s']:.3g}" for cost in killed["kills"]),
                ", ".join(f"{cost['epoch_longer_s']:.3g}" for cost in killed["kills"]),
                f"{killed['samples_missing']}, {killed['samples_again']}",
                f"{killed['test_acc']:.3f} ({calm['test_acc']:.3f})",
                str(killed["workers_at_the_end"]),
            )
        )
    print_table(
        f"Two of {WORKERS} workers killed",
        ("", "next step after, s", "epoch longer, s", "samples missing, again", "accuracy (undisturbed)", "workers at the end"),
        rows,
        caption=f"A step lasts {STEP_S} s. Next step: of the slowest worker.",
    )
