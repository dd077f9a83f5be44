"""Runs that differ in their seed alone, taken together and ranked against a baseline: a table with one row a group."""

from __future__ import annotations

import numpy as np
import pandas as pd

from lightning_gossip import ConfigurationError
from recipes.report.runs import ACCURACY, Runs

_BASELINE = "ddp"
# Vega's ten, from which the colours of recipes.plots are too
COLOURS = ["#4C78A8", "#F58518", "#54A24B", "#E45756", "#B279A2", "#72B7B2", "#9D755D", "#EECA3B", "#FF9DA6", "#79706E"]
DASHES = ["-", "--", ":", "-."]
_MEASURED = [
    *("test_acc", "test_bpc", "train_s", "reached_s", "epochs", "best"),
    *("samples_per_s", "consensus_distance", "averagings", "period_mean"),
    *("bytes_sent", "waiting", "staleness", "staleness_p95", "stalest", "dropped", "fewest_steps", "most_steps"),
]


def group(runs: Runs) -> Runs:
    """The runs with a ``label`` that names what sets a run apart from the others, the seed apart.

    The table gets a ``colour`` and a ``dash`` too: a strategy has one colour and its settings different dashes, where these
    suffice.
    """
    options = pd.DataFrame(runs.table.options.tolist())
    differing = [name for name in options if options[name].nunique(dropna=False) > 1]
    short = [name.rpartition(".")[2] for name in differing]
    names = {name: last if short.count(last) == 1 else name for name, last in zip(differing, short, strict=True)}

    def label(of: dict[str, str]) -> str:
        parts = [of[n] if n == "strategy" else f"{names[n]}={of[n]}" for n in differing if n in of]
        return ", ".join(parts) or ("defaults" if differing else of["strategy"])

    table = runs.table.assign(label=runs.table.options.map(label))
    groups = table.drop_duplicates("label").set_index("label")
    number, strategy = np.arange(len(groups)), pd.factorize(groups.strategy)[0]
    setting = groups.groupby("strategy").cumcount().to_numpy()
    if strategy.max() == 0 or strategy.max() >= len(COLOURS) or setting.max() >= len(DASHES):
        strategy, setting = number % len(COLOURS), number // len(COLOURS) % len(DASHES)
    table["colour"] = table.label.map(dict(zip(groups.index, np.take(COLOURS, strategy), strict=True)))
    table["dash"] = table.label.map(dict(zip(groups.index, np.take(DASHES, setting), strict=True)))
    of_run = table[["label", "colour", "dash"]]
    return Runs(table, runs.workers.join(of_run, on="run"), runs.epochs.join(of_run, on="run"), runs.unfinished)


def rank(runs: Runs, *, baseline: str | None = None, target: float | None = None) -> pd.DataFrame:
    """Every group a row: those of one recipe together, among them those of one baseline, best first.

    Best is who reaches the target first, then who has the higher test accuracy. A group is measured against the baseline that
    was called with most of the same options: under a slow worker, the one under a slow worker. NaN is what is not known or not
    reached.

    Args:
        runs: of :func:`group`.
        baseline: strategy or label of the groups to measure against; if None ``ddp``, or the first group where there is none.
        target: validation accuracy to which times are taken, in (0, 1]; if None the lowest that the runs of the baseline
            reached at best, rounded down to a whole per cent; of each recipe.

    Returns:
        By label: means over the seeds, and what ends with ``_min`` and ``_max`` the lowest and highest of the seeds; ``seeds``
        and, of these, ``arrived``; the label of its ``baseline`` and its ``place`` among those that have the same;
        ``speedup`` (baseline's training time ÷ this one's, at equal epochs) and ``speedup_to_target``; the ``difference`` of
        the test accuracies; ``bytes_ratio`` to the group ``bytes_reference``.

    Raises:
        ConfigurationError: if there is no such baseline, or the target is out of its range.
    """
    if target is not None and not 0.0 < target <= 1.0:
        raise ConfigurationError(f"target={target} is not an accuracy in (0, 1]. Write 0.9 for 90 %.")
    table, epochs, name = runs.table.copy(), runs.epochs, baseline or _BASELINE
    recipes = table.groupby("recipe", sort=False)
    is_base = (table.strategy == name) | (table.label == name)
    if baseline is not None and not is_base.any():
        there = ", ".join(table.strategy.unique())
        raise ConfigurationError(f"No finished run has the baseline {baseline!r}. There are: {there}.")
    none = ~is_base.groupby(table.recipe).transform("any")
    table["is_base"] = is_base | (none & (table.label == recipes.label.transform("first")))
    table["best"] = epochs.groupby("run")[ACCURACY].max()
    lowest = table.best.where(table.is_base).groupby(table.recipe).transform("min")
    # the nudge: 0.97 in 32 bits is below 0.97
    table["target"] = lowest.map(lambda acc: np.floor(100 * acc + 1e-4) / 100 or acc) if target is None else target
    wanted = table.target[epochs.run].to_numpy() - 1e-6  # accuracies are of 32 bits
    table["reached_s"] = epochs[epochs[ACCURACY] >= wanted].groupby("run").s.first()
    return _against(_means(table), recipes.ngroup().groupby(table.label).first())


def _means(table: pd.DataFrame) -> pd.DataFrame:
    """By label."""
    by_label = table.groupby("label", sort=False)
    groups = by_label[_MEASURED].agg(["mean", "min", "max"])
    groups.columns = pd.Index([name if how == "mean" else f"{name}_{how}" for name, how in groups.columns])
    groups = groups.join(by_label[["recipe", "strategy", "options", "colour", "dash", "is_base", "target"]].first())
    groups = groups.assign(seeds=by_label.size(), arrived=by_label.reached_s.count())
    return groups.assign(reached_s=groups.reached_s.where(groups.arrived == groups.seeds))


def _against(groups: pd.DataFrame, recipe: pd.Series[int]) -> pd.DataFrame:
    """The groups beside their baselines, ranked."""
    bases = groups[groups.is_base]

    def nearest(of: pd.Series[str]) -> str:
        if of.is_base:
            return str(of.name)
        there = bases.options[bases.recipe == of.recipe]
        return str(there.map(lambda options: len(options.items() & of.options.items())).idxmax())

    groups["baseline"] = groups.apply(nearest, axis=1)
    other = groups.loc[groups.baseline].set_axis(groups.index)
    alike = (groups.epochs_min == other.epochs_min) & (groups.epochs_max == other.epochs_max)
    groups["speedup"] = (other.train_s / groups.train_s).where(alike)
    groups["speedup_to_target"] = other.reached_s / groups.reached_s
    groups["difference"] = groups.test_acc - other.test_acc
    counted = groups[groups.bytes_sent > 0].sort_values("is_base", ascending=False, kind="stable").reset_index()
    groups["bytes_reference"] = groups.recipe.map(counted.groupby("recipe").label.first())
    groups["bytes_ratio"] = groups.bytes_sent / groups.bytes_sent.reindex(groups.bytes_reference).to_numpy()
    groups = groups.assign(recipe_place=recipe, base_place=groups.index.get_indexer(groups.baseline), worse=-groups.test_acc)
    groups = groups.sort_values(["recipe_place", "base_place", "reached_s", "worse"])
    return groups.assign(place=groups.groupby("baseline").cumcount() + 1).reset_index()
