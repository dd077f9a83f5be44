"""Two values of one option, paired over all else that a sweep varied: ``python -m recipes.compare <folder> --of schedule``.

For each job the mean model is loaded from its checkpoint and its loss on the whole training set computed. Of each pair the
logarithm of the ratio of the two losses counts: its mean says by which factor one setting is better, its standard error how
sure that is.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_gossip import ConfigurationError
from recipes.commands import one_sentence
from recipes.job import be_quiet
from recipes.plots import STYLE
from recipes.report import runs
from recipes.report.runs import LOSS
from recipes.tracking import environment_kept

_MODEL, _CONFIG, _LOSS = "model.ckpt", ".hydra/config.yaml", "val_loss"


def split(jobs: pd.DataFrame, of: str) -> pd.DataFrame:
    """The jobs of a sweep with the ``value`` of an option, empty where a job was called without it, and the ``setting``.

    The setting is everything else that a job was called with, the seed apart; of each option's name the last part.
    """

    def setting(options: dict[str, str]) -> str:
        rest = (item for item in sorted(options.items()) if item[0] not in (of, "seed", "experiment"))
        return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in rest)

    options = jobs.overrides.map(lambda overrides: dict(map(runs.option, overrides)))
    return jobs.assign(setting=options.map(setting), value=options.map(lambda given: given.get(of, "")))


def compare(jobs: pd.DataFrame, of: str) -> pd.DataFrame:
    """Pair the jobs by everything but one option.

    Args:
        jobs: of one sweep; folder, overrides, seed, averagings and train_loss.
        of: the option, which has two values in it; the first job's is the first.

    Returns:
        By setting: how many ``pairs``, ``mean`` and standard error (``se``) of ln(loss with the second value / loss with the
        first), in how many pairs the second's is ``lower``, and the mean number of averagings with the ``first`` and
        the ``second`` value.

    Raises:
        ConfigurationError: if it has not, or nothing pairs.
    """
    jobs = split(jobs, of)
    values = jobs.value.unique()
    if len(values) != 2:
        raise ConfigurationError(
            f"The option {of!r} has {len(values)} values in this sweep ({', '.join(values)}), and not two."
        )
    for job in jobs[~(jobs.train_loss > 0.0) | np.isinf(jobs.train_loss)].itertuples():
        raise ConfigurationError(f"The training loss of {job.folder} is {job.train_loss}: it has no ratio to another.")
    first, second = (jobs[jobs.value == value] for value in values)
    pairs = first.merge(second, on=["setting", "seed"], suffixes=("_first", "_second"))
    if pairs.empty:
        raise ConfigurationError(f"No two jobs of this sweep differ in {of!r} alone.")
    pairs["log_ratio"] = np.log(pairs.train_loss_second / pairs.train_loss_first)
    pairs["lower"] = pairs.log_ratio < 0
    return pairs.groupby("setting", sort=False).agg(
        pairs=("log_ratio", "size"),
        mean=("log_ratio", "mean"),
        se=("log_ratio", "sem"),
        lower=("lower", "sum"),
        first=("averagings_first", "mean"),
        second=("averagings_second", "mean"),
    )


def show(comparisons: pd.DataFrame, first: str, second: str, console: Console | None = None) -> None:
    """Print a table."""
    table = Table(title=f"Training loss of the mean model: {second} ÷ {first}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("setting", overflow="fold")
    for heading in ("pairs", "ratio", "mean log", "± s.e.", "lower in", "averagings"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in comparisons.itertuples():
        table.add_row(
            row.Index or "–",
            str(row.pairs),
            f"{np.exp(row.mean):.3f}",
            f"{row.mean:+.3f}",
            f"{row.se:.3f}",
            f"{row.lower} of {row.pairs}",
            f"{row.first:.0f} → {row.second:.0f}",
        )
    (console or Console()).print(table)


def draw(jobs: pd.DataFrame, epochs: pd.DataFrame, of: str, path: Path) -> None:
    """Training loss against epochs, one line a job, one panel a setting, one colour a value of the option."""
    jobs = split(jobs, of)
    colours = {value: f"C{number}" for number, value in enumerate(jobs.value.unique())}
    settings = jobs.groupby("setting", sort=False)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * len(settings), 4.2), layout="constrained")
        panels = figure.subplots(1, len(settings), squeeze=False)[0]
        for axes, (setting, members) in zip(panels, settings, strict=True):
            for run, value in members.value.items():
                own = epochs[epochs.run == run]
                axes.plot(own.number, own[LOSS], color=colours[value], lw=1.2, alpha=0.7)
            axes.set(title=setting or "training loss", xlabel="epoch", ylabel="training loss (own models)", yscale="log")
            axes.grid(alpha=0.25)
        for value, colour in colours.items():
            panels[-1].plot([], [], color=colour, label=f"{of}={value}")
        panels[-1].legend()
        figure.savefig(path, dpi=150)


@environment_kept()
def train_loss(folder: Path) -> float:
    """The loss of a job's mean model on all its training samples: what validation would say of these.

    Where training images are cropped and flipped at random, they are so in the same way in all jobs.

    Args:
        folder: of a finished training run.

    Raises:
        ConfigurationError: if it has no checkpoint, or its model logs no loss when it is validated.
    """
    if not (folder / _MODEL).is_file():
        raise ConfigurationError(f"{folder} has no {_MODEL}. Give a sweep of recipes.train, which leaves one in each job.")
    cfg = OmegaConf.load(folder / _CONFIG)
    with isolate_rng():
        model: LightningModule = instantiate(cfg.recipe.model)
        state = torch.load(folder / _MODEL, map_location="cpu", weights_only=True)
        model.load_state_dict(state["state_dict"])
        data: LightningDataModule = instantiate(cfg.recipe.data)
        data.prepare_data()
        data.setup("fit")
        data.val_dataloader = data.train_dataloader  # type: ignore[method-assign]
        trainer = Trainer(
            accelerator="auto",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*shuffl.*")  # the order has no part in a mean
            (found,) = trainer.validate(model, datamodule=data, verbose=False)
    if _LOSS not in found:
        raise ConfigurationError(f"{type(model).__name__} logs no {_LOSS} in validation_step, and that is compared.")
    return float(found[_LOSS])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sweep", type=Path, help="folder of a finished sweep")
    parser.add_argument("--of", required=True, help="the option whose two values are compared, for example schedule")
    arguments = parser.parse_args()
    be_quiet()
    with one_sentence():
        found = runs.load([arguments.sweep])
        folders = track(found.table.folder, "Losses of the mean models", console=Console(stderr=True), transient=True)
        jobs = found.table.assign(train_loss=[train_loss(folder) for folder in folders])
        comparisons = compare(jobs, arguments.of)
    show(comparisons, *split(jobs, arguments.of).value.unique())
    alone = len(jobs) - 2 * comparisons.pairs.sum()
    if alone:
        print(f"{alone} of the {len(jobs)} finished jobs have no partner and are left out.")
    draw(jobs, found.epochs, arguments.of, arguments.sweep / "comparison.png")
    print(f"The curves are in {arguments.sweep / 'comparison.png'}")


if __name__ == "__main__":
    main()
