from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gossip import ConfigurationError
from recipes.vision.data import CifarData, FashionMnistData, ImageNetData, MnistData
from recipes.vision.formats import CIFAR, FASHION_MNIST, IMAGENET, MNIST
from tests.recipes.vision import generated


def imagenet(root: Path, **options: Any) -> ImageNetData:
    data = ImageNetData(root=root, **{"classes": 3, "image_size": 64, "batch_size": 6, "num_workers": 0, **options})
    data.setup("fit")
    return data


# -- what is read ------------------------------------------------------------------------------------------------------


def test_imagenets_folders_give_images_of_one_size_and_their_classes_in_alphabetical_order(tmp_path: Path) -> None:
    data = imagenet(generated.imagenet(tmp_path))
    batches = list(data.train_dataloader())
    assert [images.shape for images, _ in batches] == [(6, 3, 64, 64)] * 2
    assert {images.dtype for images, _ in batches} == {torch.uint8}
    assert torch.cat([labels for _, labels in batches]).bincount().tolist() == [4, 4, 4]
    for i, (image, label) in enumerate(data.test):
        assert image.shape == (3, 64, 64)
        if i % 2 == 0:  # the others are grey
            assert image.sum((1, 2)).argmax() == label
    assert i == 5


def test_imagenets_training_images_are_cropped_at_random_and_those_to_evaluate_are_not(tmp_path: Path) -> None:
    data = imagenet(generated.imagenet(tmp_path))
    assert not data.train[0][0].equal(data.train[0][0])
    assert data.validation[0][0].equal(data.validation[0][0])


def test_cifars_files_give_the_pixels_that_were_written(tmp_path: Path) -> None:
    data = CifarData(root=generated.cifar10(tmp_path), validation_images=8, batch_size=8, num_workers=0)
    data.setup("fit")
    assert (len(data.train), len(data.validation), len(data.test)) == (32, 8, 16)
    written = pickle.loads((tmp_path / "cifar-10-batches-py" / "test_batch").read_bytes(), encoding="latin1")
    images, labels = next(iter(data.test_dataloader()))
    assert np.array_equal(images.numpy().reshape(8, 3072), written["data"][:8])
    assert labels.tolist() == written["labels"][:8]
    assert next(iter(data.train_dataloader()))[0].shape == (8, 3, 32, 32)


def test_images_are_bytes_until_they_are_normalised_on_the_device(tmp_path: Path) -> None:
    data = CifarData(root=generated.cifar10(tmp_path), validation_images=8, batch_size=8, num_workers=0)
    data.setup("fit")
    images, labels = next(iter(data.test_dataloader()))
    assert images.dtype == torch.uint8
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    normalised, same = data.on_after_batch_transfer([images, labels], 0)
    torch.testing.assert_close(normalised, (images.float() / 255 - mean[:, None, None]) / std[:, None, None])
    assert same is labels


def test_cifars_validation_images_are_none_of_the_training_images_and_the_same_in_every_run(tmp_path: Path) -> None:
    generated.cifar10(tmp_path)
    a, b = (CifarData(root=tmp_path, validation_images=8) for _ in range(2))
    assert a.parts == b.parts
    assert sorted(a.parts[0] + a.parts[1]) == list(range(40))


def test_mnists_files_give_the_pixels_that_were_written(tmp_path: Path) -> None:
    data = MnistData(root=generated.mnist(tmp_path), validation_images=8, batch_size=8)
    data.setup("fit")
    assert (len(data.train), len(data.validation), len(data.test)) == (40, 8, 16)
    for part in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        images, labels = next(iter(part))
        assert images.shape == (8, 1, 28, 28)
        assert torch.equal(images.sum((1, 3)).argmax(1), 2 * labels + 4)


def test_fashion_mnists_compressed_files_give_the_pixels_that_were_written(tmp_path: Path) -> None:
    data = fashion(generated.fashion_mnist(tmp_path))
    assert (len(data.train), len(data.validation), len(data.test)) == (40, 8, 16)
    assert data.training_samples == 40
    for part in (data.val_dataloader(), data.test_dataloader()):
        images, labels = next(iter(part))
        assert (images.shape, images.dtype) == ((8, 1, 28, 28), torch.uint8)
        assert torch.equal(images.sum((1, 3)).argmax(1), 2 * labels + 4)
    assert next(iter(data.train_dataloader()))[0].shape == (8, 1, 28, 28)
    assert sorted(data.parts[0] + data.parts[1]) == list(range(48))


