"""ImageNet, CIFAR-10, MNIST and Fashion-MNIST as LightningDataModules, from a folder that the user names.

The folder is checked when the module is made, before any worker starts (``formats.py``); the data sets are opened in ``setup``,
in each worker. Images are bytes until they are on the device that trains, a quarter of what they are as numbers; there they are
normalised. Where the number of images to evaluate is not a multiple of the number of workers, Lightning's sampler repeats
some, and the accuracy counts them twice: at most one image a worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import CIFAR10, MNIST
from torchvision.transforms import v2
from typing_extensions import override

from lightning_gossip import ConfigurationError
from recipes.skew import LabelledData
from recipes.vision.formats import (
    CIFAR_META,
    CIFAR_TEST,
    CIFAR_TRAIN,
    check_cifar10,
    check_fashion_mnist,
    check_imagenet,
    check_mnist,
    fashion_mnist_arrays,
)
from recipes.vision.images import CheckedImageFolder, Corrupt, EncodedImageFolder, collate

# mean and standard deviation of the training images' channels, 0 … 1
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # torchvision's
_CIFAR = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_MNIST = (0.1307,), (0.3081,)
_FASHION = (0.2860,), (0.3530,)

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
Transform = Callable[[Any], Any]

log = logging.getLogger(__name__)


class ImageData(LabelledData):
    """What they have in common: their loaders, and what happens on the device.

    Args:
        statistics: mean and standard deviation of each channel, for values in [0, 1].
        batch_size: images a worker takes in one step.
        num_workers: processes that load for one worker; 0 to load in the training process.
        prefetch: batches that each of them holds ready.
        skew, skew_seed: see :class:`~recipes.skew.LabelledData`.
    """

    def __init__(
        self,
        statistics: Statistics,
        *,
        batch_size: int,
        num_workers: int,
        prefetch: int,
        skew: float | None = None,
        skew_seed: int = 0,
    ) -> None:
        super().__init__(skew=skew, skew_seed=skew_seed)
        if batch_size < 1 or num_workers < 0 or prefetch < 1:
            raise ConfigurationError(
                f"batch_size={batch_size!r}, num_workers={num_workers!r}, prefetch={prefetch!r}: batch_size and prefetch are at"
                " least 1, num_workers at least 0."
            )
        self.normalise = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(*statistics)])
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.train: Dataset[Any] | None = None
        self.validation: Dataset[Any] | None = None
        self.test: Dataset[Any] | None = None

    @property
    @override
    def training_labels(self) -> Sequence[int]:
        labels: Sequence[int] = self.train.targets  # type: ignore[union-attr]
        return labels

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train, **self.order)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.validation)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.test)

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        images, labels = batch
        return self.normalise(images), labels

    def _loader(self, data: Dataset[Any] | None, **order: Any) -> DataLoader[Any]:
        assert data is not None, "setup() has not been called"
        return DataLoader(
            data,
            batch_size=self.batch_size,
            **order,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch if self.num_workers else None,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            collate_fn=collate if isinstance(data, EncodedImageFolder) else None,
        )


class ImageNetData(ImageData):
    """Folders of images in ImageNet's layout; the validation images are the test images, for the test's labels are not public.

    Args:
        root: has the folders train and val, and they one folder a class.
        classes: that the model tells apart; as many as there are folders.
        image_size: pixels of a side that the network sees.
        corrupt: what becomes of an image that cannot be decoded; see :class:`CheckedImageFolder`.
        decode: ``"loader"``: by the loader's processes; ``"device"``: by the device that trains, a batch at a time. The latter
            is for machines with too few CPU cores for their GPUs.
        batch_size, num_workers, prefetch, skew, skew_seed: see :class:`ImageData`.
    """

    def __init__(
        self,
        *,
        root: str | Path,
        classes: int = 1000,
        image_size: int = 224,
        corrupt: Corrupt = "skip",
        decode: Literal["loader", "device"] = "loader",
        batch_size: int = 256,
        num_workers: int = 8,
        prefetch: int = 2,
        skew: float | None = None,
        skew_seed: int = 0,
    ) -> None:
        super().__init__(
            _IMAGENET, batch_size=batch_size, num_workers=num_workers, prefetch=prefetch, skew=skew, skew_seed=skew_seed
        )
        if corrupt not in ("skip", "fatal"):
            raise ConfigurationError(f"corrupt={corrupt!r} is neither 'skip' nor 'fatal'.")
        if decode not in ("loader", "device"):
            raise ConfigurationError(f"decode={decode!r} is neither 'loader' nor 'device'.")
        self.root = check_imagenet(root, classes)
        self.image_size = image_size
        self.corrupt = corrupt
        self.folder = EncodedImageFolder if decode == "device" else CheckedImageFolder

    @override
    def setup(self, stage: str) -> None:
        if self.train is not None:
            return
        size = self.image_size
        train = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])
        evaluation = v2.Compose([v2.Resize(round(size / 0.875), antialias=True), v2.CenterCrop(size)])  # 256 for 224
        self.train = self.folder(self.root / "train", train, self.corrupt)
        self.validation = self.test = self.folder(self.root / "val", evaluation, self.corrupt)

    @override
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if self.folder is not EncodedImageFolder:
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        trains = self.trainer is not None and self.trainer.training
        folder = self.train if trains else self.validation
        assert isinstance(folder, EncodedImageFolder)
        return folder.decode(batch, device)

    @override
    def teardown(self, stage: str) -> None:
        if stage != "fit":
            return  # the same images again
        for part, data in (("training", self.train), ("validation", self.validation)):
            if isinstance(data, CheckedImageFolder) and (found := data.corrupt_images):
                rank = self.trainer.global_rank if self.trainer is not None else 0
                log.warning("Rank %d replaced %d corrupt %s images: %s", rank, len(found), part, ", ".join(found[:5]))


class _SplitData(ImageData):
    """A data set of training and test images, of which some training images are kept for validation.

    Args:
        root: has the files.
        validation_images: training images that are kept for validation, always the same ones.
        batch_size, num_workers, prefetch, skew, skew_seed: see :class:`ImageData`.
    """

    statistics: ClassVar[Statistics]
    check: ClassVar[staticmethod[[str | Path], tuple[Path, int]]]  # the folder, and how many training images there are
    dataset: ClassVar[type[Dataset[Any]]]
    augmentation: ClassVar[Sequence[Any]]

    def __init__(
        self,
        *,
        root: str | Path,
        validation_images: int = 5000,
        batch_size: int = 32,
        num_workers: int = 0,
        prefetch: int = 2,
        skew: float | None = None,
        skew_seed: int = 0,
    ) -> None:
        super().__init__(
            self.statistics,
            batch_size=batch_size,
            num_workers=num_workers,
            prefetch=prefetch,
            skew=skew,
            skew_seed=skew_seed,
        )
        self.root, images = self.check(root)
        self.parts = _split(images, validation_images)

    @property
    def training_samples(self) -> int:
        """Samples of an epoch."""
        return len(self.parts[0])

    @override
    def setup(self, stage: str) -> None:
        if self.train is not None:
            return
        plain = v2.PILToTensor()
        images = self.dataset(self.root, train=True)  # type: ignore[call-arg]
        self.train = Part(images, self.parts[0], v2.Compose([plain, *self.augmentation]))
        self.validation = Part(images, self.parts[1], plain)
        self.test = self.dataset(self.root, train=False, transform=plain)  # type: ignore[call-arg]


class _CifarFiles(CIFAR10):  # type: ignore[misc]
    """torchvision's, of files that ``formats.check_cifar10`` has looked at: torchvision is to check that they exist only."""

    train_list: ClassVar = [[name, None] for name in CIFAR_TRAIN]
    test_list: ClassVar = [[CIFAR_TEST, None]]
    meta: ClassVar = {"filename": CIFAR_META, "key": "label_names", "md5": None}


