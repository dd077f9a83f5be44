"""A text as sequences of bytes: the first part to train on, the last two to validate and to test on."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_gossip import ConfigurationError
from recipes.text import corpus


class TextData(LightningDataModule):
    """Sequences of a text's bytes in UTF-8, each with the bytes that follow: what a model is to say.

    A byte is a token, so the vocabulary is the same for every text, and no character of a held-out part is unknown. The text is
    cut in three parts that do not overlap, between two characters. A part is cut into sequences one after the other: an epoch
    has each byte of the training part once, and evaluation predicts each byte of its part once, from the bytes before it in its
    sequence; up to ``sequence_length`` bytes at a part's end are in none.

    Args:
        path: see :func:`~recipes.text.corpus.read`.
        max_characters: of the text, from its beginning; None for all.
        held_out: share of the text at its end: one half of it to validate on, the other, the last, to test on.
        sequence_length: bytes that the model sees at once.
        batch_size: sequences a worker takes in one step.

    Raises:
        ConfigurationError: if there is no text, or a part of it is shorter than a sequence.
    """

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        max_characters: int | None = None,
        held_out: float = 0.1,
        sequence_length: int = 128,
        batch_size: int = 16,
    ) -> None:
        super().__init__()
        if not 0.0 < held_out < 1.0:
            raise ConfigurationError(f"held_out={held_out!r} is not a share between 0 and 1. Write for example 0.1.")
        if sequence_length < 1 or batch_size < 1:
            raise ConfigurationError(f"sequence_length={sequence_length!r} and batch_size={batch_size!r} are at least 1.")
        self.batch_size = batch_size
        text = corpus.read(path)[:max_characters]
        parts = split(text, held_out)
        shortest = min(len(part) for part in parts)
        if shortest <= sequence_length:
            shorter = f"recipe.model.sequence_length={shortest - 1}, " if shortest > 1 else ""
            raise ConfigurationError(
                f"the text has {len(text)} characters, and a part of it {shortest} bytes: too short for a sequence of"
                f" {sequence_length} and the byte that follows. Write {shorter}a longer text or a larger recipe.data.held_out."
            )
        self.train, self.validation, self.test = (Sequences(part, sequence_length) for part in parts)

    @property
    def training_samples(self) -> int:
        """Sequences of an epoch."""
        return len(self.train)

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader(self.train, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader(self.validation)

    @override
    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader(self.test)

    def _loader(self, data: Sequences, shuffle: bool = False) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(data, self.batch_size, shuffle=shuffle, pin_memory=torch.cuda.is_available())


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """A part of a text in pieces of equal length.

    Args:
        text: its bytes, uint8, shape (n,).
        length: of a piece; less than n.
    """

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """A piece, and the same moved by one byte; int64, shape (length,) each."""
        if not 0 <= index < len(self):
            raise IndexError(index)  # it ends an iteration over the data set
        piece = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return piece[:-1], piece[1:]


def split(text: str, held_out: float) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes to train, to validate and to test on; put together again they are the text.

    Args:
        text: all of it.
        held_out: share of its characters; half of them are for the test.
    """
    ends = len(text) - round(held_out * len(text)), len(text) - round(held_out * len(text) / 2)
    parts = text[: ends[0]], text[ends[0] : ends[1]], text[ends[1] :]
    train, validation, test = (tokens(part) for part in parts)
    return train, validation, test


def tokens(text: str) -> Tensor:
    """The bytes of a text in UTF-8; uint8, shape (n,)."""
    encoded = bytearray(text.encode())
    return torch.frombuffer(encoded, dtype=torch.uint8) if encoded else torch.empty(0, dtype=torch.uint8)


def characters(of: Tensor) -> str:
    """The text that bytes stand for; what is no character of UTF-8 is shown as �.

    Args:
        of: 0 … 255, shape (n,).
    """
    return bytes(of.tolist()).decode(errors="replace")
