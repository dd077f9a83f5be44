"""Where a text comes from, how it is cut, and what is refused."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch

from lightning_gossip import ConfigurationError
from recipes.text.corpus import HOW, read, standard_library
from recipes.text.data import Sequences, TextData, characters, split, tokens

TEXT = "Übrigens ≈ 3 % of it.\n" * 40


def written(folder: Path, text: str = TEXT, name: str = "a.txt") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


# -- the text ----------------------------------------------------------------------------------------------------------


def test_a_text_is_a_file_or_the_books_of_a_folder_in_the_order_of_their_names(tmp_path: Path) -> None:
    book = written(tmp_path, "the second", "2.txt")
    written(tmp_path, "\ufeffthe first, ", "1.txt")
    written(tmp_path, "none", "notes.md")
    assert read(book) == "the second"
    assert read(tmp_path) == "the first, the second"


def test_the_standard_library_is_a_text_that_every_user_has() -> None:
    text = read(None)
    assert text == standard_library()
    assert len(text) > 2_000_000
    assert "class OrderedDict" not in text  # of the package collections
    assert "class Fraction(" in text


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda folder: folder / "none.txt", "none.txt does not exist"),
        (lambda folder: folder, "is a folder without a [*].txt file in it"),
        (lambda folder: written(folder, " \n"), "has no text in it"),
    ],
)
def test_a_wrong_path_gets_one_sentence_with_what_is_expected_and_a_command_that_makes_it(
    make: Any, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=problem) as caught:
        TextData(path=make(tmp_path))
    assert str(caught.value).endswith(f"; expected is {HOW}.")
    assert "apt-get install bible-kjv" in HOW


def test_a_file_that_is_not_utf8_is_refused_by_its_name_and_place(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes("fünf".encode("latin1"))
    with pytest.raises(ConfigurationError, match=r"latin1\.txt is not UTF-8 at byte 1: iconv converts it"):
        read(tmp_path)


# -- its parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", [0.01, 0.1, 0.37, 0.9])
def test_the_parts_never_overlap_and_are_the_text_together(held_out: float) -> None:
    parts = split(TEXT, held_out)
    assert characters(torch.cat(parts)) == TEXT
    texts = [bytes(part.tolist()).decode() for part in parts]  # raises where a character is cut
    assert len(texts[0]) == len(TEXT) - round(held_out * len(TEXT))
    assert abs(len(texts[1]) - len(texts[2])) <= 1


def test_a_part_s_sequences_have_each_of_its_bytes_once_and_are_asked_for_the_next_one() -> None:
    text = tokens("0123456789")
    for length, expected in ((3, ["012", "345", "678"]), (4, ["0123", "4567"]), (9, ["012345678"])):
        sequences = Sequences(text, length)
        pairs = [(characters(inputs), characters(targets)) for inputs, targets in sequences]
        assert [inputs for inputs, _ in pairs] == expected
        assert all(a[1:] == b[:-1] for a, b in pairs)
        assert all(before[1][-1] == after[0][0] for before, after in pairwise(pairs))


def test_the_data_module_gives_batches_of_its_parts(tmp_path: Path) -> None:
    data = TextData(path=written(tmp_path), held_out=0.2, sequence_length=16, batch_size=4)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [49, 6, 6]
    assert data.training_samples == 49
    inputs, targets = next(iter(data.train_dataloader()))
    assert (inputs.shape, inputs.dtype, targets.shape) == ((4, 16), torch.int64, (4, 16))
    for loader in (data.val_dataloader(), data.test_dataloader()):
        first, again = ([inputs for inputs, _ in loader] for _ in range(2))
        assert all(a.equal(b) for a, b in zip(first, again, strict=True))


def test_a_text_may_be_cut_off_after_some_characters(tmp_path: Path) -> None:
    data = TextData(path=written(tmp_path), max_characters=200, sequence_length=4)
    whole = torch.cat([data.train.text, data.validation.text, data.test.text])
    assert characters(whole) == TEXT[:200]


def test_bytes_that_are_no_character_are_shown_as_such() -> None:
    assert characters(torch.tensor([0x61, 0xFF, 0xC3, 0xBC])) == "a�ü"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 64}, r"a part of it 50 bytes: too short for a sequence of 64 .*sequence_length=49, a longer text"),
        (
            {"max_characters": 3, "sequence_length": 1},
            "has 3 characters, and a part of it 0 bytes.*Write a longer text",
        ),
        ({"held_out": 0.0}, "held_out=0.0 is not a share"),
        ({"sequence_length": 0}, "sequence_length=0"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_a_text_that_is_too_short_and_wrong_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TextData(path=written(tmp_path), **options)


@pytest.mark.skipif(which("bible") is None, reason="Debian's package bible-kjv is not installed")
def test_the_command_that_is_named_for_the_bible_makes_a_text(tmp_path: Path) -> None:
    made = subprocess.run(["bible", "gen1:1-rev22:21"], capture_output=True, text=True, check=True, timeout=60).stdout
    data = TextData(path=written(tmp_path, made))
    assert len(made) > 4_000_000
    assert characters(data.train.text[:200]).split()[:2] == ["Genesis", "1"]
