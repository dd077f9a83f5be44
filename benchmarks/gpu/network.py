"""The network and the images of the stages that train with Lightning."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.models import resnet50
from typing_extensions import override

CLASSES = 10


class Images(Dataset[tuple[Tensor, int, int]]):
    """Generated: a pattern for each class, and noise. An image, its class and its number.

    Args:
        count: of images.
        size: of a side.
    """

    def __init__(self, count: int, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._count = count
        self._patterns = torch.randn(CLASSES, 3, size, size, generator=generator)
        self._noise = torch.randn(16, 3, size, size, generator=generator)

    def __len__(self) -> int:
        return self._count

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        label = index % CLASSES
        return self._patterns[label] + self._noise[index // CLASSES % len(self._noise)], label, index


def small() -> nn.Module:
    """A convolution, BatchNorm and a linear layer: for a CPU."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


class Classifier(LightningModule):
    """SGD with momentum.

    Args:
        cuda: ResNet-50; else :func:`small`.
    """

    def __init__(self, *, cuda: bool) -> None:
        super().__init__()
        self.network = resnet50(num_classes=CLASSES) if cuda else small()
        self.losses: list[Tensor] = []  # on the device: reading one would wait for it

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch[0], batch[1]
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.losses.append(loss.detach())
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def trainer_options(*, cuda: bool, rank: int) -> dict[str, Any]:
    """Where a worker trains, as a Trainer wants to know it; in bfloat16 on a GPU."""
    if not cuda:
        return {"accelerator": "cpu"}
    return {"accelerator": "cuda", "devices": [rank % torch.cuda.device_count()], "precision": "bf16-mixed"}
