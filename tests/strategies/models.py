"""Small models and data for the strategy tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_gossip  # noqa: F401 - registers the strategies


def samples(count: int, seed: int = 0) -> TensorDataset:
    """Points of a learnable two-class problem, each with its index."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    y = (x[:, :4].sum(1) > x[:, 4:].sum(1)).long()
    return TensorDataset(x, y, torch.arange(count))


def loader(count: int = 128, batch_size: int = 8, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=batch_size, shuffle=shuffle, **options)


class Net(LightningModule):
    """Two layers with BatchNorm; remembers which samples it has trained on."""

    def __init__(self, make_optimizer: Callable[[Any], Any] | None = None, network: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network or nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        self.accuracy = MulticlassAccuracy(2, average="micro")
        self.seen: list[int] = []
        self.learning_rates: list[float] = []
        self._make_optimizer = make_optimizer

    def loss(self, batch: Any) -> Tensor:
        x, y, _ = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch[2].tolist()
        self.learning_rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        output = self.network(x)
        self.accuracy(output, y)
        self.log("val_acc", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(output, y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch[0])

    def configure_optimizers(self) -> Any:
        if self._make_optimizer is not None:
            return self._make_optimizer(self)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.003),
}


class RemembersLosses(LightningModule):
    """Before another module among the bases: the loss of each of this rank's batches, in order."""

    def on_train_start(self) -> None:
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Any = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss


def trainer(**options: Any) -> Trainer:
    """A quiet Trainer for as many workers as the environment says."""
    defaults: dict[str, Any] = {
        "strategy": "adpsgd",
        "devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, Checkpoint) for c in options.get("callbacks", [])),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**defaults, **options})


def flat(model: nn.Module) -> Tensor:
    """All floating-point parameters and buffers in one vector."""
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    return torch.cat([t.detach().reshape(-1).float() for t in tensors])
