"""Whether a folder holds the images of a recipe: if not, one sentence says what is expected, before any worker starts."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import pickle
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchvision.datasets import CIFAR10
from torchvision.datasets.folder import IMG_EXTENSIONS

from lightning_gossip import ConfigurationError

IMAGENET = (
    "ImageNet's layout: ROOT/train/CLASS/*.JPEG and ROOT/val/CLASS/*.JPEG with the same class folders in both (n01440764, …)"
)
CIFAR = (
    "CIFAR-10's layout: ROOT/cifar-10-batches-py/ with data_batch_1 … data_batch_5, test_batch and batches.meta, as unpacked"
    " from cifar-10-python.tar.gz"
)
MNIST = (
    "MNIST's layout: ROOT/MNIST/raw/ with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and"
    " t10k-labels-idx1-ubyte, unpacked"
)
FASHION_MNIST = (
    "Fashion-MNIST's layout: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and"
    " t10k-labels-idx1-ubyte, each as it is or with .gz, in ROOT (`apt-get install dataset-fashion-mnist` puts them into"
    " /usr/share/datasets/fashion-mnist) or in ROOT/FashionMNIST/raw (where there is a network: `python -c"
    " \"from torchvision import datasets; datasets.FashionMNIST('ROOT', download=True)\"`)"
)
CIFAR_TRAIN, CIFAR_TEST, CIFAR_META = [f"data_batch_{i}" for i in range(1, 6)], "test_batch", "batches.meta"
_MNIST_SIDE = 28

log = logging.getLogger(__name__)


def _refused(problem: str, expected: str) -> ConfigurationError:
    return ConfigurationError(f"{problem}; expected is {expected}.")


def existing(root: str | Path, expected: str) -> Path:
    """The folder that the user named, as a path.

    Raises:
        ConfigurationError: if it is no folder, or nothing is in it.
    """
    folder = Path(str(root)).expanduser()
    if not folder.is_dir():
        raise _refused(f"recipe.data.root={root} is not a folder", expected)
    if not any(folder.iterdir()):
        raise _refused(f"recipe.data.root={root} is empty", expected)
    return folder


def check_imagenet(root: str | Path, classes: int) -> Path:
    """Look at the class folders and at one image's name in each; the images are listed later.

    Args:
        root: the user's.
        classes: that the model tells apart.

    Raises:
        ConfigurationError: if the layout is another one, or has another number of classes.
    """
    folder = existing(root, IMAGENET)
    found = {part: _class_folders(folder / part) for part in ("train", "val")}
    if odd := sorted(set(found["train"]) ^ set(found["val"])):
        raise _refused(f"{folder}/train and {folder}/val have different class folders ({odd[0]} is in one only)", IMAGENET)
    if len(found["train"]) != classes:
        raise ConfigurationError(
            f"{folder}/train has {len(found['train'])} class folders and the model {classes} outputs: write"
            f" recipe.model.classes={len(found['train'])} if the folder is right."
        )
    return folder


def _class_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise _refused(f"there is no folder {folder}", IMAGENET)
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not names:
        loose = _has_image(folder)
        raise _refused(f"the images lie in {folder} itself" if loose else f"{folder} has no class folders", IMAGENET)
    for name in names:
        if not _has_image(folder / name):
            raise _refused(f"{folder / name} has no image in it", IMAGENET)
    return names


def _has_image(folder: Path) -> bool:
    return any(name.lower().endswith(IMG_EXTENSIONS) for _, _, names in os.walk(folder, followlinks=True) for name in names)


class _PlainUnpickler(pickle.Unpickler):
    """Arrays, numbers and texts only: a pickle from somewhere must not run code."""

    _ALLOWED = frozenset(
        {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
        | {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
        | {(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")}
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def check_cifar10(root: str | Path) -> tuple[Path, int]:
    """Read every file and look at its arrays.

    torchvision compares MD5 sums, and so takes none but the published files. Here files of the same names and format do too
    (a part of the images, other images); that they are not the published ones is said in the log.

    Returns:
        The folder, and how many training images there are.

    Raises:
        ConfigurationError: if a file is missing or is something else.
    """
    folder = existing(root, CIFAR)
    batches = folder / CIFAR10.base_folder
    published = dict(CIFAR10.train_list + CIFAR10.test_list) | {CIFAR_META: CIFAR10.meta["md5"]}
    images: dict[str, int] = {}
    others: list[str] = []
    for name in (*CIFAR_TRAIN, CIFAR_TEST, CIFAR_META):
        if not (batches / name).is_file():
            raise _refused(f"there is no file {batches / name}", CIFAR)
        encoded = (batches / name).read_bytes()
        if hashlib.md5(encoded, usedforsecurity=False).hexdigest() != published[name]:
            others.append(name)
        try:
            images[name] = _cifar_images(name, _PlainUnpickler(BytesIO(encoded), encoding="latin1").load())
        except (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise _refused(f"{batches / name} is not one of CIFAR-10's files ({reason})", CIFAR) from error
    if others:
        log.warning("Not the published CIFAR-10, but of its format, so it is used: %s in %s.", ", ".join(others), batches)
    return folder, sum(images[name] for name in CIFAR_TRAIN)


def _cifar_images(name: str, content: Any) -> int:
    """How many images a file holds; ValueError if it is not what its name says."""
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not a dict")
    if name == CIFAR_META:
        if len(content["label_names"]) != 10:
            raise ValueError(f"it names {len(content['label_names'])} classes, not 10")
        return 0
    data, labels = content["data"], content["labels"]
    if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == 3 * 32 * 32):
        raise ValueError("its data are not n × 3072 bytes")
    if len(labels) != len(data) or not len(data) or not all(label in range(10) for label in labels):
        raise ValueError(f"it has {len(data)} images and {len(labels)} labels, which must be as many and 0 … 9")
    return len(data)


def check_mnist(root: str | Path) -> tuple[Path, int]:
    """Read the headers of the four IDX files, and the labels.

    Returns:
        The folder, and how many training images there are.

    Raises:
        ConfigurationError: if a file is missing or is something else.
    """
    folder = existing(root, MNIST)
    raw = folder / "MNIST" / "raw"
    counts: dict[str, int] = {}
    for part in ("train", "t10k"):
        images = _idx_length(raw / f"{part}-images-idx3-ubyte", (_MNIST_SIDE, _MNIST_SIDE))
        labels = raw / f"{part}-labels-idx1-ubyte"
        if images != _idx_length(labels, ()) or not images or max(labels.read_bytes()[8:]) > 9:
            raise _refused(f"{labels} does not have one label of 0 … 9 for each of {images} images", MNIST)
        counts[part] = images
    return folder, counts["train"]


def _idx_length(path: Path, shape: tuple[int, ...]) -> int:
    """The number of items in an IDX file of bytes: 0, 0, 8 (bytes), dimensions; their sizes in 4 bytes each; the items."""
    if not path.is_file():
        raise _refused(f"there is no file {path}", MNIST)
    dimensions = 1 + len(shape)
    with path.open("rb") as file:
        header = file.read(4 + 4 * dimensions)
    sizes = [int.from_bytes(header[i : i + 4], "big") for i in range(4, len(header), 4)]
    if header[:4] != bytes((0, 0, 8, dimensions)) or tuple(sizes[1:]) != shape:
        raise _refused(f"{path} is not an IDX file of bytes, n{''.join(f' × {size}' for size in shape)}", MNIST)
    if path.stat().st_size != len(header) + int(np.prod(sizes)):
        raise _refused(f"{path} has {path.stat().st_size} bytes instead of {len(header) + int(np.prod(sizes))}", MNIST)
    return sizes[0]


def check_fashion_mnist(root: str | Path) -> tuple[Path, int]:
    """Read all four files.

    Returns:
        The folder in which they are, and how many training images there are.

    Raises:
        ConfigurationError: if a file is missing or is something else.
    """
    folder = existing(root, FASHION_MNIST)
    inner = folder / "FashionMNIST" / "raw"
    folder = inner if inner.is_dir() else folder
    counts = [len(fashion_mnist_arrays(folder, train=train)[1]) for train in (True, False)]
    return folder, counts[0]


def fashion_mnist_arrays(folder: Path, *, train: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images, n × 28 × 28 bytes, and their classes, 0 … 9, of the training or the test part.

    Raises:
        ConfigurationError: if a file is missing or is something else.
    """
    part = "train" if train else "t10k"
    images = _idx_array(folder / f"{part}-images-idx3-ubyte", (_MNIST_SIDE, _MNIST_SIDE))
    path = folder / f"{part}-labels-idx1-ubyte"
    labels = _idx_array(path, ())
    if len(labels) != len(images) or not len(images) or labels.max() > 9:
        raise _refused(f"{path} does not have one label of 0 … 9 for each of {len(images)} images", FASHION_MNIST)
    return images, labels


