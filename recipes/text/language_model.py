"""The transformer as a LightningModule: AdamW, warm-up and cosine; bits per character, perplexity, samples of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity
from typing_extensions import override

from lightning_gossip import ConfigurationError
from lightning_gossip.algorithm.checks import check_positive
from recipes.optimizers import parameter_groups
from recipes.schedules import Factor, PerStep, cosine, steps_and_epochs
from recipes.text.data import characters, tokens
from recipes.text.transformer import Transformer

BYTES = 256
_WARMUP_START = 0.1


class LanguageModel(LightningModule):
    """Cross-entropy of the next byte; logs train_loss and, of held-out text, loss, accuracy, bits per character, perplexity.

    Bits per character are all bits of a text over its characters: a character of UTF-8 has up to four bytes, whose bits all
    count. Perplexity is exp(loss), of a byte. Both are taken over the whole text of all workers, and are no means of batches.

    The learning rate is taken by every worker whole, whatever the strategy: one worker's update moves the mean model by 1/n of
    itself, so it is that of the *global* batch. Gradients are clipped by the Trainer (``gradient_clip_val``).

    Args:
        layers, heads, width, dropout, tie_weights: of the network; see :class:`~recipes.text.transformer.Transformer`.
        sequence_length: bytes that it sees at once.
        vocabulary: rows of its table of tokens, of which bytes use the first 256. More make it as large, as slow and as long on
            its way as a model of words.
        lr: peak learning rate of AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101).
        warmup_epochs: of linear warm-up, from a tenth of it; then half a cosine to 0 at the run's end.
        weight_decay: of everything but biases and LayerNorm.
        betas: of AdamW; those of GPT-3 (Brown et al. 2020, arXiv 2005.14165, appendix B) where nothing else is said.
    """

    ADAPTIVE: ClassVar[bool] = True
    """For recipes.plan, which makes no optimizer."""

    def __init__(
        self,
        *,
        layers: int = 5,
        heads: int = 4,
        width: int = 128,
        sequence_length: int = 128,
        vocabulary: int = BYTES,
        dropout: float = 0.0,
        tie_weights: bool = True,
        lr: float = 3e-3,
        warmup_epochs: float = 0.1,
        weight_decay: float = 0.1,
        betas: Sequence[float] = (0.9, 0.95),
    ) -> None:
        super().__init__()
        if vocabulary < BYTES:
            raise ConfigurationError(f"vocabulary={vocabulary!r} is less than the {BYTES} values of a byte.")
        betas = [float(beta) for beta in betas]
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigurationError(f"betas={betas!r} are not two numbers of at least 0 and below 1. Write betas=[0.9,0.95].")
        self.save_hyperparameters()
        self.net = Transformer(
            vocabulary=vocabulary,
            sequence_length=sequence_length,
            layers=layers,
            heads=heads,
            width=width,
            dropout=dropout,
            tie_weights=tie_weights,
        )
        self.loss = nn.CrossEntropyLoss()
        self.val_acc, self.test_acc = (MulticlassAccuracy(vocabulary, average="micro") for _ in range(2))
        self.val_bpc, self.test_bpc = MeanMetric(), MeanMetric()
        self.val_perplexity, self.test_perplexity = Perplexity(), Perplexity()

    @override
    def configure_model(self) -> None:
        """In shards, where the strategy has a device mesh (``strategy=adpsgd_sharded``): each block, so that one at a time is
        gathered, and then what is left, tied weights in one."""
        if self.device_mesh is None or any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in [*self.net.blocks, self.net]:
            fully_shard(layer, mesh=mesh)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Bytes, int64, batch × length, to logits of the next one, batch × length × vocabulary."""
        logits: Tensor = self.net(inputs)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss: Tensor = self.loss(self(inputs).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, part: str, batch: tuple[Tensor, Tensor]) -> None:
        inputs, targets = batch
        logits = self(inputs).float()
        loss = self.loss(logits.flatten(0, 1), targets.flatten())
        begun = characters_begun(targets)
        accuracy, bits, perplexity = (getattr(self, f"{part}_{name}") for name in ("acc", "bpc", "perplexity"))
        accuracy.update(logits.flatten(0, 1), targets.flatten())
        bits.update(loss * targets.numel() / math.log(2.0) / begun, begun)
        perplexity.update(logits, targets)
        self.log(f"{part}_loss", loss, sync_dist=True)
        self.log(f"{part}_acc", accuracy)
        self.log(f"{part}_bpc", bits, prog_bar=True)
        self.log(f"{part}_perplexity", perplexity)

    @override
    def configure_optimizers(self) -> Any:
        options = self.hparams
        steps, epochs = steps_and_epochs(self.trainer)
        groups = parameter_groups(self.net, options["weight_decay"])
        optimizer = torch.optim.AdamW(groups, lr=options["lr"], betas=tuple(options["betas"]))
        schedule = LambdaLR(optimizer, PerStep(self.factor(epochs), steps / epochs, _WARMUP_START))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def factor(self, epochs: int) -> Factor:
        """The schedule: the factor on the learning rate.

        Args:
            epochs: of the run.
        """
        warmup = self.hparams["warmup_epochs"]
        return lambda epoch, start: cosine(epoch, epochs=epochs, warmup_epochs=warmup, start=start)

    @torch.no_grad()
    def sample(self, prompt: str, *, length: int, samples: int = 1, temperature: float = 0.8, seed: int = 0) -> list[str]:
        """Texts that the model writes, byte by byte.

        Args:
            prompt: how each begins; not empty.
            length: bytes that are added.
            samples: how many texts.
            temperature: by which logits are divided: towards 0 the likeliest byte, above 1 more at random.
            seed: of the draws; the global random state stays as it is.

        Raises:
            ConfigurationError: for an empty prompt, or a temperature that is not above 0.
        """
        check_sampling(prompt, temperature)
        training = self.training
        self.eval()
        generator = torch.Generator(self.device).manual_seed(seed)
        text = tokens(prompt).long().to(self.device).repeat(samples, 1)
        for _ in range(length):
            logits = self(text[:, -self.hparams["sequence_length"] :])[:, -1, :BYTES].float()
            drawn = torch.multinomial(torch.softmax(logits / temperature, dim=1), 1, generator=generator)
            text = torch.cat([text, drawn], dim=1)
        self.train(training)
        return [characters(row) for row in text]


def check_sampling(prompt: str, temperature: float) -> None:
    """Refuse what no text can begin with or be drawn at.

    Raises:
        ConfigurationError: for an empty prompt, or a temperature that is not above 0.
    """
    if not prompt:
        raise ConfigurationError(
            f"prompt={prompt!r} is empty: a text begins with at least one character, for example a line end."
        )
    check_positive("temperature", temperature)


def characters_begun(targets: Tensor) -> Tensor:
    """How many of these bytes begin a character of UTF-8: all but those that go on with one, 0x80 … 0xBF; at least 1."""
    return ((targets & 0xC0) != 0x80).sum().clamp(min=1)
