r"""Stochastic quantization: a vector in a few bits per element, right on average.

Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD (NeurIPS 2017, arXiv 1610.02132), section 3.1 and, for buckets and the
maximum norm, section 4. The vector is cut in buckets. Of each, one scale and one small signed integer per element:

    y_i = s · |x_i| / ‖x‖ ;   l_i = ⌊y_i⌋ + [u_i < y_i − ⌊y_i⌋] ;   q_i = sign(x_i) · l_i ;   Q(x)_i = ‖x‖ · q_i / s

Hence E Q(x) = x, and Var Q(x)_i = Δ² f (1 − f) ≤ Δ²/4 with Δ = ‖x‖/s and f = y_i − ⌊y_i⌋.

| letter | here | what it is |
|---|---|---|
| x | ``flat`` | the vector; in the formula one bucket of it |
| d | ``bucket_size`` | elements in a bucket; the last bucket may be shorter |
| ‖x‖ | ``norm``, the scale | the largest magnitude in the bucket, or the L2 norm |
| s | ``levels`` | the non-zero magnitudes that an element can take; zero is one more |
| b | ``bits`` | bits in which one q is sent |
| u | ``torch.rand`` | uniform on the multiples of 2⁻²⁴ in [0, 1), in the order of the elements |
| q | code q + s | in [−s, s]; the code in [0, 2s] |

On the wire, bucket after bucket, without a header (length, bits and bucket size are agreed on beforehand):

| bytes | what |
|---|---|
| 4 | the scale, float32, little-endian |
| ⌈n·b/8⌉ for n elements | the codes as one little-endian number, Σ_i code_i · 2^(b·i), i from 0: the first lies lowest |

Departures from the paper: the codes have a fixed width (there: Elias coding, which pays off only where most are zero, as
with the L2 norm and few levels), and the scale is rounded up, so that y ≤ s whatever the type of x
(``tests/algorithm/compression/test_qsgd.py::test_a_norm_that_float32_does_not_hold_is_rounded_up``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_gossip.algorithm.checks import check_integer, is_integer
from lightning_gossip.arguments import clear_arguments
from lightning_gossip.errors import ConfigurationError

_SCALE_BYTES = 4
# Elements that are worked on at once, in whole buckets: some 30 bytes of temporaries each. As measured on a CPU with 1 MiB
# of L2 a core, 2^17 to 2^20 are alike and 2^15 takes 1.3 times as long. The other, for large kernels, is a guess.
_CPU_BLOCK = 1 << 18
_DEVICE_BLOCK = 1 << 22
# bits → the integer type of the fewest codes that fill whole bytes: 2 codes of 4 bits, 4 of 2 or 6, 8 of any other width.
_WORDS = {2: torch.int32, 3: torch.int64, 4: torch.int16, 5: torch.int64, 6: torch.int32, 7: torch.int64}


Norm = Literal["max", "l2"]


@clear_arguments
@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """QSGD's stochastic rounding of a vector, and its bytes.

    Why the maximum norm is the default: the error grows with scale/s, and the L2 norm of a bucket is many times its largest
    magnitude. At 4 bits in buckets of 512, E‖Q(x) − x‖²/‖x‖² was measured as 0.037 with the maximum and 1.58, more noise
    than signal, with the L2 norm for Gaussian values (43 times); 0.080 and 1.33 for Laplace values (17 times); 24 and 33
    times as much for gradients of an MLP on digits, before and after 300 steps of SGD: about 30 times the variance.

    Args:
        bits: per element, sign included; 2 to 8.
        levels: s, the non-zero magnitudes; the 2s + 1 codes must fit in ``bits``. Default: as many as fit, 2^(bits−1) − 1.
        bucket_size: elements that share one scale, >= 1. Smaller buckets: less error, and 32/bucket_size more bits per
            element.
        norm: ``"max"`` or ``"l2"``, what the elements of a bucket are divided by.

    Raises:
        ConfigurationError: for any other value.

    >>> quantizer = Quantizer(bits=4, bucket_size=4)
    >>> payload = quantizer.encode(torch.tensor([7.0, -3.0, 0.0, 1.0, 0.5]), torch.Generator().manual_seed(0))
    >>> len(payload) == quantizer.nbytes(5) == (4 + 2) + (4 + 1)
    True
    >>> quantizer.decode(payload, 5).tolist()
    [7.0, -3.0, 0.0, 1.0, 0.5]
    """

    bits: int = 4
    levels: int | None = None
    bucket_size: int = 512
    norm: Norm = "max"

    def __post_init__(self) -> None:
        check_integer("bits", self.bits, at_least=2, at_most=8, example=4)
        most = _most_levels(self.bits)
        if self.levels is not None and not is_integer(self.levels, 1, most):
            raise ConfigurationError(
                f"got quantization levels that do not fit: levels={self.levels!r} with bits={self.bits}; the 2·levels + 1 "
                f"codes must be at most 2^bits = {2**self.bits}, so levels is an integer in [1, {most}]. "
                f"Write levels={most}, or None for as many as fit, or choose more bits."
            )
        check_integer("bucket_size", self.bucket_size, example=512)
        if self.norm not in ("max", "l2"):
            raise ConfigurationError(f"got norm={self.norm!r}; it is 'max' or 'l2'. Write 'max', which errs less.")

    @property
    def magnitudes(self) -> int:
        """s: ``levels``, or as many as fit."""
        return self.levels if self.levels is not None else _most_levels(self.bits)

    def nbytes(self, numel: int) -> int:
        """The exact length in bytes of a payload of ``numel`` elements."""
        full, rest = divmod(numel, self.bucket_size)
        return full * self._row_bytes(self.bucket_size) + (self._row_bytes(rest) if rest else 0)

    @torch.no_grad()
    def encode(self, flat: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Quantize a vector.

        A bucket that holds an infinity or a NaN comes out as NaN or infinite in every element, so that whoever scales
        gradients sees it on the receiving side too. So does one whose norm is beyond float32's range.

        Args:
            flat: x, shape (numel,), floating; the maths is float64 for float64 and float32 for all other types.
            generator: of u, on the device of ``flat``; its state advances. The same state gives the same payload on the
                same kind of device. None for u = ½: to the nearest, for a caller that feeds the error back.

        Returns:
            The payload, uint8, shape (nbytes(numel),), on the same device.

        Raises:
            ValueError: if ``flat`` is not a floating-point vector.
        """
        _check_vector("flat", flat)
        payload = torch.empty(self.nbytes(flat.numel()), dtype=torch.uint8, device=flat.device)
        for values, rows in self._blocks(flat, payload):
            u = 0.5 if generator is None else torch.rand(values.shape, generator=generator, device=flat.device)
            self._encode_rows(values, u, rows)
        return payload

    @torch.no_grad()
    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Q(x), from its payload.

        Args:
            payload: what :meth:`encode` of an equal quantizer returned; uint8, shape (nbytes(numel),).
            numel: elements of x.
            dtype: of the result; the maths is float32.

        Returns:
            Q(x), shape (numel,), on the device of the payload.

        Raises:
            ValueError: if the payload is not one of ``numel`` elements.
        """
        self._check_payload(payload, numel)
        out = torch.empty(numel, dtype=dtype, device=payload.device)
        for values, rows in self._blocks(out, payload):
            values.copy_(self._decode_rows(rows, values.shape[1]))
        return out

    @torch.no_grad()
    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        """``out`` += Q(x), without Q(x) in memory.

        Args:
            payload: as in :meth:`decode`, on the device of ``out``.
            out: shape (numel,), floating; changed in place.

        Raises:
            ValueError: if the payload is not one of as many elements.
        """
        _check_vector("out", out)
        self._check_payload(payload, out.numel())
        for values, rows in self._blocks(out, payload):
            values.add_(self._decode_rows(rows, values.shape[1]))

    def _row_bytes(self, length: int) -> int:
        return _SCALE_BYTES + (length * self.bits + 7) // 8

    def _blocks(self, flat: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the same whole buckets in both, one bucket a row; the shorter last bucket comes alone."""
        size, nbytes = self.bucket_size, self._row_bytes(self.bucket_size)
        full = flat.numel() // size
        step = max(1, (_CPU_BLOCK if flat.device.type == "cpu" else _DEVICE_BLOCK) // size)
        for start in range(0, full, step):
            stop = min(start + step, full)
            yield (
                flat[start * size : stop * size].view(stop - start, size),
                payload[start * nbytes : stop * nbytes].view(stop - start, nbytes),
            )
        if full * size < flat.numel():
            yield flat[full * size :].unsqueeze(0), payload[full * nbytes :].unsqueeze(0)

    def _encode_rows(self, x: Tensor, u: Tensor | float, out: Tensor) -> None:
        """Quantize buckets of one length: x and u of shape (buckets, length) into ``out``, shape (buckets, bytes)."""
        s = self.magnitudes
        y = (x if x.dtype == torch.float64 else x.to(torch.float32)).abs()
        scale = self._scale(y)
        out[:, :_SCALE_BYTES] = scale.view(torch.uint8)
        # Zero and non-finite buckets are divided by infinity: 0, or NaN where x is not finite.
        usable = (scale > 0) & (scale < torch.inf)
        y.div_(torch.where(usable, scale, torch.inf)).mul_(s)
        level = y.floor()
        # ⌈f − u⌉ is [u < f] for f and u in [0, 1), without the slow way from bool to float.
        level += y.sub_(level).sub_(u).ceil_()
        codes = level.copysign_(x).add_(s).to(torch.int16).to(torch.uint8)  # float → uint8 is not vectorised
        codes.masked_fill_(~usable, s)
        out[:, _SCALE_BYTES:] = _pack(codes, self.bits)

    def _decode_rows(self, rows: Tensor, length: int) -> Tensor:
        """The values of buckets of one length, float32, shape (buckets, length); ±s gives exactly ± the scale."""
        scale = rows[:, :_SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
        codes = _unpack(rows[:, _SCALE_BYTES:], length, self.bits)
        return codes.to(torch.float32).sub_(self.magnitudes).div_(self.magnitudes).mul_(scale)

    def _scale(self, magnitude: Tensor) -> Tensor:
        """‖x‖ of each bucket, float32, shape (buckets, 1), never below the largest magnitude."""
        norm = magnitude.amax(1, keepdim=True)
        if self.norm == "l2":
            # In float64 the squares of float32 neither overflow nor underflow.
            l2 = torch.linalg.vector_norm(magnitude, dim=1, keepdim=True, dtype=torch.float64)
            norm = torch.maximum(l2, norm.to(torch.float64))
        scale = norm.to(torch.float32)
        return torch.where(scale < norm, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)

    def _check_payload(self, payload: Tensor, numel: int) -> None:
        expected = self.nbytes(numel)
        if payload.dtype != torch.uint8 or payload.shape != (expected,):
            raise ValueError(
                f"got a payload of type {payload.dtype} and shape {tuple(payload.shape)}; {numel} elements at {self} are "
                f"({expected},) of torch.uint8. Decode with the quantizer and the length that it was encoded with."
            )


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes < 2**bits, uint8, shape (rows, length), to their bytes, uint8, shape (rows, ⌈length·bits/8⌉)."""
    if bits == 8:
        return codes  # as they are; as lanes of an int64, the last would reach the sign bit, which >> would smear
    rows, length = codes.shape
    group = _WORDS[bits].itemsize
    words = torch.nn.functional.pad(codes, (0, -length % group)).view(_WORDS[bits])
    for gap, low, high in _merges(bits, group):
        words = (words & low) | ((words >> gap) & high)
    packed = words.view(torch.uint8).view(rows, -1, group)[:, :, : group * bits // 8]
    return packed.reshape(rows, -1)[:, : (length * bits + 7) // 8]


def _unpack(packed: Tensor, length: int, bits: int) -> Tensor:
    """The inverse of `_pack`: uint8, shape (rows, length)."""
    if bits == 8:
        return packed
    group = _WORDS[bits].itemsize
    nbytes = group * bits // 8
    groups = -(-length // group)
    padded = torch.nn.functional.pad(packed, (0, groups * nbytes - packed.shape[1]))
    words = torch.nn.functional.pad(padded.view(-1, groups, nbytes), (0, group - nbytes)).view(_WORDS[bits])[:, :, 0]
    for gap, low, high in reversed(_merges(bits, group)):
        words = (words & low) | ((words & high) << gap)
    return words.view(torch.uint8)[:, :length]


def _merges(bits: int, group: int) -> list[tuple[int, int, int]]:
    """How the codes of a word, one a byte, move together: by pairs, pairs of pairs, ...; log2(group) times.

    Each time the upper half of every lane moves down by ``gap`` bits, to just above the lower half; ``low`` and ``high``
    mask the two halves where they end up.
    """
    merges = []
    half, used = 8, bits  # bits of half a lane, and those of them in use
    while half < 8 * group:
        low = sum((2**used - 1) << start for start in range(0, 8 * group, 2 * half))
        merges.append((half - used, low, low << used))
        half, used = 2 * half, 2 * used
    return merges


def _most_levels(bits: int) -> int:
    return int(2 ** (bits - 1)) - 1


def _check_vector(name: str, vector: Tensor) -> None:
    if vector.dim() != 1 or not vector.is_floating_point():
        raise ValueError(
            f"got {name} of type {vector.dtype} and shape {tuple(vector.shape)}; it must be a floating-point vector. "
            "Pass one dimension, as FlatModel.flat has."
        )
