"""Unlike data: ``recipe.data.skew=0.1`` gives each worker samples of its own, whose labels are not spread as all workers'.

The shares are those of the simulator (:mod:`lightning_gossip.simulation.problems.label_skew`), the same for one seed, and stay
the same in all epochs. Work is then not shared: a batch that anybody may train on is not anybody's own. A run leaves
labels.csv, how many samples of each label each worker has, and a picture of it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import matplotlib
import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.strategies import Strategy
from matplotlib.figure import Figure
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_gossip import ConfigurationError
from lightning_gossip.algorithm.checks import check_integer, check_positive
from lightning_gossip.simulation.problems.label_skew import IntArray, label_counts, label_skew
from lightning_gossip.strategies import DecentralizedStrategy
from recipes.plots import STYLE

TABLE, PICTURE = "labels.csv", "labels.png"
_LEGIBLE = 400  # numbers in a picture


class SkewedShare(DistributedSampler[int]):
    """One worker's own samples, in a new order in each epoch; the first ones again where a share is smaller than the largest.

    A DistributedSampler, so that Lightning leaves it as it is under every strategy.

    Args:
        shares: of all workers, by rank.
        rank: this worker's.
        seed: of the orders.
    """

    def __init__(self, shares: Sequence[IntArray], *, rank: int, seed: int) -> None:
        largest = max(map(len, shares))
        super().__init__(range(largest * len(shares)), num_replicas=len(shares), rank=rank, seed=seed)  # type: ignore[arg-type]
        self._share = torch.from_numpy(shares[rank])

    @override
    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch * 10_007 + self.rank) % 2**63)
        order = self._share[torch.randperm(len(self._share), generator=generator)].tolist()
        return iter([*order, *order[: self.num_samples - len(order)]])


class LabelledData(LightningDataModule):
    """A data module whose training samples have labels, by which they may be shared unlike.

    Args:
        skew: α of the Dirichlet distribution, above 0; None for batches of all samples.
        skew_seed: of the shares.

    Raises:
        ConfigurationError: naming the key.
    """

    def __init__(self, *, skew: float | None = None, skew_seed: int = 0) -> None:
        super().__init__()
        if skew is not None:
            check_positive("skew", skew)
        check_integer("skew_seed", skew_seed, at_least=0, example=0)
        self.skew = skew
        self.skew_seed = skew_seed

    @property
    def training_labels(self) -> Sequence[int]:
        """Labels of the training samples, after ``setup``."""
        raise NotImplementedError

    def shares(self, workers: int) -> list[IntArray]:
        """The samples of each worker.

        Raises:
            ConfigurationError: without skew, or if there are more workers than samples.
        """
        if self.skew is None:
            raise ConfigurationError("Without recipe.data.skew no worker has samples of its own.")
        return label_skew(self.training_labels, workers, alpha=self.skew, seed=self.skew_seed)

    @property
    def order(self) -> dict[str, Any]:
        """What the training DataLoader is to be told of the order of its samples."""
        if self.skew is None or self.trainer is None:
            return {"shuffle": True}
        shares = self.shares(self.trainer.world_size)
        return {"sampler": SkewedShare(shares, rank=self.trainer.global_rank, seed=self.skew_seed)}


class LabelHistogram(Callback):
    """Leaves how many samples of each label each worker has, where they have samples of their own.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        data = getattr(trainer, "datamodule", None)
        if trainer.is_global_zero and isinstance(data, LabelledData) and data.skew is not None:
            leave(label_counts(data.training_labels, data.shares(trainer.world_size)), data.skew, self._folder)


def check(data: object, strategy: Strategy) -> None:
    """Refuse work sharing between workers that have samples of their own; before any process starts.

    Raises:
        ConfigurationError: saying what to leave away.
    """
    skew = getattr(data, "skew", None)
    if skew is not None and isinstance(strategy, DecentralizedStrategy) and strategy.fit_options.work_sharing is True:
        raise ConfigurationError(
            f"strategy.work_sharing=true hands each batch to whoever is free, and with recipe.data.skew={skew} each worker has"
            " samples of its own. Leave one of them away."
        )


def leave(counts: IntArray, alpha: float, folder: Path) -> list[Path]:
    """Write the table and the picture; returns their files.

    Args:
        counts: samples by worker and label, shape (workers, labels).
        alpha: for the title.
        folder: where to write; exists.
    """
    with (folder / TABLE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["rank", *range(counts.shape[1])])
        writer.writerows([rank, *row] for rank, row in enumerate(counts.tolist()))
    with matplotlib.rc_context(STYLE):
        picture(counts, alpha).savefig(folder / PICTURE, dpi=150)
    return [folder / TABLE, folder / PICTURE]


def picture(counts: IntArray, alpha: float) -> Figure:
    """The darker, the larger a share of a worker's samples has this label."""
    workers, labels = counts.shape
    figure = Figure(figsize=(min(12.0, 2.5 + 0.5 * labels), min(12.0, 1.6 + 0.32 * workers)), layout="constrained")
    axes = figure.subplots()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = axes.imshow(shares, aspect="auto", cmap="Blues", vmin=0.0, vmax=1.0)
    axes.set(title=f"Samples of each worker by label, α = {alpha:g}", xlabel="label", ylabel="rank")
    for names, count in ((axes.set_xticks, labels), (axes.set_yticks, workers)):
        names(range(0, count, max(1, -(-count // 32))))
    if counts.size <= _LEGIBLE:
        for (rank, label), number in np.ndenumerate(counts):
            colour = "white" if shares[rank, label] > 0.5 else "#33415C"
            axes.text(label, rank, str(number) if number else "·", ha="center", va="center", fontsize=8, color=colour)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, label="share of the worker's samples")
    return figure
