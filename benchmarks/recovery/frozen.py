"""How fast the others are while one worker is stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import console, print_table
from benchmarks.recovery.runs import run
from benchmarks.recovery.work import STEP_S, WORKERS, Plan, Step, steps_of

RANK = 3
PLAN = Plan(epochs=1, repeats=45, freeze=(RANK, 100), freeze_s=20.0)
_BEFORE_S, _SETTLED_S, _AFTER_S = 2.5, 0.5, 2.5


def measure(strategy: str) -> dict[str, Any]:
    """One frozen."""
    console.print(f"{strategy}, one frozen …")
    with run(strategy, PLAN) as folder:
        return account(steps_of(folder), float((folder / "frozen").read_text()))


def account(steps: dict[int, list[Step]], frozen_s: float) -> dict[str, Any]:
    """Steps a second of the others before, while and after; of the one that was frozen, after; samples not trained on."""
    others = [step.at_s for rank, own in steps.items() if rank != RANK for step in own]
    own = [step.at_s for step in steps[RANK]]
    thawed_s = frozen_s + PLAN.freeze_s
    after_s = (thawed_s + _SETTLED_S, thawed_s + _SETTLED_S + _AFTER_S)
    return {
        "others_before": _rate(others, frozen_s - _BEFORE_S, frozen_s),
        "others_while": _rate(others, frozen_s, thawed_s),
        "others_after": _rate(others, *after_s),
        "own_before": _rate(own, frozen_s - _BEFORE_S, frozen_s),
        "own_after": _rate(own, *after_s),
        "samples_missing": PLAN.samples - len({i for own in steps.values() for step in own for i in step.samples}),
    }


def _rate(at_s: Sequence[float], begin_s: float, end_s: float) -> float:
    return round(sum(begin_s < each <= end_s for each in at_s) / (end_s - begin_s), 1)


def show(results: dict[str, Any]) -> None:
    keys = ("others_before", "others_while", "others_after", "own_before", "own_after", "samples_missing")
    print_table(
        f"One of {WORKERS} workers frozen for {PLAN.freeze_s:g} s: steps a second",
        ("", "the others before", "while", "after", "the frozen one before", "after", "samples missing"),
        [(strategy, *(str(found[key]) for key in keys)) for strategy, found in results.items()],
        caption=f"A step lasts {STEP_S} s.",
    )
