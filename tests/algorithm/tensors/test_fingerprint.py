"""Tensors as numbers: equal bits, equal number; anything else, another one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_gossip.algorithm.tensors.fingerprint import fingerprints, has_bits


def number(tensor: Tensor) -> int:
    return fingerprints([tensor])[0]


def a_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)


TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (40, 3), (300, 601)])
def test_equal_bits_have_one_number_and_it_has_63_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = a_tensor(*shape, dtype=dtype)
    assert number(tensor) == number(tensor.clone())
    assert 0 <= number(tensor) < 2**63


@pytest.mark.parametrize("dtype", TYPES)
def test_one_changed_element_changes_the_number(dtype: torch.dtype) -> None:
    tensor = a_tensor(300, 601, dtype=dtype)
    before = number(tensor)
    for row, column in [(0, 0), (150, 300), (299, 600)]:
        other = tensor.clone()
        other[row, column] = not bool(other[row, column]) if dtype == torch.bool else other[row, column] + 1
        assert number(other) != before


CHANGES = {
    "two rows change places": lambda t: t.index_select(0, torch.tensor([1, 0, *range(2, len(t))])),
    "rolled": lambda t: t.roll(1, 0),
    "reversed": lambda t: t.flip(0),
    "all signs": lambda t: -t,
    "the signs of two elements": lambda t: t * torch.ones_like(t).index_fill(1, torch.tensor([1]), -1.0),
    "one step of the last bit": lambda t: torch.nextafter(t, torch.full_like(t, 9.0)),
    "negative zeros": lambda t: t * 0.0,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("shape", [(64, 32), (2048, 128)])
def test_a_rearrangement_changes_the_number(change: object, shape: tuple[int, int]) -> None:
    tensor = a_tensor(*shape)
    assert number(change(tensor)) != number(tensor)  # type: ignore[operator]


def test_strides_and_places_in_memory_do_not_matter() -> None:
    tensor = a_tensor(4, 3, 8, 8)
    assert number(tensor.contiguous(memory_format=torch.channels_last)) == number(tensor)
    longer = torch.cat([torch.zeros(1), a_tensor(7)])
    assert number(longer[1:]) == number(a_tensor(7))  # begins in the middle of a word of 64 bits


def test_what_is_no_block_of_memory_has_no_bits() -> None:
    assert has_bits(torch.zeros(3))
    assert not has_bits(torch.zeros(3, 3).to_sparse())
    assert not has_bits(torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8))
