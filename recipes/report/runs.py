"""The runs of a page as tables of pandas, read from the folders of runs and of sweeps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from lightning_gossip import ConfigurationError
from recipes.record import METRICS, RunRecord
from recipes.summary import OF_WORKER, SUMMARY
from recipes.sweep import FAILED

ACCURACY, BITS, LOSS, WALL = "val_acc", "val_bpc", "train_loss", "time/wall_s"
_HYDRA = ".hydra"
_NOT_AN_OPTION = ("seed", "run_dir", "logger")  # what may differ inside a group
_NUMBERS = [
    *("epochs", "test_acc", "test_bpc", "train_s"),
    *("samples_per_s", "consensus_distance", "period_mean", "averagings"),
]


@dataclass(frozen=True)
class Runs:
    """What is known of some runs; ``run`` is the row of a run in ``table``.

    Args:
        table: one row a finished run: its folder, the ``overrides`` of its command line, the ``options`` among them, of which
            ``strategy`` and ``recipe`` are always there, its ``config`` by dotted name, the numbers of its summary, and what
            those of its workers come to.
        workers: one row a worker of a run, with the columns of the summary.
        epochs: one row an epoch of a run: seconds and samples (``s``, ``samples``) at its end, accuracy, loss, and bits per
            character where the recipe is one of text.
        unfinished: one row a run that left no result: its folder, overrides, and the ``reason``.
    """

    table: pd.DataFrame
    workers: pd.DataFrame
    epochs: pd.DataFrame
    unfinished: pd.DataFrame


def load(folders: list[Path]) -> Runs:
    """The runs in these folders, each once, those of a sweep in the order of their numbers.

    Args:
        folders: of runs and of sweeps.

    Raises:
        ConfigurationError: if a folder does not exist or holds no run, if none has finished, or if runs of several recipes
            have no metrics in common.
    """
    found = {run.resolve(): run for folder in folders for run in _runs_in(folder)}
    read = [_read(run) for run in found.values()]
    done = [run for run in read if "reason" not in run]
    unfinished = pd.DataFrame([run for run in read if "reason" in run], columns=["folder", "overrides", "reason"])
    if not done:
        raise ConfigurationError(
            f"None of the {len(read)} jobs in {', '.join(map(str, folders))} has finished "
            f"({read[0]['folder']}: {read[0]['reason']}). Wait for them, or see their output for why they failed."
        )
    workers = pd.concat(
        [pd.DataFrame(run["workers"], columns=OF_WORKER, dtype=float).assign(run=number) for number, run in enumerate(done)]
    )
    epochs = pd.concat([_epochs(run["record"]).assign(run=number) for number, run in enumerate(done)])
    table = pd.DataFrame(done).drop(columns=["workers", "record"])
    table[_NUMBERS] = table.reindex(columns=_NUMBERS).astype(float)
    runs = Runs(_with_workers(table, workers), workers, epochs, unfinished)
    _check_metrics(runs)
    return runs


def option(override: str) -> tuple[str, str]:
    """Name and value in an override of the command line."""
    name, _, value = override.lstrip("+").partition("=")
    return name, value


def _with_workers(table: pd.DataFrame, workers: pd.DataFrame) -> pd.DataFrame:
    """The table, with what its workers' accounts come to."""
    stale = workers.assign(steps=workers.steps.where(workers.staleness_mean.notna()))
    stale["behind"] = stale.steps * stale.staleness_mean
    summed = stale.groupby("run")[["behind", "steps"]].sum()
    of_run = workers.groupby("run").agg(
        bytes_sent=("bytes_sent", "mean"),
        wait_s=("wait_s", "mean"),
        staleness_p95=("staleness_p95", "max"),
        stalest=("staleness_max", "max"),
        dropped=("dropped", "sum"),
        fewest_steps=("steps", "min"),
        most_steps=("steps", "max"),
    )
    of_run["staleness"] = summed.behind / summed.steps
    return table.join(of_run.assign(waiting=of_run.wait_s / table.train_s))