class CifarData(_SplitData):
    """CIFAR-10's batch files, in ``root/cifar-10-batches-py``.

    Training images are padded by 4 pixels, cropped and flipped at random (He et al. 2016, §4.2).
    """

    statistics = _CIFAR
    check = staticmethod(check_cifar10)
    augmentation = (v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip())
    dataset = _CifarFiles


class MnistData(_SplitData):
    """MNIST's IDX files, in ``root/MNIST/raw``, without augmentation."""

    statistics = _MNIST
    check = staticmethod(check_mnist)
    dataset = MNIST
    augmentation = ()


class _FashionMnistFiles(Dataset[Any]):
    """All images of one part in memory, 1 × 28 × 28 bytes each, with their classes; torchvision's takes no compressed files."""

    def __init__(self, root: Path, train: bool, transform: Transform | None = None) -> None:
        images, labels = fashion_mnist_arrays(root, train=train)
        self._images = torch.from_numpy(images).unsqueeze(1)
        self.targets: list[int] = labels.tolist()
        self._transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    @override
    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self._images[index]
        return image if self._transform is None else self._transform(image), self.targets[index]


class FashionMnistData(_SplitData):
    """Fashion-MNIST's IDX files (Xiao et al. 2017, arXiv 1708.07747), or .gz, in ``root`` or ``root/FashionMNIST/raw``.

    Training images are padded by 2 pixels, cropped and flipped at random.
    """

    statistics = _FASHION
    check = staticmethod(check_fashion_mnist)
    augmentation = (v2.RandomCrop(28, padding=2), v2.RandomHorizontalFlip())
    dataset = _FashionMnistFiles


class Part(Dataset[Any]):
    """Some images of a data set, under a transform of their own.

    Args:
        images: pairs of an image and its class.
        indices: which.
        transform: of the image.
    """

    def __init__(self, images: Dataset[Any], indices: Sequence[int], transform: Transform) -> None:
        self._images = images
        self._indices = indices
        self._transform = transform

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def targets(self) -> list[int]:
        """Their classes."""
        return [int(self._images.targets[index]) for index in self._indices]  # type: ignore[attr-defined]

    @override
    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self._images[self._indices[index]]
        return self._transform(image), label


def _split(images: int, validation: int) -> tuple[list[int], list[int]]:
    """Indices to train on and to validate on, the same in every run and on every worker."""
    if not 0 < validation < images:
        raise ConfigurationError(
            f"validation_images={validation} of {images} training images: write a number in 1 … {images - 1}."
        )
    order = torch.randperm(images, generator=torch.Generator().manual_seed(0)).tolist()
    return order[validation:], order[:validation]
