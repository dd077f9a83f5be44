"""A tensor's exact bits as one number, at the price of reading it once: what workers compare instead of sending it.

The bits are taken as words w_0, w_1, … of up to 64 bits and added up in columns, word i in column i mod 65521; each column
sum is folded, multiplied by an odd number of its own, and all are added, modulo 2⁶⁴. Whole numbers only, so that workers on
different hardware get one number for the same bits, as sums of floating-point numbers would not.

No protection against an adversary, and none is needed: what is compared are models that were trained apart.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_COLUMNS = 65521  # a prime: rows of a matrix that change places are noticed; 0.5 MB of sums stay in a core's cache
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2⁶⁴ divided by the golden ratio, odd, as a signed number
_POSITIVE = (1 << 63) - 1
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """One number of 63 bits a tensor; equal for equal bits in equal places. Waits once for each device.

    Args:
        tensors: of any type; see :func:`has_bits`.

    >>> a, b = fingerprints([torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])])
    >>> a == b, fingerprints([torch.tensor([1.0, 2.0])]) == [a]
    (False, True)
    """
    numbers = [_number(tensor) for tensor in tensors]
    results = [0] * len(numbers)
    for device in {number.device for number in numbers}:
        here = [index for index, number in enumerate(numbers) if number.device == device]
        for index, value in zip(here, torch.stack([numbers[index] for index in here]).tolist(), strict=True):
            results[index] = value & _POSITIVE
    return results


def has_bits(tensor: Tensor) -> bool:
    """Whether a tensor is a plain block of memory: not sparse, not quantized, no wrapper around other tensors."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not is_traceable_wrapper_subclass(tensor)


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor in their logical order, as a flat uint8 tensor; a view where that is possible."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@torch.no_grad()
def _number(tensor: Tensor) -> Tensor:
    data = as_bytes(tensor)
    size = next(size for size in _WORDS if data.numel() % size == 0 and data.storage_offset() % size == 0)
    words = data.view(_WORDS[size])
    rows = words.numel() // _COLUMNS
    if rows:
        whole, rest = words[: rows * _COLUMNS], words[rows * _COLUMNS :]
        sums = whole.view(rows, _COLUMNS).sum(0, dtype=torch.int64)
        sums[: rest.numel()] += rest
    else:
        sums = words.to(torch.int64)
    folded = sums ^ (sums >> 29)  # high bits, as a sign, must not cancel when multiplied
    return (folded * _weights(data.device)[: folded.numel()]).sum()


@functools.cache
def _weights(device: torch.device) -> Tensor:
    weights = torch.arange(1, _COLUMNS + 1, dtype=torch.int64, device=device) * _GOLDEN
    return (weights ^ (weights >> 31)) * _GOLDEN | 1
