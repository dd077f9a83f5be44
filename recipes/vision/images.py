"""A folder of images in which some may be corrupt, decoded by the loader's processes or, on a GPU, by the device.

An image that cannot be *decoded* is corrupt: it is named in the log, counted, and replaced or fatal. A file that cannot be
*read* (no permission, too many open files, a lost mount) is another matter and always raises.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image, decode_jpeg
from torchvision.transforms.v2.functional import pil_to_tensor
from typing_extensions import override

from lightning_gossip import ConfigurationError

Corrupt = Literal["skip", "fatal"]
Encoded = tuple[list[int], list[Tensor], Tensor]  # index of each image, bytes of its file, its class

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
        transform: of an image: bytes, 3 × height × width.
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
        image, label = self.decoded(index)
        return self.transform(image), label

    def decoded(self, index: int) -> tuple[Tensor, int]:
        """The image, bytes, 3 × height × width, and its class; those of the next one where it is corrupt."""
        if not 0 <= index < len(self.samples):
            raise IndexError(index)  # it ends an iteration over the data set
        for offset in range(min(len(self.samples), _TRIES)):
            candidate = (index + offset) % len(self.samples)
            if self._found[candidate]:
                continue
            path, label = self.samples[candidate]
            encoded = Path(path).read_bytes()
            try:
                return decode_rgb(encoded), label
            except _UNDECODABLE as error:
                self._note(candidate, error)
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


class EncodedImageFolder(CheckedImageFolder):
    """A folder of images as bytes of their files, to be decoded by the device that trains (:meth:`decode`)."""

    @override
    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return (index, _bytes(Path(path).read_bytes())), label

    def decode(self, batch: Encoded, device: torch.device) -> tuple[Tensor, Tensor]:
        """Decode and transform a batch of :func:`collate`.

        JPEG only, and colours only, is what a GPU decodes; everything else is decoded here as the loader would, so that
        corrupt images are found and replaced in the same way.

        Returns:
            Images, batch × 3 × height × width, and their classes, on the device.
        """
        indices, files, labels = batch
        classes = labels.tolist()
        try:
            images = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
        except RuntimeError:  # one of them
            images = []
            for position, index in enumerate(indices):
                image, classes[position] = self.decoded(index)
                images.append(image.to(device))
        return torch.stack([self.transform(image) for image in images]), torch.tensor(classes, device=device)


def collate(items: list[tuple[tuple[int, Tensor], int]]) -> Encoded:
    """A batch of an :class:`EncodedImageFolder`."""
    return [index for (index, _), _ in items], [file for (_, file), _ in items], torch.tensor([label for _, label in items])


def decode_rgb(encoded: bytes) -> Tensor:
    """Bytes, 3 × height × width. torchvision's decoder is the faster one; Pillow reads more, or says why it cannot."""
    with suppress(RuntimeError):
        image: Tensor = decode_image(_bytes(encoded), ImageReadMode.RGB)
        if image.dtype == torch.uint8 and image.dim() == 3:  # and not 16 bits, or a film
            return image
    pixels: Tensor = pil_to_tensor(Image.open(BytesIO(encoded)).convert("RGB"))
    return pixels


def _bytes(encoded: bytes) -> Tensor:
    return torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)  # which takes no empty buffer
