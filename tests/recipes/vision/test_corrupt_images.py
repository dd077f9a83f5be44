from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_gossip import ConfigurationError
from recipes.vision.data import ImageNetData
from tests.recipes.vision import generated
from tests.recipes.vision.test_data import imagenet


def image(root: Path, number: int, part: str = "train", label: int = 0) -> Path:
    name = generated.CLASSES[label]
    return root / part / name / f"{name}_{number}.JPEG"


def truncated(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:600])
    return path


@pytest.mark.parametrize("content", [b"", b"no image at all", b"\xff\xd8\xff\xe0 only a beginning"])
def test_bytes_that_are_no_image_are_corrupt(content: bytes, tmp_path: Path) -> None:
    image(generated.imagenet(tmp_path), 1).write_bytes(content)
    data = imagenet(tmp_path)
    assert data.train[1][0].shape == (3, 64, 64)
    assert data.train.corrupt_images == [str(image(tmp_path, 1))]


def test_a_corrupt_image_is_replaced_named_and_counted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generated.imagenet(tmp_path)
    bad = [truncated(image(tmp_path, 0)), truncated(image(tmp_path, 3, label=2))]  # the last of all: the first follows
    data = imagenet(tmp_path)
    for _ in range(2):
        batches = list(data.train_dataloader())
        assert [len(images) for images, _ in batches] == [6, 6]
        assert torch.cat([labels for _, labels in batches]).bincount().tolist() == [5, 4, 3]
    named = [record.getMessage() for record in caplog.records if "Corrupt image" in record.getMessage()]
    assert len(named) == 2
    assert all(sum(str(path) in message for message in named) == 1 for path in bad)
    assert "number 2 found" in named[1]
    caplog.clear()
    data.teardown("fit")
    assert "Rank 0 replaced 2 corrupt training images" in caplog.text


def test_images_found_by_the_loaders_processes_are_counted(tmp_path: Path) -> None:
    generated.imagenet(tmp_path)
    bad = {str(truncated(image(tmp_path, number, label=number % 3))) for number in range(3)}
    data = imagenet(tmp_path, num_workers=2, batch_size=2)
    loader = data.train_dataloader()
    assert [len(images) for images, _ in loader] == [2] * 6
    assert set(data.train.corrupt_images) == bad
    del loader


def test_a_corrupt_image_is_fatal_where_that_is_wished(tmp_path: Path) -> None:
    bad = truncated(image(generated.imagenet(tmp_path), 2))
    loader = imagenet(tmp_path, corrupt="fatal").train_dataloader()
    with pytest.raises(ConfigurationError, match=rf"corrupt image {bad}.*recipe\.data\.corrupt=skip"):
        list(loader)


def test_a_folder_of_nothing_but_corrupt_images_is_an_error_and_no_endless_search(tmp_path: Path) -> None:
    generated.imagenet(tmp_path)
    for path in (tmp_path / "train").rglob("*.JPEG"):
        path.write_bytes(b"")
    with pytest.raises(ConfigurationError, match="12 images in a row"):
        list(imagenet(tmp_path).train_dataloader())


def test_a_file_that_cannot_be_read_is_not_taken_for_a_corrupt_image(tmp_path: Path) -> None:
    data = imagenet(generated.imagenet(tmp_path))
    image(tmp_path, 1).unlink()
    with pytest.raises(FileNotFoundError):
        data.train[1]


# -- decoded by the device: on the CPU too, a batch at a time ------------------------------------------------------------


def on_device(data: ImageNetData) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [data.transfer_batch_to_device(batch, torch.device("cpu"), 0) for batch in data.val_dataloader()]


def test_the_device_decodes_the_same_images(tmp_path: Path) -> None:
    generated.imagenet(tmp_path)
    Image.new("RGBA", (80, 90)).save(image(tmp_path, 1, part="val", label=1), "PNG")  # which is no JPEG: not by the device
    expected = list(imagenet(tmp_path).val_dataloader())
    for (images, labels), (same, classes) in zip(on_device(imagenet(tmp_path, decode="device")), expected, strict=True):
        assert images.equal(same)
        assert labels.equal(classes)


def test_a_corrupt_image_is_replaced_or_fatal_where_the_device_decodes_too(tmp_path: Path) -> None:
    bad = truncated(image(generated.imagenet(tmp_path), 1, part="val"))
    data = imagenet(tmp_path, decode="device")
    (images, labels), *rest = on_device(data)
    assert (images.shape, labels.tolist(), rest) == ((6, 3, 64, 64), [0, 1, 1, 1, 2, 2], [])
    assert data.validation.corrupt_images == [str(bad)]
    with pytest.raises(ConfigurationError, match=f"corrupt image {bad}"):
        on_device(imagenet(tmp_path, decode="device", corrupt="fatal"))


def test_sixteen_bits_and_films_are_read_by_pillow(tmp_path: Path) -> None:
    generated.imagenet(tmp_path)
    Image.fromarray(np.full((80, 90), 40_000, dtype=np.uint16)).save(image(tmp_path, 0), "PNG")
    film = [Image.new("P", (90, 80), color) for color in (1, 2)]
    film[0].save(image(tmp_path, 1), "GIF", save_all=True, append_images=film[1:])
    folder = imagenet(tmp_path).train
    assert {(folder.decoded(index)[0].shape, folder.decoded(index)[0].dtype) for index in (0, 1)} == {
        ((3, 80, 90), torch.uint8)
    }
    assert folder.corrupt_images == []


def test_a_corrupt_image_in_the_middle_of_the_log_has_a_level_that_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    truncated(image(generated.imagenet(tmp_path), 0, part="val"))
    imagenet(tmp_path).validation[0]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