def test_fashion_mnist_is_found_where_torchvision_puts_it_unpacked_too(tmp_path: Path) -> None:
    generated.mnist(tmp_path / "other")
    shutil.move(tmp_path / "other" / "MNIST", tmp_path / "FashionMNIST")
    packed, unpacked = fashion(generated.fashion_mnist(tmp_path / "packed")), fashion(tmp_path)
    assert all(a.equal(b) and i == j for (a, i), (b, j) in zip(packed.test, unpacked.test, strict=True))


def fashion(root: Path) -> FashionMnistData:
    data = FashionMnistData(root=root, validation_images=8, batch_size=8)
    data.setup("fit")
    return data


PACKAGE = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.skipif(not PACKAGE.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_debians_package_has_sixty_thousand_images_to_train_on_and_ten_thousand_to_test_on() -> None:
    data = FashionMnistData(root=PACKAGE)
    data.setup("fit")
    assert (len(data.train), len(data.validation), len(data.test)) == (55_000, 5_000, 10_000)
    counts = torch.tensor([label for _, label in data.test]).bincount()
    assert counts.tolist() == [1_000] * 10


def test_that_cifars_files_are_not_the_published_ones_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CifarData(root=generated.cifar10(tmp_path), validation_images=8)
    assert "Not the published CIFAR-10, but of its format" in caplog.text


# -- what is refused, before any worker starts ----------------------------------------------------------------------------


def make(kind: str, root: Path) -> Any:
    if kind == "imagenet":
        return ImageNetData(root=root, classes=3)
    return {"cifar10": CifarData, "mnist": MnistData, "fashion_mnist": FashionMnistData}[kind](root=root, validation_images=8)


LAYOUTS = {"imagenet": IMAGENET, "cifar10": CIFAR, "mnist": MNIST, "fashion_mnist": FASHION_MNIST}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_missing_and_an_empty_folder_get_one_sentence_with_the_expected_layout(kind: str, tmp_path: Path) -> None:
    for folder, problem in ((tmp_path / "none", "is not a folder"), (tmp_path, "is empty")):
        with pytest.raises(ConfigurationError) as caught:
            make(kind, folder)
        assert str(caught.value) == f"recipe.data.root={folder} {problem}; expected is {LAYOUTS[kind]}."


def _flat_val(root: Path) -> None:
    for image in list((root / "val").rglob("*.JPEG")):
        image.rename(root / "val" / image.name)
    for folder in (root / "val").iterdir():
        if folder.is_dir():
            folder.rmdir()


def _classes_at_the_top(root: Path) -> None:
    for folder in (root / "train").iterdir():
        folder.rename(root / folder.name)
    shutil.rmtree(root / "train")


def _no_images(root: Path) -> None:
    for image in (root / "train" / generated.CLASSES[1]).iterdir():
        image.rename(image.with_suffix(".txt"))


def _runs_code(root: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return (Path.touch, (root / "was_run",))

    (root / "cifar-10-batches-py" / "data_batch_2").write_bytes(pickle.dumps(Attack()))


def _written(name: str, content: Any) -> Callable[[Path], None]:
    encoded = content if isinstance(content, bytes) else pickle.dumps(content, protocol=2)
    return lambda root: (root / name).write_bytes(encoded) and None  # type: ignore[return-value]


def _cut(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:-5]) and None  # type: ignore[return-value]


_CIFAR, _MNIST = "cifar-10-batches-py", "MNIST/raw"
_IMAGES = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("kind", "spoil", "problem"),
    [
        ("imagenet", lambda root: shutil.rmtree(root / "val"), "there is no folder .*/val;"),
        ("imagenet", _classes_at_the_top, "there is no folder .*/train;"),
        ("imagenet", _flat_val, "the images lie in .*/val itself;"),
        ("imagenet", _no_images, f"{generated.CLASSES[1]} has no image in it;"),
        ("imagenet", lambda root: shutil.rmtree(root / "val" / generated.CLASSES[2]), f"{generated.CLASSES[2]} is in one only"),
        ("cifar10", lambda root: (root / _CIFAR / "data_batch_3").unlink(), "there is no file .*/data_batch_3;"),
        ("cifar10", lambda root: (root / _CIFAR / "batches.meta").unlink(), "there is no file .*/batches.meta;"),
        ("cifar10", _written(f"{_CIFAR}/data_batch_1", b"not a pickle"), "data_batch_1 is not one of CIFAR-10's files"),
        ("cifar10", _written(f"{_CIFAR}/data_batch_1", [1, 2]), "it holds a list, not a dict"),
        ("cifar10", _written(f"{_CIFAR}/data_batch_1", {"data": [1], "labels": [1]}), "its data are not n × 3072 bytes"),
        ("cifar10", _written(f"{_CIFAR}/test_batch", {"data": _IMAGES, "labels": [1, 10]}), "0 … 9"),
        ("cifar10", _written(f"{_CIFAR}/test_batch", {"data": _IMAGES, "labels": [1]}), "2 images and 1 labels"),
        ("cifar10", _written(f"{_CIFAR}/batches.meta", {"label_names": ["cat"]}), "names 1 classes, not 10"),
        ("cifar10", _cut(f"{_CIFAR}/data_batch_5"), "data_batch_5 is not one of CIFAR-10's files"),
        ("cifar10", _runs_code, "it refers to pathlib"),
        ("mnist", lambda root: (root / _MNIST / "t10k-labels-idx1-ubyte").unlink(), "there is no file .*t10k-labels"),
        ("mnist", _written(f"{_MNIST}/train-images-idx3-ubyte", b"\x1f\x8b a gzip file"), "train-images.* is not an IDX file"),
        ("mnist", _cut(f"{_MNIST}/t10k-images-idx3-ubyte"), "bytes instead of"),
        (
            "mnist",
            _written(f"{_MNIST}/t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x01\x05"),
            "one label of 0 … 9 for each of 16",
        ),
        ("fashion_mnist", lambda root: (root / "train-labels-idx1-ubyte.gz").unlink(), "there is no file .*train-labels"),
        ("fashion_mnist", _cut("t10k-images-idx3-ubyte.gz"), "t10k-images.* cannot be decompressed"),
        ("fashion_mnist", _written("train-images-idx3-ubyte.gz", b"not compressed"), "train-images.* cannot be decompressed"),
        ("fashion_mnist", _written("train-images-idx3-ubyte", b"another file"), "train-images.* is not an IDX file"),
        ("fashion_mnist", _written("t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x01"), "8 bytes instead of 9"),
        ("fashion_mnist", _written("t10k-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x01\x05"), "for each of 16 images"),
    ],
)
def test_a_folder_in_another_layout_gets_one_sentence(
    kind: str, spoil: Callable[[Path], None], problem: str, tmp_path: Path
) -> None:
    getattr(generated, kind)(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ConfigurationError, match=problem) as caught:
        make(kind, tmp_path)
    assert str(caught.value).endswith(f"; expected is {LAYOUTS[kind]}.")
    assert not (tmp_path / "was_run").exists()


def test_another_number_of_classes_than_the_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"3 class folders.*1000 outputs.*classes=3"):
        ImageNetData(root=generated.imagenet(tmp_path))


@pytest.mark.parametrize("options", [{"corrupt": "skp"}, {"batch_size": 0}, {"num_workers": -1}, {"prefetch": 0}])
def test_wrong_options_are_refused_by_name(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="=".join(str(part) for part in next(iter(options.items()))).split("=")[0]):
        imagenet(generated.imagenet(tmp_path), **options)


@pytest.mark.parametrize("images", [0, 40])
def test_some_images_must_be_left_to_train_and_to_validate_on(images: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"validation_images={images} of 40.*1 … 39"):
        CifarData(root=generated.cifar10(tmp_path), validation_images=images)
