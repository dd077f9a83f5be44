"""A network of ``models.py`` as a LightningModule: SGD with Nesterov momentum under the schedules of large-batch training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_gossip import ConfigurationError
from recipes.optimizers import parameter_groups
from recipes.schedules import Factor, PerStep, cosine, multistep, steps_and_epochs
from recipes.vision import models


class Classifier(LightningModule):
    """Cross-entropy, top-1 and top-5; logs train_loss, val_loss, val_acc, val_acc5 and test_acc.

    The learning rate is that of the *global* batch, all workers' samples in one round of steps: ``lr_per_256`` · global batch ÷
    256 (linear scaling, Goyal et al. 2017, arXiv 1706.02677, §2.1). Every worker takes it whole, whatever the strategy: one
    worker's update moves the mean model by 1/n of itself. The warm-up begins at ``lr_per_256``, as in the published code of
    stochastic gradient push, so there is none where the global batch has 256 images or fewer.

    Args:
        model: a name of ``models.MODELS``.
        classes: outputs.
        batch_size: images a worker takes in one step; the data module's.
        lr_per_256: learning rate of a global batch of 256 images.
        schedule: after the warm-up: divided at milestones, or half a cosine to 0 at the run's end.
        warmup_epochs: of linear warm-up.
        milestones, gamma: epochs at which ``multistep`` multiplies the learning rate by gamma.
        momentum: of SGD, Nesterov's.
        weight_decay: of everything but biases and normalisation layers.
        label_smoothing: of the training loss; val_loss has none.
        channels_last: keep images and weights in NHWC order, which convolutions on tensor cores and recent CPUs prefer.
    """

    NESTEROV: ClassVar[bool] = True
    """For recipes.plan, which makes no optimizer."""

    def __init__(
        self,
        *,
        model: str,
        classes: int,
        batch_size: int,
        lr_per_256: float = 0.1,
        schedule: Literal["multistep", "cosine"] = "multistep",
        warmup_epochs: float = 5,
        milestones: Sequence[float] = (30, 60, 80),
        gamma: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        label_smoothing: float = 0.0,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        if schedule not in ("multistep", "cosine"):
            raise ConfigurationError(f"schedule={schedule!r} is neither 'multistep' nor 'cosine'.")
        if warmup_epochs < 0:
            raise ConfigurationError(f"warmup_epochs={warmup_epochs!r} is negative. Write 0 for no warm-up.")
        if lr_per_256 <= 0 or batch_size < 1:
            raise ConfigurationError(f"lr_per_256={lr_per_256!r} and batch_size={batch_size!r} must be positive.")
        if not 0 <= label_smoothing < 1:
            raise ConfigurationError(f"label_smoothing={label_smoothing!r} is not in [0, 1).")
        milestones = [float(epoch) for epoch in milestones]
        self.save_hyperparameters()
        self.net = models.build(model, classes)
        if channels_last:
            self.net = self.net.to(memory_format=torch.channels_last)
        self.channels_last = channels_last
        self.train_objective = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.loss = nn.CrossEntropyLoss()
        self.val_acc = MulticlassAccuracy(classes, average="micro")
        self.val_acc5 = MulticlassAccuracy(classes, average="micro", top_k=min(5, classes))
        self.test_acc = MulticlassAccuracy(classes, average="micro")

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Images, batch × channels × height × width, to logits, batch × classes."""
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        logits: Tensor = self.net(images)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss: Tensor = self.train_objective(self(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_acc(logits, labels)
        self.val_acc5(logits, labels)
        self.log("val_loss", self.loss(logits, labels), sync_dist=True)
        self.log("val_acc", self.val_acc, prog_bar=True)
        self.log("val_acc5", self.val_acc5)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.test_acc(self(images), labels)
        self.log("test_acc", self.test_acc)

    @override
    def configure_optimizers(self) -> Any:
        options, trainer = self.hparams, self.trainer
        steps, epochs = steps_and_epochs(trainer)
        global_batch = options["batch_size"] * trainer.world_size * trainer.accumulate_grad_batches
        optimizer = torch.optim.SGD(
            parameter_groups(self.net, options["weight_decay"]),
            lr=options["lr_per_256"] * global_batch / 256,
            momentum=options["momentum"],
            nesterov=self.NESTEROV and options["momentum"] > 0,
        )
        start = min(1.0, 256 / global_batch)
        schedule = LambdaLR(optimizer, PerStep(self.factor(epochs), steps / epochs, start))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def factor(self, epochs: int) -> Factor:
        """The schedule: the factor on the global batch's learning rate.

        Args:
            epochs: of the run.
        """
        options = self.hparams
        warmup = options["warmup_epochs"]
        if options["schedule"] == "cosine":
            return lambda epoch, start: cosine(epoch, epochs=epochs, warmup_epochs=warmup, start=start)
        milestones, gamma = options["milestones"], options["gamma"]
        return lambda epoch, start: multistep(epoch, milestones=milestones, gamma=gamma, warmup_epochs=warmup, start=start)
