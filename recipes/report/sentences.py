"""What was run, and what came out, in sentences computed from the runs."""

from __future__ import annotations

from typing import Any

import pandas as pd

from recipes.report.units import Unit, count, listed, percent, points, times


def what_was_run(table: pd.DataFrame) -> str:
    """Recipe, workers, epochs, groups, seeds and date."""
    recipes, strategies, seeds = table.recipe.unique(), table.strategy.unique(), table.label.value_counts()
    epochs, workers = (sorted(set(table[name].astype(int))) for name in ("epochs", "world_size"))
    low, high = int(seeds.min()), int(seeds.max())
    settings = "" if len(seeds) == len(strategies) else f", in {count(len(seeds), 'setting')}"
    each = f"{low}–{high} runs" if low < high else count(low, "run")
    apart = "" if high == 1 else " that differ in their seed alone"
    return (
        f"The {'recipe' if len(recipes) == 1 else 'recipes'} {listed(recipes)} trained for "
        f"{listed(epochs)} {'epoch' if epochs == [1] else 'epochs'} on {listed(workers)} "
        f"{'worker' if workers == [1] else 'workers'} with the {'strategy' if len(strategies) == 1 else 'strategies'} "
        f"{listed(strategies)}{settings}: {each} of each{apart}, {count(len(table), 'run')} in all, "
        f"finished {_when(table.ended)}."
    )


def headline(rows: pd.DataFrame, unit: Unit) -> str:
    """Who was first at the target, what that did to the test accuracy, and whose that is highest.

    Args:
        rows: of the ranking, with one baseline.
        unit: for times.
    """
    first, *others = rows.itertuples()
    highest, fastest = rows.loc[rows.test_acc.idxmax()], rows.loc[rows.train_s.idxmin()]
    goal = f"{percent(first.target, 0)} validation accuracy"
    if not others:
        when = f", and {goal} after {unit.text(first.reached_s)}" if first.reached_s > 0 else ""
        return (
            f"{first.label} reached {percent(first.test_acc, 2)} test accuracy in {unit.text(first.train_s)}{when}. "
            "There is nothing to compare it with on this page."
        )
    if pd.isna(first.reached_s):
        return (
            f"{'' if pd.isna(first.target) else f'None reached {goal} with every seed. '}"
            f"{highest.label} has the highest test accuracy, {percent(highest.test_acc, 2)}; "
            f"{fastest.label} took the least time for its epochs, {unit.text(fastest.train_s)}."
        )
    said = f"{first.label} was the first to reach {goal}, after {unit.text(first.reached_s)}"
    baseline = rows[rows.label == first.baseline].iloc[0]
    compared = first
    if first.label != first.baseline and first.speedup_to_target > 0:
        ratio = times(first.speedup_to_target).removesuffix("×").strip()
        said += f": {ratio} times as fast as the baseline {first.baseline}{_overlap(first, baseline, unit)}. "
    elif first.label != first.baseline:
        said += f"; the baseline {first.baseline} did not reach it with every seed. "
    elif pd.isna(others[0].reached_s):
        said += "; it is the baseline, and no other reached it with every seed. "
        compared = None
    else:
        compared = others[0]
        said += f"; it is the baseline. {compared.label} came next, after {unit.text(compared.reached_s)}. "
    said += "" if compared is None else f"{_quality(compared, baseline)} "
    if percent(highest.test_acc, 2) != percent(first.test_acc, 2):
        said += f"The highest test accuracy, {percent(highest.test_acc, 2)}, is that of {highest.label}."
    return said.rstrip()


def _quality(row: Any, baseline: Any) -> str:
    accuracy, other = percent(row.test_acc, 2), percent(baseline.test_acc, 2)
    distance = points(abs(row.difference)).lstrip("+")
    if distance == "0":
        return f"Its test accuracy is that of {baseline.label}, {accuracy}."
    side = "above" if row.difference > 0 else "below"
    compared = f"Its test accuracy of {accuracy} is {distance} points {side} the {other} of {baseline.label}"
    if row.seeds < 2 or baseline.seeds < 2:
        return f"{compared}; without several seeds of both, that may be chance."
    overlap = row.test_acc_min <= baseline.test_acc_max and baseline.test_acc_min <= row.test_acc_max
    return f"{compared}, {'which is within' if overlap else 'more than'} the spread of the seeds."


def _overlap(row: Any, baseline: Any, unit: Unit) -> str:
    """Said where a slow seed of the faster is behind a fast seed of the slower."""
    slowest, fastest = row.reached_s_max, baseline.reached_s_min
    if slowest < fastest:
        return ""
    return f" in the mean, though its slowest run took {unit.text(slowest)} and the baseline's fastest {unit.text(fastest)}"


def _when(ended: pd.Series[pd.Timestamp]) -> str:
    first, last = ended.min(), ended.max()
    day = f"{first.day} {first:%B %Y}"
    if first.date() != last.date():
        return f"between {day} and {last.day} {last:%B %Y}"
    return f"on {day}" if f"{first:%H:%M}" == f"{last:%H:%M}" else f"on {day} between {first:%H:%M} and {last:%H:%M}"
