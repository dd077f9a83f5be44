"""Scikit-learn's digits and a network for them: real handwritten digits, no download, seconds on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from recipes.optimizers import parameter_groups
from recipes.skew import LabelledData

CLASSES = 10
TEST, VALIDATION = 360, 160  # divisible by 8: up to 8 workers evaluate equal shares, so that none is padded
_EVALUATION_BATCH = 40


class DigitsData(LabelledData):
    """The 1,797 images, always in the same three parts: 1,277 to train on, 160 to validate, 360 to test.

    Args:
        batch_size: samples a worker takes in one step.
        skew, skew_seed: see :class:`~recipes.skew.LabelledData`.
    """

    def __init__(self, *, batch_size: int = 16, skew: float | None = None, skew_seed: int = 0) -> None:
        super().__init__(skew=skew, skew_seed=skew_seed)
        self.batch_size = batch_size
        images, digits = load_digits(return_X_y=True)
        rest, test = train_test_split(range(len(images)), test_size=TEST, stratify=digits, random_state=0)
        train, validation = train_test_split(rest, test_size=VALIDATION, stratify=digits[rest], random_state=0)
        x = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16.0
        y = torch.from_numpy(digits).long()
        self.train, self.validation, self.test = (TensorDataset(x[part], y[part]) for part in (train, validation, test))

    @property
    def training_samples(self) -> int:
        """Samples of an epoch."""
        return len(self.train)

    @property
    @override
    def training_labels(self) -> Sequence[int]:
        labels: list[int] = self.train.tensors[1].tolist()
        return labels

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.batch_size, **self.order)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, batch_size=_EVALUATION_BATCH)

    @override
    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test, batch_size=_EVALUATION_BATCH)


class _Classifier(LightningModule):
    """What the networks for the digits have in common: a loss, metrics.

    Args:
        net: images, batch × 1 × 8 × 8, to logits, batch × 10.
        shift: pixels by which training images are moved at random, in each direction; 0 for none.
    """

    def __init__(self, net: nn.Module, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.net = net
        self.loss = nn.CrossEntropyLoss()
        self.val_acc = MulticlassAccuracy(CLASSES, average="micro")
        self.test_acc = MulticlassAccuracy(CLASSES, average="micro")

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        loss: Tensor = self.loss(self(shifted(images, self.shift)), digits)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, digits = batch
        logits = self(images)
        self.val_acc(logits, digits)
        self.log("val_loss", self.loss(logits, digits), sync_dist=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, digits = batch
        self.test_acc(self(images), digits)
        self.log("test_acc", self.test_acc)


class DigitsClassifier(_Classifier):
    """Four convolutions with BatchNorm, two poolings, one linear layer; SGD with momentum under a one-cycle schedule.

    Deep enough that models trained apart from each other have no useful mean: a run shows whether the gossip works.

    Args:
        channels: of the first two convolutions; the others have twice as many.
        lr: peak learning rate, that of the *global* batch (all workers' samples in one round of steps). One worker's update
            moves the mean model by 1/n of itself, so AD-PSGD and DDP take the same value.
        momentum: of SGD.
        weight_decay: of everything but biases and BatchNorm.
        shift: pixels by which training images are moved at random, in each direction; 0 for none.
    """

    def __init__(
        self,
        *,
        channels: int = 16,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        shift: int = 1,
    ) -> None:
        super().__init__(
            nn.Sequential(
                *convolution(1, channels),
                *convolution(channels, channels),
                nn.MaxPool2d(2),
                *convolution(channels, 2 * channels),
                *convolution(2 * channels, 2 * channels),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(2 * channels * 4, CLASSES),
            ),
            shift,
        )
        self.save_hyperparameters()

    @override
    def configure_optimizers(self) -> Any:
        options = self.hparams
        groups = parameter_groups(self.net, options["weight_decay"])
        optimizer = torch.optim.SGD(groups, lr=options["lr"], momentum=options["momentum"])
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, max_lr=options["lr"], total_steps=steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class DigitsMLP(_Classifier):
    """One hidden layer; SGD with momentum, the learning rate divided by 10 at 30 % and at 60 % of the run.

    Args:
        hidden: units.
        lr, momentum: of SGD.
        weight_decay: of everything but biases.
        milestones: shares of the run at which the learning rate falls.
    """

    def __init__(
        self,
        *,
        hidden: int = 64,
        lr: float = 0.2,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        milestones: Sequence[float] = (0.3, 0.6),
    ) -> None:
        super().__init__(
            nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)),
            shift=0,
        )
        milestones = list(milestones)
        self.save_hyperparameters()

    @override
    def configure_optimizers(self) -> Any:
        options = self.hparams
        groups = parameter_groups(self.net, options["weight_decay"])
        optimizer = torch.optim.SGD(groups, lr=options["lr"], momentum=options["momentum"])
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = MultiStepLR(optimizer, [round(share * steps) for share in options["milestones"]], gamma=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def shifted(images: Tensor, by: int) -> Tensor:
    """Each image moved by a whole number of pixels in [−by, by] in each direction, filled up with background.

    Args:
        images: batch × 1 × height × width.
        by: 0 leaves the images as they are.
    """
    if by == 0:
        return images
    n, _, height, width = images.shape
    padded = nn.functional.pad(images, (by, by, by, by))[:, 0]
    down, right = torch.randint(0, 2 * by + 1, (2, n, 1), device=images.device)
    rows = (down + torch.arange(height, device=images.device))[:, :, None]
    columns = (right + torch.arange(width, device=images.device))[:, None, :]
    return padded[torch.arange(n, device=images.device)[:, None, None], rows, columns][:, None]


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """3 × 3, with BatchNorm and ReLU."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
