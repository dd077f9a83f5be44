"""Tiny data sets of random images in the real formats: ImageNet's folders, CIFAR-10's batch files, IDX files of both MNISTs."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("n01440764", "n01443537", "n01484850")
CIFAR_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def imagenet(root: Path, *, train: int = 4, val: int = 2, side: int = 72) -> Path:
    """JPEG files of three classes; ``train`` and ``val`` are images a class. One of them is grey, as some of ImageNet's are."""
    random = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for label, name in enumerate(CLASSES):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 128, (side, side + 8 * i, 3), dtype=np.uint8)
                pixels[..., label] += 100
                image = Image.fromarray(pixels)
                if i == 1:
                    image = image.convert("L")
                image.save(folder / f"{name}_{i}.JPEG")
    return root


def cifar10(root: Path, *, per_batch: int = 8, test: int = 16) -> Path:
    """Five training batches and a test batch, pickled as the published ones are: protocol 2, texts as of Python 2."""
    random = np.random.default_rng(0)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, count in [*((f"data_batch_{i}", per_batch) for i in range(1, 6)), ("test_batch", test)]:
        labels = [i % 10 for i in range(count)]
        data = random.integers(0, 256, (count, 3072), dtype=np.uint8)
        content = {"batch_label": name, "labels": labels, "data": data, "filenames": [f"{i}.png" for i in range(count)]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    meta = {"num_cases_per_batch": per_batch, "label_names": CIFAR_NAMES, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    return root


def mnist(root: Path, *, train: int = 48, test: int = 16) -> Path:
    """Four IDX files: big-endian headers, then bytes. Each image shows its digit as a bright row."""
    random = np.random.default_rng(0)
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = random.integers(0, 64, (count, 28, 28), dtype=np.uint8)
        images[np.arange(count), 2 * labels + 4] = 255
        header = (0x803).to_bytes(4, "big") + b"".join(size.to_bytes(4, "big") for size in images.shape)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            (0x801).to_bytes(4, "big") + count.to_bytes(4, "big") + labels.tobytes()
        )
    return root


def fashion_mnist(root: Path) -> Path:
    """The same images in the files of Debian's package: compressed, in the folder itself."""
    files = list((mnist(root / "unpacked") / "MNIST" / "raw").iterdir())
    for file in files:
        (root / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    for folder in ("unpacked/MNIST/raw", "unpacked/MNIST", "unpacked"):
        (root / folder).rmdir()
    return root
