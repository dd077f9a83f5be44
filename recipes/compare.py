"""Two values of one option, paired over all else that a sweep varied: ``python -m recipes.compare <folder> --of schedule``.

For each job the mean model is loaded from its checkpoint and its loss on the whole training set computed. Of each pair the
logarithm of the ratio of the two losses counts: its mean says by which factor one setting is better, its standard error how
sure that is.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_gossip import ConfigurationError
from recipes.commands import one_sentence
from recipes.plots import STYLE
from recipes.record import RunRecord
from recipes.summary import SUMMARY

_MODEL, _CONFIG, _OVERRIDES = "model.ckpt", ".hydra/config.yaml", ".hydra/overrides.yaml"


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Args:
        folder: where it lies.
        options: what it was called with.
        summary: what it came to.
        train_loss: of the mean model at the end, on the whole training set.
    """

    folder: Path
    options: dict[str, str]
    summary: dict[str, Any]
    train_loss: float

    def value(self, of: str) -> str:
        """Of an option; empty where the job was called without it."""
        return self.options.get(of, "")

    def setting(self, of: str) -> str:
        """Everything else that it was called with, the seed apart; of each option's name the last part."""
        rest = (item for item in sorted(self.options.items()) if item[0] not in (of, "seed", "experiment"))
        return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in rest)


@dataclass(frozen=True)
class Comparison:
    """Pairs of jobs that differ in one option.

    Args:
        setting: what the pairs have in common, the seed apart.
        names: of the two values of the option, first and second.
        log_ratios: ln(loss with the second / loss with the first), one a pair.
        averagings: of the jobs, first and second, one pair a pair.
    """

    setting: str
    names: tuple[str, str]
    log_ratios: list[float]
    averagings: list[tuple[float, float]]

    @property
    def mean(self) -> float:
        """Mean log ratio."""
        return statistics.fmean(self.log_ratios)

    @property
    def standard_error(self) -> float:
        """Of the mean; nan with a single pair."""
        n = len(self.log_ratios)
        return statistics.stdev(self.log_ratios) / math.sqrt(n) if n > 1 else math.nan


def load(sweep: Path) -> list[Job]:
    """The finished jobs of a sweep, in the order of their numbers.

    Raises:
        ConfigurationError: if there is none.
    """
    folders = sorted((path.parent for path in sweep.glob(f"*/{SUMMARY}")), key=lambda folder: (len(folder.name), folder.name))
    if not folders:
        raise ConfigurationError(f"{sweep} has no finished job (no */{SUMMARY}). Give the folder of a sweep.")
    return [_job(folder) for folder in folders]


def compare(jobs: list[Job], of: str) -> list[Comparison]:
    """Pair the jobs by everything but one option.

    Args:
        jobs: of one sweep.
        of: the option, which has two values in it; the first job's is the first.

    Raises:
        ConfigurationError: if it has not, or nothing pairs.
    """
    values = values_of(jobs, of)
    if len(values) != 2:
        raise ConfigurationError(
            f"The option {of!r} has {len(values)} values in this sweep ({', '.join(values)}), and not two."
        )
    for job in jobs:
        if not 0.0 < job.train_loss < math.inf:
            raise ConfigurationError(f"The training loss of {job.folder} is {job.train_loss}: it has no ratio to another.")
    pairs: dict[tuple[str, str], dict[str, Job]] = defaultdict(dict)  # by setting and seed
    for job in jobs:
        pairs[job.setting(of), job.value("seed")][job.value(of)] = job
    grouped: dict[str, list[tuple[Job, Job]]] = defaultdict(list)
    for (setting, _), pair in pairs.items():
        if len(pair) == 2:
            grouped[setting].append((pair[values[0]], pair[values[1]]))
    if not grouped:
        raise ConfigurationError(f"No two jobs of this sweep differ in {of!r} alone.")
    return [
        Comparison(
            setting,
            (values[0], values[1]),
            [math.log(second.train_loss / first.train_loss) for first, second in both],
            [(first.summary["averagings"] or math.nan, second.summary["averagings"] or math.nan) for first, second in both],
        )
        for setting, both in grouped.items()
    ]