def _idx_array(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The items of an IDX file of bytes; of the compressed one beside it if there is none."""
    compressed = path.with_name(f"{path.name}.gz")
    try:
        encoded = path.read_bytes() if path.is_file() else gzip.decompress(compressed.read_bytes())
    except FileNotFoundError as error:
        raise _refused(f"there is no file {path}, nor {compressed.name} beside it", FASHION_MNIST) from error
    except (OSError, EOFError, zlib.error) as error:
        raise _refused(f"{compressed} cannot be decompressed ({error})", FASHION_MNIST) from error
    dimensions = 1 + len(shape)
    start = 4 + 4 * dimensions
    sizes = [int.from_bytes(encoded[i : i + 4], "big") for i in range(4, start, 4)]
    if encoded[:4] != bytes((0, 0, 8, dimensions)) or tuple(sizes[1:]) != shape:
        raise _refused(f"{path} is not an IDX file of bytes, n{''.join(f' × {size}' for size in shape)}", FASHION_MNIST)
    if len(encoded) != start + int(np.prod(sizes)):
        raise _refused(f"{path} has {len(encoded)} bytes instead of {start + int(np.prod(sizes))}", FASHION_MNIST)
    return np.frombuffer(bytearray(encoded[start:]), dtype=np.uint8).reshape(sizes)
