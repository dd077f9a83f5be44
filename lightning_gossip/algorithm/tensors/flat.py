"""A model as one flat vector: what averaging, quantizing and sending work on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LiveTensors(Sequence[Tensor]):
    """Tensors that are looked up anew whenever they are used: a training loop may put others in their place.

    Args:
        read: the tensors as they are now, always as many, of the same shapes.
    """

    def __init__(self, read: Callable[[], list[Tensor]]) -> None:
        self._read = read

    def __len__(self) -> int:
        return len(self._read())

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._read())


class FlatModel:
    """One flat vector of a model's size and its views, shaped like the model's tensors.

    Args:
        tensors: whose shapes, in the same order on every worker.
        dtype: of the vector; default: see :func:`common_dtype`.
        device: of the vector; default: the CPU.
        room: so many elements more at the end, for what is sent with the model.

    Attributes:
        flat: shape (d + room,), zeros at first.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        room: int = 0,
    ) -> None:
        numel = sum(tensor.numel() for tensor in tensors) + room
        self.flat = torch.zeros(numel, dtype=dtype if dtype is not None else common_dtype(tensors), device=device or "cpu")
        self._views = views_like(self.flat, tensors)

    @torch.no_grad()
    def read(self, tensors: Sequence[Tensor]) -> Tensor:
        """Read the tensors into the vector, which is returned."""
        copy_all(tensors, self._views)
        return self.flat

    @torch.no_grad()
    def write(self, tensors: Sequence[Tensor], *, only: int | None = None) -> None:
        """Write the vector into the tensors, in place; ``only`` into the first so many, if given."""
        copy_all(self._views[:only], tensors[:only])

    @torch.no_grad()
    def add_to(self, tensors: Sequence[Tensor]) -> None:
        """Add the vector to the tensors, in place."""
        for tensor, view in zip(tensors, self._views, strict=True):
            tensor.add_(view.to(tensor.device))


class Fading(NamedTuple):
    """Where a flat vector holds running statistics (BatchNorm's), and what they keep of a change made from outside.

    A layer with momentum a replaces its statistic b by (1 − a)·b + a·batch. A change m that came to b meanwhile is applied as
    if it had come before, which leaves (1 − a)·m of it: with all of m a running variance could turn negative.

    Args:
        place: in the vector.
        share: 1 − a, which one forward pass in training mode leaves.
    """

    place: slice
    share: float


def fading(tensors: Sequence[Tensor], retention: Sequence[float] | None) -> list[Fading]:
    """The running statistics among tensors.

    Args:
        tensors: in the order of the flat vector.
        retention: per tensor its share, 1 for everything that is not a running statistic; None: there are none.
    """
    if retention is None:
        return []
    ends = itertools.accumulate(tensor.numel() for tensor in tensors)
    return [
        Fading(slice(end - tensor.numel(), end), share)
        for tensor, end, share in zip(tensors, ends, retention, strict=True)
        if share != 1.0
    ]


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors into others of the same shapes, in place. There may be none: a rank of an island may own nothing."""
    sources, targets = list(sources), list(targets)
    if targets:  # torch refuses empty lists
        torch._foreach_copy_(targets, sources)


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The type that holds all tensors' values, at least float32 so that averaging half-precision values loses nothing."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def host_copy(tensor: Tensor) -> Tensor:
    """The values of a tensor in host memory of their own, contiguous."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def views_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat vector, one per tensor, with its shape and, where it is dense, its strides.

    Equal strides make the copies between x and y plain memory copies for channels_last tensors too.
    """
    views = []
    offset = 0
    for tensor in tensors:
        piece = flat[offset : offset + tensor.numel()]
        dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        views.append(piece.as_strided(tensor.shape, tensor.stride()) if dense else piece.view(tensor.shape))
        offset += tensor.numel()
    return views


def chunk_slices(numel: int, chunk_numel: int) -> list[slice]:
    """Cut ``numel`` elements into consecutive slices of at most ``chunk_numel``."""
    return [slice(start, min(start + chunk_numel, numel)) for start in range(0, numel, chunk_numel)]


def fragment_slices(numel: int, fragments: int) -> list[slice]:
    """Cut ``numel`` elements into so many consecutive slices, as equal as may be.

    >>> [(part.start, part.stop) for part in fragment_slices(10, 3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    ends = [number * numel // fragments for number in range(fragments + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]