def values_of(jobs: list[Job], of: str) -> list[str]:
    """The values of an option in a sweep, in the order of the jobs."""
    return list(dict.fromkeys(job.value(of) for job in jobs))


def show(comparisons: list[Comparison], console: Console | None = None) -> None:
    """Print a table."""
    first, second = comparisons[0].names
    table = Table(title=f"Training loss of the mean model: {second} ÷ {first}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("setting", overflow="fold")
    for heading in ("pairs", "ratio", "mean log", "± s.e.", "lower in", "averagings"):
        table.add_column(heading, justify="right", no_wrap=True)
    for comparison in comparisons:
        lower = sum(ratio < 0 for ratio in comparison.log_ratios)
        counts = [statistics.fmean(pair[side] for pair in comparison.averagings) for side in (0, 1)]
        table.add_row(
            comparison.setting or "–",
            str(len(comparison.log_ratios)),
            f"{math.exp(comparison.mean):.3f}",
            f"{comparison.mean:+.3f}",
            f"{comparison.standard_error:.3f}",
            f"{lower} of {len(comparison.log_ratios)}",
            f"{counts[0]:.0f} → {counts[1]:.0f}",
        )
    (console or Console()).print(table)


def draw(jobs: list[Job], of: str, path: Path) -> None:
    """Training loss against epochs, one line a job, one panel a setting, one colour a value of the option."""
    values = values_of(jobs, of)
    settings: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        settings[job.setting(of)].append(job)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * len(settings), 4.2), layout="constrained")
        panels = figure.subplots(1, len(settings), squeeze=False)[0]
        for axes, (setting, members) in zip(panels, settings.items(), strict=True):
            for job in members:
                losses = [row["train_loss"] for row in RunRecord.load(job.folder).epochs]
                number = values.index(job.value(of))
                axes.plot(range(1, len(losses) + 1), losses, color=f"C{number}", lw=1.2, alpha=0.7)
            axes.set(title=setting or "training loss", xlabel="epoch", ylabel="training loss (own models)", yscale="log")
            axes.grid(alpha=0.25)
        for number, value in enumerate(values):
            panels[-1].plot([], [], color=f"C{number}", label=f"{of}={value}")
        panels[-1].legend()
        figure.savefig(path, dpi=150)


def _job(folder: Path) -> Job:
    overrides = OmegaConf.to_container(OmegaConf.load(folder / _OVERRIDES))
    assert isinstance(overrides, list)
    options = dict(str(override).lstrip("+").split("=", 1) for override in overrides)
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    return Job(folder, options, summary, _train_loss(folder))


@torch.no_grad()
def _train_loss(folder: Path) -> float:
    cfg = OmegaConf.load(folder / _CONFIG)
    model: LightningModule = instantiate(cfg.recipe.model)
    state = torch.load(folder / _MODEL, map_location="cpu", weights_only=True)
    model.load_state_dict(state["state_dict"])
    model.eval()
    data: LightningDataModule = instantiate(cfg.recipe.data)
    total, count = 0.0, 0
    for images, labels in data.train_dataloader():
        total += float(model.loss(model(images), labels)) * len(labels)  # type: ignore[operator]
        count += len(labels)
    return total / count


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sweep", type=Path, help="folder of a finished sweep")
    parser.add_argument("--of", required=True, help="the option whose two values are compared, for example schedule")
    arguments = parser.parse_args()
    with one_sentence():
        jobs = load(arguments.sweep)
        comparisons = compare(jobs, arguments.of)
    show(comparisons)
    alone = len(jobs) - 2 * sum(len(comparison.log_ratios) for comparison in comparisons)
    if alone:
        print(f"{alone} of the {len(jobs)} finished jobs have no partner and are left out.")
    draw(jobs, arguments.of, arguments.sweep / "comparison.png")
    print(f"The curves are in {arguments.sweep / 'comparison.png'}")


if __name__ == "__main__":
    main()