def _epochs(record: RunRecord) -> pd.DataFrame:
    """An epoch covers each sample once, so that the samples are spread evenly over the epochs."""
    each = sum(worker.samples for worker in record.workers) / max(len(record.epochs) - record.epochs_before, 1)
    frame = pd.DataFrame(record.epochs, columns=[WALL, ACCURACY, LOSS, BITS], dtype=float).replace([np.inf, -np.inf], np.nan)
    return frame.assign(s=frame[WALL], number=frame.index + 1, samples=each * (frame.index + 1))


def _runs_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a folder. Give the folder of a run or of a sweep.")
    if _is_run(folder):
        return [folder]
    runs = [path for path in folder.iterdir() if path.is_dir() and _is_run(path)]
    if not runs:
        raise ConfigurationError(
            f"{folder} has no finished job: neither {SUMMARY} nor */{SUMMARY}. Give the folder of a run or of a sweep."
        )
    return sorted(runs, key=lambda run: (len(run.name), run.name))


def _is_run(folder: Path) -> bool:
    return (folder / SUMMARY).is_file() or (folder / _HYDRA).is_dir()


def _read(folder: Path) -> dict[str, Any]:
    """A row of the table, or one of those without a result."""
    run: dict[str, Any] = {"folder": folder, "overrides": []}
    try:
        run["overrides"] = [str(override) for override in _hydra(folder, "overrides") or []]
        if not (folder / SUMMARY).is_file():
            return {**run, "reason": f"{_failure(folder)}; {_progress(folder)}"}
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        config = pd.json_normalize(_hydra(folder, "config") or {}).to_dict("records")
        options = dict(map(option, run["overrides"]))
        seed = options.get("seed", "")
        if not (folder / _HYDRA).is_dir():  # started by a program: what the summary says must do
            options = {name: str(summary[name]) for name in ("topology", "world_size", "epochs")}
        options = {name: value for name, value in options.items() if name not in _NOT_AN_OPTION}
        choices = ((_hydra(folder, "hydra") or {}).get("hydra", {}).get("runtime") or {}).get("choices") or {}
        model = str(config[0].get("recipe.model._target_", "unknown")) if config else "unknown"
        options = {"strategy": summary["strategy"], "recipe": choices.get("recipe") or model.rpartition(".")[2], **options}
        return {
            **run,
            **summary,
            "workers": summary["workers"],
            "seed": seed,
            "options": options,
            "strategy": options["strategy"],
            "recipe": options["recipe"],
            "config": {name: "null" if value is None else str(value) for name, value in (config or [{}])[0].items()},
            "record": RunRecord.load(folder),
            "ended": datetime.fromtimestamp((folder / SUMMARY).stat().st_mtime),
        }
    except Exception as error:  # noqa: BLE001 - omegaconf's, yaml's and the file system's have no common base
        return {**run, "reason": f"cannot be read: {type(error).__name__}: {error}"}


def _hydra(folder: Path, name: str) -> Any:
    """What Hydra wrote down beside a run; None if it was not there."""
    path = folder / _HYDRA / f"{name}.yaml"
    return OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None


def _failure(folder: Path) -> str:
    path = folder / FAILED
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return f"failed: {lines[0]}" if lines else f"no {SUMMARY}: stopped or still running"


def _progress(folder: Path) -> str:
    path = folder / METRICS
    rows = len(path.read_text(encoding="utf-8").splitlines()) - 1 if path.is_file() else 0
    return "no epoch done" if rows < 1 else "1 epoch done" if rows == 1 else f"{rows} epochs done"


def _check_metrics(runs: Runs) -> None:
    """Several recipes on one page need the metrics that it draws in all of them, or in none."""
    has = runs.epochs.groupby("run")[[ACCURACY, LOSS]].count().gt(0).drop_duplicates()
    if runs.table.recipe.nunique() > 1 and len(has) > 1:
        said = "; ".join(
            f"{runs.table.folder[run]} has {' and '.join(name for name in has if row[name]) or 'neither'}"
            for run, row in has.iterrows()
        )
        raise ConfigurationError(
            f"The runs are of several recipes with different metrics ({said}). Make one page for each recipe."
        )
