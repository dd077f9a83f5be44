r"""How the two models of an exchange are written for the wire, and the half-difference that both ends read from what was sent.

An exchange must not change the sum of the two models, whatever the rounding. So a codec never rounds a result: both ends know
both payloads, and reckon from these alone

    d_i = ½ (Q(s_j) − Q(s_i)) = −d_j      to the bit

What rounding has left out of d stays where it is, in the difference of the two models, and is sent when they meet again: error
feedback without a vector to feed it from.

| name | bytes an element | what is sent |
|---|---|---|
| ``float32`` | 4; 8 for float64 models | s as it is |
| ``bfloat16`` | 2 | s, rounded to 8 bits of mantissa: a difference of less than 2⁻⁸ of a weight is not seen, and stays |
| ``int16`` | 2, and 8 for 1024 | s modulo 2¹⁶ steps, see :mod:`lightning_gossip.algorithm.compression.moniqua` |
| ``int8`` | 1, and 8 for 1024 | s modulo 2⁸ steps, which follow the difference of the models |
"""

from __future__ import annotations

from typing import Protocol, get_args

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gossip.algorithm.checks import check_choice
from lightning_gossip.algorithm.compression.moniqua import ModularCode, modular_bytes
from lightning_gossip.algorithm.compression.wires import Wire
from lightning_gossip.algorithm.tensors.finite import all_finite


class Codec(Protocol):
    """Compression of the chunks that one worker sends of one model, one exchange at a time. Not thread-safe.

    Attributes:
        granule: chunks begin at multiples of so many elements.
        payload_dtype: what payloads are made of.
    """

    granule: int
    payload_dtype: torch.dtype

    def greeting(self) -> Tensor | None:
        """What both ends send before the first chunk; None if nothing."""

    def agree(self, theirs: Tensor) -> None:
        """Take in the partner's greeting."""

    def payload_numel(self, length: int) -> int:
        """Elements, of :attr:`payload_dtype`, of the payload of a chunk of so many elements."""

    def room(self, payload: Tensor, length: int) -> Tensor:
        """Where a chunk is to be copied to before :meth:`encode`, shape (length,); valid until then."""

    def encode(self, chunk: slice, payload: Tensor) -> None:
        """Write what is in the room into the payload.

        Args:
            chunk: its place in the model.
            payload: that the room belongs to.
        """

    def half_difference(self, chunk: slice, mine: Tensor, theirs: Tensor) -> Tensor:
        """d = ½ (Q(theirs) − Q(mine)); the other end gets exactly −d. NaN where one of the two is not finite.

        Args:
            chunk: its place in the model.
            mine, theirs: payloads; ``theirs`` may be overwritten.

        Returns:
            d, shape (length,), valid until the next call.
        """

    def is_finite(self, payload: Tensor) -> bool:
        """Whether the elements that a payload was made of are finite."""


class Plain(Codec):
    """Codec that sends elements as they are.

    Args:
        dtype: of the model.
    """

    granule = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.payload_dtype = dtype

    @override
    def greeting(self) -> Tensor | None:
        return None

    @override
    def agree(self, theirs: Tensor) -> None:
        raise AssertionError("there is no greeting")

    @override
    def payload_numel(self, length: int) -> int:
        return length

    @override
    def room(self, payload: Tensor, length: int) -> Tensor:
        return payload

    @override
    def encode(self, chunk: slice, payload: Tensor) -> None:
        """Nothing to do: the copy of the chunk is the payload."""

    @override
    def half_difference(self, chunk: slice, mine: Tensor, theirs: Tensor) -> Tensor:
        return half_difference(mine, theirs)

    @override
    def is_finite(self, payload: Tensor) -> bool:
        return all_finite(payload)


class Rounded(Plain):
    """Sends elements rounded to the nearest of a shorter type.

    Args:
        dtype: of the model.
        sent: the shorter type.
    """

    def __init__(self, dtype: torch.dtype, sent: torch.dtype) -> None:
        super().__init__(sent)
        self._copy, self._difference = torch.empty(0, dtype=dtype, device="cpu"), torch.empty(0, dtype=dtype, device="cpu")

    @override
    def room(self, payload: Tensor, length: int) -> Tensor:
        if self._copy.numel() < length:
            self._copy, self._difference = self._copy.new_empty(length), self._copy.new_empty(length)
        return self._copy[:length]

    @override
    def encode(self, chunk: slice, payload: Tensor) -> None:
        payload.copy_(self._copy[: payload.numel()])

    @override
    def half_difference(self, chunk: slice, mine: Tensor, theirs: Tensor) -> Tensor:
        length = mine.numel()
        mine_again = self.room(mine, length).copy_(mine)
        return half_difference(mine_again, self._difference[:length].copy_(theirs))


def exchange_bytes(wire: Wire, numel: int, dtype: torch.dtype = torch.float32) -> int:
    """What each end of an exchange sends, in bytes, without the headers of messages and packets.

    Args:
        wire: see :func:`make_codec`.
        numel: elements of the model.
        dtype: of the published model.

    >>> [exchange_bytes(wire, 1024) for wire in get_args(Wire)]
    [4096, 2048, 2056, 1032]
    """
    if wire in ("int8", "int16"):
        return modular_bytes(numel, 8 if wire == "int8" else 16)
    return numel * (torch.bfloat16 if wire == "bfloat16" else dtype).itemsize


def make_codec(wire: Wire, model: Tensor) -> Codec:
    """Make the codec of a name.

    Args:
        wire: the name, the same on all workers.
        model: shape (d,), the published model when its layout is new.

    Raises:
        ConfigurationError: for another name.

    >>> make_codec("int8", torch.zeros(2048)).payload_numel(1024)
    1028
    """
    check_choice("wire", wire, get_args(Wire))
    if wire in ("int8", "int16"):
        return ModularCode(model, 8 if wire == "int8" else 16)
    return Rounded(model.dtype, torch.bfloat16) if wire == "bfloat16" else Plain(model.dtype)


def half_difference(mine: Tensor, theirs: Tensor) -> Tensor:
    """d = ½ (s_j − s_i), computed in the memory of ``theirs``. The other end gets exactly −d."""
    return theirs.sub_(mine).mul_(0.5)
