"""What the model writes at the end of a run: the quickest way to see what it has learned."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_integer
from recipes.text.language_model import LanguageModel, check_sampling

SAMPLES = "samples.txt"


class TextSamples(Callback):
    """Writes samples of text after the test, by rank 0, into ``samples.txt``, and prints the first.

    Args:
        folder: where to write; exists.
        samples: how many texts.
        length: bytes of each.
        prompt: how each begins.
        temperature: see :meth:`~recipes.text.language_model.LanguageModel.sample`.
    """

    def __init__(
        self, folder: str | Path, *, samples: int = 3, length: int = 300, prompt: str = "\n", temperature: float = 0.8
    ) -> None:
        check_integer("recipe.callbacks.samples.samples", samples, example=3)
        check_integer("recipe.callbacks.samples.length", length, example=300)
        check_sampling(prompt, temperature)
        self._folder = Path(folder)
        self._samples, self._length = samples, length
        self._prompt, self._temperature = prompt, temperature

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        in_shards = any(isinstance(parameter, DTensor) for parameter in pl_module.parameters())
        if not (trainer.is_global_zero or in_shards):  # else all ranks gather the weights of each pass
            return
        texts = pl_module.sample(self._prompt, length=self._length, samples=self._samples, temperature=self._temperature)
        if not trainer.is_global_zero:
            return
        separator = f"\n{'-' * 72}\n"
        (self._folder / SAMPLES).write_text(separator.join(texts) + "\n", encoding="utf-8")
        console = Console()
        console.print("\nThe model writes:", style="bold")
        console.print(printable(texts[0]).strip(), markup=False, highlight=False)


def printable(text: str) -> str:
    """The text without what a terminal would obey: an untrained model writes any byte."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)
