"""How fast the others are while one worker is stopped."""

from __future__ import annotations

from typing import Any

import pandas as pd

from benchmarks.harness import console, print_table
from benchmarks.recovery.runs import run
from benchmarks.recovery.work import STEP_S, WORKERS, Plan

RANK = 3
PLAN = Plan(epochs=1, repeats=45, freeze=(RANK, 100), freeze_s=20.0)
_BEFORE_S, _SETTLED_S, _AFTER_S = 2.5, 0.5, 2.5


def measure(strategy: str) -> dict[str, Any]:
    """One frozen."""
    console.print(f"{strategy}, one frozen …")
    _, steps, happened = run(strategy, PLAN)
    return account(steps, happened["frozen"])


def account(steps: pd.DataFrame, frozen_s: float) -> dict[str, Any]:
    """Steps a second of the others before, while and after; of the one that was frozen, after; samples not trained on."""
    thawed_s = frozen_s + PLAN.freeze_s
    settled_s = thawed_s + _SETTLED_S
    own = steps["rank"] == RANK

    def rate(of: pd.DataFrame, begin_s: float, end_s: float) -> float:
        return round(((of.at_s > begin_s) & (of.at_s <= end_s)).sum() / (end_s - begin_s), 1)

    return {
        "others_before": rate(steps[~own], frozen_s - _BEFORE_S, frozen_s),
        "others_while": rate(steps[~own], frozen_s, thawed_s),
        "others_after": rate(steps[~own], settled_s, settled_s + _AFTER_S),
        "own_before": rate(steps[own], frozen_s - _BEFORE_S, frozen_s),
        "own_after": rate(steps[own], settled_s, settled_s + _AFTER_S),
        "samples_missing": PLAN.samples - steps.samples.explode().nunique(),
    }


def show(results: dict[str, Any]) -> None:
    keys = ("others_before", "others_while", "others_after", "own_before", "own_after", "samples_missing")
    print_table(
        f"One of {WORKERS} workers frozen for {PLAN.freeze_s:g} s: steps a second",
        ("", "the others before", "while", "after", "the frozen one before", "after", "samples missing"),
        [(strategy, *(str(found[key]) for key in keys)) for strategy, found in results.items()],
        caption=f"A step lasts {STEP_S} s.",
    )
