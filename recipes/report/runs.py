"""The jobs of a page, read from the folders of runs and of sweeps."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_gossip import ConfigurationError
from recipes.record import METRICS, RECORD, RunRecord
from recipes.summary import SUMMARY
from recipes.sweep import FAILED

ACCURACY, LOSS, WALL = "val_acc", "train_loss", "time/wall_s"
_HYDRA = ".hydra"
_NOT_AN_OPTION = ("seed", "run_dir", "logger")  # what may differ inside a group


@dataclass(frozen=True)
class Job:
    """One finished run.

    Args:
        folder: where it lies.
        seed: that it was called with; empty if it was called without.
        options: what else it was called with; ``strategy`` and ``recipe`` always among them.
        config: its whole configuration, by dotted name; empty where none was kept.
        summary: what it came to.
        epochs: one row an epoch: metrics at its end, ``time/wall_s`` among them.
        ended: when its summary was written.
        epochs_before: how many epochs were trained before it was resumed; the workers' accounts are without them.
    """

    folder: Path
    seed: str
    options: dict[str, str]
    config: dict[str, str]
    summary: dict[str, Any]
    epochs: list[dict[str, float]]
    ended: datetime
    epochs_before: int = 0

    @property
    def workers(self) -> list[dict[str, Any]]:
        """The account of each worker."""
        workers: list[dict[str, Any]] = self.summary["workers"]
        return workers

    @property
    def samples(self) -> int:
        """Trained on by all workers together."""
        return sum(worker["samples"] for worker in self.workers)

    def curve(self, metric: str) -> list[tuple[float, float, float]]:
        """Of each epoch that has the metric: seconds and samples at its end, and the metric.

        An epoch covers each sample once, so that the samples are spread evenly over the epochs.
        """
        each = self.samples / max(len(self.epochs) - self.epochs_before, 1)
        return [
            (row[WALL], each * number, row[metric])
            for number, row in enumerate(self.epochs, start=1)
            if math.isfinite(row.get(metric, math.nan))
        ]

    def worker_values(self, name: str) -> list[float]:
        """Of the workers that have such a thing."""
        return [worker[name] for worker in self.workers if worker.get(name) is not None]


@dataclass(frozen=True)
class Unfinished:
    """A run that left no result.

    Args:
        folder: where it lies.
        overrides: what it was called with.
        reason: what is known of it.
    """

    folder: Path
    overrides: str
    reason: str


def load(folders: list[Path]) -> tuple[list[Job], list[Unfinished]]:
    """The runs in these folders, each once, those of a sweep in the order of their numbers.

    Args:
        folders: of runs and of sweeps.

    Returns:
        Those that finished, and the others.

    Raises:
        ConfigurationError: if a folder does not exist or holds no run, if none has finished, or if runs of several recipes
            have no metrics in common.
    """
    found = {run.resolve(): run for folder in folders for run in _runs_in(folder)}
    read = [_read(run) for run in found.values()]
    jobs = [job for job in read if isinstance(job, Job)]
    unfinished = [job for job in read if isinstance(job, Unfinished)]
    if not jobs:
        raise ConfigurationError(
            f"None of the {len(unfinished)} jobs in {', '.join(map(str, folders))} has finished "
            f"({unfinished[0].folder}: {unfinished[0].reason}). Wait for them, or see their output for why they failed."
        )
    _check_metrics(jobs)
    return jobs, unfinished


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


def _read(folder: Path) -> Job | Unfinished:
    try:
        overrides = _overrides(folder)
    except Exception as error:  # noqa: BLE001 - omegaconf's, yaml's and the file system's have no common base
        return Unfinished(folder, "", f"its overrides cannot be read: {error}")
    text = " ".join(overrides)
    if not (folder / SUMMARY).is_file():
        return Unfinished(folder, text, f"{_failure(folder)}; {_progress(folder)}")
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        record = RunRecord.load(folder)
        config = _config(folder)
        options = dict(_option(override) for override in overrides)
        seed = options.get("seed", "")
        if not (folder / _HYDRA).is_dir():  # started by a program: what the summary says must do
            options = {name: str(summary[name]) for name in ("topology", "world_size", "epochs")}
        options = {name: value for name, value in options.items() if name not in _NOT_AN_OPTION}
        options.setdefault("strategy", summary["strategy"])
        options.setdefault("recipe", _recipe(folder, config))
        ended = datetime.fromtimestamp((folder / SUMMARY).stat().st_mtime)
        return Job(folder, seed, options, config, summary, record.epochs, ended, record.epochs_before)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return Unfinished(folder, text, f"{SUMMARY} or {RECORD} cannot be read: {type(error).__name__}: {error}")


def _overrides(folder: Path) -> list[str]:
    path = folder / _HYDRA / "overrides.yaml"
    if not path.is_file():
        return []
    overrides = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(overrides, list)
    return [str(override) for override in overrides]


def _option(override: str) -> tuple[str, str]:
    name, _, value = override.lstrip("+").partition("=")
    return name, value


def _config(folder: Path) -> dict[str, str]:
    path = folder / _HYDRA / "config.yaml"
    return _flat(OmegaConf.to_container(OmegaConf.load(path))) if path.is_file() else {}


def _flat(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        return {key: text for part, inner in value.items() for key, text in _flat(inner, f"{name}.{part}".lstrip(".")).items()}
    return {name: "null" if value is None else str(value)}


def _recipe(folder: Path, config: dict[str, str]) -> str:
    """Its name where Hydra kept it, else the class of its model."""
    path = folder / _HYDRA / "hydra.yaml"
    choices = OmegaConf.select(OmegaConf.load(path), "hydra.runtime.choices") if path.is_file() else None
    if choices is not None and choices.get("recipe"):
        return str(choices["recipe"])
    return config.get("recipe.model._target_", "unknown").rpartition(".")[2]


def _failure(folder: Path) -> str:
    path = folder / FAILED
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return f"failed: {lines[0]}" if lines else f"no {SUMMARY}: stopped or still running"


def _progress(folder: Path) -> str:
    path = folder / METRICS
    rows = len(path.read_text(encoding="utf-8").splitlines()) - 1 if path.is_file() else 0
    return "no epoch done" if rows < 1 else "1 epoch done" if rows == 1 else f"{rows} epochs done"


def _check_metrics(jobs: list[Job]) -> None:
    """Several recipes on one page need the metrics that it draws in all of them, or in none."""
    has: dict[str, Path] = {}
    for job in jobs:
        names = " and ".join(name for name in (ACCURACY, LOSS) if job.curve(name)) or "neither"
        has.setdefault(names, job.folder)
    if len({job.options["recipe"] for job in jobs}) > 1 and len(has) > 1:
        said = "; ".join(f"{folder} has {names}" for names, folder in has.items())
        raise ConfigurationError(
            f"The runs are of several recipes with different metrics ({said}). Make one page for each recipe."
        )
