"""Real images: a ResNet-8 on Fashion-MNIST learns; what takes time is ResNet-50, 25,557,032 parameters in float32, at 0.15 s a
step (of a GPU with a batch of 32 to 64; assumed, not measured)."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.time_to_loss.task import Task
from lightning_gossip.simulation.problems.modules import ModuleObjective
from lightning_gossip.simulation.problems.torch_optimizers import TorchOptimizer
from recipes.simulated.modules import PlannedRun, trained
from recipes.vision.classifier import Classifier
from recipes.vision.data import FashionMnistData

BATCH_SIZE, VALIDATION_IMAGES, HELD_OUT = 32, 5000, 1000
MODEL = "fashion_resnet8_groupnorm"  # whose loss is one model's: no buffers that differ from worker to worker
FOLDER = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))


@cache
def images() -> FashionMnistData:
    """Of Debian's package dataset-fashion-mnist, or of the folder that the environment's FASHION_MNIST names."""
    data = FashionMnistData(root=str(FOLDER), validation_images=VALIDATION_IMAGES, batch_size=BATCH_SIZE, num_workers=0)
    data.prepare_data()
    data.setup("fit")
    return data


def build(lr: float, planned: PlannedRun) -> tuple[ModuleObjective, TorchOptimizer]:
    """The recipe's module with Nesterov momentum and a cosine; the learning rate is that of a global batch of 256 images."""

    def classifier() -> Classifier:
        return Classifier(
            model=MODEL,
            classes=10,
            batch_size=BATCH_SIZE,
            lr_per_256=lr,
            schedule="cosine",
            warmup_epochs=0,
            weight_decay=5e-4,
        )

    return trained(classifier, images(), planned, clip_norm=None, held_out=HELD_OUT)


def about() -> dict[str, Any]:
    """The model and the data."""
    return {"recipe": "fashion_mnist", "model": MODEL, "validation_images": VALIDATION_IMAGES, "held_out_images": HELD_OUT}


FASHION_MNIST = Task(
    name="fashion_mnist",
    file="time_to_loss_fashion_mnist",
    title="a classifier's loss on Fashion-MNIST",
    model_bytes=4 * 25_557_032,
    compute_s=0.15,
    rates_mbit=(1000, 200),
    lrs=(0.05, 0.1, 0.2),
    steps=240,
    batch_size=BATCH_SIZE,
    build=build,
    about=about,
)
