"""What each kill has cost, and what has become of the samples."""

from __future__ import annotations

from typing import Any

import pandas as pd

from benchmarks.harness import console, print_table
from benchmarks.recovery.runs import run
from benchmarks.recovery.work import STEP_S, WORKERS, Plan

CALM, KILLS = Plan(), Plan(kills={3: 4, 6: 7})
HOLDER, HOLDER_KILLED = Plan(kills={0: 4}), "rank 0 killed, which holds the store"


def measure(strategy: str) -> dict[str, Any]:
    """Undisturbed, and with two killed."""
    found = {}
    for name, plan in (("undisturbed", CALM), ("two killed", KILLS)):
        console.print(f"{strategy}, {name} …")
        accuracy, steps, happened = run(strategy, plan)
        found[name] = {"test_acc": accuracy, **account(strategy, steps, plan, happened)}
    return found


def measure_holder() -> dict[str, Any]:
    """AD-PSGD with the worker killed that holds the store."""
    console.print(f"adpsgd, {HOLDER_KILLED} …")
    accuracy, steps, happened = run("adpsgd", HOLDER)
    return {"test_acc": accuracy, **account("adpsgd", steps, HOLDER, happened)}


def account(strategy: str, steps: pd.DataFrame, plan: Plan, happened: dict[str, float]) -> dict[str, Any]:
    """What became of the samples, and what each kill cost."""
    taken = steps.explode("samples").groupby("epoch").samples
    padding = 0 if strategy == "adpsgd" else -plan.samples % WORKERS  # torch's sampler repeats a few
    lengths = steps.groupby("epoch").at_s.agg(lambda at_s: at_s.max() - at_s.min())
    costs = []
    for rank, epoch in plan.kills.items():
        killed_s = happened[f"killed-{rank}"]
        later = steps[steps.at_s > killed_s]
        if strategy == "ddp":  # all start anew
            later = later[~later.process.isin(steps.process[steps.at_s <= killed_s])]
        costs.append(
            {
                "rank": rank,
                "next_step_s": round(later.groupby("rank").at_s.min().max() - killed_s, 3),
                "epoch_longer_s": round(lengths[epoch] - lengths.loc[1 : epoch - 1].median(), 3),
            }
        )
    return {
        "samples_missing": int((plan.samples - taken.nunique()).sum()),
        "samples_again": int((taken.size() - taken.nunique() - padding).clip(lower=0).sum()),
        "workers_at_the_end": int(steps["rank"][steps.epoch == plan.epochs - 1].nunique()),
        "epoch_s": round(lengths.median(), 3),
        "kills": costs,
    }


def show(results: dict[str, Any]) -> None:
    rows = []
    for strategy, kind in [(strategy, kind) for strategy, runs in results.items() for kind in runs if kind != "undisturbed"]:
        calm, killed = results[strategy]["undisturbed"], results[strategy][kind]
        rows.append(
            (
                f"{strategy}, {kind}",
                ", ".join(f"{cost['next_step_s']:.3g}" for cost in killed["kills"]),
                ", ".join(f"{cost['epoch_longer_s']:.3g}" for cost in killed["kills"]),
                f"{killed['samples_missing']}, {killed['samples_again']}",
                f"{killed['test_acc']:.3f} ({calm['test_acc']:.3f})",
                str(killed["workers_at_the_end"]),
            )
        )
    print_table(
        f"Of {WORKERS} workers some killed",
        ("", "next step after, s", "epoch longer, s", "samples missing, again", "accuracy (undisturbed)", "workers at the end"),
        rows,
        caption=f"A step lasts {STEP_S} s. Next step: of the slowest worker.",
    )
