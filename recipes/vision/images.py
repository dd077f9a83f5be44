"""A folder of images in which some may be corrupt.

An image that cannot be *decoded* is corrupt: it is named in the log, counted, and replaced or fatal. A file that cannot be
*read* (no permission, too many open files, a lost mount) is another matter and always raises.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]
from typing_extensions import override

from lightning_gossip import ConfigurationError

Corrupt = Literal["skip", "fatal"]

# more corrupt images in a row than this are no accident
_TRIES = 100
# what Pillow raises for bytes that are no image, or only the beginning of one
_UNDECODABLE = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error, Image.DecompressionBombError)

log = logging.getLogger(__name__)


class CheckedImageFolder(ImageFolder):  # type: ignore[misc]
    """torchvision's ImageFolder; what it does with a corrupt image is the user's choice.

    ``"skip"``: the next readable image of the folder, in the order of their names, takes its place, mostly one of the same
    class; so every batch has its size and an epoch its length. ``"fatal"``: ends the run.

    Args:
        root: has one folder a class.
        transform: PIL image, RGB, to tensor.
        corrupt: ``"skip"`` or ``"fatal"``.
    """

    def __init__(self, root: Path, transform: Callable[[Any], Any], corrupt: Corrupt) -> None:
        super().__init__(str(root), transform=transform)
        self._corrupt = corrupt
        # one flag an image, in memory that the DataLoader's processes share: an image is counted once, whoever finds it
        self._found: torch.Tensor = torch.zeros(len(self.samples), dtype=torch.uint8)
        self._found.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def corrupt_images(self) -> list[str]:
        """Paths of the corrupt images found so far by this worker, its DataLoader's processes included."""
        return [self.samples[index][0] for index in self._found.nonzero().flatten().tolist()]

    @override
    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < len(self.samples):
            raise IndexError(index)  # it ends an iteration over the data set
        for offset in range(min(len(self.samples), _TRIES)):
            candidate = (index + offset) % len(self.samples)
            if self._found[candidate]:
                continue
            path, label = self.samples[candidate]
            encoded = Path(path).read_bytes()
            try:
                image = Image.open(BytesIO(encoded)).convert("RGB")
            except _UNDECODABLE as error:
                self._note(candidate, error)
                continue
            return self.transform(image), label
        raise ConfigurationError(
            f"{min(len(self.samples), _TRIES)} images in a row cannot be decoded, from {self.samples[index][0]} on. Something"
            " is wrong with the whole folder: copy it again."
        )

    def _note(self, index: int, error: Exception) -> None:
        """Count a corrupt image and name it, or end the run."""
        path = self.samples[index][0]
        if self._corrupt == "fatal":
            raise ConfigurationError(
                f"corrupt image {path} ({error}). Replace it, or write recipe.data.corrupt=skip to train without such images."
            ) from error
        self._found[index] = 1
        log.warning(
            "Corrupt image %s (%s), number %d found by this worker: the next readable one takes its place.",
            path,
            error,
            int(self._found.sum()),
        )
